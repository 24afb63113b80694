#include "compiler/layout/sglang_sizes.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/job/object_reader.h"
#include "compiler/layout/mixers.h"
#include "compiler/layout/serving.h"
#include "compiler/layout/sglang_models.h"

namespace refit::sglang {
namespace {

using enum ParamRole;

// Reports shared experts that the side cannot hold.
void CheckShared(const LayoutContext& context, const RoleTable& table,
                 const SizeChecks::Divisor& tensor, SizeChecks& checks) {
  const Located<SharedExperts>& shared = context.side.shared_experts;
  if (shared.given && table.Params(kSharedExpertUp).empty()) {
    checks.Report(
        shared.place,
        absl::StrFormat("%s.shared_experts needs a model with shared "
                        "experts; this %s has none",
                        context.side.key, context.model.architecture.family));
    return;
  }
  const SharedExperts kind = SharedExpertsOf(context, table);
  if (kind == SharedExperts::kTensor) CheckSharedExperts(checks, tensor);
  if (kind != SharedExperts::kFused) return;
  if (table.Params(kSharedExpertGate).empty()) {
    checks.Report(
        shared.place,
        absl::StrFormat("%s.shared_experts \"fused\" is not what SGLang does "
                        "with those of %s; wanted \"tensor\" or "
                        "\"replicated\"",
                        context.side.key, context.model.architecture.family));
    return;
  }
  const int64_t expert = table.param(table.Params(kExpertUp)[0]).shape[0];
  for (const ParamId id : table.Params(kSharedExpertUp)) {
    const int64_t rows = table.param(id).shape[0];
    if (rows == expert) continue;
    checks.Report(
        shared.given ? shared.place : context.side.layout.place,
        absl::StrFormat("%s.shared_experts \"fused\"%s needs shared experts of "
                        "the size of one; they have %d intermediate features, "
                        "an expert has %d",
                        context.side.key,
                        shared.given ? "" : ", SGLang's default here,", rows,
                        expert));
  }
}

// "1, 2 or 4"
std::string DivisorsText(int64_t number) {
  std::vector<std::string> divisors;
  for (int64_t i = 1; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(absl::StrCat(i));
  }
  return Alternatives({divisors.begin(), divisors.end()});
}

}  // namespace

Sizes SizesOf(const SideSpec& side) {
  const int64_t tensor = side.tensor_parallel.value;
  return {.tensor = tensor,
          .pipeline = side.pipeline_parallel.value,
          .attention = tensor / side.dp_attention.value,
          .expert = side.expert_parallel.value,
          .expert_tensor = tensor / side.expert_parallel.value};
}

bool CheckAxes(const LayoutContext& context) {
  const SideSpec& side = context.side;
  const int64_t tensor = side.tensor_parallel.value;
  const auto report = [&](const Place& place, std::string message) {
    context.diagnostics.Error(place, std::move(message));
    return false;
  };
  bool fits = true;
  if (side.data_parallel.value > 1 && side.dp_attention.value > 1) {
    fits = report(
        side.data_parallel.place,
        absl::StrFormat(
            "%s.data_parallel %d beside dp_attention %d: SGLang's dp_size is "
            "one or the other; wanted \"replicas\": %d for as many engines",
            side.key, side.data_parallel.value, side.dp_attention.value,
            side.data_parallel.value));
  }
  for (const auto& [key, size] :
       {std::pair("dp_attention", &side.dp_attention),
        std::pair("expert_parallel", &side.expert_parallel)}) {
    if (tensor % size->value == 0) continue;
    fits = report(size->place,
                  absl::StrFormat("%s.%s %d does not divide "
                                  "%s.tensor_parallel %d; wanted %s",
                                  side.key, key, size->value, side.key, tensor,
                                  DivisorsText(tensor)));
  }
  const auto needs_parts = [&](const Place& place, std::string_view setting) {
    fits = report(place, absl::StrFormat(
                             "%s.%s needs dp_attention of 2 or more; "
                             "%s.dp_attention is 1%s",
                             side.key, setting, side.key,
                             side.dp_attention.given ? "" : " (the default)"));
  };
  if (side.dp_attention.value == 1) {
    if (side.dp_lm_head.value) needs_parts(side.dp_lm_head.place, "dp_lm_head");
    if (side.embedding.value == EmbeddingCut::kAttention) {
      needs_parts(side.embedding.place, "embedding \"attention\"");
    }
  }
  return fits;
}

ExpertForm CheckSizes(const LayoutContext& context, const RoleTable& table,
                      const Sizes& sizes, SizeChecks& checks) {
  const SideSpec& side = context.side;
  const SizeChecks::Divisor tensor =
      checks.Named("tensor_parallel", side.tensor_parallel);
  SizeChecks::Divisor attention = tensor;
  if (side.dp_attention.value > 1) {
    attention.text = absl::StrFormat("%s / dp_attention %d", tensor.text,
                                     side.dp_attention.value);
    attention.value = sizes.attention;
  }
  checks.Heads(attention);
  CheckMlp(checks, tensor);
  CheckShared(context, table, tensor, checks);
  CheckMixerSizes(checks, context.model.architecture, attention,
                  MambaGroups::kCutOrWhole);
  CheckModel(context, table, checks);

  const SizeChecks::Divisor expert =
      checks.Named("expert_parallel", side.expert_parallel);
  checks.HasExperts(sizes.expert > 1, expert.place, "expert_parallel");
  if (!side.experts.given) {
    checks.Divides(expert, context.model.architecture.experts, "experts");
  }
  SizeChecks::Divisor expert_tensor = tensor;
  if (sizes.expert > 1) {
    expert_tensor.text =
        absl::StrFormat("%s / expert_parallel %d", tensor.text, sizes.expert);
    expert_tensor.value = sizes.expert_tensor;
  }
  CheckExpertTensors(checks, expert_tensor);
  checks.HasExperts(side.router_dtype.given, side.router_dtype.place,
                    "router_dtype");
  // Triton's kernels for unquantized experts want them so.
  ExpertForm form;
  form.transposed =
      side.moe_backend.value == "triton_kernel" && !side.quantized.given;
  if (form.transposed) {
    checks.HasExperts(true, side.moe_backend.place, "moe_backend");
  } else {
    form.order = CheckMoeBackend(side, checks);
  }
  CheckFusedExperts(context, table, form.order, checks);
  if (context.model.architecture.mtp_layers > 0) {
    checks.Report(
        side.mtp.given ? side.mtp.place : side.layout.place,
        absl::StrFormat("%s cannot hold the model's %d multi-token-"
                        "prediction layers: SGLang's draft model is a "
                        "worker of its own; wanted \"mtp\": false",
                        side.key, context.model.architecture.mtp_layers));
  }
  return form;
}

}  // namespace refit::sglang
