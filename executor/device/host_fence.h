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

// The calling thread itself waits, until Abort: whoever owns the fence knows
// the deadline and what went wrong.
class HostFence : public DeviceFence {
 public:
  explicit HostFence(int32_t rank);
  ~HostFence() override;

  absl::StatusOr<std::string> Export() override;
  absl::Status Connect(absl::Span<const int32_t> peers,
                       absl::Span<const std::string> exported,
                       std::chrono::steady_clock::time_point) override;
  void Abort() override;
  std::vector<int32_t> Waiting() const override;

  absl::Status Grant(absl::Span<const int32_t> origins, void*) override;
  absl::Status AwaitGrants(absl::Span<const int32_t> targets, void*) override;
  absl::Status Progress(absl::Span<const int32_t> targets, void*) override;
  absl::Status Finish(absl::Span<const int32_t> targets, void*) override;
  absl::Status AwaitFinishes(absl::Span<const int32_t> origins, void*) override;
  void Withdraw() override { fence_.Withdraw(); }
  const uint32_t* aborted() const override { return nullptr; }

 private:
  absl::Status Outcome(std::optional<int32_t> absent);

  const int32_t rank_;
  // A peer may hold this rank's end longer than the rank its fence.
  const std::shared_ptr<FenceEnd> own_;
  const Token own_token_;  // what Export says of own_
  absl::flat_hash_map<int32_t, std::shared_ptr<FenceEnd>> peers_;
  ThreadFence fence_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_FENCE_H_
