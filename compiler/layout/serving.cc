#include "compiler/layout/serving.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace refit {
namespace {

constexpr int64_t kVocabularyPadding = 64;

}  // namespace

std::string RenameModule(std::string_view name, std::string_view module) {
  const size_t leaf = name.rfind('.');
  const size_t begin = name.rfind('.', leaf - 1) + 1;
  return absl::StrFormat("%s%s%s", name.substr(0, begin), module,
                         name.substr(leaf));
}

std::string_view ExpertsPrefix(std::string_view name) {
  return name.substr(0, name.find("{1}"));
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
  struct Block {
    const Param* param;
    Range heads;
    int64_t head_rows;
  };
  for (const auto& [param, heads, head_rows] :
       {Block{group.params[0], query, architecture.query_head_rows()},
        Block{group.params[1], kv, head}, Block{group.params[2], kv, head}}) {
    const Range rows = {heads.begin * head_rows, heads.end * head_rows};
    spec.parts.push_back(RowsPart(*param, rows, spec.shape[0]));
    spec.shape[0] += rows.size();
  }
  return spec;
}

TensorSpec GateAndUp(const LayerGroup& group, std::string name, EvenPart part) {
  const Range gate =
      EvenShare(group.params[0]->shape[0], part.count, part.index);
  const Range up = EvenShare(group.params[1]->shape[0], part.count, part.index);
  return {.name = std::move(name),
          .shape = {gate.size() + up.size(), group.params[0]->shape[1]},
          .parts = {RowsPart(*group.params[0], gate, 0),
                    RowsPart(*group.params[1], up, gate.size())}};
}

TensorSpec ConcatRows(const LayerGroup& group, std::string name) {
  TensorSpec spec = {.name = std::move(name),
                     .shape = {0, group.params[0]->shape[1]},
                     .parts = {}};
  for (const Param* param : group.params) {
    const int64_t rows = param->shape[0];
    spec.parts.push_back(RowsPart(*param, {0, rows}, spec.shape[0]));
    spec.shape[0] += rows;
  }
  return spec;
}

TensorSpec RowShard(const LayerGroup& group, EvenPart part) {
  const Param& param = *group.params[0];
  const Range rows = EvenShare(param.shape[0], part.count, part.index);
  return {.name = param.name,
          .shape = {rows.size(), param.shape[1]},
          .parts = {RowsPart(param, rows, 0)}};
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

std::string DraftLayerName(std::string name) {
  constexpr std::string_view kLayer = "model.layers.{0}.";
  if (name.starts_with(kLayer)) name.insert(kLayer.size(), "mtp_block.");
  return name;
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

}  // namespace refit
