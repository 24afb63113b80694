// A host device whose streams do nothing until somebody waits for them, so that
// a wait that is missing shows in the bytes.
#ifndef REFIT_TESTS_EXECUTOR_LAZY_DEVICE_H_
#define REFIT_TESTS_EXECUTOR_LAZY_DEVICE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "refit/host_device.h"

namespace refit {

// Work is done at once on the null stream, the caller's. A rank's thread uses
// its device alone.
class LazyDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    return std::make_unique<LazyStream>();
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return std::make_unique<LazyEvent>();
  }
  absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> table,
      absl::Span<const CopyBatch> batches) override {
    auto prepared = HostDevice::Prepare(table, batches);
    if (!prepared.ok()) return prepared.status();
    return std::make_unique<LazyCopies>(*std::move(prepared));
  }

 private:
  struct Queue {
    std::vector<std::function<void()>> work;
    size_t done = 0;

    void RunUntil(size_t end) {
      while (done < end) {
        const std::function<void()> next = work[done++];
        next();
      }
    }
  };

  class LazyStream : public DeviceStream {
   public:
    Stream get() const override { return queue_.get(); }

   private:
    const std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
  };

  class LazyEvent : public DeviceEvent {
   public:
    absl::Status Record(Stream stream) override {
      queue_ = static_cast<Queue*>(stream);
      point_ = queue_ == nullptr ? 0 : queue_->work.size();
      return absl::OkStatus();
    }
    absl::Status Await(Stream stream) override {
      if (queue_ == nullptr) return absl::OkStatus();
      const auto wait = [queue = queue_, point = point_] {
        queue->RunUntil(point);
      };
      if (stream == nullptr) {
        wait();
      } else {
        static_cast<Queue*>(stream)->work.push_back(wait);
      }
      return absl::OkStatus();
    }
    absl::StatusOr<bool> Reached() override { return true; }

   private:
    Queue* queue_ = nullptr;  // not owned
    size_t point_ = 0;
  };

  class LazyCopies : public PreparedCopies {
   public:
    explicit LazyCopies(std::unique_ptr<PreparedCopies> copies)
        : copies_(std::move(copies)) {}
    absl::Status Enqueue(size_t batch, Stream stream, const uint32_t* unless,
                         uint32_t) override {
      if (stream == nullptr) return copies_->Enqueue(batch, nullptr, unless);
      static_cast<Queue*>(stream)->work.push_back([this, batch, unless] {
        (void)copies_->Enqueue(batch, nullptr, unless);
      });
      return absl::OkStatus();
    }

   private:
    const std::unique_ptr<PreparedCopies> copies_;
  };
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_LAZY_DEVICE_H_
