// What a rank digests: boxes of params that its tensors hold, and the parts of
// single params that they fall into.
#ifndef REFIT_EXECUTOR_DIGEST_DIGEST_PARTS_H_
#define REFIT_EXECUTOR_DIGEST_DIGEST_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "executor/digest/param_box.h"
#include "plan/plan_file.h"
#include "plan/schedule/copy_batch.h"
#include "plan/schedule/tensor_table.h"
#include "refit/device_types.h"

namespace refit {

// A box of a stack of params that lies in a stack of the rank's tensors, inside
// what `fragment` says these hold. Params that the plan does not move are in no
// box.
struct DigestBox {
  size_t slot = 0;  // of the rank's buffers
  const fb::Fragment* fragment = nullptr;
  ParamBox box;
  DType dtype = DType::kUnspecified;  // in which its elements are digested
  uint32_t region = 0;                // that the box is a part of
};

// Whose stacks count: the worker's tensors without post-hooks, which alone keep
// the source's values; or all tensors, and scratch.
enum class HeldStacks { kUnhooked, kAll };

// What `rank` holds in these stacks and no lower rank of `among` does, each
// element once; with its tensors' dtypes.
std::vector<DigestBox> BoxesCountedBy(const PlanFile& plan, int32_t rank,
                                      absl::Span<const int32_t> among,
                                      HeldStacks stacks);

// The distinct boxes that destination ranks hold, scratch included, in the
// dtypes of their tensors: the same list on all ranks.
struct DigestRegion {
  uint32_t param = 0;  // of Body.params
  ParamBox box;
  DType dtype = DType::kUnspecified;
};
std::vector<DigestRegion> RegionsOf(const PlanFile& plan);

// What `rank` digests of each region: a destination rank each box that it
// holds; a source rank what no lower source rank holds, as the dtype of the
// region if values are cast to that.
std::vector<DigestBox> BoxesOfRegions(const PlanFile& plan, int32_t rank,
                                      absl::Span<const DigestRegion> regions);

// A part of one param: one sum.
struct DigestPart {
  size_t box = 0;        // whose part it is, of those given
  uint32_t param = 0;    // the stack, of Body.params
  uint64_t ordinal = 0;  // of the param in its stack
  uint64_t elements = 0;
};

// Appends a part for each param of `boxes`, and to `batch` the copies that
// digest part i into the 16 i-th byte of table entry `sums_entry`.
void AppendDigests(const PlanFile& plan, const TensorTable& tensors,
                   absl::Span<const DigestBox> boxes, uint64_t sums_entry,
                   std::vector<DigestPart>& parts, CopyBatch& batch);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DIGEST_DIGEST_PARTS_H_
