// A host device whose streams do nothing until somebody waits for them, so that
// a wait that is missing shows in the bytes.
#ifndef REFIT_TESTS_EXECUTOR_LAZY_DEVICE_H_
#define REFIT_TESTS_EXECUTOR_LAZY_DEVICE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "refit/host_device.h"

namespace refit {

// Work is done at once on the null stream, the caller's. A rank's thread uses
// its device alone.
class LazyDevice : public HostDevice {
 public:
  // While set, no event is reached, as behind work that never ends.
  bool is_stuck = false;
  // Work of streams that nobody has waited for.
  size_t Pending() const {
    size_t pending = 0;
    for (const std::weak_ptr<Queue>& weak : queues_) {
      const std::shared_ptr<Queue> queue = weak.lock();
      if (queue != nullptr) pending += queue->work.size() - queue->done;
    }
    return pending;
  }
  // Called, unless null, where messages are about to be applied.
  std::function<void(const std::vector<MessageToCode>&)> before_apply;

  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    auto stream = std::make_unique<LazyStream>();
    queues_.push_back(stream->queue());
    return stream;
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return std::make_unique<LazyEvent>(*this);
  }
  absl::StatusOr<std::unique_ptr<MessageCoder>> PrepareCodes(
      absl::Span<std::byte* const> table, const ChangeEntries& changes,
      std::vector<MessageToCode> messages) override {
    auto prepared = HostDevice::PrepareCodes(table, changes, messages);
    if (!prepared.ok()) return prepared.status();
    return std::make_unique<LazyCoder>(*this, std::move(messages),
                                       *std::move(prepared));
  }
  // Codes are not checked before somebody waits.
  bool IsHost() const override { return false; }
  absl::Status Synchronize(Stream stream) override {
    RunAll(stream);
    return absl::OkStatus();
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

  static void RunAll(Stream stream) {
    auto* const queue = static_cast<Queue*>(stream);
    if (queue != nullptr) queue->RunUntil(queue->work.size());
  }
  static void Put(Stream stream, std::function<void()> work) {
    if (stream == nullptr) return work();
    static_cast<Queue*>(stream)->work.push_back(std::move(work));
  }

  class LazyStream : public DeviceStream {
   public:
    Stream get() const override { return queue_.get(); }
    const std::shared_ptr<Queue>& queue() const { return queue_; }

   private:
    const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  };

  class LazyEvent : public DeviceEvent {
   public:
    explicit LazyEvent(const LazyDevice& device) : device_(device) {}
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
      Put(stream, wait);
      return absl::OkStatus();
    }
    // The host waits for it.
    absl::StatusOr<bool> Reached() override {
      if (device_.is_stuck) return false;
      if (queue_ != nullptr) queue_->RunUntil(point_);
      return true;
    }

   private:
    const LazyDevice& device_;
    Queue* queue_ = nullptr;  // not owned
    size_t point_ = 0;
  };

  class LazyCopies : public PreparedCopies {
   public:
    explicit LazyCopies(std::unique_ptr<PreparedCopies> copies)
        : copies_(std::move(copies)) {}
    absl::Status Enqueue(size_t batch, Stream stream, const uint32_t* unless,
                         const DeviceUse&) override {
      Put(stream, [this, batch, unless] {
        (void)copies_->Enqueue(batch, nullptr, unless);
      });
      return absl::OkStatus();
    }
    absl::Status EnqueueStep(size_t batch, uint32_t step, Stream stream,
                             const uint32_t* unless,
                             const DeviceUse&) override {
      Put(stream, [this, batch, step, unless] {
        (void)copies_->EnqueueStep(batch, step, nullptr, unless);
      });
      return absl::OkStatus();
    }

   private:
    const std::unique_ptr<PreparedCopies> copies_;
  };

  class LazyCoder : public MessageCoder {
   public:
    LazyCoder(const LazyDevice& device, std::vector<MessageToCode> messages,
              std::unique_ptr<MessageCoder> coder)
        : device_(device),
          messages_(std::move(messages)),
          coder_(std::move(coder)) {}
    absl::Status Restart(Stream stream) override {
      Put(stream, [this] { (void)coder_->Restart(nullptr); });
      return absl::OkStatus();
    }
    absl::Status Count(Stream stream) override {
      Put(stream, [this] { (void)coder_->Count(nullptr); });
      return absl::OkStatus();
    }
    absl::StatusOr<absl::Span<const ChangedElements>> Counted(
        Stream stream) override {
      RunAll(stream);
      return coder_->Counted(nullptr);
    }
    absl::Status Encode(size_t begin, size_t count, size_t rung,
                        Stream stream) override {
      Put(stream,
          [=, this] { (void)coder_->Encode(begin, count, rung, nullptr); });
      return absl::OkStatus();
    }
    absl::Status Apply(size_t begin, size_t count, size_t rung,
                       Stream stream) override {
      Put(stream, [=, this] {
        if (device_.before_apply) device_.before_apply(messages_);
        (void)coder_->Apply(begin, count, rung, nullptr);
      });
      return absl::OkStatus();
    }
    absl::Status Keep(Stream stream) override {
      Put(stream, [this] { (void)coder_->Keep(nullptr); });
      return absl::OkStatus();
    }
    absl::StatusOr<std::optional<CodingFailure>> FirstFailure(
        Stream stream) override {
      RunAll(stream);
      return coder_->FirstFailure(nullptr);
    }

   private:
    const LazyDevice& device_;
    const std::vector<MessageToCode> messages_;
    const std::unique_ptr<MessageCoder> coder_;
  };

  std::vector<std::weak_ptr<Queue>> queues_;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_LAZY_DEVICE_H_
