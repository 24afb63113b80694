// Flat buffers of `generic`: one-dimensional tensors that hold params one after
// the other, of which every rank holds ranges.
#ifndef REFIT_COMPILER_LAYOUT_GENERIC_FLAT_BUFFERS_H_
#define REFIT_COMPILER_LAYOUT_GENERIC_FLAT_BUFFERS_H_

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/generic/rule_partition.h"
#include "compiler/layout/layout.h"

namespace refit {

// Which members of each param stand in flat buffers, and in which dtype.
class HeldMembers {
 public:
  explicit HeldMembers(const Model& model) : dtypes_(model.params.size()) {}

  // The member's dtype; kUnspecified: no flat buffer holds it. `member` counts
  // row-major over the index dims.
  DType At(ParamId id, int64_t member) const;
  void Set(ParamId id, const Param& param, int64_t member, DType dtype);

  // `parts` of the param without the members that flat buffers hold.
  std::vector<RulePart> WithoutHeld(ParamId id, const Param& param,
                                    std::vector<RulePart> parts) const;

 private:
  std::vector<std::vector<DType>> dtypes_;  // empty: none held
};

// Adds the side's flat buffers to its ranks. Reports entries that do not fit.
HeldMembers PlaceFlatBuffers(const LayoutContext& context, SideLayout& layout);

// The names of the tensors that `flat` is, one per layer.
std::vector<std::string> FlatBufferNames(const FlatBufferSpec& flat);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_GENERIC_FLAT_BUFFERS_H_
