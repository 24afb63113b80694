#include "compiler/layout/serving.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace refit {
namespace {

using enum ParamRole;

constexpr int64_t kVocabularyPadding = 64;

// "a.experts.{1}.w1.weight": "a.experts." with `module` and `weight` after it.
std::string ExpertsName(const LayerGroup& group, std::string_view module,
                        std::string_view weight) {
  const std::string_view name = group.params[0]->name;
  return absl::StrFormat("%s%s%s", name.substr(0, name.find("{1}")), module,
                         weight);
}

}  // namespace

std::string RenameModule(std::string_view name, std::string_view module) {
  const size_t leaf = name.rfind('.');
  const size_t begin = name.rfind('.', leaf - 1) + 1;
  return absl::StrFormat("%s%s%s", name.substr(0, begin), module,
                         name.substr(leaf));
}

int64_t ServingVocabularyRows(const Param& param) {
  const int64_t vocab = param.shape[0];
  return (vocab + kVocabularyPadding - 1) / kVocabularyPadding *
         kVocabularyPadding;
}

Buffer ServingVocabulary(const LayoutContext& context, ParamId id,
                         EvenPart part) {
  const Param& param = context.model.params[IndexOf(id)];
  return VocabularyTensor(context, param.name, id,
                          {.padded_rows = ServingVocabularyRows(param),
                           .count = part.count,
                           .index = part.index});
}

TensorSpec FusedHeads(const LayerGroup& group, const Architecture& architecture,
                      EvenPart part) {
  const int64_t head = architecture.head_dim;
  const Range query = EvenShare(architecture.heads, part.count, part.index);
  Range kv;
  if (part.count >= architecture.kv_heads) {
    const int64_t ranks_per_head = part.count / architecture.kv_heads;
    kv = {part.index / ranks_per_head, part.index / ranks_per_head + 1};
  } else {
    kv = EvenShare(architecture.kv_heads, part.count, part.index);
  }

  TensorSpec spec;
  spec.name = RenameModule(group.params[0]->name, "qkv_proj");
  spec.shape = group.params[0]->shape;
  spec.shape[0] = 0;
  for (const auto& [param, heads] :
       {std::pair(group.params[0], query), std::pair(group.params[1], kv),
        std::pair(group.params[2], kv)}) {
    const Range rows = {heads.begin * head, heads.end * head};
    spec.parts.push_back(RowsPart(*param, rows, spec.shape[0]));
    spec.shape[0] += rows.size();
  }
  return spec;
}

TensorSpec GateAndUp(const LayerGroup& group, std::string name, EvenPart part,
                     GateUpOrder order) {
  const Param& gate = *group.params[0];
  const Param& up = *group.params[1];
  const Range gate_rows = EvenShare(gate.shape[0], part.count, part.index);
  const Range up_rows = EvenShare(up.shape[0], part.count, part.index);
  const bool gate_first = order == GateUpOrder::kGateFirst;
  return {.name = std::move(name),
          .shape = {gate_rows.size() + up_rows.size(), gate.shape[1]},
          .parts = {RowsPart(gate, gate_rows, gate_first ? 0 : up_rows.size()),
                    RowsPart(up, up_rows, gate_first ? gate_rows.size() : 0)}};
}

TensorSpec ColumnShard(const LayerGroup& group, std::string name,
                       EvenPart part) {
  const Param& param = *group.params[0];
  const Range columns = EvenShare(param.shape[1], part.count, part.index);
  return {.name = std::move(name),
          .shape = {param.shape[0], columns.size()},
          .parts = {ColumnsPart(param, columns)}};
}

TensorSpec Replicated(const LayerGroup& group) {
  return {.name = group.params[0]->name,
          .shape = group.params[0]->shape,
          .parts = {WholePart(*group.params[0])}};
}

TensorSpec ExpertGateAndUp(const LayerGroup& group, std::string_view module,
                           EvenPart part, GateUpOrder order) {
  return GateAndUp(group, ExpertsName(group, module, "w13_weight"), part,
                   order);
}

TensorSpec ExpertDown(const LayerGroup& group, std::string_view module,
                      EvenPart part) {
  return ColumnShard(group, ExpertsName(group, module, "w2_weight"), part);
}

void AddLayerStacks(const LayoutContext& context, const RoleTable& table,
                    Range layers, std::initializer_list<ParamRole> roles,
                    const std::optional<ExpertSlice>& experts,
                    absl::FunctionRef<TensorSpec(const LayerGroup&)> make_spec,
                    std::vector<BufferId>& out) {
  for (const LayerGroup& group : table.Group(roles, layers)) {
    out.push_back(context.buffers.Intern(
        LayerStack(table, make_spec(group), group.layers,
                   {.dtype = BufferDType(context.side, *group.params[0]),
                    .experts = experts})));
  }
}

void AddEnd(const LayoutContext& context, EndUse use, Buffer buffer,
            std::vector<BufferId>& out) {
  if (use == EndUse::kAbsent) return;
  if (use == EndUse::kUnread) {
    buffer = SkippedCopy(std::move(buffer), SkipReason::kUnread,
                         "this pipeline stage holds a copy but never reads it");
  }
  out.push_back(context.buffers.Intern(std::move(buffer)));
}

void CheckExpertTensors(SizeChecks& checks,
                        const SizeChecks::Divisor& divisor) {
  constexpr std::string_view kWhat = "intermediate features of an expert";
  for (const ParamRole role : {kExpertGate, kExpertUp}) {
    checks.Rows(divisor, role, kWhat);
  }
  checks.Columns(divisor, kExpertDown, kWhat);
}

void CheckMlp(SizeChecks& checks, const SizeChecks::Divisor& divisor) {
  constexpr std::string_view kWhat = "intermediate features of the MLP";
  for (const ParamRole role : {kMlpGate, kMlpUp}) {
    checks.Rows(divisor, role, kWhat);
  }
  checks.Columns(divisor, kMlpDown, kWhat);
}

void CheckVocabulary(SizeChecks& checks, const RoleTable& table, ParamRole role,
                     const SizeChecks::Divisor& divisor) {
  for (const ParamId id : table.Params(role)) {
    checks.Divides(divisor, ServingVocabularyRows(table.param(id)),
                   "vocabulary rows (padded to a multiple of 64)");
  }
}

}  // namespace refit
