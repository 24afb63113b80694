// Stacks from flat lists of parameters, and back.
#ifndef REFIT_COMPILER_MODEL_STACKS_H_
#define REFIT_COMPILER_MODEL_STACKS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"

namespace refit {

// One parameter of a list.
struct NamedTensor {
  std::string name;
  Dims shape;
  DType dtype = DType::kUnspecified;
  Place place;
};

// Reports a name that stands twice, is empty, or holds a brace or a control
// character. Returns whether all is well.
bool CheckNames(const std::vector<NamedTensor>& tensors,
                Diagnostics& diagnostics);

// Folds parameters that differ only in the first two numbers between the dots
// of their names into stacks of role kOther. Numbers that do not form a full
// product (layer 0 has 4 experts, layer 1 has 8) give a stack for each set of
// second numbers. Stacks are in the order of their first member; `tensors` pass
// CheckNames.
std::vector<Param> FoldStacks(const std::vector<NamedTensor>& tensors);

// The names of a stack's parameters, row-major over the index dimensions.
std::vector<std::string> MemberNames(const Param& param);

// Members of a stack to which one rule applies: the product of `positions`.
struct RulePart {
  int32_t rule = -1;                            // of a list; -1: none
  std::vector<std::vector<int32_t>> positions;  // ascending, per index dim

  friend bool operator==(const RulePart&, const RulePart&) = default;
};

// Disjoint parts that make up the whole of `param`, in order of their first
// member. `rule_of` is given a member's name, and its number row-major over the
// index dims.
std::vector<RulePart> PartitionMembers(
    const Param& param,
    absl::FunctionRef<int32_t(const std::string& name, size_t number)> rule_of);

// The numbers of a part's members.
std::vector<IndexDim> NumbersOf(
    const Param& param, const std::vector<std::vector<int32_t>>& positions);

// Reports a stack with more parameters than can be listed, or so many elements
// that bytes and offsets could overflow.
void CheckStackSize(const Param& param, const Place& place,
                    Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_STACKS_H_
