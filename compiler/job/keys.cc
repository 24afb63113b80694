#include "compiler/job/keys.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace refit {
namespace {

// Calls `visit(object, spec, keys)` for each kind of object, with its defaults.
template <typename Visit>
void ForEachObject(Visit visit) {
  visit(JobObject::kRoot, Job{}, kRootKeys);
  visit(JobObject::kModel, ModelSpec{}, kModelKeys);
  visit(JobObject::kSide, SideSpec{}, kSideKeys);
  visit(JobObject::kTopology, TopologySpec{}, kTopologyKeys);
  visit(JobObject::kOptions, OptionsSpec{}, kOptionsKeys);
}

std::string_view NameOf(JobObject object) {
  switch (object) {
    case JobObject::kRoot:
      return "the job itself, beside \"source\"";
    case JobObject::kModel:
      return "model";
    case JobObject::kSide:
      return "source or destination";
    case JobObject::kTopology:
      return "topology";
    case JobObject::kOptions:
      return "options";
  }
  return "";
}

// "256 MiB", "4096"
std::string NumberText(int64_t number) {
  constexpr std::pair<int, std::string_view> kUnits[] = {
      {40, " TiB"}, {30, " GiB"}, {20, " MiB"}};
  for (const auto& [bits, unit] : kUnits) {
    if (number > 0 && number % (int64_t{1} << bits) == 0) {
      return absl::StrFormat("%d%s", number >> bits, unit);
    }
  }
  return absl::StrCat(number);
}

template <typename Spec, typename Member>
std::string DefaultText(const Spec& spec, Member member) {
  using Type = std::decay_t<decltype(spec.*member)>;
  if constexpr (std::is_same_v<Type, Located<bool>>) {
    return (spec.*member).value ? "`true`" : "`false`";
  } else if constexpr (std::is_same_v<Type, Located<int64_t>>) {
    return NumberText((spec.*member).value);
  } else if constexpr (std::is_same_v<Type, Located<double>>) {
    return absl::StrCat((spec.*member).value);
  }
  return "";
}

template <typename Spec, typename... Members>
std::string RowText(JobObject object, const Spec& spec,
                    const JobKey<Members...>& key) {
  const KeyInfo& info = key.info;
  std::string default_text(info.default_text);
  if constexpr (sizeof...(Members) == 1) {
    if (default_text.empty()) {
      default_text = DefaultText(spec, std::get<0>(key.members));
    }
  }
  std::vector<std::string> cells = {absl::StrFormat("`%s`", info.name),
                                    default_text};
  if (object == JobObject::kSide) {
    const std::vector<std::string_view> layouts = LayoutNames(info.layouts);
    cells.push_back(info.layouts == kEvery
                        ? "all"
                        : absl::StrJoin(std::vector<std::string>(
                                            layouts.begin(), layouts.end()),
                                        ", "));
  } else if (object == JobObject::kOptions) {
    const bool has_range = info.range.min != IntegerRange{}.min;
    cells.push_back(has_range ? absl::StrCat(NumberText(info.range.min), " to ",
                                             NumberText(info.range.max))
                              : "");
  }
  cells.push_back(std::string(info.help));
  return absl::StrCat("| ", absl::StrJoin(cells, " | "), " |");
}

// Keys of options.delta that no other object has.
constexpr std::string_view kDeltaKeysAlone[] = {"changes", "dense_every"};

}  // namespace

void RefuseKeysOfOthers(ObjectReader& reader, JobObject here) {
  ForEachObject([&](JobObject object, const auto&, const auto& keys) {
    if (object == here) return;
    ForEachKey(keys, [&](const auto& key) {
      const std::string_view name = key.info.name;
      reader.Refuse(
          name, absl::StrFormat("%s is a key of %s",
                                here == JobObject::kRoot ? Quoted(name)
                                                         : reader.PathOf(name),
                                NameOf(object)));
    });
  });
  for (const std::string_view name : kDeltaKeysAlone) {
    reader.Refuse(
        name, absl::StrFormat("%s is a key of options.delta",
                              here == JobObject::kRoot ? Quoted(name)
                                                       : reader.PathOf(name)));
  }
}

void ReadMember(ObjectReader& reader, const KeyInfo& key,
                Located<DeltaSpec>& target) {
  const JsonValue* value = reader.Find(key.name);
  if (value == nullptr) return;
  const std::string path = reader.PathOf(key.name);
  const ValueReader& values = reader.values();
  target.place = values.PlaceOf(*value);
  target.given = true;
  if (value->AsObject() == nullptr) {
    if (const bool* enabled = value->AsBool()) {
      target.value.enabled = *enabled;
    } else {
      values.Wrong(*value, path, "true, false or an object");
    }
    return;
  }
  target.value.enabled = true;
  ObjectReader members(values, *value, path);
  Located<fb::DeltaChanges> changes{.value = target.value.changes};
  ReadMember(members, {.name = "changes", .help = ""}, changes);
  target.value.changes = changes.value;
  Located<int64_t> dense_every{.value = target.value.dense_every};
  members.Read("dense_every", {.min = 0, .max = 1'000'000}, dense_every);
  target.value.dense_every = dense_every.value;
  Located<bool> check{.value = target.value.check};
  members.Read("check", {}, check);
  target.value.check = check.value;
  members.RejectOtherKeys();
}

std::vector<std::string> DocumentedKeys(JobObject object) {
  std::vector<std::string> rows;
  ForEachObject([&](JobObject other, const auto& spec, const auto& keys) {
    if (other != object) return;
    ForEachKey(keys, [&](const auto& key) {
      rows.push_back(RowText(object, spec, key));
    });
  });
  return rows;
}

}  // namespace refit
