#include "compiler/job/placement.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "llvm/ADT/STLExtras.h"

namespace refit {
namespace {

constexpr std::string_view kPlacementsWanted =
    "Replicate, Shard(d) or StridedShard(d, split_factor=k)";

// "Name(a, key=b)" taken apart.
struct Call {
  struct Argument {
    std::string key;  // "" without one
    int64_t value = 0;
  };
  std::string name;
  std::vector<Argument> arguments;
};

std::optional<Call> ParseCall(std::string text) {
  std::erase(text, ' ');
  Call call;
  const size_t open = text.find('(');
  call.name = text.substr(0, open);
  if (open == std::string::npos) return call;
  if (!text.ends_with(')')) return std::nullopt;
  std::string_view rest = std::string_view(text).substr(open + 1);
  rest.remove_suffix(1);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    std::string argument(rest.substr(0, comma));
    const bool is_last = comma == std::string_view::npos;
    rest.remove_prefix(is_last ? rest.size() : comma + 1);
    if (!is_last && rest.empty()) return std::nullopt;
    Call::Argument parsed;
    if (const size_t equals = argument.find('='); equals != std::string::npos) {
      parsed.key = argument.substr(0, equals);
      argument.erase(0, equals + 1);
    }
    if (!absl::SimpleAtoi(argument, &parsed.value)) return std::nullopt;
    call.arguments.push_back(std::move(parsed));
  }
  return call;
}

bool IsKey(const Call::Argument& argument, std::string_view key,
           std::string_view short_key) {
  return argument.key.empty() || argument.key == key ||
         argument.key == short_key;
}

std::optional<Placement> PlacementOf(const Call& call) {
  const auto named = [&](std::initializer_list<std::string_view> names) {
    return llvm::is_contained(names, call.name);
  };
  const std::vector<Call::Argument>& arguments = call.arguments;
  if (named({"Replicate", "R"}) && arguments.empty()) return Placement{};
  const bool has_dim = !arguments.empty() && IsKey(arguments[0], "dim", "d");
  if (named({"Shard", "S"}) && has_dim && arguments.size() == 1) {
    return Placement{.kind = Placement::Kind::kShard,
                     .dim = arguments[0].value,
                     .place = {}};
  }
  if (named({"StridedShard", "_StridedShard"}) && has_dim &&
      arguments.size() == 2 && IsKey(arguments[1], "split_factor", "sf")) {
    return Placement{.kind = Placement::Kind::kStridedShard,
                     .dim = arguments[0].value,
                     .split_factor = arguments[1].value,
                     .place = {}};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Placement> ReadPlacement(const ValueReader& values,
                                       const JsonValue& value,
                                       std::string_view what) {
  const std::string* text = values.String(value, what, kPlacementsWanted);
  if (text == nullptr) return std::nullopt;
  const std::optional<Call> call = ParseCall(*text);
  std::optional<Placement> placement;
  if (call.has_value()) placement = PlacementOf(*call);
  if (!placement.has_value()) {
    values.Error(value, "unknown placement %s; wanted %s", Quoted(*text),
                 kPlacementsWanted);
    return std::nullopt;
  }
  if (placement->dim < 0) {
    values.Error(value,
                 "dimension of placement %s is %d; wanted 0 or more, counted "
                 "from the first",
                 Quoted(*text), placement->dim);
    return std::nullopt;
  }
  if (placement->split_factor < 1) {
    values.Error(value, "split_factor of placement %s is %d; wanted 1 or more",
                 Quoted(*text), placement->split_factor);
    return std::nullopt;
  }
  placement->place = values.PlaceOf(value);
  return placement;
}

}  // namespace refit
