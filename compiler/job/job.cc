#include "compiler/job/job.h"

#include <cstddef>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/job/json.h"
#include "compiler/job/keys.h"
#include "compiler/job/object_reader.h"
#include "compiler/job/side.h"
#include "compiler/job/text_file.h"
#include "plan/plan_file.h"
#include "topology/machines.h"

namespace refit {
namespace {

constexpr std::string_view kModelWanted =
    "the path of a config.json, {\"config\": PATH, \"rules\": PATH}, "
    "{\"safetensors\": PATH} or {\"parameters\": […]}";

std::optional<ParameterSpec> ReadParameter(const ValueReader& values,
                                           const JsonValue& value,
                                           const std::string& path) {
  if (!values.IsObject(value, path)) return std::nullopt;
  ObjectReader reader(values, value, path);
  const JsonValue* name = reader.Require("name", "a string");
  const JsonValue* shape = reader.Require("shape", "an array of integers");
  const JsonValue* dtype = reader.Require("dtype", "a dtype");
  reader.RejectOtherKeys();
  if (name == nullptr || shape == nullptr || dtype == nullptr) {
    return std::nullopt;
  }

  const std::string* name_text = values.String(*name, reader.PathOf("name"));
  std::optional<std::vector<int64_t>> extents =
      values.Integers(*shape, reader.PathOf("shape"), kExtentRange);
  const std::optional<DType> type =
      ReadDType(values, *dtype, reader.PathOf("dtype"));
  if (name_text == nullptr || !extents.has_value() || !type.has_value()) {
    return std::nullopt;
  }
  return ParameterSpec{.name = *name_text,
                       .shape = *std::move(extents),
                       .dtype = *type,
                       .place = values.PlaceOf(value)};
}

std::optional<std::vector<ParameterSpec>> ReadParameters(
    const ValueReader& values, const JsonValue& value) {
  constexpr std::string_view kPath = "model.parameters";
  const JsonValue::Array* array =
      values.Array(value, kPath, "an array of parameters");
  if (array == nullptr) return std::nullopt;
  if (array->empty()) {
    values.Error(value, "model.parameters is empty; wanted at least one");
  }
  std::vector<ParameterSpec> parameters;
  parameters.reserve(array->size());
  for (size_t i = 0; i < array->size(); ++i) {
    std::optional<ParameterSpec> parameter =
        ReadParameter(values, (*array)[i], absl::StrFormat("%s[%d]", kPath, i));
    if (parameter.has_value()) parameters.push_back(*std::move(parameter));
  }
  return parameters;
}

// Whether a path looks like a model's name on the Hugging Face hub,
// "Qwen/Qwen3-0.6B", and nothing is there.
bool LooksLikeHubId(const std::string& path, const std::string& resolved) {
  const size_t slash = path.find('/');
  if (slash == 0 || slash == std::string::npos || slash + 1 == path.size() ||
      path.find('/', slash + 1) != std::string::npos) {
    return false;
  }
  if (path[0] == '.' || path[0] == '~' || path.ends_with(".json") ||
      path.ends_with(".safetensors")) {
    return false;
  }
  std::error_code error;
  return !std::filesystem::exists(resolved, error) &&
         !std::filesystem::exists(DirectoryOf(resolved), error);
}

void RefuseHubId(const ValueReader& values, const JsonValue& value,
                 const std::string& path, std::string_view wanted) {
  values.Error(value,
               "%s is no path here; if it is a model of the Hugging Face hub, "
               "Refit does not fetch it; wanted %s",
               Quoted(path), wanted);
}

void ReadConfigPath(const ValueReader& values, const JsonValue& value,
                    const std::string& path, const std::string& directory,
                    ModelSpec& model) {
  model.place = values.PlaceOf(value);
  model.config_path = ResolvePath(directory, path);
  if (LooksLikeHubId(path, *model.config_path)) {
    RefuseHubId(values, value, path, "the path of its config.json, downloaded");
    return;
  }
  std::error_code error;
  if (std::filesystem::is_directory(*model.config_path, error)) {
    model.config_path = ResolvePath(*model.config_path, "config.json");
  }
}

ModelSpec ReadModelSpec(const ValueReader& values, const JsonValue& value,
                        const std::string& directory) {
  ModelSpec model;
  model.place = values.PlaceOf(value);
  if (const std::string* path = value.AsString(); path && !path->empty()) {
    ReadConfigPath(values, value, *path, directory, model);
    return model;
  }
  if (value.AsObject() == nullptr) {
    values.Wrong(value, "model", kModelWanted);
    return model;
  }
  ObjectReader reader(values, value, "model");
  const JsonValue* config = reader.Find("config");
  const JsonValue* safetensors = reader.Find("safetensors");
  const JsonValue* parameters = reader.Find("parameters");
  reader.Read("rules", {}, model.rules_path);
  RefuseKeysOfOthers(reader, JobObject::kModel);
  reader.RejectOtherKeys();
  const int forms =
      (config != nullptr) + (safetensors != nullptr) + (parameters != nullptr);
  if (forms != 1) {
    values.Error(value,
                 "model has %s of \"config\", \"safetensors\" and "
                 "\"parameters\"; wanted one of them",
                 forms == 0 ? "none" : "more than one");
    return model;
  }
  if (model.rules_path.given) {
    model.rules_path.value = ResolvePath(directory, model.rules_path.value);
  }
  if (config != nullptr) {
    const std::string* path =
        values.String(*config, "model.config", "the path of a config.json");
    if (path != nullptr) {
      ReadConfigPath(values, *config, *path, directory, model);
    }
  } else if (safetensors != nullptr) {
    const std::string* path = values.String(*safetensors, "model.safetensors",
                                            "a directory or an index");
    if (path != nullptr) {
      model.place = values.PlaceOf(*safetensors);
      model.safetensors_path = ResolvePath(directory, *path);
      if (LooksLikeHubId(*path, *model.safetensors_path)) {
        RefuseHubId(values, *safetensors, *path,
                    "the directory of its files, downloaded");
      }
    }
  } else {
    model.parameters = ReadParameters(values, *parameters);
    if (model.rules_path.given) {
      values.diagnostics().Error(
          model.rules_path.place,
          "model.rules describe a config.json, and \"parameters\" have none; "
          "wanted \"config\" or \"safetensors\" beside them");
    }
  }
  return model;
}

// Keys that were, and what took their place.
struct RemovedKey {
  std::string_view name;
  std::string_view instead;
};
constexpr RemovedKey kRemovedOptions[] = {
    {"deal",
     "ranks receive for others of their host wherever that is faster, and for "
     "fewer peers where options.network_peers asks for it"},
    {"fan_out",
     "ranks relay to each other wherever that is faster, and through staging "
     "where options.peer is \"staged\""},
    {"fold",
     "equal parts of a job are always planned once, and the files of jobs of "
     "more than 1,024 ranks are compact"},
    {"slots",
     "rounds always take turns in two halves of staging, and "
     "options.staging_bytes says how large it may be"},
    {"operations_per_round",
     "a rank has at most 32 sends and receives in a round, the most that NCCL "
     "surely runs as one kernel"},
};

// Reads an object whose keys are members of one type each.
template <typename Spec, typename Keys>
void ReadKeys(const ValueReader& values, const JsonValue& value,
              std::string path, JobObject object, const Keys& keys,
              Spec& spec) {
  if (!values.IsObject(value, path)) return;
  ObjectReader reader(values, value, std::move(path));
  ForEachKey(keys, [&](const auto& key) {
    ReadMember(reader, key.info, spec.*std::get<0>(key.members));
  });
  if (object == JobObject::kOptions) {
    for (const auto& [name, instead] : kRemovedOptions) {
      reader.Refuse(name, absl::StrCat(reader.PathOf(name),
                                       " is gone: ", std::string(instead),
                                       "; wanted no such key"));
    }
  }
  RefuseKeysOfOthers(reader, object);
  reader.RejectOtherKeys();
}

// Fills the topology of the machine that `value` names, if it names one.
void ReadMachine(const ValueReader& values, const JsonValue& value,
                 TopologySpec& topology) {
  if (value.AsObject() == nullptr) return;
  const ObjectReader reader(values, value, "topology");
  const JsonValue* name = reader.Peek("machine");
  if (name == nullptr || name->AsString() == nullptr) return;
  const MachineFile* machine = FindMachine(*name->AsString());
  if (machine == nullptr) {
    values.Wrong(*name, "topology.machine", Alternatives(MachineNames()));
    return;
  }
  const auto file = std::make_shared<SourceFile>();
  file->path = absl::StrFormat("%s.json", machine->name);
  file->text = machine->text;
  const std::optional<JsonDocument> document =
      ParseJson(file, file->text, values.diagnostics());
  if (!document.has_value()) return;
  ReadKeys(ValueReader(*document, values.diagnostics()), document->root,
           "topology", JobObject::kTopology, kTopologyKeys, topology);
  // The job says where its ranks are.
  if (reader.Peek("hosts") != nullptr &&
      reader.Peek("gpus_per_host") == nullptr) {
    topology.gpus_per_host = {};
  }
}

void CheckLeaves(const TopologySpec& topology, Diagnostics& diagnostics) {
  const Located<double>& spine = topology.spine_oversubscription;
  if (spine.value < 1) {
    diagnostics.Error(
        spine.place, "topology.spine_oversubscription is %g; wanted at least 1",
        spine.value);
  } else if (spine.given && !topology.rails.value &&
             !topology.hosts_per_leaf.given) {
    diagnostics.Error(spine.place,
                      "topology.spine_oversubscription, but all NICs are on "
                      "one leaf; wanted \"hosts_per_leaf\" or \"rails\"");
  }
}

TopologySpec ReadTopology(const ValueReader& values, const JsonValue& value) {
  TopologySpec topology;
  topology.place = values.PlaceOf(value);
  ReadMachine(values, value, topology);
  ReadKeys(values, value, "topology", JobObject::kTopology, kTopologyKeys,
           topology);
  CheckLeaves(topology, values.diagnostics());
  if (topology.gpus_per_host.given && topology.hosts.given) {
    values.diagnostics().Error(topology.gpus_per_host.place,
                               "topology has both \"gpus_per_host\" and "
                               "\"hosts\"; wanted one of them");
  }
  return topology;
}

OptionsSpec ReadOptions(const ValueReader& values, const JsonValue& value) {
  OptionsSpec options;
  ReadKeys(values, value, "options", JobObject::kOptions, kOptionsKeys,
           options);
  return options;
}

// What can be said about both sides together without the model.
void CheckRanks(const Job& job, Diagnostics& diagnostics) {
  const int64_t source = CountRanks(job.source);
  const int64_t destination = CountRanks(job.destination);
  for (const auto& [side, ranks] : {std::pair(&job.source, source),
                                    std::pair(&job.destination, destination)}) {
    if (ranks > kRanksMax) {
      diagnostics.Error(side->place,
                        "%s has more than %d ranks, the most a job may have",
                        side->key, kRanksMax);
    }
  }
  if (source > kRanksMax || destination > kRanksMax) return;
  if (source + destination > kRanksMax) {
    diagnostics.Error(
        job.place,
        "source and destination have %d ranks together; wanted at most %d",
        source + destination, kRanksMax);
  }
  const int64_t hosts = static_cast<int64_t>(job.topology.hosts.value.size());
  if (job.topology.hosts.given && hosts != source + destination) {
    diagnostics.Error(job.topology.hosts.place,
                      "topology.hosts has %d ranks; wanted %d, the %d of the "
                      "source and the %d of the destination",
                      hosts, source + destination, source, destination);
  }
}

// Reads a job's keys.
class RootReader {
 public:
  RootReader(const ValueReader& values, const JsonValue& root,
             const std::string& directory)
      : values_(values), reader_(values, root, ""), directory_(directory) {
    job_.place = reader_.place();
    job_.topology.place = job_.place;
    const auto place = [&](auto& spec, const auto& keys) {
      ForEachMember(keys,
                    [&](auto member) { (spec.*member).place = job_.place; });
    };
    place(job_.topology, kTopologyKeys);
    place(job_.options, kOptionsKeys);
  }

