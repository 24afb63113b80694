// FSDP2: every param's rows cut over the data-parallel ranks as torch.chunk
// cuts them, also inside tensor parallelism. docs/layouts.md holds the formulas
// and where they come from.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/role_table.h"
#include "compiler/layout/shard.h"
#include "compiler/layout/sizes.h"
#include "compiler/layout/tensor_stack.h"

namespace refit {
namespace {

using enum ParamRole;

// What tensor parallelism leaves of a param to a rank, before FSDP cuts it.
enum class TensorStyle : uint8_t { kWhole, kRows, kColumns, kUnknown };

// The plan that the frameworks give torch's parallelize_module.
TensorStyle TensorStyleOf(ParamRole role) {
  switch (role) {
    case kEmbedding:
    case kOutputHead:
    case kQuery:
    case kKey:
    case kValue:
    case kQueryBias:
    case kKeyBias:
    case kValueBias:
    case kMlpGate:
    case kMlpUp:
      return TensorStyle::kRows;
    case kAttentionOutput:
    case kMlpDown:
      return TensorStyle::kColumns;
    case kFinalNorm:
    case kAttentionNorm:
    case kMlpNorm:
    case kMoeNorm:
    case kQueryNorm:
    case kKeyNorm:
    case kAttentionOutputBias:
      return TensorStyle::kWhole;
    default:
      return TensorStyle::kUnknown;
  }
}

bool IsExpert(const Param& param) {
  return param.role == kExpertGate || param.role == kExpertUp ||
         param.role == kExpertDown;
}

// A buffer of the modules, not a parameter: FSDP leaves it whole.
bool IsModuleBuffer(const Param& param) {
  return param.role == kRouterCorrection;
}

// Where a rank stands on the side's two axes.
struct Coordinate {
  int64_t data = 0;
  int64_t tensor = 0;
};

class FsdpLayout {
 public:
  explicit FsdpLayout(const LayoutContext& context)
      : context_(context),
        tensor_(context.side.tensor_parallel.value),
        data_(context.side.data_parallel.value),
        fused_(context.side.fused_experts.value),
        table_(context.model) {}

  SideLayout LayOut();

 private:
  // Reports sizes that do not fit; true when all do.
  bool CheckSizes();

  // The name of a param, or of what is made of it.
  std::string ModuleName(std::string_view name) const;

  Buffer Shard(ParamId id, const Coordinate& rank) const;
  // [experts, gate rows then up rows, …] and [experts, …] of every layer.
  std::vector<Buffer> FusedExperts(const Coordinate& rank) const;

