#include "compiler/layout/common/mixers.h"

#include "absl/strings/str_format.h"

namespace refit {
namespace {

EvenPart GroupPart(const MambaSizes& sizes, EvenPart part) {
  return sizes.groups % part.count == 0 ? part : EvenPart{};
}

// Runs of rows of one param that go to consecutive rows of a tensor, one run
// of each key head.
struct HeadRows {
  const Param* param;
  int64_t head_rows;  // of the param, per key head
  int64_t begin;      // within them
  int64_t rows;
};

// Appends a part of a param's rows.
void AppendRowPart(const Param& param, EvenPart part, TensorSpec& spec) {
  const Range rows = EvenShard(param.shape[0], part.count, part.index);
  spec.parts.push_back(RowsPart(param, rows, spec.shape[0]));
  spec.shape[0] += rows.size();
}

}  // namespace

TensorSpec SectionRows(const Param& param, absl::Span<const Section> sections) {
  TensorSpec spec = {.name = param.name, .shape = param.shape, .parts = {}};
  spec.shape[0] = 0;
  int64_t begin = 0;
  for (const Section& section : sections) {
    Range rows =
        EvenShard(section.rows, section.part.count, section.part.index);
    rows = {begin + rows.begin, begin + rows.end};
    spec.parts.push_back(RowsPart(param, rows, spec.shape[0]));
    spec.shape[0] += rows.size();
    begin += section.rows;
  }
  return spec;
}

TensorSpec RowPart(const Param& param, EvenPart part) {
  return SectionRows(param, {{.rows = param.shape[0], .part = part}});
}

TensorSpec MambaInRows(const Param& param, const MambaSizes& sizes,
                       EvenPart part) {
  const EvenPart group = GroupPart(sizes, part);
  return SectionRows(param, {{sizes.inner(), part},
                             {sizes.inner(), part},
                             {sizes.shared(), group},
                             {sizes.shared(), group},
                             {sizes.heads, part}});
}

TensorSpec MambaConvRows(const Param& param, const MambaSizes& sizes,
                         EvenPart part) {
  const EvenPart group = GroupPart(sizes, part);
  return SectionRows(param, {{sizes.inner(), part},
                             {sizes.shared(), group},
                             {sizes.shared(), group}});
}

TensorSpec DeltaConvRows(const Param& param, const DeltaNetSizes& sizes,
                         EvenPart part) {
  return SectionRows(
      param,
      {{sizes.keys(), part}, {sizes.keys(), part}, {sizes.values(), part}});
}

TensorSpec DeltaInRows(const LayerGroup& group, const DeltaNetSizes& sizes,
                       EvenPart part) {
  const Param* const qkvz = group.params[0];
  const Param* const ba = group.params[1];
  const int64_t value_heads = sizes.value_heads / sizes.key_heads;
  const int64_t key = sizes.key_dim;
  const int64_t value = value_heads * sizes.value_dim;
  const int64_t qkvz_rows = 2 * key + 2 * value;
  const int64_t ba_rows = 2 * value_heads;
  const Range heads = EvenShard(sizes.key_heads, part.count, part.index);

  TensorSpec spec = {
      .name = qkvz->name, .shape = {0, qkvz->shape[1]}, .parts = {}};
  for (const HeadRows& run :
       {HeadRows{qkvz, qkvz_rows, 0, key}, HeadRows{qkvz, qkvz_rows, key, key},
        HeadRows{qkvz, qkvz_rows, 2 * key, value},
        HeadRows{qkvz, qkvz_rows, 2 * key + value, value},
        HeadRows{ba, ba_rows, 0, value_heads},
        HeadRows{ba, ba_rows, value_heads, value_heads}}) {
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const int64_t begin = head * run.head_rows + run.begin;
      spec.parts.push_back(
          RowsPart(*run.param, {begin, begin + run.rows}, spec.shape[0]));
      spec.shape[0] += run.rows;
    }
  }
  return spec;
}

TensorSpec DeltaQkvzRows(const LayerGroup& group, const DeltaNetSizes& sizes,
                         EvenPart part) {
  TensorSpec spec = DeltaConvRows(*group.params[0], sizes, part);
  AppendRowPart(*group.params[1], part, spec);
  return spec;
}

TensorSpec DeltaBaRows(const LayerGroup& group, EvenPart part) {
  TensorSpec spec = RowPart(*group.params[0], part);
  AppendRowPart(*group.params[1], part, spec);
  return spec;
}

void CheckMixerSizes(SizeChecks& checks, const Architecture& architecture,
                     const SizeChecks::Divisor& tensor, MambaGroups groups) {
  if (architecture.mamba.has_value()) {
    const MambaSizes& mamba = *architecture.mamba;
    checks.Divides(tensor, mamba.heads, "Mamba heads");
    if (groups == MambaGroups::kCut || mamba.groups > 1) {
      checks.Divides(tensor, mamba.groups, "Mamba groups");
    }
  }
  if (architecture.delta.has_value()) {
    checks.Divides(tensor, architecture.delta->key_heads,
                   "key heads of the gated delta net");
  }
}

}  // namespace refit
