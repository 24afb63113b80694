// FSDP2: every param's rows cut over the data-parallel ranks as torch.chunk
// cuts them, also inside tensor parallelism, and experts over a mesh of their
// own. README.md beside it holds the formulas and where they come from.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/version.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"
#include "llvm/ADT/STLExtras.h"

namespace refit {
namespace {

using enum ParamRole;

// What tensor parallelism leaves of a param to a rank, before FSDP cuts it: the
// plan that the frameworks give torch's parallelize_module. nullopt: it has no
// such role.
std::optional<Cut> TensorCutOf(ParamRole role) {
  constexpr ParamRole kOfRows[] = {
      kEmbedding, kOutputHead, kQuery,   kKey,   kValue, kQueryBias,
      kKeyBias,   kValueBias,  kMlpGate, kMlpUp, kColumn};
  constexpr ParamRole kOfColumns[] = {kAttentionOutput, kMlpDown, kRow};
  constexpr ParamRole kWholeRoles[] = {
      kFinalNorm, kAttentionNorm,       kMlpNorm,    kMoeNorm,    kQueryNorm,
      kKeyNorm,   kAttentionOutputBias, kReplicated, kFirstStage, kLastStage};
  if (llvm::is_contained(kOfRows, role)) return Cut::kRows;
  if (llvm::is_contained(kOfColumns, role)) return Cut::kColumns;
  if (llvm::is_contained(kWholeRoles, role)) return Cut::kWhole;
  return std::nullopt;
}

bool IsExpert(const Param& param) {
  return FormOf(param.role).scope == RoleScope::kExpert;
}

// A buffer of the modules, not a parameter: FSDP leaves it whole.
bool IsModuleBuffer(const Param& param) {
  return param.role == kRouterCorrection;
}

// Where the experts of `range` stand in an index that may lack some.
Range PositionsOf(Range range, const IndexDim& experts) {
  const auto position = [&](int64_t expert) {
    return std::lower_bound(experts.numbers.begin(), experts.numbers.end(),
                            expert) -
           experts.numbers.begin();
  };
  return {position(range.begin), position(range.end)};
}

bool NamesNothing(const Buffer& buffer) {
  return std::any_of(
      buffer.index.begin(), buffer.index.end(),
      [](const IndexDim& index) { return index.numbers.empty(); });
}

// Where a rank stands on the side's two axes.
struct Coordinate {
  int64_t data = 0;
  int64_t tensor = 0;
};

// What a rank holds of a layer's stacked experts: of the stack's first dim and
// of its second.
struct ExpertShard {
  Range experts;
  EvenPart second;
};

class FsdpLayout {
 public:
  explicit FsdpLayout(const LayoutContext& context) : context_(context) {}

  SideLayout LayOut();

 private:
  // Reports sizes that do not fit; true when all do.
  bool CheckSizes();
  void CheckTensorParallel(SizeChecks& checks);
  void CheckExpertMesh(SizeChecks& checks);

  // The experts of a layer, as a mesh [data / expert, expert] of the
  // data-parallel ranks shares them: consecutive ones to each coordinate of
  // its fastest axis, which FSDP cuts over the other.
  Range OwnExperts(const Coordinate& rank) const {
    return EvenShard(context_.model.architecture.experts, expert_,
                     rank.data % expert_);
  }
  ExpertShard StackShard(const Coordinate& rank) const;
  int64_t StackDim() const;

  // Modules that hold fused experts are always those of transformers 5.
  bool IsTransformers5() const {
    return fused_ ||
           (context_.side.version.given && IsSince(context_.side, {5}));
  }

  // The name of a param, or of what is made of it.
  std::string ModuleName(std::string_view name) const;