  const LayoutContext& context_;
  const int64_t tensor_;
  const int64_t data_;
  const bool fused_;
  const RoleTable table_;
};

bool FsdpLayout::CheckSizes() {
  const SideSpec& side = context_.side;
  SizeChecks checks(context_, table_);
  for (const Param& param : context_.model.params) {
    if (!param.shape.empty()) continue;
    checks.Report(side.layout.place,
                  absl::StrFormat("parameter \"%s\" has no dims; FSDP cuts dim "
                                  "0, wanted one or more",
                                  param.name));
  }
  // Roles that contradict the model are the model's error, not the sizes'.
  if ((fused_ || tensor_ > 1) && !CheckRoles(context_, "fsdp", table_)) {
    return false;
  }
  checks.HasExperts(fused_, side.fused_experts.place, "fused_experts");
  if (tensor_ > 1) {
    const SizeChecks::Divisor tensor =
        checks.Named("tensor_parallel", side.tensor_parallel);
    checks.Divides(tensor, context_.model.architecture.heads,
                   "attention heads");
    checks.Divides(tensor, context_.model.architecture.kv_heads,
                   "key-value heads");
    for (const ParamRole role : {kMlpGate, kMlpUp}) {
      checks.Rows(tensor, role, "intermediate features of the MLP");
    }
    for (const Param& param : context_.model.params) {
      if (TensorStyleOf(param.role) != TensorStyle::kUnknown) continue;
      checks.Report(
          side.tensor_parallel.place,
          absl::StrFormat("%s cannot place parameter \"%s\"; wanted a dense "
                          "model, or layout \"generic\" with its placements",
                          tensor.text, param.FirstName()));
      break;
    }
  }
  return checks.ok();
}

// Modules that hold fused experts are those of transformers 5, where mixtral's
// block is named as the other families', and nemotron_h's model too.
std::string FsdpLayout::ModuleName(std::string_view name) const {
  if (!fused_) return std::string(name);
  if (context_.model.architecture.family == "nemotron_h") {
    return absl::StrReplaceAll(std::string(name), {{"backbone.", "model."}});
  }
  return absl::StrReplaceAll(std::string(name),
                             {{".block_sparse_moe.", ".mlp."}});
}

Buffer FsdpLayout::Shard(ParamId id, const Coordinate& rank) const {
  const Param& param = context_.model.params[IndexOf(id)];
  Box box = WholeBox(param.VirtualShape());
  const size_t rows = param.index.size();

  const TensorStyle style =
      tensor_ > 1 ? TensorStyleOf(param.role) : TensorStyle::kWhole;
  if (style == TensorStyle::kColumns) {
    const Range columns = EvenShare(param.shape[1], tensor_, rank.tensor);
    box.lo[rows + 1] = columns.begin;
    box.hi[rows + 1] = columns.end;
  }
  Range held = {0, param.shape[0]};
  if (style == TensorStyle::kRows) {
    held = ChunkShare(held.end, tensor_, rank.tensor);
  }
  if (!IsModuleBuffer(param)) {
    const Range chunk = ChunkShare(held.size(), data_, rank.data);
    held = {held.begin + chunk.begin, held.begin + chunk.end};
  }
  box.lo[rows] = held.begin;
  box.hi[rows] = held.end;

  Buffer buffer;
  buffer.name = ModuleName(param.name);
  buffer.index = param.index;
  for (size_t dim = rows; dim < box.lo.size(); ++dim) {
    buffer.shape.push_back(box.extent(dim));
  }
  buffer.dtype = BufferDType(context_.side, param);
  buffer.own_dtype = IsModuleBuffer(param);
  const Dims strides = RowMajorStrides(buffer.VirtualShape());
  buffer.shape = param.StoredShape(std::move(buffer.shape));
  if (!box.Empty()) {
    buffer.fragments.push_back(
        {.param = id, .box = std::move(box), .offset = 0, .stride = strides});
  }
  return buffer;
}

std::vector<Buffer> FsdpLayout::FusedExperts(const Coordinate& rank) const {
  const Architecture& architecture = context_.model.architecture;
  const Range layers = {0, architecture.all_layers()};
  const ExpertSlice slice = ConsecutiveExperts(
      ChunkShare(architecture.experts, data_, rank.data), false);
  std::vector<Buffer> buffers;
  const auto add = [&](const LayerGroup& group, std::string_view leaf) {
    const Param& first = *group.params[0];
    const std::string name = ModuleName(first.name);
    TensorSpec spec = {
        .name = absl::StrFormat("%s%s", name.substr(0, name.find("{1}")), leaf),
        .shape = first.shape,
        .parts = {}};
    spec.shape[0] = 0;
    for (const Param* param : group.params) {
      spec.parts.push_back(
          RowsPart(*param, {0, param->shape[0]}, spec.shape[0]));
      spec.shape[0] += param->shape[0];
    }
    buffers.push_back(LayerStack(table_, std::move(spec), group.layers,
                                 {.dtype = BufferDType(context_.side, first),
                                  .first_layer = first.first_layer,
                                  .experts = slice}));
  };
  const bool gated = !table_.Params(kExpertGate).empty();
  if (gated) {
    for (const LayerGroup& group :
         table_.Group({{kExpertGate, kExpertUp}}, layers)) {
      add(group, "gate_up_proj");
    }
  } else {
    for (const LayerGroup& group : table_.Group({{kExpertUp}}, layers)) {
      add(group, "up_proj");
    }
  }
  for (const LayerGroup& group : table_.Group({{kExpertDown}}, layers)) {
    add(group, "down_proj");
  }
  return buffers;
}

SideLayout FsdpLayout::LayOut() {
  SideLayout layout;
  if (!CheckSizes()) return layout;
  const std::vector<Param>& params = context_.model.params;
  for (int64_t data = 0; data < data_; ++data) {
    for (int64_t tensor = 0; tensor < tensor_; ++tensor) {
      const Coordinate rank = {.data = data, .tensor = tensor};
      std::vector<BufferId>& buffers = layout.ranks.emplace_back();
      bool experts_placed = false;
      for (size_t i = 0; i < params.size(); ++i) {
        if (!fused_ || !IsExpert(params[i])) {
          buffers.push_back(
              context_.buffers.Intern(Shard(static_cast<ParamId>(i), rank)));
        } else if (!std::exchange(experts_placed, true)) {
          for (Buffer& buffer : FusedExperts(rank)) {
            buffers.push_back(context_.buffers.Intern(std::move(buffer)));
          }
        }
      }
    }
  }
  AppendReplicas(context_.side.replicas.value, layout);
  return layout;
}

}  // namespace

SideLayout LayOutFsdp(const LayoutContext& context) {
  return FsdpLayout(context).LayOut();
}

}  // namespace refit
