#include "compiler/layout/serving/engine.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace refit {
namespace {

using enum ParamRole;

// Roles of modules of which nothing is known but how ranks cut them.
struct ModuleCut {
  ParamRole role;
  Axis axis;
  Cut cut;
};
constexpr ModuleCut kModules[] = {
    {kColumn, Axis::kTensor, Cut::kRows},
    {kRow, Axis::kTensor, Cut::kColumns},
    {kTowerConnector, Axis::kConnector, Cut::kRows},
    {kTowerColumn, Axis::kTower, Cut::kRows},
    {kTowerRow, Axis::kTower, Cut::kColumns},
    {kTowerHeads, Axis::kTower, Cut::kRows},
};

// What stands beside an expert's role where shared experts are one more expert.
ParamRole SharedRoleOf(ParamRole role) {
  if (role == kExpertGate) return kSharedExpertGate;
  return role == kExpertUp ? kSharedExpertUp : kSharedExpertDown;
}

// Of an expert's or of all experts' tensor.
std::string ExpertsName(const Param& param, const Engine& engine,
                        std::string_view weight) {
  constexpr std::string_view kExperts = ".experts.";
  const bool is_one = FormOf(param.role).scope == RoleScope::kExpert;
  const size_t end =
      is_one ? param.name.find("{1}") : param.name.find(kExperts) + 9;
  return absl::StrFormat("%s%s%s", param.name.substr(0, end),
                         engine.experts_module, weight);
}

// With the tensor's last two dimensions exchanged.
void Transpose(TensorSpec& spec) {
  int64_t& rows = spec.shape[spec.shape.size() - 2];
  int64_t& columns = spec.shape.back();
  const int64_t matrix = rows * columns;
  // Of an element that is `at` elements from the first; also of a stride.
  const auto moved = [&](int64_t at) {
    return at / matrix * matrix + at % columns * rows + at % matrix / columns;
  };
  for (Part& part : spec.parts) {
    part.offset = moved(part.offset);
    for (int64_t& stride : part.stride) stride = moved(stride);
  }
  std::swap(rows, columns);
}

// "model.layers.{0}.x" as the draft model of multi-token prediction calls it,
// "model.layers.{0}.mtp_block.x". What it alone has stands beside its block.
std::string DraftName(const Param& param, std::string name) {
  constexpr std::string_view kLayer = "model.layers.{0}.";
  if (!FormOf(param.role).of_prediction && name.starts_with(kLayer)) {
    name.insert(kLayer.size(), "mtp_block.");
  }
  return name;
}

// What a part of a side's tensors is listed for.
struct At {
  int64_t stage = 0;
  Range layers;
  int64_t rank = 0;  // among those of the stage that cut the tensors
  const ExpertSlice* experts = nullptr;
};

class EngineLayout {
 public:
  EngineLayout(const LayoutContext& context, const RoleTable& table,
               const Engine& engine)
      : context_(context), table_(table), engine_(engine) {}

  // The buffers of a stage in three runs: what comes before the experts, the
  // experts, what comes after.
  std::vector<BufferId> Before(const At& at);
  std::vector<BufferId> Experts(const At& at);
  std::vector<BufferId> After(const At& at);

 private:
  void AddRows(bool of_experts, const At& at) {
    for (const ServingRow& row : ServingRows()) {
      if ((row.axis == Axis::kExpert) == of_experts) AddRow(row, at);
    }
  }
  void AddRow(const ServingRow& row, const At& at);
  // The stacks of the layers with the params of a row.
  void AddLayers(const ServingRow& row, absl::Span<const ParamRole> roles,
                 bool of_draft, Range layers, const At& at);
  TensorSpec SpecOf(const ServingRow& row, const LayerGroup& group,
                    const At& at) const;
  TensorSpec ExpertSpec(absl::Span<const Param* const> params,
                        const ServingRow& row, const At& at) const;
  Range LayersOf(Cell::Layers layers, const At& at) const;

  // Modules of which nothing is known but how they are cut: of the layers, or
  // of a vision tower.
  void AddModules(bool of_tower, const At& at);
  void AddModule(ParamId id, absl::Span<const Fusion> fusions, const At& at);

  Buffer Vocabulary(ParamId id, Axis axis, int64_t rank) const;
  // A tensor outside the layers.
  void AddEnd(bool is_read, Unread otherwise, Buffer buffer);
  void AddWhole(ParamRole role, bool is_read, Unread otherwise);
  void AddEmbedding(const At& at);
  void AddHead(const At& at);

  bool IsLast(const At& at) const { return at.stage == engine_.pipeline - 1; }

