// Megatron's modules in attention's place: MambaMixer and GatedDeltaNet.
#ifndef REFIT_COMPILER_LAYOUT_MEGATRON_MIXERS_H_
#define REFIT_COMPILER_LAYOUT_MEGATRON_MIXERS_H_

#include <initializer_list>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "compiler/job/job.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/model/model.h"

namespace refit::megatron {

// Adds the stacks of a layer's tensor `name`, of the layers that have `roles`.
using AddStack = absl::FunctionRef<void(
    std::string_view name, std::initializer_list<ParamRole> roles,
    absl::FunctionRef<TensorSpec(const LayerGroup&)> make)>;

// What the tensor-parallel rank of `part` holds of the model's mixers.
void AddMixers(const Architecture& architecture, const SideSpec& side,
               EvenPart part, AddStack add);

}  // namespace refit::megatron

#endif  // REFIT_COMPILER_LAYOUT_MEGATRON_MIXERS_H_
