// The meshes and placements of a generic side.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/job/placement.h"
#include "compiler/job/side.h"
#include "llvm/ADT/STLExtras.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr IntegerRange kElementRange = {.min = 0, .max = int64_t{1} << 50};
constexpr int64_t kLayersMax = 1'000'000;

class GenericReader {
 public:
  explicit GenericReader(ObjectReader& side)
      : side_(side), values_(side.values()) {}

  GenericSpec Read() {
    const JsonValue* meshes = side_.Require("meshes", "an object of meshes");
    const JsonValue* flat_buffers = side_.Find("flat_buffers");
    const JsonValue* tensors =
        flat_buffers == nullptr ? side_.Require("tensors", "an array of rules")
                                : side_.Find("tensors");
    if (meshes != nullptr) ReadMeshes(*meshes);
    if (tensors != nullptr) ReadTensors(*tensors);
    if (flat_buffers != nullptr) ReadFlatBuffers(*flat_buffers);
    return std::move(spec_);
  }

 private:
  void ReadMeshes(const JsonValue& value) {
    const std::string path = side_.PathOf("meshes");
    if (!values_.IsObject(value, path)) return;
    ObjectReader meshes(values_, value, path);
    if (meshes.members().empty()) {
      values_.Error(value, "%s has no mesh; wanted at least one", path);
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
    if (member.key.empty()) {
      values_.diagnostics().Error(
          values_.document().PlaceAt(member.key_offset),
          "a mesh is named \"\"; wanted a name that rules can say");
      return std::nullopt;
    }
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
      if (axis.key.empty()) {
        values_.diagnostics().Error(
            values_.document().PlaceAt(axis.key_offset),
            "an axis of mesh %s is named \"\"; wanted a name",
            Quoted(mesh.name));
        return false;
      }
      const std::optional<int64_t> extent = values_.Integer(
          axis.value, axes.PathOf(axis.key), {.min = 1, .max = kRanksMax});
      if (!extent.has_value()) return false;
      mesh.axes.push_back(axis.key);
      mesh.shape.push_back(*extent);
      size = std::min(size * *extent, kRanksMax + 1);
    }
    if (mesh.axes.empty()) {
      values_.Error(value, "mesh %s has no axes; wanted at least one",
                    Quoted(mesh.name));
      return false;
    }
    if (size > kRanksMax) {
      values_.Error(value, "mesh %s has more than %d ranks; wanted fewer",
                    Quoted(mesh.name), kRanksMax);
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
                    "mesh %s has %d ranks; wanted %d, the product of its axes",
                    Quoted(mesh.name), ranks->size(), size);
      return false;
    }
    std::vector<bool> seen(static_cast<size_t>(kRanksMax), false);
    for (size_t i = 0; i < ranks->size(); ++i) {
      const auto rank = static_cast<size_t>((*ranks)[i]);
      if (seen[rank]) {
        values_.Error((*value->AsArray())[i], "rank %d stands twice in mesh %s",
                      rank, Quoted(mesh.name));
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
                    "rank %d is in no mesh; wanted all of 0 to %d, the largest "
                    "rank named",
                    i, ranks.back());
      return;
    }
  }

  void ReadTensors(const JsonValue& value) {
    const std::string path = side_.PathOf("tensors");
    const JsonValue::Array* rules =
        values_.Array(value, path, "an array of rules");
    if (rules == nullptr) return;
    if (rules->empty()) {
      values_.Error(value, "%s has no rule; wanted at least one", path);
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
    if (mesh != nullptr) ReadMeshName(*mesh, reader.PathOf("mesh"), rule.mesh);
    if (placements != nullptr) {
      ReadPlacements(*placements, reader.PathOf("placements"), rule.mesh,
                     rule.placements);
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
                  "%s %s holds a brace outside of {name}; wanted {name} for "
                  "the parameter's name, and no other brace",
                  path, Quoted(name));
  }

  void ReadMeshName(const JsonValue& value, const std::string& path,
                    std::string& mesh) {
    const std::string* name = values_.String(value, path, "the name of a mesh");
    if (name == nullptr) return;
    mesh = *name;
    // Without any mesh that has been reported already.
    if (mesh_names_.empty() || llvm::is_contained(mesh_names_, *name)) return;
    const std::string nearest = NearestWord(*name, mesh_names_);
    values_.Error(
        value, nearest.empty()
                   ? absl::StrFormat("unknown mesh %s; wanted %s",
                                     Quoted(*name), Alternatives(mesh_names_))
                   : absl::StrFormat("unknown mesh %s; did you mean \"%s\"?",
                                     Quoted(*name), nearest));
  }

  void ReadPlacements(const JsonValue& value, const std::string& path,
                      std::string_view mesh_name,
                      std::vector<Placement>& placements) {
    const JsonValue::Array* array =
        values_.Array(value, path, "an array of placements");
    if (array == nullptr) return;
    for (size_t i = 0; i < array->size(); ++i) {
      std::optional<Placement> placement = ReadPlacement(
          values_, (*array)[i], absl::StrFormat("%s[%d]", path, i));
      if (placement.has_value()) {
        placements.push_back(*std::move(placement));
      }
    }
    const auto mesh =
        std::find_if(spec_.meshes.begin(), spec_.meshes.end(),
                     [&](const MeshSpec& m) { return m.name == mesh_name; });
    if (mesh != spec_.meshes.end() && array->size() != mesh->axes.size()) {
      values_.Error(value,
                    "%s has %d placements; wanted %d, one per axis of mesh %s",
                    path, array->size(), mesh->axes.size(), Quoted(mesh->name));
    }
  }

  void ReadFlatBuffers(const JsonValue& value) {
    const std::string path = side_.PathOf("flat_buffers");
    const JsonValue::Array* array =
        values_.Array(value, path, "an array of flat buffers");
    if (array == nullptr) return;
    for (size_t i = 0; i < array->size(); ++i) {
      ReadFlatBuffer((*array)[i], absl::StrFormat("%s[%d]", path, i));
    }
  }

  void ReadFlatBuffer(const JsonValue& value, const std::string& path) {
    if (!values_.IsObject(value, path)) return;
    ObjectReader reader(values_, value, path);
    FlatBufferSpec flat;
    flat.place = values_.PlaceOf(value);
    Located<std::string> name;
    Located<int64_t> length;
    reader.Require("name", "the buffer's name");
    reader.Read("name", {}, name);
    reader.Require("length", "a number of elements");
    reader.Read("length", kElementRange, length);
    flat.name = name.value;
    flat.length = length.value;
    const JsonValue* mesh = reader.Require("mesh", "the name of a mesh");
    const JsonValue* placements = reader.Find("placements");
    const JsonValue* ranges = reader.Find("ranges");
    const JsonValue* dtype = reader.Find("dtype");
    const JsonValue* layers = reader.Find("layers");
    const JsonValue* entries = reader.Require("entries", "an array of entries");
    reader.RejectOtherKeys();

    if (mesh != nullptr) ReadMeshName(*mesh, reader.PathOf("mesh"), flat.mesh);
    if ((placements == nullptr) == (ranges == nullptr)) {
      values_.Error(
          value, "%s has %s \"placements\" %s \"ranges\"; wanted one of them",
          path, ranges == nullptr ? "neither" : "both",
          ranges == nullptr ? "nor" : "and");
    } else if (placements != nullptr) {
      ReadPlacements(*placements, reader.PathOf("placements"), flat.mesh,
                     flat.placements);
    } else {
      ReadRanges(*ranges, reader.PathOf("ranges"), flat);
    }
    if (dtype != nullptr) {
      flat.dtype = ReadDType(values_, *dtype, reader.PathOf("dtype"));
    }
    if (layers != nullptr) {
      flat.layers = ReadRange(*layers, reader.PathOf("layers"), kLayersMax);
      if (flat.layers.has_value() && flat.layers->begin == flat.layers->end) {
        values_.Error(*layers, "%s holds no layer; wanted at least one",
                      reader.PathOf("layers"));
      }
    }
    if (name.given) {
      CheckLayerName(name.place, reader.PathOf("name"), flat.name,
                     layers != nullptr);
    }
    if (entries != nullptr) {
      ReadEntries(*entries, reader.PathOf("entries"), layers != nullptr, flat);
    }
    spec_.flat_buffers.push_back(std::move(flat));
  }

  // "[begin, end]", half-open, within [0, max].
  std::optional<RangeSpec> ReadRange(const JsonValue& value,
                                     const std::string& path, int64_t max) {
    const std::optional<std::vector<int64_t>> ends =
        values_.Integers(value, path, {.min = 0, .max = max});
    if (!ends.has_value()) return std::nullopt;
    if (ends->size() != 2 || (*ends)[0] > (*ends)[1]) {
      values_.Error(
          value, "%s is no range; wanted [begin, end] with begin not after end",
          path);
      return std::nullopt;
    }
    return RangeSpec{.begin = (*ends)[0],
                     .end = (*ends)[1],
                     .place = values_.PlaceOf(value)};
  }

  void ReadRanges(const JsonValue& value, const std::string& path,
                  FlatBufferSpec& flat) {
    const JsonValue::Array* array =
        values_.Array(value, path, "an array of ranges, one per rank");
    if (array == nullptr) return;
    for (size_t i = 0; i < array->size(); ++i) {
      std::optional<RangeSpec> range = ReadRange(
          (*array)[i], absl::StrFormat("%s[%d]", path, i), kElementRange.max);
      if (!range.has_value()) continue;
      if (range->end > flat.length) {
        values_.Error(
            (*array)[i],
            "%s[%d] ends at element %d; wanted at most %d, the buffer's length",
            path, i, range->end, flat.length);
      }
      flat.ranges.push_back(*std::move(range));
    }
    const auto mesh =
        std::find_if(spec_.meshes.begin(), spec_.meshes.end(),
                     [&](const MeshSpec& m) { return m.name == flat.mesh; });
    if (mesh != spec_.meshes.end() && array->size() != mesh->ranks.size()) {
      values_.Error(
          value, "%s has %d ranges; wanted %d, one per rank of mesh %s", path,
          array->size(), mesh->ranks.size(), Quoted(mesh->name));
    }
  }

  void ReadEntries(const JsonValue& value, const std::string& path,
                   bool has_layers, FlatBufferSpec& flat) {
    const JsonValue::Array* array =
        values_.Array(value, path, "an array of entries");
    if (array == nullptr) return;
    for (size_t i = 0; i < array->size(); ++i) {
      const JsonValue& item = (*array)[i];
      const std::string item_path = absl::StrFormat("%s[%d]", path, i);
      if (!values_.IsObject(item, item_path)) continue;
      ObjectReader reader(values_, item, item_path);
      Located<std::string> param;
      Located<int64_t> offset;
      reader.Require("param", "the name of a parameter");
      reader.Read("param", {}, param);
      reader.Require("offset", "the element at which it begins");
      reader.Read("offset", kElementRange, offset);
      const JsonValue* rows = reader.Find("rows");
      reader.RejectOtherKeys();
      FlatEntry entry = {.param = param.value,
                         .offset = offset.value,
                         .rows = {},
                         .place = values_.PlaceOf(item)};
      if (rows != nullptr) {
        entry.rows = ReadRange(*rows, reader.PathOf("rows"), kElementRange.max);
      }
      if (param.given) {
        CheckLayerName(param.place, reader.PathOf("param"), entry.param,
                       has_layers);
      }
      flat.entries.push_back(std::move(entry));
    }
  }

  // A buffer with layers, and what it holds, have one in the name.
  void CheckLayerName(const Place& place, const std::string& path,
                      const std::string& name, bool has_layers) {
    const std::string others =
        absl::StrReplaceAll(name, {{std::string(kLayerMark), ""}});
    const bool has_mark = others.size() != name.size();
    if (has_mark == has_layers &&
        others.find_first_of("{}") == std::string::npos) {
      return;
    }
    values_.diagnostics().Error(
        place, "%s is %s; wanted %s", path, Quoted(name),
        has_layers
            ? "{layer} where the number of the layer stands, and no other brace"
            : "no brace, or \"layers\" beside it");
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