  const LayoutContext& context_;
  const RoleTable& table_;
  const Engine& engine_;
  const Architecture& architecture_ = context_.model.architecture;
  std::vector<BufferId> out_;
};

TensorSpec EngineLayout::ExpertSpec(absl::Span<const Param* const> params,
                                    const ServingRow& row, const At& at) const {
  const EvenPart part = engine_.PartOf(row.axis, at.rank);
  const Param& first = *params[0];
  TensorSpec spec;
  if (IsStacked(first.role)) {
    const std::vector<int32_t>& held = at.experts->experts.front();
    const Range experts =
        held.empty() ? Range{} : Range{held.front(), held.back() + 1};
    const bool alternates = first.split == Split::kLastInPairs;
    spec =
        StackedExperts(first, experts, part,
                       alternates ? GateUpOrder::kAlternating : engine_.order);
  } else {
    spec = CutOf(params, row.cut, architecture_, part);
    if (params.size() == 2 && engine_.order == GateUpOrder::kUpFirst) {
      const int64_t up = spec.shape[0] - spec.parts[1].offset / spec.shape[1];
      spec.parts[0].offset = up * spec.shape[1];
      spec.parts[1].offset = 0;
    }
  }
  if (engine_.transposes_experts && !IsStackedBias(first.role)) {
    Transpose(spec);
  }
  return spec;
}

TensorSpec EngineLayout::SpecOf(const ServingRow& row, const LayerGroup& group,
                                const At& at) const {
  const Cell& cell = row.*engine_.column;
  const EvenPart part = engine_.PartOf(row.axis, at.rank);
  const Param& first = *group.params[0];
  TensorSpec spec;
  if (row.axis != Axis::kExpert) {
    spec = CutOf(group.params, row.cut, architecture_, part);
    spec.name = group.params.size() > 1 ? WithModule(first.name, cell.module)
                                        : first.name;
  } else {
    const absl::Span<const Param* const> params = group.params;
    const bool has_shared = engine_.fuses_shared_experts &&
                            at.experts->layer_experts > 0 &&
                            FormOf(first.role).scope == RoleScope::kExpert;
    const size_t own = has_shared ? params.size() / 2 : params.size();
    spec = ExpertSpec(params.first(own), row, at);
    if (has_shared) {
      const auto before = static_cast<int64_t>(at.experts->experts[0].size()) *
                          Product(spec.shape);
      for (Part& part_of : ExpertSpec(params.subspan(own), row, at).parts) {
        part_of.offset += before;
        spec.parts.push_back(std::move(part_of));
      }
    }
    spec.name = ExpertsName(first, engine_, cell.module);
  }
  spec.own_dtype = cell.dtype;
  spec.form = cell.form;
  if (cell.hook.has_value() && context_.which == fb::Side::kDestination) {
    spec.post_hooks.push_back(
        {.name = cell.hook->name, .detail = std::string(cell.hook->detail)});
  }
  if (cell.change != nullptr) {
    cell.change({context_, engine_, first, part, spec});
  }
  return spec;
}

Range EngineLayout::LayersOf(Cell::Layers layers, const At& at) const {
  // The first of all layers is the first stage's.
  const int64_t first =
      std::min(at.layers.begin + (at.stage == 0 ? 1 : 0), at.layers.end);
  switch (layers) {
    case Cell::Layers::kAll:
      return at.layers;
    case Cell::Layers::kFirst:
      return {at.layers.begin, first};
    case Cell::Layers::kAllButFirst:
      return {first, at.layers.end};
    case Cell::Layers::kHash:
      return {at.layers.begin,
              std::min(at.layers.end, architecture_.hash_layers)};
  }
  return {};
}

void EngineLayout::AddLayers(const ServingRow& row,
                             absl::Span<const ParamRole> roles, bool of_draft,
                             Range layers, const At& at) {
  const bool by_expert = FormOf(roles[0]).scope == RoleScope::kExpert;
  for (const LayerGroup& group : table_.Group(roles, layers)) {
    const Param& first = *group.params[0];
    TensorSpec spec = SpecOf(row, group, at);
    spec.name = of_draft ? DraftName(first, std::move(spec.name))
                         : Renamed(spec.name, engine_.renames);
    out_.push_back(context_.buffers.Intern(LayerStack(
        table_, std::move(spec), group.layers,
        {.dtype = BufferDType(context_.side, first),
         .first_layer = first.first_layer,
         .experts = by_expert ? std::optional(*at.experts) : std::nullopt})));
  }
}

void EngineLayout::AddRow(const ServingRow& row, const At& at) {
  const Cell& cell = row.*engine_.column;
  if (!cell.is_held) return;
  if (cell.condition != nullptr && engine_.*cell.condition != cell.wanted) {
    return;
  }
  std::vector<ParamRole> roles;
  for (const ParamRole role : row.roles) {
    if (role != kOther && !table_.Params(role).empty()) roles.push_back(role);
  }
  if (roles.empty()) return;
  if (engine_.fuses_shared_experts &&
      FormOf(roles[0]).scope == RoleScope::kExpert) {
    const size_t own = roles.size();
    for (size_t i = 0; i < own; ++i) roles.push_back(SharedRoleOf(roles[i]));
  }
  AddLayers(row, roles, /*of_draft=*/false, LayersOf(cell.layers, at), at);
  if (!IsLast(at) || cell.layers == Cell::Layers::kFirst ||
      cell.layers == Cell::Layers::kHash) {
    return;
  }
  AddLayers(row, roles, /*of_draft=*/true,
            {architecture_.layers, architecture_.all_layers()}, at);
}

void EngineLayout::AddModule(ParamId id, absl::Span<const Fusion> fusions,
                             const At& at) {
  const Param& param = table_.param(id);
  std::vector<std::string> names = {param.name};
  std::string into = param.name;
  for (const Fusion& fusion : fusions) {
    const auto found = std::find(fusion.modules.begin(), fusion.modules.end(),
                                 ModuleOf(param.name));
    if (found == fusion.modules.end() || param.index.empty()) continue;
    // One tensor holds them all, and is added at the first.
    if (found != fusion.modules.begin()) return;
    into = WithModule(param.name, fusion.into);
    names.clear();
    for (const std::string& module : fusion.modules) {
      names.push_back(WithModule(param.name, module));
    }
  }
  into = Renamed(into, engine_.renames);
  EvenPart part;  // of others all
  Cut cut = Cut::kWhole;
  for (const auto& [role, axis, how] : kModules) {
    if (role != param.role) continue;
    cut = how;
    if (!IsTower(role) || !engine_.HoldsWhole(param)) {
      part = engine_.PartOf(axis, at.rank);
    }
  }
  const auto spec_of = [&](absl::Span<const Param* const> params) {
    TensorSpec spec = CutOf(params, cut, architecture_, part);
    spec.name = into;
    return spec;
  };
  if (param.index.empty()) {
    const Param* const alone[] = {&param};
    out_.push_back(
        context_.buffers.Intern(TensorOf(context_, spec_of(alone), id)));
    return;
  }
  const Range layers =
      IsTower(param.role) ? table_.Numbers(param.role) : at.layers;
  for (const LayerGroup& group : table_.GroupNamed(param.role, names, layers)) {
    out_.push_back(context_.buffers.Intern(
        LayerStack(table_, spec_of(group.params), group.layers,
                   {.dtype = BufferDType(context_.side, *group.params[0]),
                    .experts = std::nullopt})));
  }
}

void EngineLayout::AddModules(bool of_tower, const At& at) {
  static const auto& names =
      *new std::vector<std::string>{"q_proj", "k_proj", "v_proj"};
  const Fusion of_heads = {.into = "qkv_proj", .modules = names};
  const absl::Span<const Fusion> fusions =
      of_tower ? absl::MakeConstSpan(&of_heads, 1) : engine_.fused;
  std::set<std::string_view> done;  // an exclude may have split a stack
  for (size_t i = 0; i < context_.model.params.size(); ++i) {
    const Param& param = context_.model.params[i];
    const bool is_module =
        of_tower ? IsTower(param.role)
                 : IsPlainModule(param.role) &&
                       FormOf(param.role).scope == RoleScope::kLayer;
    if (!is_module || !done.insert(param.name).second) continue;
    const auto id = static_cast<ParamId>(i);
    if (param.role == kTowerPositions && engine_.cuts_tower_positions) {
      AddEnd(at.stage == 0, Unread::kAbsent,
             Vocabulary(id, Axis::kTower, at.rank));
    } else {
      AddModule(id, fusions, at);
    }
  }
}

Buffer EngineLayout::Vocabulary(ParamId id, Axis axis, int64_t rank) const {
  const Param& param = table_.param(id);
  const EvenPart part = engine_.PartOf(axis, rank);
  int64_t rows = PaddedVocabulary(param);
  if (rows % part.count != 0) rows = PaddedVocabulary(param, part.count);
  return VocabularyTensor(
      context_, param.name, id,
      {.padded_rows = rows, .count = part.count, .index = part.index});
}

void EngineLayout::AddEnd(bool is_read, Unread otherwise, Buffer buffer) {
  if (!is_read && otherwise == Unread::kAbsent) return;
  buffer.name = Renamed(buffer.name, engine_.renames);
  if (!is_read) {
    buffer = SkippedCopy(std::move(buffer), SkipReason::kUnread,
                         "this pipeline stage holds a copy but never reads it");
  }
  out_.push_back(context_.buffers.Intern(std::move(buffer)));
}

void EngineLayout::AddWhole(ParamRole role, bool is_read, Unread otherwise) {
  for (const ParamId id : table_.Params(role)) {
    AddEnd(is_read, otherwise,
           WholeTensor(context_, table_.param(id).name, id));
  }
}

void EngineLayout::AddEmbedding(const At& at) {
  // The draft model, on the last stage, has an embedding of its own unless it
  // shares that of the first. Its head is the model's.
  const bool drafts = IsLast(at) && architecture_.mtp_layers > 0;
  const bool is_read = at.stage == 0 || (drafts && !engine_.draft_has_prefix) ||
                       (IsLast(at) && engine_.shares_embedding);
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer embedding = engine_.pads_embedding
                           ? Vocabulary(id, Axis::kEmbedding, at.rank)
                           : WholeTensor(context_, table_.param(id).name, id);
    if (drafts && engine_.draft_has_prefix && at.stage > 0) {
      Buffer copy = embedding;
      copy.name = "mtp.embed_tokens.weight";
      AddEnd(/*is_read=*/true, Unread::kAbsent, std::move(copy));
    }
    AddEnd(is_read, engine_.embedding, std::move(embedding));
  }
}

