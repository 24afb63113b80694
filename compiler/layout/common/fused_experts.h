// Experts that a checkpoint holds in one tensor a layer. As gpt_oss: gate and
// up [expert, in, out, gate or up], down [expert, in, out], and their biases.
// As llama4: gate and up [expert, in, gate or up · out]. As qwen3_5: [expert,
// gate or up · out, in], down [expert, out, in].
#ifndef REFIT_COMPILER_LAYOUT_COMMON_FUSED_EXPERTS_H_
#define REFIT_COMPILER_LAYOUT_COMMON_FUSED_EXPERTS_H_

#include <string>

#include "compiler/ir/module.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/tensor_stack.h"

namespace refit {

// One tensor an expert (LayerStackOptions::fused_experts): rows are outputs,
// those of the gate first. `part` cuts the gate's and the up's rows each.
TensorSpec GateUpOfExperts(const Param& param, Range experts, EvenPart part);
TensorSpec GateUpBiasOfExperts(const Param& param, Range experts,
                               EvenPart part);
// `part` cuts the columns.
TensorSpec DownOfExperts(const Param& param, Range experts, EvenPart part);
TensorSpec DownBiasOfExperts(const Param& param, Range experts);

// One tensor a layer, experts first: rows are outputs, gate and up rows
// alternate as in the checkpoint.
TensorSpec StackedGateUp(const Param& param, std::string name, Range experts,
                         EvenPart part);
TensorSpec StackedGateUpBias(const Param& param, std::string name,
                             Range experts, EvenPart part);
TensorSpec StackedDown(const Param& param, std::string name, Range experts,
                       EvenPart part);
TensorSpec StackedDownBias(const Param& param, std::string name, Range experts);

// The same of gate columns before up columns, [expert, in, 2 * out].
TensorSpec StackedGateThenUp(const Param& param, std::string name,
                             Range experts, EvenPart part, bool gate_first);

// The same of experts [expert, out, in], the gates' rows before the ups'.
TensorSpec StackedGateAndUpRows(const Param& param, std::string name,
                                Range experts, EvenPart part, bool gate_first);
TensorSpec StackedDownColumns(const Param& param, std::string name,
                              Range experts, EvenPart part);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_FUSED_EXPERTS_H_
