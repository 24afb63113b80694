#include "compiler/model/model.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/job/object_reader.h"
#include "compiler/job/text_file.h"
#include "compiler/model/config.h"
#include "compiler/model/family.h"
#include "compiler/model/rules/rules.h"
#include "compiler/model/safetensors.h"
#include "compiler/model/stacks.h"
#include "llvm/ADT/STLExtras.h"
#include "plan/dtype.h"
#include "plan/glob.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr int64_t kConfigBytesMax = int64_t{16} << 20;

std::string ShapeText(const Dims& shape) { return absl::StrJoin(shape, "x"); }

// The known class that is most like one that the config names. Of an unknown
// family "architectures" may be anything.
const BuiltInRules* LikeClass(ConfigReader& config) {
  std::vector<std::string_view> names;
  for (const BuiltInRules& rules : AllBuiltInRules()) {
    if (!rules.transformers_class.empty()) {
      names.push_back(rules.transformers_class);
    }
  }
  const JsonValue* named = config.FindSet("architectures");
  if (named == nullptr || named->AsArray() == nullptr) return nullptr;
  for (const JsonValue& name : *named->AsArray()) {
    if (name.AsString() == nullptr) continue;
    const std::string like = NearestWord(*name.AsString(), names);
    for (const BuiltInRules& rules : AllBuiltInRules()) {
      if (!like.empty() && rules.transformers_class == like) return &rules;
    }
  }
  return nullptr;
}

// Says what else a model of an unknown family can be moved by.
std::string UnknownFamily(const std::string& model_type, ConfigReader& config) {
  std::string like;
  if (const BuiltInRules* found = LikeClass(config)) {
    like = absl::StrFormat(
        "its architectures are like %s of %s, whose rules may be copied and "
        "changed: share/refit/families/%s.json; ",
        found->transformers_class, found->model_type, found->model_type);
  }
  std::vector<std::string_view> known;
  for (const BuiltInRules& rules : AllBuiltInRules()) {
    known.push_back(rules.model_type);
  }
  const std::string nearest = NearestWord(model_type, known);
  return absl::StrFormat(
      "unknown model_type %s; %s%swanted %s; a file can describe other "
      "families: \"model\": {\"config\": PATH, \"rules\": PATH}; or they move "
      "without roles: {\"safetensors\": DIRECTORY} with layout generic or "
      "fsdp, or the "
      "job that Python's refit.describe and refit.merge make of live models",
      Quoted(model_type),
      nearest.empty() ? "" : absl::StrFormat("did you mean \"%s\"? ", nearest),
      like, Alternatives(known));
}

// What the job wants beside the model's layers.
struct Parts {
  bool mtp = false;
  bool vision = false;
};

// The model of a config.json. Without an error there is none either if its
// model_type is unknown and `need_family` is false.
// With `rules` the file says what the family is.
std::optional<Model> ReadConfigModel(const std::string& path,
                                     const Place& asked,
                                     const Located<std::string>& rules,
                                     bool need_family, const Parts& parts,
                                     Diagnostics& diagnostics) {
  const std::optional<JsonDocument> document =
      ReadJsonFile(path, asked, kConfigBytesMax, "config", diagnostics);
  if (!document.has_value()) return std::nullopt;
  const ValueReader values(*document, diagnostics);

  const int64_t errors_before = diagnostics.error_count();
  ConfigReader config(values, document->root);
  const std::string model_type = config.String("model_type");
  if (model_type.empty()) return std::nullopt;
  const BuiltInRules* built_in = FindBuiltInRules(model_type);
  if (built_in == nullptr && !rules.given) {
    if (need_family) {
      config.Error("model_type", UnknownFamily(model_type, config));
    }
    return std::nullopt;
  }
  Model model;
  model.place = config.place();
  model.mtp = parts.mtp;
  model.vision = parts.vision;
  model.quant_method = config.QuantMethod();
  if (rules.given) {
    BuildByRules(rules.value, rules.place, config, model);
  } else {
    BuildByRules(*built_in, config, model);
  }
  // Buffers that older code stored; all frameworks make them anew.
  model.stored_beside.push_back("*.rotary_emb.inv_freq");
  if (diagnostics.error_count() != errors_before) return std::nullopt;
  return model;
}

// Gives a family's params the dtypes of a checkpoint, and reports where the two
// disagree.
class CheckpointMatcher {
 public:
  CheckpointMatcher(const Checkpoint& checkpoint, Model& model,
                    Diagnostics& diagnostics)
      : checkpoint_(checkpoint), model_(model), diagnostics_(diagnostics) {
    for (const NamedTensor& tensor : checkpoint.tensors) {
      unused_.emplace(tensor.name, &tensor);
    }
  }