void EngineLayout::AddHead(const At& at) {
  for (const ParamId id : table_.Params(kOutputHead)) {
    AddEnd(IsLast(at), engine_.head, Vocabulary(id, Axis::kHead, at.rank));
  }
  if (!architecture_.tied || engine_.shares_embedding) return;
  std::string name = "lm_head.weight";
  for (const Skip& skip : context_.model.skips) {
    if (skip.reason == SkipReason::kTied) name = skip.name;
  }
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer head = Vocabulary(id, Axis::kHead, at.rank);
    head.name = name;
    if (IsLast(at) && context_.which == fb::Side::kSource) {
      head = SkippedCopy(
          std::move(head), SkipReason::kTied,
          absl::StrFormat("a copy of the tied %s, which the first stage sends",
                          table_.param(id).name));
    }
    AddEnd(IsLast(at), engine_.head, std::move(head));
  }
}

std::vector<BufferId> EngineLayout::Before(const At& at) {
  out_.clear();
  AddModules(/*of_tower=*/true, at);
  AddWhole(kFirstStage, at.stage == 0, engine_.first);
  AddEmbedding(at);
  AddRows(/*of_experts=*/false, at);
  AddModules(/*of_tower=*/false, at);
  return out_;
}

std::vector<BufferId> EngineLayout::Experts(const At& at) {
  out_.clear();
  AddRows(/*of_experts=*/true, at);
  return out_;
}

