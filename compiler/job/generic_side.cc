// The meshes and placements of a generic side.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/job/side.h"
#include "plan/nearest_word.h"

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
    return std::find(names.begin(), names.end(), call.name) != names.end();
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

std::optional<Placement> ReadPlacement(const ValueReader& values,
                                       const JsonValue& value,
                                       std::string_view what) {
  const std::string* text = values.String(value, what, kPlacementsWanted);
  if (text == nullptr) return std::nullopt;
  const std::optional<Call> call = ParseCall(*text);
  std::optional<Placement> placement;
  if (call.has_value()) placement = PlacementOf(*call);
  if (!placement.has_value()) {
    values.Error(value, absl::StrFormat("unknown placement %s; wanted %s",
                                        Quoted(*text), kPlacementsWanted));
    return std::nullopt;
  }
  if (placement->dim < 0) {
    values.Error(value,
                 absl::StrFormat("dimension of placement %s is %d; wanted 0 or "
                                 "more, counted from the first",
                                 Quoted(*text), placement->dim));
    return std::nullopt;
  }
  if (placement->split_factor < 1) {
    values.Error(value,
                 absl::StrFormat("split_factor of placement %s is %d; "
                                 "wanted 1 or more",
                                 Quoted(*text), placement->split_factor));
    return std::nullopt;
  }
  placement->place = values.PlaceOf(value);
  return placement;
}

class GenericReader {
 public:
  explicit GenericReader(ObjectReader& side)
      : side_(side), values_(side.values()) {}

  GenericSpec Read() {
    const JsonValue* meshes = side_.Require("meshes", "an object of meshes");
    const JsonValue* tensors = side_.Require("tensors", "an array of rules");
    if (meshes != nullptr) ReadMeshes(*meshes);
    if (tensors != nullptr) ReadTensors(*tensors);
    return std::move(spec_);
  }

 private:
  void ReadMeshes(const JsonValue& value) {
    const std::string path = side_.PathOf("meshes");
    if (!values_.IsObject(value, path)) return;
    ObjectReader meshes(values_, value, path);
    if (meshes.members().empty()) {
      values_.Error(
          value, absl::StrFormat("%s has no mesh; wanted at least one", path));
      return;
    }
    bool all_good = true;
    for (const JsonMember& member : meshes.members()) {
      std::optional<MeshSpec> mesh =
          ReadMesh(member, meshes.PathOf(member.key));
      mesh_names_.push_back(member.key);
      all_good &= mesh.has_value();
      if (mesh.has_value()) spec_.meshes.push_back(*std::move(mesh));
    }
    if (all_good) CheckNoRankMissing(value);
  }

  std::optional<MeshSpec> ReadMesh(const JsonMember& member,
                                   const std::string& path) {
    if (!values_.IsObject(member.value, path)) return std::nullopt;
    ObjectReader reader(values_, member.value, path);
    MeshSpec mesh = {.name = member.key,
                     .axes = {},
                     .shape = {},
                     .ranks = {},
                     .place = values_.document().PlaceAt(member.key_offset)};
    const JsonValue* axes = reader.Require("axes", "an object of sizes");
    const JsonValue* ranks = reader.Find("ranks");
    reader.RejectOtherKeys();
    if (axes == nullptr || !ReadAxes(*axes, reader.PathOf("axes"), mesh)) {
      return std::nullopt;
    }
    if (!ReadRanks(ranks, reader.PathOf("ranks"), mesh)) return std::nullopt;
    return mesh;
  }

  bool ReadAxes(const JsonValue& value, const std::string& path,
                MeshSpec& mesh) {
    if (!values_.IsObject(value, path)) return false;
    ObjectReader axes(values_, value, path);
    int64_t size = 1;
    for (const JsonMember& axis : axes.members()) {
      const std::optional<int64_t> extent = values_.Integer(
          axis.value, axes.PathOf(axis.key), {.min = 1, .max = kRanksMax});
      if (!extent.has_value()) return false;
      mesh.axes.push_back(axis.key);
      mesh.shape.push_back(*extent);
      size = std::min(size * *extent, kRanksMax + 1);
    }
    if (mesh.axes.empty()) {
      values_.Error(value,
                    absl::StrFormat("mesh %s has no axes; wanted at least one",
                                    Quoted(mesh.name)));
      return false;
    }
    if (size > kRanksMax) {
      values_.Error(
          value, absl::StrFormat("mesh %s has more than %d ranks; wanted fewer",
                                 Quoted(mesh.name), kRanksMax));
      return false;
    }
    return true;
  }

  bool ReadRanks(const JsonValue* value, const std::string& path,
                 MeshSpec& mesh) {
    const int64_t size = std::accumulate(mesh.shape.begin(), mesh.shape.end(),
                                         int64_t{1}, std::multiplies<>());
    if (value == nullptr) {
      mesh.ranks.resize(static_cast<size_t>(size));
      std::iota(mesh.ranks.begin(), mesh.ranks.end(), 0);
      return true;
    }
    std::optional<std::vector<int64_t>> ranks =
        values_.Integers(*value, path, {.min = 0, .max = kRanksMax - 1});
    if (!ranks.has_value()) return false;
    if (static_cast<int64_t>(ranks->size()) != size) {
      values_.Error(*value,
                    absl::StrFormat("mesh %s has %d ranks; wanted %d, "
                                    "the product of its axes",
                                    Quoted(mesh.name), ranks->size(), size));
      return false;
    }
    std::vector<bool> seen(static_cast<size_t>(kRanksMax), false);
    for (size_t i = 0; i < ranks->size(); ++i) {
      const auto rank = static_cast<size_t>((*ranks)[i]);
      if (seen[rank]) {
        values_.Error((*value->AsArray())[i],
                      absl::StrFormat("rank %d stands twice in mesh %s", rank,
                                      Quoted(mesh.name)));
        return false;
      }
      seen[rank] = true;
    }
    mesh.ranks = *std::move(ranks);
    return true;
  }

