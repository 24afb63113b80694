// The placement of experts on a serving engine's ranks.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/side.h"
#include "llvm/ADT/STLExtras.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr IntegerRange kExpertRange = {.min = 0, .max = 1'000'000};

// The placements by name that a layout has.
std::vector<std::string_view> PlacementNames(LayoutKind layout) {
  if (layout == LayoutKind::kSglang) return {"linear"};
  return {"linear", "round_robin"};
}

ExpertPlacement::Kind ReadKind(const ValueReader& values,
                               const JsonValue& value, const std::string& path,
                               LayoutKind layout) {
  const std::vector<std::string_view> names = PlacementNames(layout);
  const std::string wanted = Alternatives(names);
  const std::string* name = values.String(value, path, wanted);
  if (name == nullptr || *name == "linear") {
    return ExpertPlacement::Kind::kLinear;
  }
  if (llvm::is_contained(names, *name)) {
    return ExpertPlacement::Kind::kRoundRobin;
  }
  const std::string nearest = NearestWord(*name, names);
  values.Error(
      value,
      nearest.empty()
          ? absl::StrFormat("layout \"%s\" has no placement %s; wanted %s",
                            LayoutName(layout), Quoted(*name), wanted)
          : absl::StrFormat("unknown placement %s; did you mean \"%s\"?",
                            Quoted(*name), nearest));
  return ExpertPlacement::Kind::kLinear;
}

// A list of experts, or a list of such lists.
std::vector<std::vector<int64_t>> ReadTable(const ValueReader& values,
                                            const JsonValue& value,
                                            const std::string& path) {
  constexpr std::string_view kWanted =
      "an array with the logical expert of each physical one, or one per layer";
  std::vector<std::vector<int64_t>> table;
  const JsonValue::Array* array = values.Array(value, path, kWanted);
  if (array == nullptr) return table;
  if (array->empty()) {
    values.Error(value, "%s is empty; wanted %s", path, kWanted);
    return table;
  }
  if (array->front().AsArray() == nullptr) {
    std::optional<std::vector<int64_t>> list =
        values.Integers(value, path, kExpertRange);
    if (list.has_value()) table.push_back(*std::move(list));
    return table;
  }
  for (size_t i = 0; i < array->size(); ++i) {
    std::optional<std::vector<int64_t>> list = values.Integers(
        (*array)[i], absl::StrFormat("%s[%d]", path, i), kExpertRange);
    if (list.has_value()) table.push_back(*std::move(list));
  }
  return table;
}

}  // namespace

void ReadExpertPlacement(ObjectReader& side, LayoutKind layout,
                         Located<ExpertPlacement>& target) {
  const JsonValue* value = side.Find("experts");
  target.place = side.PlaceOfKey("experts");
  if (value == nullptr) return;
  const ValueReader& values = side.values();
  const std::string path = side.PathOf("experts");
  if (!values.IsObject(*value, path)) return;
  ObjectReader reader(values, *value, path);
  ExpertPlacement& placement = target.value;
  target.given = true;

  const JsonValue* kind = reader.Find("placement");
  if (kind != nullptr) {
    placement.kind =
        ReadKind(values, *kind, reader.PathOf("placement"), layout);
  }
  Located<int64_t> redundant{.value = 0};
  reader.Read("num_redundant_experts", kExpertRange, redundant);
  placement.redundant_experts = redundant.value;
  if (placement.kind == ExpertPlacement::Kind::kRoundRobin &&
      redundant.value > 0) {
    values.diagnostics().Error(
        redundant.place,
        "%s is %d; placement \"round_robin\" has no redundant experts",
        reader.PathOf("num_redundant_experts"), redundant.value);
  }
  const JsonValue* table = reader.Find("physical_to_logical");
  if (table != nullptr) {
    const std::string table_path = reader.PathOf("physical_to_logical");
    if (kind != nullptr || redundant.given) {
      values.Error(
          *table,
          "%s says where every expert stands; wanted no key \"%s\" beside it",
          table_path, kind != nullptr ? "placement" : "num_redundant_experts");
    }
    placement.kind = ExpertPlacement::Kind::kTable;
    placement.physical_to_logical = ReadTable(values, *table, table_path);
  }
  reader.RejectOtherKeys();
}

}  // namespace refit
