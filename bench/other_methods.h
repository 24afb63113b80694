// What `refit-bench transfer --against` names, found before anything runs.
#ifndef REFIT_BENCH_OTHER_METHODS_H_
#define REFIT_BENCH_OTHER_METHODS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bench/m2n_api.h"
#include "bench/m2n_tensors.h"
#include "bench/window_api.h"
#include "executor/transport/nccl_api.h"
#include "plan/plan_file.h"

namespace refit {

struct OtherMethods {
  nccl::Api nccl;
  std::optional<m2n::Api> m2n;
  bool m2n_calls = false;   // "nccl_m2n"
  bool m2n_groups = false;  // "nccl_m2n_groups"
  std::vector<M2nTensor> m2n_tensors;
  std::optional<nccl::WindowApi> windows;  // "windows"
};

// `names`: "nccl_m2n", NVIDIA's NCCL M2N, tensor by tensor; "nccl_m2n_groups",
// the same in groups; "windows", the plan's staged messages in memory that all
// ranks registered. `one_rank`: whether each rank is a process. Errors:
// kInvalidArgument, another name; else why one of them cannot be measured here.
absl::StatusOr<OtherMethods> FindOtherMethods(
    const PlanFile& plan, absl::Span<const std::string> names, bool one_rank);

}  // namespace refit

#endif  // REFIT_BENCH_OTHER_METHODS_H_
