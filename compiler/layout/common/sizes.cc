#include "compiler/layout/common/sizes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "llvm/ADT/STLExtras.h"

namespace refit {

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

void SizeChecks::Heads(const Divisor& tensor) {
  const Architecture& architecture = context_.model.architecture;
  const bool grouped = !table_.Params(ParamRole::kQuery).empty();
  if (grouped || architecture.latent.has_value()) {
    Divides(tensor, architecture.heads, "attention heads");
  }
  if (!grouped) return;
  if (tensor.value <= architecture.kv_heads) {
    Divides(tensor, architecture.kv_heads, "key-value heads");
  } else if (tensor.value % architecture.kv_heads != 0) {
    Report(tensor.place,
           absl::StrFormat("%s is not a multiple of %d key-value heads",
                           tensor.text, architecture.kv_heads));
  }
}

void SizeChecks::Rows(const Divisor& divisor, ParamRole role,
                      std::string_view what) {
  for (const ParamId id : table_.Params(role)) {
    Divides(divisor, table_.param(id).shape[0], what);
  }
}

void SizeChecks::Columns(const Divisor& divisor, ParamRole role,
                         std::string_view what) {
  Dim(divisor, role, 1, what);
}

void SizeChecks::Dim(const Divisor& divisor, ParamRole role, size_t dim,
                     std::string_view what) {
  for (const ParamId id : table_.Params(role)) {
    Divides(divisor, table_.param(id).shape[dim], what);
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

void CheckPlainModules(SizeChecks& checks, const SizeChecks::Divisor& tensor) {
  checks.Rows(tensor, ParamRole::kColumn, "rows of a module of role column");
  checks.Columns(tensor, ParamRole::kRow, "columns of a module of role row");
}

void SizeChecks::Report(const Place& place, std::string message) {
  if (llvm::is_contained(reported_, message)) return;
  context_.diagnostics.Error(place, message);
  reported_.push_back(std::move(message));
}

}  // namespace refit
