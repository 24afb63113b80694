// A host device that asks before it enqueues a batch of copies.
#ifndef REFIT_TESTS_EXECUTOR_OBSERVED_DEVICE_H_
#define REFIT_TESTS_EXECUTOR_OBSERVED_DEVICE_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "refit/host_device.h"

namespace refit {

class ObservedDevice : public HostDevice {
 public:
  struct Enqueued {
    CopyKind kind = CopyKind::kCopy;
    bool copies = false;  // anything
    bool quantizes = false;
    bool is_step = false;  // one step of the batch
    DeviceUse use = {};
  };
  // Whether the batch is to be enqueued. Called by the threads of all ranks; a
  // null function enqueues all.
  std::function<bool(const Enqueued&)> on_enqueue;

  absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> table,
      absl::Span<const CopyBatch> batches) override {
    auto prepared = HostDevice::Prepare(table, batches);
    if (!prepared.ok()) return prepared.status();
    std::vector<Enqueued> told;
    for (const CopyBatch& batch : batches) {
      told.push_back({.kind = batch.kind,
                      .copies = !batch.copies.empty(),
                      .quantizes = !batch.quantizes.empty()});
    }
    return std::make_unique<Observed>(*this, *std::move(prepared),
                                      std::move(told));
  }

 private:
  class Observed : public PreparedCopies {
   public:
    Observed(ObservedDevice& device, std::unique_ptr<PreparedCopies> copies,
             std::vector<Enqueued> told)
        : device_(device), copies_(std::move(copies)), told_(std::move(told)) {}
    absl::Status Enqueue(size_t batch, Stream stream, const uint32_t* unless,
                         const DeviceUse& use) override {
      return Allows(batch, /*is_step=*/false, use)
                 ? copies_->Enqueue(batch, stream, unless, use)
                 : absl::OkStatus();
    }
    absl::Status EnqueueStep(size_t batch, uint32_t step, Stream stream,
                             const uint32_t* unless,
                             const DeviceUse& use) override {
      return Allows(batch, /*is_step=*/true, use)
                 ? copies_->EnqueueStep(batch, step, stream, unless, use)
                 : absl::OkStatus();
    }

   private:
    bool Allows(size_t batch, bool is_step, const DeviceUse& use) const {
      if (device_.on_enqueue == nullptr) return true;
      Enqueued enqueued = told_[batch];
      enqueued.is_step = is_step;
      enqueued.use = use;
      return device_.on_enqueue(enqueued);
    }

    const ObservedDevice& device_;
    const std::unique_ptr<PreparedCopies> copies_;
    const std::vector<Enqueued> told_;
  };
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_OBSERVED_DEVICE_H_
