// What no row of rows.inc can say.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/layout/serving/engine.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

using enum ParamRole;

void NameQueryKeyValueDown(const HeldTensor& tensor) {
  const std::string_view module = tensor.engine.query_key_value_down;
  // One param alone keeps its name.
  if (module.empty() || tensor.spec.parts.size() < 2) return;
  tensor.spec.name = WithModule(tensor.spec.name, module);
}

// A tensor of this shape that the worker makes of kv_b_proj.
void DeriveProjection(const HeldTensor& tensor, std::string_view name,
                      Dims shape) {
  const std::string_view source = tensor.param.name;
  const std::string_view module = ModuleOf(source);
  tensor.spec = {
      .name = absl::StrCat(
          std::string(source.substr(0, module.data() - source.data())),
          "mla_attn.mla_attn.", std::string(name)),
      .shape = std::move(shape),
      .parts = {},
      .skip = DeclaredSkip{.reason = SkipReason::kDerived,
                           .detail = "made of kv_b_proj after each refit "
                                     "(derive-latent-projections)"}};
}

void DeriveValueProjection(const HeldTensor& tensor) {
  const Architecture& architecture = tensor.context.model.architecture;
  const LatentAttention& latent = *architecture.latent;
  DeriveProjection(tensor, "W_UV",
                   {architecture.heads / tensor.part.count,
                    latent.key_value_rank, latent.value_dim});
}

void DeriveKeyProjection(const HeldTensor& tensor) {
  const Architecture& architecture = tensor.context.model.architecture;
  const LatentAttention& latent = *architecture.latent;
  DeriveProjection(tensor, "W_UK_T",
                   {architecture.heads / tensor.part.count, latent.nope_dim,
                    latent.key_value_rank});
}

// Kernels have sinks for some numbers of heads alone.
void PadHeads(const HeldTensor& tensor) {
  int64_t& rows = tensor.spec.shape[0];
  const int64_t heads = rows;
  rows = PaddedHeads(tensor.context.side.attention_backend.value, heads);
  if (rows == heads) return;
  tensor.spec.tail = {heads,
                      {.reason = SkipReason::kFrozen,
                       .detail = "heads that pad those of the rank; vLLM keeps "
                                 "-inf there"}};
}

void GiveRouterItsDType(const HeldTensor& tensor) {
  const SideSpec& side = tensor.context.side;
  TensorSpec& spec = tensor.spec;
  if (tensor.engine.fp32_router) spec.own_dtype = DType::kFp32;
  if (side.router_dtype.given) spec.own_dtype = side.router_dtype.value;
  if (!tensor.engine.caches_router ||
      tensor.context.which != fb::Side::kDestination) {
    return;
  }
  spec.post_hooks.push_back(
      {.name = "drop-router-copy",
       .detail = "set the gate's cached fp32 copy, _weight_fp32, to None"});
}

// Beside the router of a layer that chooses experts by token.
void NameHashTable(const HeldTensor& tensor) {
  const Architecture& architecture = tensor.context.model.architecture;
  const std::string& gate = tensor.param.name;
  tensor.spec = {
      .name = absl::StrCat(gate.substr(0, gate.rfind('.')), ".tid2eid"),
      .shape = {architecture.vocab, architecture.experts_per_token},
      .parts = {},
      .own_dtype = DType::kInt32,
      .skip = DeclaredSkip{.reason = SkipReason::kFrozen,
                           .detail = "a table of experts by token, which "
                                     "training never changes"}};
}

// Of ranks that share an expert, one adds the bias to its output.
void KeepBiasOfFirst(const HeldTensor& tensor) {
  if (tensor.part.index == 0) return;
  tensor.spec.parts.clear();
  tensor.spec.zeros = tensor.context.which == fb::Side::kDestination;
}

constexpr Cell kOwn;
constexpr Cell kNone = {.is_held = false};
constexpr Cell kFp32 = {.dtype = DType::kFp32};
constexpr Cell As(std::string_view module) { return {.module = module}; }

}  // namespace

absl::Span<const ServingRow> ServingRows() {
  using enum Cut;
  using enum Axis;
  static constexpr ServingRow kTable[] = {
#include "compiler/layout/serving/rows.inc"
  };
  return kTable;
}

int64_t PaddedHeads(AttentionBackend backend, int64_t heads) {
  int64_t padded = backend == AttentionBackend::kFlashMla ? 64 : 8;
  while (padded < heads) padded *= 2;
  return padded > 128 ? 0 : padded;
}

}  // namespace refit
