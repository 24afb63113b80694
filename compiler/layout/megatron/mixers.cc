#include "compiler/layout/megatron/mixers.h"

#include "compiler/job/version.h"
#include "compiler/layout/common/mixers.h"
#include "compiler/layout/megatron/specs.h"

namespace refit::megatron {
namespace {

using enum ParamRole;

void AddMambaMixers(const MambaSizes& mamba, const SideSpec& side,
                    EvenPart part, AddStack add) {
  const auto row_part = [&](const LayerGroup& group) {
    return RowPart(*group.params[0], part);
  };
  // The modules declare fp32, and Float16Module casts them with all others.
  const auto declared_fp32 = [&](const LayerGroup& group) {
    TensorSpec spec = row_part(group);
    if (side.mamba_fp32.value) spec.own_dtype = DType::kFp32;
    return spec;
  };
  const auto in_rows = [&](const LayerGroup& group) {
    return MambaInRows(*group.params[0], mamba, part);
  };
  const auto conv_rows = [&](const LayerGroup& group) {
    return MambaConvRows(*group.params[0], mamba, part);
  };
  const auto column_shard = [&](const LayerGroup& group) {
    return ColumnShard(group, part.count, part.index);
  };
  add("mixer.dt_bias", {kMambaDtBias}, row_part);
  add("mixer.A_log", {kMambaALog}, declared_fp32);
  add("mixer.D", {kMambaD}, declared_fp32);
  // A module of its own up to 0.16.
  const bool has_module = !IsSince(side, {0, 17});
  add(has_module ? "mixer.conv1d.weight" : "mixer.conv1d_weight", {kMambaConv},
      conv_rows);
  add(has_module ? "mixer.conv1d.bias" : "mixer.conv1d_bias", {kMambaConvBias},
      conv_rows);
  add("mixer.in_proj.layer_norm_weight", {kMambaNorm}, Replicated);
  add("mixer.in_proj.weight", {kMambaIn}, in_rows);
  add("mixer.in_proj.bias", {kMambaInBias}, in_rows);
  add("mixer.norm.weight", {kMambaGatedNorm}, row_part);
  add("mixer.out_proj.weight", {kMambaOut}, column_shard);
  add("mixer.out_proj.bias", {kMambaOutBias}, Replicated);
}

void AddDeltaNets(const DeltaNetSizes& delta, EvenPart part, AddStack add) {
  const auto row_part = [&](const LayerGroup& group) {
    return RowPart(*group.params[0], part);
  };
  // The norm in front is part of the projection.
  add("self_attention.in_proj.layer_norm_weight", {kDeltaQkvz, kAttentionNorm},
      ReplicatedSecond);
  add("self_attention.in_proj.weight", {kDeltaQkvz, kDeltaBa},
      [&](const LayerGroup& group) { return DeltaInRows(group, delta, part); });
  add("self_attention.conv1d.weight", {kDeltaConv},
      [&](const LayerGroup& group) {
        return DeltaConvRows(*group.params[0], delta, part);
      });
  add("self_attention.dt_bias", {kDeltaDtBias}, row_part);
  add("self_attention.A_log", {kDeltaALog}, row_part);
  // Megatron adds 1 to the weights of all norms, the checkpoint's network to
  // those of all others.
  add("self_attention.out_norm.weight", {kDeltaGatedNorm},
      [](const LayerGroup& group) {
        TensorSpec spec = megatron::Replicated(group);
        spec.form = ValueForm::kMinusOne;
        return spec;
      });
  add("self_attention.out_proj.weight", {kDeltaOut},
      [&](const LayerGroup& group) {
        return ColumnShard(group, part.count, part.index);
      });
}

}  // namespace

void AddMixers(const Architecture& architecture, const SideSpec& side,
               EvenPart part, AddStack add) {
  if (architecture.mamba.has_value()) {
    AddMambaMixers(*architecture.mamba, side, part, add);
  }
  if (architecture.delta.has_value()) {
    AddDeltaNets(*architecture.delta, part, add);
  }
}

}  // namespace refit::megatron
