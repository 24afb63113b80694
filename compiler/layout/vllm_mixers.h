// vLLM's modules in attention's place: MambaMixer2 and the gated delta net.
#ifndef REFIT_COMPILER_LAYOUT_VLLM_MIXERS_H_
#define REFIT_COMPILER_LAYOUT_VLLM_MIXERS_H_

#include <initializer_list>

#include "absl/functional/function_ref.h"
#include "compiler/layout/role_table.h"
#include "compiler/layout/shard.h"
#include "compiler/layout/tensor_stack.h"
#include "compiler/model/model.h"

namespace refit::vllm {

// Adds the stacks of the layers that have `roles`.
using AddStack = absl::FunctionRef<void(
    std::initializer_list<ParamRole> roles,
    absl::FunctionRef<TensorSpec(const LayerGroup&)> make)>;

// What the tensor-parallel rank of `part` holds of the model's mixers.
void AddMixers(const Architecture& architecture, EvenPart part, AddStack add);

}  // namespace refit::vllm

#endif  // REFIT_COMPILER_LAYOUT_VLLM_MIXERS_H_
