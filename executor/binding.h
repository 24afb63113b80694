// Bind's check: the tensors of a worker against what the plan says of its rank.
#ifndef REFIT_EXECUTOR_BINDING_H_
#define REFIT_EXECUTOR_BINDING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/schedule/tensor_table.h"
#include "refit/executor.h"

namespace refit {

// The address of each tensor table entry; null for those left out and for
// scratch. Unless `allows_unaligned`, an address that is no multiple of the
// element's size is a problem too. `other_problems` are told beside those of
// the tensors.
absl::StatusOr<std::vector<std::byte*>> BindTensors(
    const TensorTable& table, int32_t rank,
    absl::Span<const BoundTensor> tensors, bool allows_unaligned,
    absl::Span<const std::string> other_problems = {});

}  // namespace refit

#endif  // REFIT_EXECUTOR_BINDING_H_