  void Match() {
    if (ReportPacked()) return;
    for (Param& param : model_.params) MatchParam(param);
    if (model_.architecture.tied) MatchTiedHead();
    for (const NamedTensor& tensor : checkpoint_.tensors) {
      if (!unused_.contains(tensor.name)) continue;
      if (IsStoredBeside(tensor.name)) continue;
      diagnostics_.Error(
          tensor.place,
          "tensor %s is not a parameter of a %s model with this config.json",
          Quoted(tensor.name), model_.architecture.family->model_type);
    }
  }

 private:
  // Values of 4 bits that compressed-tensors packs into integers: all that the
  // checkpoint has of the param.
  bool ReportPacked() {
    constexpr std::string_view kPacked = ".weight_packed";
    for (const NamedTensor& tensor : checkpoint_.tensors) {
      if (!tensor.name.ends_with(kPacked)) continue;
      diagnostics_.Error(tensor.place,
                         "tensor %s holds packed values of a few bits, which "
                         "no job moves; wanted a checkpoint of unquantized "
                         "weights, or its config.json alone as the model",
                         Quoted(tensor.name));
      return true;
    }
    return false;
  }

  const NamedTensor* Take(const std::string& name) {
    const auto found = unused_.find(name);
    if (found == unused_.end()) return nullptr;
    const NamedTensor* tensor = found->second;
    unused_.erase(found);
    return tensor;
  }

  bool IsStoredBeside(std::string_view name) const {
    return std::any_of(
        model_.stored_beside.begin(), model_.stored_beside.end(),
        [&](const std::string& glob) { return GlobMatches(glob, name); });
  }

  void CheckShape(const NamedTensor& tensor, const Dims& wanted) {
    if (tensor.shape == wanted) return;
    diagnostics_.Error(
        tensor.place, "tensor %s is %s; wanted %s by config.json",
        Quoted(tensor.name), ShapeText(tensor.shape), ShapeText(wanted));
  }

  void MatchParam(Param& param) {
    const NamedTensor* first = nullptr;
    for (const std::string& name : MemberNames(param)) {
      const NamedTensor* tensor = Take(name);
      if (tensor == nullptr) {
        diagnostics_.Error(checkpoint_.place,
                           "parameter %s of config.json is missing",
                           Quoted(name));
        continue;
      }
      CheckShape(*tensor, param.StoredShape());
      if (first == nullptr) first = tensor;
      if (tensor->dtype != first->dtype) {
        diagnostics_.Error(tensor->place, "tensor %s is %s; wanted %s as %s",
                           Quoted(name), DTypeName(tensor->dtype),
                           DTypeName(first->dtype), Quoted(first->name));
      }
    }
    // A quantized checkpoint is only a way to store: the param's dtype is that
    // of the weights behind it.
    if (first != nullptr && first->dtype != DType::kFp8E4m3) {
      param.dtype = first->dtype;
    }
  }

  // A checkpoint may store the head again that the config declares tied.
  void MatchTiedHead() {
    for (const Skip& skip : model_.skips) {
      const NamedTensor* tensor = Take(skip.name);
      if (tensor == nullptr) continue;
      CheckShape(*tensor,
                 {model_.architecture.vocab, model_.architecture.hidden});
    }
  }

  const Checkpoint& checkpoint_;
  Model& model_;
  Diagnostics& diagnostics_;
  absl::flat_hash_map<std::string_view, const NamedTensor*> unused_;
};

Model FoldModel(const std::vector<NamedTensor>& tensors, const Place& place,
                Diagnostics& diagnostics) {
  Model model;
  model.place = place;
  model.params = FoldStacks(tensors);
  for (const Param& param : model.params) {
    CheckStackSize(param, place, diagnostics);
  }
  return model;
}

std::optional<Model> ReadSafetensorsModel(const std::string& path,
                                          const Place& asked,
                                          const Located<std::string>& rules,
                                          const Parts& parts,
                                          Diagnostics& diagnostics) {
  const std::optional<Checkpoint> checkpoint =
      ReadCheckpoint(path, asked, diagnostics);
  if (!checkpoint.has_value()) return std::nullopt;
  const std::string config = ResolvePath(checkpoint->directory, "config.json");
  std::error_code error;
  if (std::filesystem::exists(config, error)) {
    const int64_t errors_before = diagnostics.error_count();
    std::optional<Model> model = ReadConfigModel(
        config, asked, rules, /*need_family=*/false, parts, diagnostics);
    if (model.has_value()) {
      CheckpointMatcher(*checkpoint, *model, diagnostics).Match();
      return model;
    }
    if (diagnostics.error_count() != errors_before) return std::nullopt;
  } else if (rules.given) {
    diagnostics.Error(rules.place,
                      "model.rules describe a config.json, and there is no %s; "
                      "wanted it beside the checkpoint",
                      Quoted(config));
    return std::nullopt;
  }
  // Of an unknown family the parameters are known all the same, without roles.
  return FoldModel(checkpoint->tensors, checkpoint->place, diagnostics);
}

