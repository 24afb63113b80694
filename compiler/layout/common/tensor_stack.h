// Buffers from params: the pieces that framework layouts are built of.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_TENSOR_STACK_H_
#define REFIT_COMPILER_LAYOUT_COMMON_TENSOR_STACK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compiler/ir/module.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/layout.h"

namespace refit {

// A box of one param's tensor and where it stands in one tensor of a buffer.
// Of params by layer: the same for every layer and expert.
struct Part {
  ParamRole role = ParamRole::kOther;
  Box box;             // over the param's own dims
  int64_t offset = 0;  // of box.lo, in elements of the buffer's tensor
  Dims stride;
  // The param's own name where others of the layer have its role: of plain
  // modules and vision towers.
  std::string_view name = "";
};

// Rows [rows.begin, rows.end) of the param, from row `buffer_row` on of a
// buffer as wide as the param.
Part RowsPart(const Param& param, Range rows, int64_t buffer_row);

// Columns of the param, alone in a buffer that is as wide as they are.
Part ColumnsPart(const Param& param, Range columns);

// Why a tensor is neither read nor written.
struct DeclaredSkip {
  SkipReason reason = SkipReason::kUnspecified;
  std::string detail;
};

// One tensor of a stack of buffers.
struct TensorSpec {
  std::string
      name;    // with "{0}" for the layer, "{1}" for an expert in the name
  Dims shape;  // of one layer, or one expert of a layer
  std::vector<Part> parts;
  bool zeros = false;  // holds no param, but zeros
  ValueForm form = ValueForm::kPlain;
  // The dtype in which the framework keeps the tensor whatever the side's is.
  std::optional<DType> own_dtype = std::nullopt;
  std::vector<PostHook> post_hooks = {};  // that each write of it asks for
  std::optional<DeclaredSkip> skip = std::nullopt;  // of all of it
  // Of a vector: why nothing is written from this element on.
  std::optional<std::pair<int64_t, DeclaredSkip>> tail = std::nullopt;
};

// The experts of each layer that a rank holds.
struct ExpertSlice {
  // The logical expert that each local physical expert is; several may be the
  // same one. One list for all layers, or one per layer of the model.
  std::vector<std::vector<int32_t>> experts;
  // More physical experts, for params of the layer: parts say their offset.
  int64_t layer_experts = 0;
  bool in_name = true;  // one tensor per expert; else one tensor, experts first

  const std::vector<int32_t>& OfLayer(int32_t layer) const {
    return experts[experts.size() == 1 ? 0 : layer];
  }
};

// The same experts of all layers, in their order.
ExpertSlice ConsecutiveExperts(Range experts, bool in_name);

struct LayerStackOptions {
  DType dtype = DType::kUnspecified;
  // The number in the name of global layer n is n - first_layer.
  int64_t first_layer = 0;
  std::optional<ExpertSlice> experts;
  // Of params that hold all experts of a layer: the stack has so many tensors
  // a layer, one per expert. An expert more is one tensor on.
  std::optional<int64_t> fused_experts = std::nullopt;
};

// The stack that holds `spec` for each layer of `layers` (ascending).
Buffer LayerStack(const RoleTable& table, TensorSpec spec,
                  absl::Span<const int32_t> layers,
                  const LayerStackOptions& options);

// The dtype of a buffer that holds `param`: the side's, if the job gives one.
// Some roles are fp32 everywhere (IsAlwaysFp32).
DType BufferDType(const SideSpec& side, const Param& param);

// A tensor of parts of `id`, which has no layer.
Buffer TensorOf(const LayoutContext& context, TensorSpec spec, ParamId id);

// A tensor that is `id` whole.
Buffer WholeTensor(const LayoutContext& context, std::string name, ParamId id);

// Shard `index` of `count` of a vocabulary matrix whose rows are padded to
// `padded_rows`. Padding rows of a destination are filled with zeros; what
// stands there in a source is nobody's.
struct VocabularyShard {
  int64_t padded_rows = 0;
  int64_t count = 1;
  int64_t index = 0;
};
Buffer VocabularyTensor(const LayoutContext& context, std::string name,
                        ParamId id, const VocabularyShard& shard);

// `buffer` as a copy that nobody reads or writes: its whole content is one
// declared skip.
Buffer SkippedCopy(Buffer buffer, SkipReason reason, std::string detail);

// Appends copies of the ranks so far until there are `replicas` of them.
void AppendReplicas(int64_t replicas, SideLayout& layout);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_TENSOR_STACK_H_