  void CheckNoRankMissing(const JsonValue& meshes) {
    std::vector<int64_t> ranks;
    for (const MeshSpec& mesh : spec_.meshes) {
      ranks.insert(ranks.end(), mesh.ranks.begin(), mesh.ranks.end());
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] == static_cast<int64_t>(i)) continue;
      values_.Error(meshes,
                    absl::StrFormat("rank %d is in no mesh; wanted all of 0 "
                                    "to %d, the largest rank named",
                                    i, ranks.back()));
      return;
    }
  }

  void ReadTensors(const JsonValue& value) {
    const std::string path = side_.PathOf("tensors");
    const JsonValue::Array* rules =
        values_.Array(value, path, "an array of rules");
    if (rules == nullptr) return;
    if (rules->empty()) {
      values_.Error(
          value, absl::StrFormat("%s has no rule; wanted at least one", path));
    }
    for (size_t i = 0; i < rules->size(); ++i) {
      ReadRule((*rules)[i], absl::StrFormat("%s[%d]", path, i));
    }
  }

  void ReadRule(const JsonValue& value, const std::string& path) {
    if (!values_.IsObject(value, path)) return;
    ObjectReader reader(values_, value, path);
    TensorRule rule;
    rule.place = values_.PlaceOf(value);
    const JsonValue* match = reader.Require("match", "a glob over names");
    const JsonValue* mesh = reader.Require("mesh", "the name of a mesh");
    const JsonValue* placements =
        reader.Require("placements", "an array of placements");
    const JsonValue* rename = reader.Find("rename");
    const JsonValue* dtype = reader.Find("dtype");
    reader.RejectOtherKeys();

    if (match != nullptr) {
      const std::string* glob = values_.String(*match, reader.PathOf("match"));
      if (glob != nullptr) rule.match = *glob;
    }
    if (mesh != nullptr) ReadMeshName(*mesh, reader.PathOf("mesh"), rule);
    if (placements != nullptr) {
      ReadPlacements(*placements, reader.PathOf("placements"), rule);
    }
    if (rename != nullptr) {
      const std::string* name =
          values_.String(*rename, reader.PathOf("rename"));
      if (name != nullptr) {
        CheckRename(*rename, reader.PathOf("rename"), *name);
        rule.rename = *name;
      }
    }
    if (dtype != nullptr) {
      rule.dtype = ReadDType(values_, *dtype, reader.PathOf("dtype"));
    }
    spec_.tensors.push_back(std::move(rule));
  }

  // A brace would be taken for an index number of a stack's name.
  void CheckRename(const JsonValue& value, const std::string& path,
                   const std::string& name) {
    const std::string others = absl::StrReplaceAll(name, {{"{name}", ""}});
    if (others.find_first_of("{}") == std::string::npos) return;
    values_.Error(value,
                  absl::StrFormat("%s %s holds a brace outside of {name}; "
                                  "wanted {name} for the parameter's name, and "
                                  "no other brace",
                                  path, Quoted(name)));
  }

  void ReadMeshName(const JsonValue& value, const std::string& path,
                    TensorRule& rule) {
    const std::string* name = values_.String(value, path, "the name of a mesh");
    if (name == nullptr) return;
    rule.mesh = *name;
    // Without any mesh that has been reported already.
    if (mesh_names_.empty() || std::find(mesh_names_.begin(), mesh_names_.end(),
                                         *name) != mesh_names_.end()) {
      return;
    }
    const std::string nearest = NearestWord(*name, mesh_names_);
    values_.Error(
        value, nearest.empty()
                   ? absl::StrFormat("unknown mesh %s; wanted %s",
                                     Quoted(*name), Alternatives(mesh_names_))
                   : absl::StrFormat("unknown mesh %s; did you mean \"%s\"?",
                                     Quoted(*name), nearest));
  }

  void ReadPlacements(const JsonValue& value, const std::string& path,
                      TensorRule& rule) {
    const JsonValue::Array* array =
        values_.Array(value, path, "an array of placements");
    if (array == nullptr) return;
    for (size_t i = 0; i < array->size(); ++i) {
      std::optional<Placement> placement = ReadPlacement(
          values_, (*array)[i], absl::StrFormat("%s[%d]", path, i));
      if (placement.has_value()) {
        rule.placements.push_back(*std::move(placement));
      }
    }
    const auto mesh =
        std::find_if(spec_.meshes.begin(), spec_.meshes.end(),
                     [&](const MeshSpec& m) { return m.name == rule.mesh; });
    if (mesh != spec_.meshes.end() && array->size() != mesh->axes.size()) {
      values_.Error(value, absl::StrFormat(
                               "%s has %d placements; wanted %d, one per axis "
                               "of mesh %s",
                               path, array->size(), mesh->axes.size(),
                               Quoted(mesh->name)));
    }
  }

  ObjectReader& side_;
  const ValueReader& values_;
  GenericSpec spec_;
  std::vector<std::string_view> mesh_names_;  // also of meshes with errors
};

}  // namespace

GenericSpec ReadGeneric(ObjectReader& side) {
  return GenericReader(side).Read();
}

}  // namespace refit