  Job Read() {
    ForEachKey(kRootKeys, [&](const auto& key) {
      ReadKey(key.info, job_.*std::get<0>(key.members));
    });
    RefuseKeysOfOthers(reader_, JobObject::kRoot);
    reader_.RejectOtherKeys();
    if (values_.diagnostics().ok()) CheckRanks(job_, values_.diagnostics());
    return std::move(job_);
  }

 private:
  void ReadKey(const KeyInfo& key, ModelSpec& model) {
    const JsonValue* value = reader_.Require(key.name, kModelWanted);
    if (value != nullptr) model = ReadModelSpec(values_, *value, directory_);
  }
  void ReadKey(const KeyInfo& key, SideSpec& side) {
    const JsonValue* value = reader_.Require(key.name, "an object");
    if (value == nullptr) return;
    side = ReadSide(values_, *value, std::string(key.name));
  }
  void ReadKey(const KeyInfo& key, TopologySpec& topology) {
    const JsonValue* value = reader_.Find(key.name);
    if (value != nullptr) topology = ReadTopology(values_, *value);
  }
  void ReadKey(const KeyInfo& key, OptionsSpec& options) {
    const JsonValue* value = reader_.Find(key.name);
    if (value != nullptr) options = ReadOptions(values_, *value);
  }
  void ReadKey(const KeyInfo& key, Located<bool>& flag) {
    ReadMember(reader_, key, flag);
  }

