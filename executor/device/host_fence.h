// DeviceFence of the host device: between threads of one process.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_FENCE_H_
#define REFIT_EXECUTOR_DEVICE_HOST_FENCE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "control/token.h"
#include "executor/device/thread_fence.h"
#include "refit/device.h"

namespace refit {

// It waits until Abort: whoever owns the fence knows the deadline and what went
// wrong.
class HostFence : public ThreadFence<DeviceFence> {
 public:
  explicit HostFence(int32_t rank);
  ~HostFence() override;

  absl::StatusOr<std::string> Export() override;
  absl::Status Connect(absl::Span<const int32_t> peers,
                       absl::Span<const std::string> exported,
                       std::chrono::steady_clock::time_point) override;
  void Abort() override;
  std::vector<int32_t> Waiting() const override;

 private:
  // A fence is aborted once, and another one made then.
  static constexpr uint64_t kOnlyStep = 1;

  FenceEnd& EndOf(int32_t rank) override {
    return rank == rank_ ? *own_ : *peers_.at(rank);
  }
  uint64_t Step() const override { return kOnlyStep; }
  FenceEnd::Deadline Limit() const override {
    return FenceEnd::Deadline::max();
  }
  absl::Status Absent(int32_t peer) override;

  // A peer may hold this rank's end longer than the rank its fence.
  const std::shared_ptr<FenceEnd> own_;
  const Token own_token_;  // what Export says of own_
  absl::flat_hash_map<int32_t, std::shared_ptr<FenceEnd>> peers_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_FENCE_H_
