#include "compiler/layout/common/sizes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "llvm/ADT/STLExtras.h"

namespace refit {
namespace {

using enum ParamRole;

// A dimension of a role's params that is cut.
struct CutSize {
  ParamRole role;
  size_t dim;
  std::string_view what;
};
constexpr std::string_view kOfMlp = "intermediate features of the MLP";
constexpr std::string_view kOfShared =
    "intermediate features of the shared experts";
constexpr std::string_view kOfExpert = "intermediate features of an expert";
constexpr CutSize kCutSizes[] = {
    {kMlpGate, 0, kOfMlp},
    {kMlpUp, 0, kOfMlp},
    {kMlpDown, 1, kOfMlp},
    {kSharedExpertGate, 0, kOfShared},
    {kSharedExpertUp, 0, kOfShared},
    {kSharedExpertDown, 1, kOfShared},
    {kExpertGate, 0, kOfExpert},
    {kExpertUp, 0, kOfExpert},
    {kExpertDown, 1, kOfExpert},
    {kFusedExpertDown, 1, kOfExpert},
    {kStackedExpertDown, 2, kOfExpert},
    {kMtpProjection, 0, "rows that join the draft's inputs"},
    {kColumn, 0, "rows of a module of role column"},
    {kRow, 1, "columns of a module of role row"},
    {kTowerConnector, 0,
     "rows of what joins the vision tower to the language model"},
};

}  // namespace

SizeChecks::SizeChecks(const LayoutContext& context, const RoleTable& table)
    : context_(context), table_(table) {}

SizeChecks::Divisor SizeChecks::Named(std::string_view key,
                                      const Located<int64_t>& size) const {
  return {
      .place = size.place,
      .text = absl::StrFormat("%s.%s %d", context_.side.key, key, size.value),
      .value = size.value};
}

void SizeChecks::Divides(const Divisor& divisor, int64_t count,
                         std::string_view what) {
  if (count % divisor.value == 0) return;
  Report(divisor.place, absl::StrFormat("%s does not divide %d %s",
                                        divisor.text, count, what));
}

void SizeChecks::KeyValueHeads(const Divisor& divisor) {
  const int64_t heads = context_.model.architecture.kv_heads;
  if (divisor.value <= heads) {
    Divides(divisor, heads, "key-value heads");
  } else if (divisor.value % heads != 0) {
    Report(divisor.place,
           absl::StrFormat("%s is not a multiple of %d key-value heads",
                           divisor.text, heads));
  }
}

void SizeChecks::Parts(const Divisor& divisor, ParamRole role) {
  if (table_.Params(role).empty()) return;
  const Architecture& architecture = context_.model.architecture;
  switch (role) {
    case kQuery:
    case kKeyValueUp:
    case kAttentionSinksFp32:
      return Divides(divisor, architecture.heads, "attention heads");
    case kKey:
      return KeyValueHeads(divisor);
    case kAttentionOutputDown:
      return Divides(divisor, architecture.output_groups,
                     "groups of the output projection");
    case kMambaIn:
      Divides(divisor, architecture.mamba->heads, "Mamba heads");
      // A single group may be whole on each rank.
      if (architecture.mamba->groups == 1) return;
      return Divides(divisor, architecture.mamba->groups, "Mamba groups");
    case kDeltaConv:
      return Divides(divisor, architecture.delta->key_heads,
                     "key heads of the gated delta net");
    default:
      break;
  }
  for (const CutSize& size : kCutSizes) {
    if (size.role != role) continue;
    for (const ParamId id : table_.Params(role)) {
      Divides(divisor, table_.param(id).shape[size.dim], size.what);
    }
  }
}

void SizeChecks::HasExperts(bool asked, const Place& place,
                            std::string_view key) {
  if (!asked || context_.model.architecture.experts > 0) return;
  Report(place,
         absl::StrFormat("%s.%s needs a model with experts; this %s has none",
                         context_.side.key, key,
                         context_.model.architecture.family->model_type));
}

void SizeChecks::WantsOne(std::string_view key, const Located<int64_t>& size,
                          std::string_view framework, std::string_view why) {
  if (size.value == 1) return;
  Report(size.place, "%s: %s's %s %s", Named(key, size).text, framework,
         context_.model.architecture.family->model_type, why);
}

void SizeChecks::Report(const Place& place, std::string message) {
  if (llvm::is_contained(reported_, message)) return;
  context_.diagnostics.Error(place, message);
  reported_.push_back(std::move(message));
}

}  // namespace refit
