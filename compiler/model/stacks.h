// Stacks from flat lists of parameters, and back.
#ifndef REFIT_COMPILER_MODEL_STACKS_H_
#define REFIT_COMPILER_MODEL_STACKS_H_

#include <string>
#include <vector>

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

// Reports a stack with more parameters than can be listed, or so many elements
// that bytes and offsets could overflow.
void CheckStackSize(const Param& param, const Place& place,
                    Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_STACKS_H_