std::optional<Model> ReadListedModel(const ModelSpec& spec,
                                     Diagnostics& diagnostics) {
  std::vector<NamedTensor> tensors;
  tensors.reserve(spec.parameters->size());
  for (const ParameterSpec& parameter : *spec.parameters) {
    tensors.push_back(
        {.name = parameter.name,
         .shape = Dims(parameter.shape.begin(), parameter.shape.end()),
         .dtype = parameter.dtype,
         .place = parameter.place});
  }
  if (!CheckNames(tensors, diagnostics)) return std::nullopt;
  // The plan does not depend on the order in which the job lists them.
  std::sort(tensors.begin(), tensors.end(),
            [](const NamedTensor& a, const NamedTensor& b) {
              return a.name < b.name;
            });
  return FoldModel(tensors, spec.place, diagnostics);
}

// Reports prediction layers that the job asks of a model without any, or
// without known ones. What a
// list of parameters without roles has is its own affair.
void CheckMtp(const Job& job, const Model& model, Diagnostics& diagnostics) {
  const Architecture& architecture = model.architecture;
  if (!model.mtp || architecture.family == &kNoFamily ||
      architecture.mtp_layers > 0) {
    return;
  }
  const SideSpec& side = job.source.mtp.value ? job.source : job.destination;
  const Family& family = *architecture.family;
  diagnostics.Error(
      side.mtp.place,

      "%s.mtp is true, and %s; wanted \"mtp\": false", side.key,
      family.knows_mtp
          ? absl::StrFormat("this %s has no multi-token-prediction layers",
                            family.model_type)
          : absl::StrFormat(
                "the multi-token-prediction layers of %s are not known",
                family.model_type));
}

// Reports a vision tower asked of a model without any.
void CheckVision(const Job& job, const Model& model, Diagnostics& diagnostics) {
  const Family& family = *model.architecture.family;
  for (const SideSpec* side : {&job.source, &job.destination}) {
    if (!side->vision.given) continue;
    if (&family == &kNoFamily) {
      diagnostics.Error(
          side->vision.place,
          "%s.vision: no parameter of this model is known to be of a vision "
          "tower; wanted options.exclude with the names to leave out",
          side->key);
    } else if (model.vision && side->vision.value && !family.tower) {
      diagnostics.Error(side->vision.place,
                        "%s.vision is true, and no vision tower of this %s is "
                        "known; wanted \"vision\": false",
                        side->key, family.model_type);
    }
  }
}

}  // namespace

std::optional<Model> ReadModel(const Job& job, Diagnostics& diagnostics) {
  const int64_t errors_before = diagnostics.error_count();
  const ModelSpec& spec = job.model;
  const Parts parts = {.mtp = MovesMtpLayers(job),
                       .vision = MovesVisionTower(job)};
  std::optional<Model> model;
  if (spec.config_path.has_value()) {
    model = ReadConfigModel(*spec.config_path, spec.place, spec.rules_path,
                            /*need_family=*/true, parts, diagnostics);
  } else if (spec.safetensors_path.has_value()) {
    model = ReadSafetensorsModel(*spec.safetensors_path, spec.place,
                                 spec.rules_path, parts, diagnostics);
  } else if (spec.parameters.has_value()) {
    model = ReadListedModel(spec, diagnostics);
  }
  if (model.has_value()) {
    CheckMtp(job, *model, diagnostics);
    CheckVision(job, *model, diagnostics);
  }
  if (diagnostics.error_count() != errors_before) return std::nullopt;
  return model;
}

void ApplyExcludes(const OptionsSpec& options, Model& model,
                   Diagnostics& diagnostics) {
  const std::vector<std::string>& globs = options.exclude.value;
  if (globs.empty()) return;
  const auto matches = [&](const std::string& name, size_t) {
    return llvm::any_of(
               globs,
               [&](const std::string& glob) { return GlobMatches(glob, name); })
               ? 0
               : -1;
  };
  std::vector<Param> params;
  for (const Param& param : model.params) {
    for (const RulePart& part : PartitionMembers(param, matches)) {
      Param& of_part = params.emplace_back(param);
      of_part.index = NumbersOf(param, part.positions);
      if (part.rule == 0) of_part.skip = SkipReason::kExcluded;
    }
  }
  model.params = std::move(params);
  const bool moves = std::any_of(
      model.params.begin(), model.params.end(), [](const Param& param) {
        return param.skip == SkipReason::kUnspecified;
      });
  if (!moves) {
    diagnostics.Error(options.exclude.place,
                      "options.exclude matches every parameter, so that "
                      "nothing is left to move; wanted globs that leave some");
  }
}

}  // namespace refit