std::vector<BufferId> EngineLayout::After(const At& at) {
  out_.clear();
  for (const ParamRole role : {kFinalNorm, kLastStage}) {
    AddWhole(role, IsLast(at), engine_.final_norm);
  }
  if (engine_.has_hyper_heads) {
    AddWhole(kHyperHead, IsLast(at), Unread::kDeclaredSkip);
  }
  AddHead(at);
  return out_;
}

}  // namespace

SideLayout LayOutEngine(const LayoutContext& context, const RoleTable& table,
                        const Engine& engine,
                        const std::optional<PipelineSplit>& split,
                        SizeChecks& checks) {
  std::vector<ExpertSlice> slices = PlaceExperts(
      context, table, engine.spreads_experts ? engine.experts : 0, checks);
  if (!checks.ok() || !split.has_value()) return {};
  for (ExpertSlice& slice : slices) {
    slice.layer_experts = engine.fuses_shared_experts ? 1 : 0;
  }

  const int64_t expert_ranks = engine.data * engine.tensor;
  EngineLayout ranks(context, table, engine);
  SideLayout layout;
  layout.ranks.resize(expert_ranks * engine.pipeline);
  for (int64_t stage = 0; stage < engine.pipeline; ++stage) {
    At at = {.stage = stage, .layers = (*split)[stage][0]};
    std::vector<std::vector<BufferId>> before, after;
    for (at.rank = 0; at.rank < engine.tensor; ++at.rank) {
      before.push_back(ranks.Before(at));
      after.push_back(ranks.After(at));
    }
    for (at.rank = 0; at.rank < expert_ranks; ++at.rank) {
      const int64_t tensor = at.rank % engine.tensor;
      const int64_t data = at.rank / engine.tensor;
      at.experts = &slices[at.rank * engine.experts / expert_ranks];
      std::vector<BufferId>& rank =
          layout
              .ranks[(data * engine.pipeline + stage) * engine.tensor + tensor];
      for (const std::vector<BufferId>& run :
           {before[tensor], ranks.Experts(at), after[tensor]}) {
        rank.insert(rank.end(), run.begin(), run.end());
      }
    }
  }
  AppendReplicas(engine.replicas, layout);
  if (context.model.architecture.experts > 0) {
    layout.requirements = ExpertRequirements(context.side, engine.experts);
  }
  return layout;
}

}  // namespace refit