  // Whether the modules have the last two dims of the param's tensor exchanged.
  bool IsTransposed(const Param& param) const {
    return IsStacked(param.role) && IsTransformers5() &&
           context_.model.architecture.family->transformers
               .transposes_experts_since_5;
  }
  bool IsFp32Norm(std::string_view name) const {
    return context_.model.architecture.family->transformers
               .fp32_norms_since_5 &&
           IsTransformers5() && !context_.side.dtype.given &&
           ModuleOf(name).ends_with("norm");
  }
  // Of the modules' tensor.
  Dims ModuleShape(const Param& param) const {
    Dims shape = param.StoredShape();
    if (IsTransposed(param)) std::swap(shape[1], shape[2]);
    return shape;
  }

  Buffer Shard(ParamId id, const Coordinate& rank) const;
  // [experts, gate rows then up rows, …] and [experts, …] of every layer.
  std::vector<Buffer> FusedExperts(const Coordinate& rank) const;

  const LayoutContext& context_;
  const int64_t tensor_ = context_.side.tensor_parallel.value;
  const int64_t data_ = context_.side.data_parallel.value;
  const int64_t expert_ = context_.side.expert_parallel.value;
  const bool fused_ = context_.side.fused_experts.value;
  const RoleTable table_{context_.model};
};

bool FsdpLayout::CheckSizes() {
  const SideSpec& side = context_.side;
  SizeChecks checks(context_, table_);
  for (const Param& param : context_.model.params) {
    if (!param.shape.empty()) continue;
    checks.Report(
        side.layout.place,
        "parameter \"%s\" has no dims; FSDP cuts dim 0, wanted one or more",
        param.name);
  }
  const Family& family = *context_.model.architecture.family;
  if (context_.model.vision && IsTransformers5() &&
      !family.transformers.knows_tower_since_5) {
    checks.Report(
        side.version.given ? side.version.place : side.fused_experts.place,
        "%s: transformers 5 holds rows of the vision tower of %s in an order "
        "that no plan has; wanted \"vision\": false, or neither version nor "
        "fused_experts for modules named as in the checkpoint",
        side.key, family.model_type);
  }
  // Roles that contradict the model are the model's error, not the sizes'.
  if ((fused_ || tensor_ > 1 || expert_ > 1) && !CheckRoles(context_)) {
    return false;
  }
  checks.HasExperts(fused_, side.fused_experts.place, "fused_experts");
  checks.HasExperts(expert_ > 1, side.expert_parallel.place, "expert_parallel");
  if (tensor_ > 1) CheckTensorParallel(checks);
  if (checks.ok()) CheckExpertMesh(checks);
  return checks.ok();
}

void FsdpLayout::CheckTensorParallel(SizeChecks& checks) {
  const SizeChecks::Divisor tensor =
      checks.Named("tensor_parallel", context_.side.tensor_parallel);
  checks.Divides(tensor, context_.model.architecture.heads, "attention heads");
  checks.Divides(tensor, context_.model.architecture.kv_heads,
                 "key-value heads");
  for (const ParamRole role : {kMlpGate, kMlpUp, kColumn, kRow}) {
    checks.Parts(tensor, role);
  }
  for (const Param& param : context_.model.params) {
    if (TensorCutOf(param.role).has_value()) continue;
    checks.Report(tensor.place,
                  "%s cannot place parameter \"%s\"; wanted a dense model%s, "
                  "or layout \"generic\" with its placements",
                  tensor.text, param.FirstName(),
                  IsTower(param.role) ? " and \"vision\": false" : "");
    break;
  }
}

void FsdpLayout::CheckExpertMesh(SizeChecks& checks) {
  const SideSpec& side = context_.side;
  const SizeChecks::Divisor expert =
      checks.Named("expert_parallel", side.expert_parallel);
  checks.Divides(expert, context_.model.architecture.experts, "experts");
  checks.Divides(expert, data_, "data-parallel ranks");

  const bool stacked = fused_ || !table_.Params(kFusedExpertDown).empty() ||
                       !table_.Params(kStackedExpertDown).empty();
  if (side.expert_shard_dim.given && !stacked) {
    checks.Report(side.expert_shard_dim.place,
                  "%s.expert_shard_dim %d is of stacked experts; wanted "
                  "fused_experts beside it",
                  side.key, side.expert_shard_dim.value);
  }
  if (!checks.ok() || !stacked || StackDim() == 0) return;
  // FSDP2 refuses uneven shards of any dim but the first.
  const int64_t shards = data_ / expert_;
  const auto divides = [&](int64_t size, std::string_view stack) {
    if (size % shards == 0) return;
    checks.Report((side.expert_shard_dim.given ? side.expert_shard_dim
                                               : side.expert_parallel)
                      .place,
                  "%s.data_parallel %d over expert_parallel %d leaves %d "
                  "shards of dim 1 of %s, which do not divide its %d; wanted "
                  "expert_shard_dim 0 or other sizes",
                  side.key, data_, expert_, shards, stack, size);
  };
  for (const Param& param : context_.model.params) {
    if (IsStacked(param.role))
      divides(ModuleShape(param)[1], param.FirstName());
    if (!fused_) continue;
    // Both halves of gate_up_proj have the rows of an up projection.
    const bool gated = !table_.Params(kExpertGate).empty();
    if (param.role == kExpertUp) {
      divides(param.shape[0] * (gated ? 2 : 1),
              gated ? "gate_up_proj" : "up_proj");
    }
    if (param.role == kExpertDown) divides(param.shape[0], "down_proj");
  }
}

// Over more ranks than experts torchtitan cuts the second dim, so that no shard
// is empty.
int64_t FsdpLayout::StackDim() const {
  const Located<int64_t>& given = context_.side.expert_shard_dim;
  if (given.given) return given.value;
  return expert_ > 1 && data_ > context_.model.architecture.experts ? 1 : 0;
}

ExpertShard FsdpLayout::StackShard(const Coordinate& rank) const {
  const Range own = OwnExperts(rank);
  const EvenPart part = {.count = data_ / expert_,
                         .index = rank.data / expert_};
  if (StackDim() == 1) return {.experts = own, .second = part};
  const Range chunk = ChunkShard(own.size(), part.count, part.index);
  return {.experts = {own.begin + chunk.begin, own.begin + chunk.end},
          .second = {}};
}

std::string FsdpLayout::ModuleName(std::string_view name) const {
  if (!IsTransformers5()) return std::string(name);
  return Renamed(
      name, context_.model.architecture.family->transformers.renames_since_5);
}

Buffer FsdpLayout::Shard(ParamId id, const Coordinate& rank) const {
  const Param& param = context_.model.params[IndexOf(id)];
  const size_t rows = param.index.size();
  const Dims shape = ModuleShape(param);
  Dims whole = param.VirtualShape();
  whole.resize(rows);
  whole.insert(whole.end(), shape.begin(), shape.end());
  Box box = WholeBox(whole);

  const std::optional<Cut> cut =
      tensor_ > 1 ? TensorCutOf(param.role) : Cut::kWhole;
  if (cut == Cut::kColumns) {
    const Range columns = EvenShard(shape[1], tensor_, rank.tensor);
    box.lo[rows + 1] = columns.begin;
    box.hi[rows + 1] = columns.end;
  }
  Range held = {0, shape[0]};
  EvenPart part = {.count = data_, .index = rank.data};
  Buffer buffer;
  buffer.name = ModuleName(param.name);
  buffer.index = param.index;
  if (cut == Cut::kRows) {
    held = ChunkShard(held.end, tensor_, rank.tensor);
  } else if (IsStacked(param.role)) {
    const ExpertShard shard = StackShard(rank);
    const Range second =
        EvenShard(shape[1], shard.second.count, shard.second.index);
    held = shard.experts;
    box.lo[rows + 1] = second.begin;
    box.hi[rows + 1] = second.end;
    part = {};
  } else if (expert_ > 1 && IsExpert(param)) {
    const Range positions = PositionsOf(OwnExperts(rank), param.index[1]);
    box.lo[1] = positions.begin;
    box.hi[1] = positions.end;
    std::vector<int32_t>& numbers = buffer.index[1].numbers;
    numbers = {numbers.begin() + positions.begin,
               numbers.begin() + positions.end};
    part = {.count = data_ / expert_, .index = rank.data / expert_};
  }
  if (!IsModuleBuffer(param)) {
    const Range chunk = ChunkShard(held.size(), part.count, part.index);
    held = {held.begin + chunk.begin, held.begin + chunk.end};
  }
  box.lo[rows] = held.begin;
  box.hi[rows] = held.end;

  for (size_t dim = rows; dim < box.lo.size(); ++dim) {
    buffer.shape.push_back(box.extent(dim));
  }
  buffer.dtype = BufferDType(context_.side, param);
  buffer.own_dtype = IsAlwaysFp32(param.role);
  if (IsFp32Norm(buffer.name)) {
    buffer.dtype = DType::kFp32;
    buffer.own_dtype = true;
  }
  if (box.Empty()) return buffer;
  Fragment held_part = {.param = id,
                        .box = std::move(box),
                        .offset = 0,
                        .stride = RowMajorStrides(buffer.VirtualShape())};
  if (IsTransposed(param)) {
    for (Dims* dims :
         {&held_part.box.lo, &held_part.box.hi, &held_part.stride}) {
      std::swap((*dims)[rows + 1], (*dims)[rows + 2]);
    }
  }
  buffer.fragments = OfSplitParam(param, held_part);
  return buffer;
}

std::vector<Buffer> FsdpLayout::FusedExperts(const Coordinate& rank) const {
  const Architecture& architecture = context_.model.architecture;
  const Range layers = {0, architecture.all_layers()};
  const ExpertShard shard = StackShard(rank);
  const ExpertSlice slice = ConsecutiveExperts(shard.experts, false);
  std::vector<Buffer> buffers;
  const auto add = [&](const LayerGroup& group, std::string_view leaf) {
    const Param& first = *group.params[0];
    const std::string name = ModuleName(first.name);
    TensorSpec spec = {
        .name = absl::StrFormat("%s%s", name.substr(0, name.find("{1}")), leaf),
        .shape = first.shape,
        .parts = {}};
    int64_t rows = 0;  // of an expert in the stack
    for (const Param* param : group.params) rows += param->shape[0];
    const Range held = EvenShard(rows, shard.second.count, shard.second.index);
    spec.shape[0] = held.size();
    int64_t before = 0;  // rows of the stack before the param's
    for (const Param* param : group.params) {
      const Range own = {std::max(held.begin - before, int64_t{0}),
                         std::min(held.end - before, param->shape[0])};
      if (own.begin < own.end) {
        spec.parts.push_back(
            RowsPart(*param, own, before + own.begin - held.begin));
      }
      before += param->shape[0];
    }
    buffers.push_back(LayerStack(table_, std::move(spec), group.layers,
                                 {.dtype = BufferDType(context_.side, first),
                                  .first_layer = first.first_layer,
                                  .experts = slice}));
  };
  const bool gated = !table_.Params(kExpertGate).empty();
  const std::vector<ParamRole> inner =
      gated ? std::vector{kExpertGate, kExpertUp} : std::vector{kExpertUp};
  for (const LayerGroup& group : table_.Group(inner, layers)) {
    add(group, gated ? "gate_up_proj" : "up_proj");
  }
  for (const LayerGroup& group : table_.Group({kExpertDown}, layers)) {
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
          Buffer shard = Shard(static_cast<ParamId>(i), rank);
          // An exclude may have left a rank none of a stack's experts.
          if (NamesNothing(shard)) continue;
          buffers.push_back(context_.buffers.Intern(std::move(shard)));
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
