#include "compiler/layout/serving_mixers.h"

#include "compiler/layout/mixers.h"

namespace refit {
namespace {

using enum ParamRole;

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