  const ValueReader& values_;
  ObjectReader reader_;
  const std::string& directory_;
  Job job_;
};

constexpr size_t kFactBytesMax = 200;

// In one line, for readers: strings without their quotes.
std::string BriefText(const JsonValue& value) {
  if (const std::string* text = value.AsString()) return *text;
  std::vector<std::string> parts;
  if (const JsonValue::Array* array = value.AsArray()) {
    for (const JsonValue& element : *array) parts.push_back(BriefText(element));
    return absl::StrCat("[", absl::StrJoin(parts, ", "), "]");
  }
  if (const JsonValue::Object* object = value.AsObject()) {
    for (const JsonMember& member : *object) {
      parts.push_back(absl::StrCat(member.key, ": ", BriefText(member.value)));
    }
    return absl::StrCat("{", absl::StrJoin(parts, ", "), "}");
  }
  return value.Text();
}

// The same; of a long one its begin, and a digest that tells it from others.
std::string FactText(const JsonValue& value) {
  std::string text = BriefText(value);
  if (text.size() <= kFactBytesMax) return text;
  const fb::Digest digest =
      DigestOf({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  size_t end = kFactBytesMax;
  while ((text[end] & 0xc0) == 0x80) --end;  // inside a character of UTF-8
  return absl::StrCat(text.substr(0, end), " …, digest ",
                      absl::Hex(digest.low(), absl::kZeroPad16));
}

JobFacts FactsOf(const JsonValue& root) {
  JobFacts facts;
  for (const JsonMember& member : *root.AsObject()) {
    if (member.key == "model") continue;  // what was read of it says more
    if (const JsonValue::Object* object = member.value.AsObject()) {
      for (const JsonMember& inner : *object) {
        facts[absl::StrCat(member.key, ".", inner.key)] = FactText(inner.value);
      }
    } else {
      facts[member.key] = FactText(member.value);
    }
  }
  return facts;
}

// Says what a job is where a model's config, `file`, is given in its place.
bool IsConfig(const ValueReader& values, const JsonValue& root,
              const SourceFile& file, std::string_view reader) {
  const ObjectReader members(values, root, "");
  const JsonValue* type = members.Peek("model_type");
  if (type == nullptr || type->AsString() == nullptr) return false;
  for (const std::string_view key : {"model", "source", "destination"}) {
    if (members.Peek(key) != nullptr) return false;
  }
  // A text that no file holds has a name in angle brackets.
  const bool has_path = !absl::StartsWith(file.path, "<");
  values.Error(root,
               "this is a model's config, %s, but %s takes a job: the path of "
               "the config, and how each side cuts the model; wanted %sat "
               "least {\"model\": %s, \"source\": {\"layout\": \"fsdp\"}, "
               "\"destination\": {\"layout\": \"vllm\"}}",
               *type->AsString(), reader,
               has_path ? "a file in the working directory that says " : "",
               Quoted(has_path ? file.path : "config.json"));
  return true;
}

// Whether parts of the model that one side may ask for are moved.
bool AreWanted(const Located<bool>& source, const Located<bool>& destination) {
  const bool left_out = (source.given && !source.value) ||
                        (destination.given && !destination.value);
  return (source.value || destination.value) && !left_out;
}

}  // namespace

bool MovesMtpLayers(const Job& job) {
  return AreWanted(job.source.mtp, job.destination.mtp);
}

bool MovesVisionTower(const Job& job) {
  return AreWanted(job.source.vision, job.destination.vision);
}

std::optional<Job> ReadJob(const std::string& path, Diagnostics& diagnostics,
                           std::string_view reader) {
  absl::StatusOr<std::shared_ptr<const SourceFile>> file =
      ReadTextFile(path, kJobBytesMax);
  if (!file.ok()) {
    diagnostics.Error(WholeFile(path), std::string(file.status().message()));
    return std::nullopt;
  }
  return ReadJobText(*std::move(file), path == "-" ? "" : DirectoryOf(path),
                     diagnostics, reader);
}

std::optional<Job> ReadJobText(std::shared_ptr<const SourceFile> file,
                               const std::string& directory,
                               Diagnostics& diagnostics,
                               std::string_view reader) {
  const int64_t errors_before = diagnostics.error_count();
  const std::optional<JsonDocument> document =
      ParseJson(file, file->text, diagnostics);
  if (!document.has_value()) return std::nullopt;
  const ValueReader values(*document, diagnostics);
  if (!values.IsObject(document->root, "job")) return std::nullopt;
  if (IsConfig(values, document->root, *file, reader)) return std::nullopt;
  Job job = RootReader(values, document->root, directory).Read();
  if (diagnostics.error_count() != errors_before) return std::nullopt;
  job.facts = FactsOf(document->root);
  return job;
}

}  // namespace refit
