// BoundRank: what an executor holds since Bind.
#ifndef REFIT_EXECUTOR_BOUND_H_
#define REFIT_EXECUTOR_BOUND_H_

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "executor/digest/state_check.h"
#include "executor/peer_memory.h"
#include "executor/peer_tensors.h"
#include "refit/executor.h"

namespace refit {

struct BoundRank {
  BoundRank(Device& device, const BoundRank* earlier)
      : shared(device, earlier == nullptr ? nullptr : &earlier->shared) {}

  // The end if the caller does not perform it.
  std::vector<PostHookPerformer>::const_iterator PerformerOf(
      const TensorPostHook& hook) const {
    return std::find_if(hooks.begin(), hooks.end(),
                        [&](const PostHookPerformer& candidate) {
                          return candidate.name == hook.name;
                        });
  }

  // Whether CheckMemory notices a free of any tensor.
  bool IsWatched() const {
    return memory != nullptr && memory->Unwatched().empty();
  }
  // That the tensors are in the memory they were in.
  absl::Status CheckMemory() const {
    if (memory == nullptr) return absl::OkStatus();
    const std::optional<size_t> gone = memory->FirstGone();
    if (!gone.has_value()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "the memory of \"", tensors[*gone].name, "\" was freed since Bind"));
  }

  std::vector<BoundTensor> tensors;    // in the order of Bind
  std::vector<const void*> addresses;  // likewise
  std::vector<std::byte*> entries;     // by entry of the TensorTable
  std::vector<PostHookPerformer> hooks;
  std::unique_ptr<MemoryWatch> memory;
  PeerMemory shared;
  PeerTensors peers;
  std::unique_ptr<StateCheck> check;  // since the first Run that checks
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_BOUND_H_
