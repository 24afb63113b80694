#include "compiler/model/tower.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/model/stacks.h"

namespace refit {
namespace {

using enum ParamRole;

bool HasDType(ConfigReader& config) {
  return config.Has("dtype") || config.Has("torch_dtype");
}

}  // namespace

void ReadTowerHeads(std::string_view key, int64_t hidden, ConfigReader& vision,
                    Model& model) {
  const int64_t heads = vision.Size(key);
  if (hidden % heads != 0) {
    vision.Error(key, absl::StrFormat("%s %d does not divide hidden_size %d",
                                      key, heads, hidden));
  }
  model.architecture.tower_heads = heads;
}

void CheckTowerDType(ConfigReader& vision, ConfigReader& text) {
  if (HasDType(text) || !HasDType(vision)) return;
  if (vision.WeightDType() == text.WeightDType()) return;
  const std::string key = vision.Has("dtype") ? "dtype" : "torch_dtype";
  vision.Error(
      key, absl::StrFormat("%s %s is of the vision tower alone, and frameworks "
                           "differ in what dtype the model then has; wanted "
                           "\"%s\" beside vision_config",
                           key, vision.String(key), key));
}

TowerBuilder::TowerBuilder(ConfigReader& vision, ConfigReader& text,
                           Model& model, std::string root)
    : vision_(vision),
      model_(model),
      root_(std::move(root)),
      dtype_(text.WeightDType()) {}

void TowerBuilder::Add(std::string_view name, ParamRole role, Dims shape,
                       const Index& index) {
  const Param& param = model_.params.emplace_back(
      Param{.name = absl::StrFormat("%s%s", root_, name),
            .index = index,
            .shape = std::move(shape),
            .dtype = dtype_,
            .role = role});
  CheckStackSize(param, vision_.place(), vision_.diagnostics());
}

void TowerBuilder::AddLinear(std::string_view name, ParamRole role, int64_t out,
                             int64_t in, const Index& index, bool bias) {
  Add(absl::StrFormat("%s.weight", name), role, {out, in}, index);
  if (!bias) return;
  Add(absl::StrFormat("%s.bias", name), role == kTowerRow ? kTowerWhole : role,
      {out}, index);
}

void TowerBuilder::AddNorm(std::string_view name, int64_t size,
                           const Index& index) {
  Add(absl::StrFormat("%s.weight", name), kTowerWhole, {size}, index);
  Add(absl::StrFormat("%s.bias", name), kTowerWhole, {size}, index);
}

}  // namespace refit
