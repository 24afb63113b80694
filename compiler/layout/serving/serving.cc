#include "compiler/layout/serving/serving.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/layout/common/fused_experts.h"
#include "compiler/layout/common/mixers.h"

namespace refit {
namespace {

using enum ParamRole;

constexpr int64_t kVocabularyPadding = 64;

std::string ExpertsName(const LayerGroup& group, std::string_view module,
                        std::string_view weight) {
  return absl::StrFormat("%s%s%s", ExpertsPrefix(group.params[0]->name), module,
                         weight);
}

// Of experts that the checkpoint holds in one tensor a layer.
std::string StackedName(const Param& param, std::string_view module,
                        std::string_view weight) {
  constexpr std::string_view kExperts = ".experts.";
  const std::string_view whole = param.name;
  return absl::StrFormat(
      "%s%s%s", whole.substr(0, whole.find(kExperts) + kExperts.size()), module,
      weight);
}

// The rows of these heads.
TensorSpec HeadsOf(const Param& param, Range heads, int64_t head_rows) {
  const Range rows = {heads.begin * head_rows, heads.end * head_rows};
  return {.name = param.name,
          .shape = {rows.size()},
          .parts = {RowsPart(param, rows, 0)}};
}

// Heads of a query, key or value, from row `buffer_row` on of a buffer. Of rows
// in rotary pairs engines have the first of all pairs before the second.
Part HeadRows(const Param& param, Range heads, int64_t head_rows,
              int64_t buffer_row) {
  if (param.split != Split::kRowsInHeadPairs) {
    return RowsPart(param, {heads.begin * head_rows, heads.end * head_rows},
                    buffer_row);
  }
  Part part = RowsPart(param, heads, 0);
  const int64_t columns = param.shape.back();
  part.offset = buffer_row * columns;
  part.stride = {head_rows * columns, columns, head_rows / 2 * columns, 1};
  return part;
}

// The key-value heads of a rank.
Range KeyValueHeads(const Architecture& architecture, EvenPart part) {
  if (part.count < architecture.kv_heads) {
    return EvenShard(architecture.kv_heads, part.count, part.index);
  }
  const int64_t ranks_per_head = part.count / architecture.kv_heads;
  const int64_t head = part.index / ranks_per_head;
  return {head, head + 1};
}

void CheckGatedMlp(SizeChecks& checks, const SizeChecks::Divisor& divisor,
                   ParamRole gate, ParamRole up, ParamRole down,
                   std::string_view what) {
  checks.Rows(divisor, gate, what);
  checks.Rows(divisor, up, what);
  checks.Columns(divisor, down, what);
}

}  // namespace

std::string RenameModule(std::string_view name, std::string_view module) {
  return WithModule(name, module);
}

std::string_view ExpertsPrefix(std::string_view name) {
  return name.substr(0, name.find("{1}"));
}

int64_t ServingVocabularyRows(const Param& param, int64_t multiple) {
  const int64_t vocab = param.shape[0];
  const int64_t unit = kVocabularyPadding * multiple;
  return (vocab + unit - 1) / unit * unit;
}

Buffer ServingVocabulary(const LayoutContext& context, ParamId id,
                         EvenPart part, int64_t multiple) {
  const Param& param = context.model.params[IndexOf(id)];
  return VocabularyTensor(
      context, param.name, id,
      {.padded_rows = ServingVocabularyRows(param, multiple),
       .count = part.count,
       .index = part.index});
}

TensorSpec FusedHeads(const LayerGroup& group, const Architecture& architecture,
                      EvenPart part) {
  const int64_t head = architecture.head_dim;
  const Range query = EvenShard(architecture.heads, part.count, part.index);
  const Range kv = KeyValueHeads(architecture, part);

  TensorSpec spec;
  spec.name = RenameModule(group.params[0]->name, "qkv_proj");
  spec.shape = group.params[0]->StoredShape();
  spec.shape[0] = 0;
  struct Block {
    const Param* param;
    Range heads;
    int64_t head_rows;
  };
  for (const auto& [param, heads, head_rows] :
       {Block{group.params[0], query, architecture.query_head_rows()},
        Block{group.params[1], kv, head}, Block{group.params[2], kv, head}}) {
    spec.parts.push_back(HeadRows(*param, heads, head_rows, spec.shape[0]));
    spec.shape[0] += heads.size() * head_rows;
  }
  return spec;
}

TensorSpec QueryHeadsNorm(const LayerGroup& group,
                          const Architecture& architecture, EvenPart part) {
  const Range heads = EvenShard(architecture.heads, part.count, part.index);
  return HeadsOf(*group.params[0], heads, architecture.head_dim);
}

TensorSpec KeyHeadsNorm(const LayerGroup& group,
                        const Architecture& architecture, EvenPart part) {
  return HeadsOf(*group.params[0], KeyValueHeads(architecture, part),
                 architecture.head_dim);
}

TensorSpec GateAndUp(const LayerGroup& group, std::string name, EvenPart part,
                     GateUpOrder order) {
  const Param& gate = *group.params[0];
  const Param& up = *group.params[1];
  const Range gate_rows = EvenShard(gate.shape[0], part.count, part.index);
  const Range up_rows = EvenShard(up.shape[0], part.count, part.index);
  const bool gate_first = order == GateUpOrder::kGateFirst;
  return {.name = std::move(name),
          .shape = {gate_rows.size() + up_rows.size(), gate.shape[1]},
          .parts = {RowsPart(gate, gate_rows, gate_first ? 0 : up_rows.size()),
                    RowsPart(up, up_rows, gate_first ? gate_rows.size() : 0)}};
}

void AddMlp(const RoleTable& table, const MlpRoles& roles, EvenPart part,
            AddStack add) {
  if (table.Params(roles.gate).empty()) {
    add({roles.up},
        [&](const LayerGroup& group) { return RowShard(group, part); });
  } else {
    add({roles.gate, roles.up}, [&](const LayerGroup& group) {
      return GateAndUp(
          group, RenameModule(group.params[0]->name, "gate_up_proj"), part);
    });
  }
  add({roles.down}, [&](const LayerGroup& group) {
    return ColumnShard(group, group.params[0]->name, part);
  });
}

TensorSpec ExpertGateAndUp(const LayerGroup& group, std::string_view module,
                           EvenPart part, GateUpOrder order) {
  return GateAndUp(group, ExpertsName(group, module, "w13_weight"), part,
                   order);
}

TensorSpec ExpertUp(const LayerGroup& group, std::string_view module,
                    EvenPart part) {
  TensorSpec spec = RowShard(group, part);
  spec.name = ExpertsName(group, module, "w13_weight");
  return spec;
}

TensorSpec ExpertDown(const LayerGroup& group, std::string_view module,
                      EvenPart part) {
  return ColumnShard(group, ExpertsName(group, module, "w2_weight"), part);
}

TensorSpec Transposed(TensorSpec spec) {
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
  return spec;
}

void AddPlainModules(const LayoutContext& context, const RoleTable& table,
                     absl::Span<const Fusion> fused, Renames renames,
                     EvenPart part, Range layers, std::vector<BufferId>& out) {
  const auto add = [&](const LayerGroup& group, TensorSpec spec) {
    spec.name = Renamed(spec.name, renames);
    out.push_back(context.buffers.Intern(
        LayerStack(table, std::move(spec), group.layers,
                   {.dtype = BufferDType(context.side, *group.params[0]),
                    .experts = std::nullopt})));
  };
  std::set<std::string_view> done;  // an exclude may have split a stack
  for (const Param& param : context.model.params) {
    const ParamRole role = param.role;
    const std::string& name = param.name;
    const bool is_plain = role == kColumn || role == kRow ||
                          role == kReplicated || role == kReplicatedFp32;
    if (!is_plain || !done.insert(name).second) continue;
    const std::string_view module = ModuleOf(name);
    std::vector<std::string> names = {name};
    std::string into = name;
    bool follows = false;
    for (const Fusion& fusion : fused) {
      const auto found =
          std::find(fusion.modules.begin(), fusion.modules.end(), module);
      if (found == fusion.modules.end()) continue;
      follows = found != fusion.modules.begin();
      into = WithModule(name, fusion.into);
      names.clear();
      for (const std::string& other : fusion.modules) {
        names.push_back(WithModule(name, other));
      }
    }
    if (follows) continue;
    for (const LayerGroup& group : table.GroupNamed(role, names, layers)) {
      if (role == kRow) {
        add(group, ColumnShard(group, into, part));
        continue;
      }
      TensorSpec spec = {
          .name = into, .shape = group.params[0]->shape, .parts = {}};
      spec.shape[0] = 0;
      const EvenPart cut = role == kColumn ? part : EvenPart{};
      for (const Param* of_group : group.params) {
        const Range rows = EvenShard(of_group->shape[0], cut.count, cut.index);
        spec.parts.push_back(RowsPart(*of_group, rows, spec.shape[0]));
        spec.shape[0] += rows.size();
      }
      add(group, std::move(spec));
    }
  }
}

void AddFusedExperts(const LayoutContext& context,
                     const FusedExpertTensors& tensors, Range experts,
                     EvenPart part, AddStack add) {
  const auto name = [&](const Param& param, std::string_view weight) {
    return StackedName(param, tensors.module, weight);
  };
  add({kFusedExpertGateUp}, [&](const LayerGroup& group) {
    const Param& param = *group.params[0];
    return StackedGateUp(param, name(param, "w13_weight"), experts, part);
  });
  add({kFusedExpertGateThenUp}, [&](const LayerGroup& group) {
    const Param& param = *group.params[0];
    return StackedGateThenUp(param, name(param, "w13_weight"), experts, part,
                             tensors.order == GateUpOrder::kGateFirst);
  });
  add({kFusedExpertGateUpBias}, [&](const LayerGroup& group) {
    const Param& param = *group.params[0];
    TensorSpec spec = StackedGateUpBias(
        param, name(param, tensors.gate_up_bias), experts, part);
    spec.own_dtype = tensors.bias_dtype;
    return spec;
  });
  add({kFusedExpertDown}, [&](const LayerGroup& group) {
    const Param& param = *group.params[0];
    return StackedDown(param, name(param, "w2_weight"), experts, part);
  });
  // Of ranks that share an expert, one adds the bias to its output.
  add({kFusedExpertDownBias}, [&](const LayerGroup& group) {
    const Param& param = *group.params[0];
    TensorSpec spec =
        StackedDownBias(param, name(param, tensors.down_bias), experts);
    spec.own_dtype = tensors.bias_dtype;
    if (part.index > 0) {
      spec.parts.clear();
      spec.zeros = context.which == fb::Side::kDestination;
    }
    return spec;
  });
}

void AddStackedExperts(std::string_view module, GateUpOrder order,
                       Range experts, EvenPart part, AddStack add) {
  add({kStackedExpertGateUp}, [&](const LayerGroup& group) {
    const Param& param = *group.params[0];
    return StackedGateAndUpRows(param, StackedName(param, module, "w13_weight"),
                                experts, part,
                                order == GateUpOrder::kGateFirst);
  });
  add({kStackedExpertDown}, [&](const LayerGroup& group) {
    const Param& param = *group.params[0];
    return StackedDownColumns(param, StackedName(param, module, "w2_weight"),
                              experts, part);
  });
}

void CheckFusedExperts(const LayoutContext& context, const RoleTable& table,
                       GateUpOrder order, SizeChecks& checks) {
  if (table.Params(kFusedExpertDown).empty() &&
      table.Params(kStackedExpertDown).empty()) {
    return;
  }
  const SideSpec& side = context.side;
  const std::string_view family = context.model.architecture.family->model_type;
  if (side.experts.given) {
    checks.Report(side.experts.place,
                  absl::StrFormat("%s.experts: the experts of %s are placed "
                                  "linearly; wanted no such key",
                                  side.key, family));
  }
  if (order != GateUpOrder::kGateFirst &&
      !table.Params(kFusedExpertGateUp).empty()) {
    checks.Report(
        side.moe_backend.place,
        absl::StrFormat("%s.moe_backend \"%s\" has no known order of %s's "
                        "alternating gate and up rows; wanted triton",
                        side.key, side.moe_backend.value, family));
  }
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
  TensorSpec spec = RowsOf(*group.params[0], part);
  spec.name = group.params[0]->name;
  return spec;
}

TensorSpec ColumnShard(const LayerGroup& group, std::string name,
                       EvenPart part) {
  TensorSpec spec = ColumnsOf(*group.params[0], part);
  spec.name = std::move(name);
  return spec;
}

TensorSpec Replicated(const LayerGroup& group) {
  TensorSpec spec = WholeOf(*group.params[0]);
  spec.name = group.params[0]->name;
  return spec;
}

std::string DraftLayerName(std::string name) {
  constexpr std::string_view kLayer = "model.layers.{0}.";
  if (name.starts_with(kLayer)) name.insert(kLayer.size(), "mtp_block.");
  return name;
}

void AddLayerStacks(const LayoutContext& context, const RoleTable& table,
                    Range layers, absl::Span<const ParamRole> roles,
                    const std::optional<ExpertSlice>& experts,
                    absl::FunctionRef<TensorSpec(const LayerGroup&)> make_spec,
                    std::vector<BufferId>& out) {
  for (const LayerGroup& group : table.Group(roles, layers)) {
    out.push_back(context.buffers.Intern(
        LayerStack(table, make_spec(group), group.layers,
                   {.dtype = BufferDType(context.side, *group.params[0]),
                    .first_layer = group.params[0]->first_layer,
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
  constexpr std::string_view kFeatures = "intermediate features of an expert";
  CheckGatedMlp(checks, divisor, kExpertGate, kExpertUp, kExpertDown,
                kFeatures);
  checks.Columns(divisor, kFusedExpertDown, kFeatures);
  checks.Dim(divisor, kStackedExpertDown, 2, kFeatures);
}

void CheckMlp(SizeChecks& checks, const SizeChecks::Divisor& divisor) {
  CheckGatedMlp(checks, divisor, kMlpGate, kMlpUp, kMlpDown,
                "intermediate features of the MLP");
}

void CheckSharedExperts(SizeChecks& checks,
                        const SizeChecks::Divisor& divisor) {
  CheckGatedMlp(checks, divisor, kSharedExpertGate, kSharedExpertUp,
                kSharedExpertDown,
                "intermediate features of the shared experts");
}

void CheckVocabulary(SizeChecks& checks, const RoleTable& table, ParamRole role,
                     const SizeChecks::Divisor& divisor) {
  for (const ParamId id : table.Params(role)) {
    checks.Divides(divisor, ServingVocabularyRows(table.param(id)),
                   "vocabulary rows (padded to a multiple of 64)");
  }
}

namespace {

void AddMambaMixers(const MambaSizes& mamba, EvenPart part, AddStack add) {
  const auto row_part = [&](const LayerGroup& group) {
    return RowPart(*group.params[0], part);
  };
  const auto in_rows = [&](const LayerGroup& group) {
    return MambaInRows(*group.params[0], mamba, part);
  };
  const auto conv_rows = [&](const LayerGroup& group) {
    return MambaConvRows(*group.params[0], mamba, part);
  };
  add({kMambaConv}, conv_rows);
  add({kMambaConvBias}, conv_rows);
  add({kMambaIn}, in_rows);
  add({kMambaInBias}, in_rows);
  add({kMambaALog}, [&](const LayerGroup& group) {
    TensorSpec spec = row_part(group);
    spec.own_dtype = DType::kFp32;
    spec.form = ValueForm::kNegativeExp;
    return spec;
  });
  add({kMambaD}, row_part);
  add({kMambaDtBias}, row_part);
  add({kMambaOut}, [&](const LayerGroup& group) {
    return ColumnShard(group, group.params[0]->name, part);
  });
  add({kMambaOutBias}, Replicated);
  add({kMambaGatedNorm}, row_part);
  add({kMambaNorm}, Replicated);
}

void AddDeltaNets(const DeltaNetSizes& delta, EvenPart part, AddStack add) {
  const auto row_part = [&](const LayerGroup& group) {
    return RowPart(*group.params[0], part);
  };
  add({kDeltaConv}, [&](const LayerGroup& group) {
    return DeltaConvRows(*group.params[0], delta, part);
  });
  // Rows stand by key head, as in the checkpoint.
  add({kDeltaQkvz}, row_part);
  add({kDeltaBa}, row_part);
  add({kDeltaQkv, kDeltaZ}, [&](const LayerGroup& group) {
    TensorSpec spec = DeltaQkvzRows(group, delta, part);
    spec.name = RenameModule(spec.name, "in_proj_qkvz");
    return spec;
  });
  add({kDeltaB, kDeltaA}, [&](const LayerGroup& group) {
    TensorSpec spec = DeltaBaRows(group, part);
    spec.name = RenameModule(spec.name, "in_proj_ba");
    return spec;
  });
  add({kDeltaDtBias}, row_part);
  add({kDeltaALog}, [&](const LayerGroup& group) {
    TensorSpec spec = row_part(group);
    spec.own_dtype = DType::kFp32;
    return spec;
  });
  add({kDeltaGatedNorm}, Replicated);
  add({kDeltaOut}, [&](const LayerGroup& group) {
    return ColumnShard(group, group.params[0]->name, part);
  });
}

}  // namespace

TensorSpec WithPostHook(const LayoutContext& context, TensorSpec spec,
                        PostHook hook) {
  if (context.which == fb::Side::kDestination) {
    spec.post_hooks.push_back(std::move(hook));
  }
  return spec;
}

TensorSpec Router(const LayoutContext& context, const LayerGroup& group,
                  bool fp32) {
  TensorSpec spec = Replicated(group);
  if (fp32) spec.own_dtype = DType::kFp32;
  if (context.side.router_dtype.given) {
    spec.own_dtype = context.side.router_dtype.value;
  }
  return spec;
}

void AddIndexers(bool joined, std::optional<DType> weights_dtype,
                 AddStack add) {
  const auto whole_as = [](std::optional<DType> dtype) {
    return [=](const LayerGroup& group) {
      TensorSpec spec = Replicated(group);
      spec.own_dtype = dtype;
      return spec;
    };
  };
  add({ParamRole::kIndexQuery}, Replicated);
  if (joined) {
    add({ParamRole::kIndexKey, ParamRole::kIndexWeights},
        [&](const LayerGroup& group) {
          TensorSpec spec = ConcatRows(
              group, RenameModule(group.params[0]->name, "wk_weights_proj"));
          spec.own_dtype = weights_dtype;
          return spec;
        });
  } else {
    add({ParamRole::kIndexKey}, Replicated);
    add({ParamRole::kIndexWeights}, whole_as(weights_dtype));
  }
  add({ParamRole::kIndexKeyNorm}, whole_as(DType::kFp32));
  add({ParamRole::kIndexKeyNormBias}, whole_as(DType::kFp32));
}

void AddServingMixers(const Architecture& architecture, EvenPart part,
                      AddStack add) {
  if (architecture.mamba.has_value()) {
    AddMambaMixers(*architecture.mamba, part, add);
  }
  if (architecture.delta.has_value()) {
    AddDeltaNets(*architecture.delta, part, add);
  }
}

}  // namespace refit
