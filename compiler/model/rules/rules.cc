#include "compiler/model/rules/rules.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "compiler/job/keys.h"
#include "compiler/job/object_reader.h"
#include "compiler/model/json_file.h"
#include "compiler/model/role_shape.h"
#include "compiler/model/rules/expression.h"
#include "compiler/model/rules/like.h"
#include "compiler/model/stacks.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

using enum ParamRole;

constexpr int64_t kRulesBytesMax = int64_t{4} << 20;
constexpr int64_t kExtentMax = (int64_t{1} << 31) - 1;
constexpr int64_t kCountMax = 100'000;
constexpr std::string_view kLayer = "{layer}";
constexpr std::string_view kExpert = "{expert}";
constexpr std::string_view kOrNone = " or []";
constexpr std::string_view kTower = "tower";

constexpr std::pair<std::string_view, ParamRole> kRoles[] = {
    {"embedding", kEmbedding},
    {"final_norm", kFinalNorm},
    {"output_head", kOutputHead},
    {"attention_norm", kAttentionNorm},
    {"query", kQuery},
    {"key", kKey},
    {"value", kValue},
    {"query_bias", kQueryBias},
    {"key_bias", kKeyBias},
    {"value_bias", kValueBias},
    {"query_norm", kQueryNorm},
    {"key_norm", kKeyNorm},
    {"query_heads_norm", kQueryHeadsNorm},
    {"key_heads_norm", kKeyHeadsNorm},
    {"attention_output", kAttentionOutput},
    {"attention_output_bias", kAttentionOutputBias},
    {"attention_sinks", kAttentionSinks},
    {"latent_query", kLatentQuery},
    {"query_down", kQueryDown},
    {"query_down_norm", kQueryDownNorm},
    {"query_up", kQueryUp},
    {"key_value_down", kKeyValueDown},
    {"key_value_down_norm", kKeyValueDownNorm},
    {"key_value_up", kKeyValueUp},
    {"index_query", kIndexQuery},
    {"index_key", kIndexKey},
    {"index_key_norm", kIndexKeyNorm},
    {"index_key_norm_bias", kIndexKeyNormBias},
    {"index_weights", kIndexWeights},
    {"mamba_norm", kMambaNorm},
    {"mamba_in", kMambaIn},
    {"mamba_in_bias", kMambaInBias},
    {"mamba_conv", kMambaConv},
    {"mamba_conv_bias", kMambaConvBias},
    {"mamba_a_log", kMambaALog},
    {"mamba_d", kMambaD},
    {"mamba_dt_bias", kMambaDtBias},
    {"mamba_gated_norm", kMambaGatedNorm},
    {"mamba_out", kMambaOut},
    {"mamba_out_bias", kMambaOutBias},
    {"delta_qkv", kDeltaQkv},
    {"delta_z", kDeltaZ},
    {"delta_b", kDeltaB},
    {"delta_a", kDeltaA},
    {"delta_conv", kDeltaConv},
    {"delta_a_log", kDeltaALog},
    {"delta_dt_bias", kDeltaDtBias},
    {"delta_gated_norm", kDeltaGatedNorm},
    {"delta_out", kDeltaOut},
    {"mlp_norm", kMlpNorm},
    {"mlp_input_norm", kMlpInputNorm},
    {"mlp_output_norm", kMlpOutputNorm},
    {"mlp_gate", kMlpGate},
    {"mlp_up", kMlpUp},
    {"mlp_down", kMlpDown},
    {"moe_norm", kMoeNorm},
    {"router", kRouter},
    {"router_bias", kRouterBias},
    {"router_correction", kRouterCorrection},
    {"expert_gate", kExpertGate},
    {"expert_up", kExpertUp},
    {"expert_down", kExpertDown},
    {"stacked_expert_gate_up", kStackedExpertGateUp},
    {"stacked_expert_down", kStackedExpertDown},
    {"fused_expert_gate_up", kFusedExpertGateUp},
    {"fused_expert_gate_up_bias", kFusedExpertGateUpBias},
    {"fused_expert_gate_then_up", kFusedExpertGateThenUp},
    {"fused_expert_down", kFusedExpertDown},
    {"fused_expert_down_bias", kFusedExpertDownBias},
    {"experts_latent_down", kLatentDown},
    {"experts_latent_up", kLatentUp},
    {"shared_expert_gate", kSharedExpertGate},
    {"shared_expert_up", kSharedExpertUp},
    {"shared_expert_down", kSharedExpertDown},
    {"shared_expert_router", kSharedExpertRouter},
    {"mtp_embedding_norm", kMtpEmbeddingNorm},
    {"mtp_hidden_norm", kMtpHiddenNorm},
    {"mtp_projection", kMtpProjection},
    {"mtp_final_norm", kMtpFinalNorm},
    {"column", kColumn},
    {"row", kRow},
    {"replicated", kReplicated},
    {"first_stage", kFirstStage},
    {"last_stage", kLastStage},
    {"tower_column", kTowerColumn},
    {"tower_row", kTowerRow},
    {"tower_heads", kTowerHeads},
    {"tower_whole", kTowerWhole},
    {"tower_connector", kTowerConnector},
    {"tower_positions", kTowerPositions},
};

// Sizes that layouts read, and what each is unless the file says.
template <typename Sizes>
struct KnownSize {
  std::string_view name;
  std::string_view otherwise;
  int64_t min;
  int64_t max;
  int64_t Sizes::*member;
};
constexpr KnownSize<Architecture> kSizes[] = {
    {"layers", "num_hidden_layers", 1, kCountMax, &Architecture::layers},
    {"hidden", "hidden_size", 1, kExtentMax, &Architecture::hidden},
    {"heads", "num_attention_heads", 1, kExtentMax, &Architecture::heads},
    {"kv_heads", "num_key_value_heads or num_attention_heads", 1, kExtentMax,
     &Architecture::kv_heads},
    {"head_dim", "head_dim or hidden_size // num_attention_heads", 1,
     kExtentMax, &Architecture::head_dim},
    {"vocab", "vocab_size", 1, kExtentMax, &Architecture::vocab},
    {"experts", "0", 0, kCountMax, &Architecture::experts},
    {"expert_groups", "1", 0, kCountMax, &Architecture::expert_groups},
    {"mtp_layers", "0", 0, kCountMax, &Architecture::mtp_layers},
};
// Sizes of a part that a model has or lacks: each is above 0, or all are 0.
// Products of two and sums of products stay far below 2^63.
constexpr int64_t kPartMax = int64_t{1} << 20;
constexpr KnownSize<LatentAttention> kLatentSizes[] = {
    {"key_value_rank", "0", 0, kPartMax, &LatentAttention::key_value_rank},
    {"nope_dim", "0", 0, kPartMax, &LatentAttention::nope_dim},
    {"rope_dim", "0", 0, kPartMax, &LatentAttention::rope_dim},
    {"value_dim", "0", 0, kPartMax, &LatentAttention::value_dim},
};
constexpr KnownSize<LatentAttention> kQueryRank = {
    "query_rank", "0", 0, kPartMax, &LatentAttention::query_rank};
constexpr KnownSize<MambaSizes> kMambaSizes[] = {
    {"mamba_heads", "0", 0, kPartMax, &MambaSizes::heads},
    {"mamba_head_dim", "0", 0, kPartMax, &MambaSizes::head_dim},
    {"mamba_groups", "0", 0, kPartMax, &MambaSizes::groups},
    {"mamba_state", "0", 0, kPartMax, &MambaSizes::state},
};
constexpr KnownSize<DeltaNetSizes> kDeltaSizes[] = {
    {"delta_key_heads", "0", 0, kPartMax, &DeltaNetSizes::key_heads},
    {"delta_value_heads", "0", 0, kPartMax, &DeltaNetSizes::value_heads},
    {"delta_key_dim", "0", 0, kPartMax, &DeltaNetSizes::key_dim},
    {"delta_value_dim", "0", 0, kPartMax, &DeltaNetSizes::value_dim},
};
constexpr std::string_view kTied = "tied";
constexpr std::string_view kTiedKey = "tie_word_embeddings";
constexpr std::string_view kTiedOtherwise = "tie_word_embeddings or false";
// Of a vision tower, whose layers the model's do not count.
struct TowerSizes {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
};
constexpr KnownSize<TowerSizes> kTowerSizes[] = {
    {"layers", "num_hidden_layers", 1, kCountMax, &TowerSizes::layers},
    {"hidden", "hidden_size", 1, kExtentMax, &TowerSizes::hidden},
    {"heads", "num_attention_heads", 1, kExtentMax, &TowerSizes::heads},
};
constexpr std::string_view kOfText = "text_config.";

// Rows of these stand in one tensor of a framework, so that their other
// dimensions are equal; of the first two of a gated MLP the rows too.
struct JoinedRoles {
  std::array<ParamRole, 3> roles;
  size_t from_dim;  // the first that is equal
};
constexpr JoinedRoles kJoined[] = {
    {{kQuery, kKey, kValue}, 1},
    {{kQueryDown, kKeyValueDown, kKeyValueDown}, 1},
    {{kMlpGate, kMlpUp, kMlpUp}, 0},
    {{kExpertGate, kExpertUp, kExpertUp}, 0},
    {{kSharedExpertGate, kSharedExpertUp, kSharedExpertUp}, 0},
    {{kIndexKey, kIndexWeights, kIndexWeights}, 1},
    {{kDeltaQkv, kDeltaZ, kDeltaZ}, 1},
    {{kDeltaB, kDeltaA, kDeltaA}, 0},
};

// A role, and what a layer with it has too.
struct Companions {
  ParamRole role;
  ParamRole other;
  // Whether a layer with the other has the role.
  enum class Back { kNo, kWhereTheModelHasIt, kAlways } back;
};
constexpr auto kNotBack = Companions::Back::kNo;
constexpr auto kBackIfThere = Companions::Back::kWhereTheModelHasIt;
constexpr auto kBack = Companions::Back::kAlways;
constexpr Companions kCompanions[] = {
    {kQueryHeadsNorm, kQuery, kNotBack},
    {kKeyHeadsNorm, kKey, kNotBack},
    {kAttentionOutput, kQuery, kNotBack},
    {kQueryBias, kQuery, kNotBack},
    {kMlpInputNorm, kMlpNorm, kBackIfThere},
    {kStackedExpertGateUp, kStackedExpertDown, kBack},
    {kFusedExpertGateUp, kFusedExpertDown, kBack},
    {kQueryDown, kKeyValueDown, kBackIfThere},
    {kIndexKey, kIndexWeights, kBack},
    {kDeltaQkv, kDeltaZ, kBack},
    {kDeltaB, kDeltaA, kBack},
};

constexpr ParamRole kLatentRoles[] = {
    kLatentQuery,  kQueryDown,        kQueryDownNorm, kQueryUp,
    kKeyValueDown, kKeyValueDownNorm, kKeyValueUp};

// What stands in place of a role of attention by heads where attention is
// latent; "": the role is none of these.
std::string_view InPlaceOf(ParamRole role) {
  switch (role) {
    case kQuery:
      return "latent_query";
    case kKey:
    case kValue:
      return "key_value_down and key_value_up";
    case kQueryBias:
    case kKeyBias:
    case kValueBias:
    case kQueryHeadsNorm:
    case kKeyHeadsNorm:
      return "no such role";
    default:
      return "";
  }
}

bool IsOfPrediction(ParamRole role) {
  return role == kMtpEmbeddingNorm || role == kMtpHiddenNorm ||
         role == kMtpProjection || role == kMtpFinalNorm;
}

std::string_view WordOf(ParamRole role) {
  for (const auto& [word, known] : kRoles) {
    if (known == role) return word;
  }
  return "";
}

std::vector<std::string_view> WordsOf(
    absl::Span<const std::pair<std::string_view, ParamRole>> roles) {
  std::vector<std::string_view> words;
  for (const auto& [word, role] : roles) words.push_back(word);
  return words;
}

bool IsOfNumber(char c) {
  return absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '{' ||
         c == '}';
}

// The pattern of a name, with one mark for each number and what digits stand
// beside it: equal names have the same.
std::string WithoutNumbers(std::string_view pattern) {
  std::string without;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (!IsOfNumber(pattern[i])) {
      without += pattern[i];
    } else if (i == 0 || !IsOfNumber(pattern[i - 1])) {
      without += '#';
    }
  }
  return without;
}

// Whether the numbers of layer and expert could be told apart in two ways.
bool HasNumbersSideBySide(std::string_view pattern) {
  const size_t first = pattern.find('{');
  const size_t second = pattern.rfind('{');
  return first != second &&
         std::all_of(pattern.begin() + static_cast<ptrdiff_t>(first),
                     pattern.begin() + static_cast<ptrdiff_t>(second),
                     IsOfNumber);
}

std::string Hint(std::string_view word,
                 const std::vector<std::string_view>& words) {
  const std::string nearest = NearestWord(word, words);
  return nearest.empty() ? absl::StrFormat("; wanted %s", Alternatives(words))
                         : absl::StrFormat("; did you mean \"%s\"?", nearest);
}

template <typename T>
struct TraitWord {
  std::string_view word;
  T value;
};
constexpr TraitWord<VllmTraits::EveryStage> kEveryStageWords[] = {
    {"nothing", VllmTraits::EveryStage::kNothing},
    {"embedding", VllmTraits::EveryStage::kEmbedding},
    {"vocabulary", VllmTraits::EveryStage::kVocabulary},
    {"ends", VllmTraits::EveryStage::kEnds}};
constexpr TraitWord<SglangTraits::Head> kHeadWords[] = {
    {"last_stage", SglangTraits::Head::kLastStage},
    {"every_stage", SglangTraits::Head::kEveryStage},
    {"own_tensor", SglangTraits::Head::kOwnTensor}};
constexpr TraitWord<SglangTraits::SharedFusion> kSharedFusionWords[] = {
    {"never", SglangTraits::SharedFusion::kNever},
    {"one_expert", SglangTraits::SharedFusion::kOneExpert},
    {"always", SglangTraits::SharedFusion::kAlways}};
constexpr TraitWord<SglangTraits::Embedding> kEmbeddingWords[] = {
    {"first_stage", SglangTraits::Embedding::kFirstStage},
    {"every_stage", SglangTraits::Embedding::kEveryStage},
    {"whole", SglangTraits::Embedding::kWhole},
    {"whole_beside_dp_attention",
     SglangTraits::Embedding::kWholeBesideDpAttention}};

bool HasDType(ConfigReader& config) {
  return config.Has("dtype") || config.Has("torch_dtype");
}

// Reports a dtype that the tower alone has. Where the model has one, this is
// the tower's too: frameworks do not heed the tower's own.
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

// Reads the file into the model, in the order of its parts: each uses those
// before. The rules of a tower are read by a reader of their own.
class RulesReader {
 public:
  // `config` is what the whole file says, of which the language model's keys
  // are a part where there is a tower.
  RulesReader(const ValueReader& values, const JsonValue& root,
              bool is_compiled_in, ConfigReader& config, ConfigReader& whole,
              Model& model)
      : values_(values),
        reader_(values, root, ""),
        config_(config),
        whole_(whole),
        scope_({.config = config.members(), .sizes = {}}),
        model_(model),
        is_compiled_in_(is_compiled_in) {
    if (&config != &whole) scope_.beside = &whole.members();
  }

  void Read();

 private:
  // Of the tower of the model that `text` reads.
  RulesReader(const JsonValue& tower, ConfigReader& vision,
              const RulesReader& text)
      : values_(text.values_),
        reader_(text.values_, tower, std::string(kTower)),
        config_(vision),
        whole_(vision),
        scope_({.config = vision.members(), .sizes = {}}),
        model_(text.model_),
        is_compiled_in_(text.is_compiled_in_),
        is_tower_(true),
        dtype_(text.dtype_) {
    for (const auto& [name, value] : text.scope_.sizes) {
      scope_.sizes.emplace_back(absl::StrFormat("text_%s", name), value);
    }
  }

  struct Rule {
    size_t param;  // of model_.params
    const JsonValue* value;
  };

  void ReadModelType();
  // What is known of keys of the config beside sizes: defaults, the only value
  // of some, and pairs that say one thing.
  void ReadKeys();
  void ReadSizes();
  // Whether the head is the embedding. Where there is a tower, frameworks take
  // the key beside the language model's.
  bool ReadTied(absl::Span<const JsonMember> sizes, const Place& place);
  // Sizes of the file that no layout reads, behind those that one does.
  void ReadOwnSizes(absl::Span<const JsonMember> members);
  // The part of the model that reads images, before the language model.
  void ReadTower();
  void ReadAsTower();
  // The value of a size that layouts read, which all others may name.
  template <typename Sizes>
  int64_t ReadKnownSize(const KnownSize<Sizes>& size,
                        absl::Span<const JsonMember> members,
                        const Place& place);
  // Of a part; nullopt: the model lacks it.
  template <typename Sizes, size_t N>
  std::optional<Sizes> ReadPart(const KnownSize<Sizes> (&sizes)[N],
                                absl::Span<const JsonMember> members,
                                const Place& place);
  // Configs of which the file says that frameworks would differ.
  void ReadRefusals();
  void ReadLayerSets();
  std::vector<int32_t> LayerSet(const JsonValue& value,
                                const std::string& path);
  // A word of each layer: of a list, or the letters of one string.
  std::vector<std::string> WordsOfLayers(std::string_view key);
  // Reports a list of the config that has not `word` for these layers alone.
  void CheckLayersAlike(const JsonMember& list, const std::string& path,
                        const std::vector<int32_t>& layers,
                        const std::string& by);
  // The same of a list of layers' numbers.
  void CheckNumbersAlike(const JsonMember& list,
                         const std::vector<int32_t>& layers,
                         const std::string& by);
  void ReadParams();
  // What is known of the layers that predict more tokens.
  void ReadMtpLayers();
  void ReadParam(const JsonValue& value, const std::string& path);
  // Reports a role of a kind of layer that the model's sizes do not have.
  void CheckKindOf(ParamRole role, const JsonValue& value,
                   const std::string& path);
  void ReadTraits();
  void ReadVllm(const JsonValue& value);
  void ReadSglang(const JsonValue& value);

  void CheckNoNameTwice();
  void CheckRolesOfLayers();
  void CheckCompanions();
  void CheckStackedExperts();
  void CheckJoined();
  // Engines join the three projections of a tower's attention.
  void CheckTowerProjections();
  void CheckFusion(const Fusion& fusion, const JsonValue& value,
                   const std::string& path);

  // The members of an object, which the file may lack.
  absl::Span<const JsonMember> Members(std::string_view key) {
    const JsonValue* value = reader_.Find(key);
    if (value == nullptr || !values_.IsObject(*value, key)) return {};
    return *value->AsObject();
  }
  // Reports the key of the config that gives an expression no value, or one out
  // of range, if the file is compiled in: else the file may be wrong. Returns
  // whether the mistake is reported, be it long before.
  bool ReportConfig(std::string_view expression, const absl::Status& status,
                    IntegerRange range);

  // The value of an expression in the range; nullopt after a report.
  std::optional<int64_t> Number(const JsonValue& value, const std::string& path,
                                IntegerRange range);
  Renames ReadNames(ObjectReader& traits);
  absl::Span<const Fusion> ReadFused(ObjectReader& traits);
  template <typename T, size_t N>
  void ReadWord(ObjectReader& traits, std::string_view key,
                const TraitWord<T> (&words)[N], T& target);
  void ReadFlag(ObjectReader& traits, std::string_view key, bool& target);
  std::string_view Keep(std::string text) {
    own_->texts.push_back({std::move(text)});
    return own_->texts.back().front();
  }
  Architecture& architecture() { return model_.architecture; }
  int64_t layers() const {
    return is_tower_ ? tower_.layers : model_.architecture.layers;
  }
  int64_t all_layers() const {
    return is_tower_ ? tower_.layers : model_.architecture.all_layers();
  }
  Diagnostics& diagnostics() { return values_.diagnostics(); }

  const ValueReader& values_;
  ObjectReader reader_;
  ConfigReader& config_;
  ConfigReader& whole_;
  ExpressionScope scope_;
  Model& model_;
  const bool is_compiled_in_;
  const bool is_tower_ = false;
  TowerSizes tower_;                   // of a tower
  DType dtype_ = DType::kUnspecified;  // of the config
  bool has_sizes_ = false;             // and layers, all of them
  int64_t mtp_layers_ = 0;             // also if the job leaves them out
  std::set<std::string> reported_;     // keys of the config
  std::shared_ptr<OwnFamily> own_ = std::make_shared<OwnFamily>();
  std::map<std::string, std::vector<int32_t>, std::less<>> layer_sets_;
  std::vector<Rule> rules_;         // of each param
  std::vector<std::string> names_;  // in the file, also of absent params
  std::string head_;                // the name of a tied one
};

void RulesReader::Read() {
  const int64_t errors_before = diagnostics().error_count();
  const auto ok = [&] { return diagnostics().error_count() == errors_before; };
  if (!is_compiled_in_) model_.place = reader_.place();
  if (&config_ != &whole_) model_.quant_method = config_.QuantMethod();
  dtype_ = config_.WeightDType();
  model_.own_family = std::shared_ptr<const Family>(own_, &own_->family);
  model_.architecture.family = &own_->family;
  ReadModelType();
  ReadKeys();
  ReadSizes();
  ReadLayerSets();
  ReadTower();
  ReadRefusals();
  has_sizes_ = ok();
  ReadParams();
  Located<std::vector<std::string>> globs;
  reader_.Read("stored_beside", {}, globs);
  model_.stored_beside.insert(model_.stored_beside.end(), globs.value.begin(),
                              globs.value.end());
  ReadMtpLayers();
  if (ok()) CheckNoNameTwice();
  if (ok()) CheckRolesOfLayers();
  if (ok()) {
    CheckTowerProjections();
    CheckJoined();
    CheckCompanions();
    CheckStackedExperts();
    ReadTraits();
  }
  for (const std::string_view key :
       {"model_type", "like", "defaults", "needed", "only", "alike", "refuse",
        "sizes", "layers", "params", "stored_beside", "tower", "vllm", "sglang",
        "megatron", "transformers"}) {
    reader_.Find(key);
  }
  reader_.RejectOtherKeys();
}

void RulesReader::ReadModelType() {
  const JsonValue* value = reader_.Require("model_type", "a string");
  if (value == nullptr) return;
  const std::string* type = values_.String(*value, "model_type");
  if (type == nullptr) return;
  own_->model_type = *type;
  own_->family.model_type = own_->model_type;
  own_->family.of_file = !is_compiled_in_;
  const std::string found = whole_.String("model_type");
  if (found.empty() || found == *type) return;
  values_.Error(*value, absl::StrFormat("model_type %s, but config.json is of "
                                        "model_type %s; wanted the same",
                                        Quoted(*type), Quoted(found)));
}

void RulesReader::ReadKeys() {
  for (const JsonMember& member : Members("defaults")) {
    if (config_.IsThere(member.key)) continue;
    const std::optional<int64_t> number =
        Number(member.value, reader_.PathOf("defaults." + member.key),
               {.min = 0, .max = kExtentMax});
    if (number.has_value()) scope_.defaults.emplace_back(member.key, *number);
  }
  Located<std::vector<std::string>> needed;
  reader_.Read("needed", {}, needed);
  for (const std::string& key : needed.value) {
    if (!config_.IsThere(key)) config_.NumberOrNone(key);  // which reports it
  }
  for (const JsonMember& member : Members("only")) {
    if (!config_.IsThere(member.key)) continue;
    // null is no value; a class that takes one has no flag then.
    const JsonValue* found = scope_.Find(member.key);
    const std::string text = found == nullptr ? "null" : found->Text();
    const std::string only = member.value.Text();
    if (text == only || (found == nullptr && only == "false")) continue;
    config_.Error(member.key,
                  absl::StrFormat("%s %s is not supported; wanted %s",
                                  member.key, text, only));
  }
  for (const JsonMember& member : Members("alike")) {
    const std::string* other =
        values_.String(member.value, reader_.PathOf("alike." + member.key),
                       "a key of config.json");
    if (other == nullptr || other->starts_with(kOfText)) continue;
    config_.CheckAlike(member.key, *other);
  }
}

bool RulesReader::ReadTied(absl::Span<const JsonMember> sizes,
                           const Place& place) {
  if (&config_ == &whole_) {
    return ReadKnownSize<Architecture>({kTied, kTiedOtherwise, 0, 1, nullptr},
                                       sizes, place) != 0;
  }
  const JsonValue* otherwise = nullptr;
  for (const JsonMember& member : Members("defaults")) {
    if (member.key == kTiedKey) otherwise = &member.value;
  }
  if (otherwise == nullptr && !whole_.Has(kTiedKey)) {
    whole_.Error(kTiedKey,
                 absl::StrFormat("missing key \"%s\": classes of this model "
                                 "differ in what that means; wanted true or "
                                 "false",
                                 kTiedKey));
    return false;
  }
  const bool tied = whole_.FlagOr(
      kTiedKey, otherwise != nullptr && otherwise->AsBool() != nullptr &&
                    *otherwise->AsBool());
  scope_.sizes.emplace_back(kTied, tied);
  const absl::Span<const JsonMember> alike = Members("alike");
  const bool is_checked =
      std::any_of(alike.begin(), alike.end(),
                  [](const JsonMember& pair) { return pair.key == kTiedKey; });
  if (is_checked && config_.FlagOr(kTiedKey, tied) != tied) {
    config_.Error(
        kTiedKey,
        absl::StrFormat("%s of text_config is %s, and the one beside it %s%s: "
                        "frameworks differ in which they take; wanted both "
                        "alike",
                        kTiedKey, tied ? "false" : "true",
                        tied ? "true" : "false",
                        whole_.Has(kTiedKey) ? "" : " by default"));
  }
  return tied;
}

bool RulesReader::ReportConfig(std::string_view expression,
                               const absl::Status& status, IntegerRange range) {
  if (absl::IsUnavailable(status)) return true;
  const std::string key(status.ok()
                            ? expression.substr(0, expression.find(" or "))
                            : KeyOf(status));
  if (!is_compiled_in_ || key.empty()) return false;
  if (status.ok() && scope_.Find(key) == nullptr) return false;
  // Several sizes may be made of it.
  if (!reported_.insert(key).second) return true;
  const JsonValue* value = scope_.Find(key);
  if (value == nullptr) {
    config_.Size(key);  // which reports it
    return true;
  }
  config_.Error(key, absl::StrFormat("%s is %s; wanted an integer from %d to "
                                     "%d",
                                     key, value->Text(), range.min, range.max));
  return true;
}

std::optional<int64_t> RulesReader::Number(const JsonValue& value,
                                           const std::string& path,
                                           IntegerRange range) {
  const auto wanted = [&] {
    return absl::StrFormat("wanted %d to %d", range.min, range.max);
  };
  std::optional<int64_t> number;
  std::string shown = value.Text();
  if (const int64_t* integer = value.AsInteger()) {
    number = *integer;
  } else if (const bool* flag = value.AsBool()) {
    number = *flag ? 1 : 0;
  } else if (const std::string* text = value.AsString()) {
    const absl::StatusOr<int64_t> result = Evaluate(*text, scope_);
    if (!result.ok()) {
      if (ReportConfig(*text, result.status(), range)) return std::nullopt;
      values_.Error(value, absl::StrFormat("%s is %s: %s", path, shown,
                                           result.status().message()));
      return std::nullopt;
    }
    number = *result;
    absl::StrAppend(&shown, ", ", *number, " for this config.json");
  } else {
    values_.Wrong(value, path, "an integer or an expression in quotes");
    return std::nullopt;
  }
  if (*number >= range.min && *number <= range.max) return number;
  if (const std::string* text = value.AsString();
      text != nullptr && ReportConfig(*text, absl::OkStatus(), range)) {
    return std::nullopt;
  }
  values_.Error(value, absl::StrFormat("%s is %s; %s", path, shown, wanted()));
  return std::nullopt;
}

template <typename Sizes>
int64_t RulesReader::ReadKnownSize(const KnownSize<Sizes>& size,
                                   absl::Span<const JsonMember> members,
                                   const Place& place) {
  const IntegerRange range = {.min = size.min, .max = size.max};
  const auto given =
      std::find_if(members.begin(), members.end(),
                   [&](const JsonMember& m) { return m.key == size.name; });
  std::optional<int64_t> value;
  if (given != members.end()) {
    value =
        Number(given->value,
               reader_.PathOf(absl::StrFormat("sizes.%s", size.name)), range);
  } else {
    const absl::StatusOr<int64_t> number = Evaluate(size.otherwise, scope_);
    const bool fits =
        number.ok() && *number >= range.min && *number <= range.max;
    if (fits) {
      value = *number;
    } else if (!ReportConfig(size.otherwise, number.status(), range)) {
      diagnostics().Error(
          place,
          absl::StrFormat(
              "missing key \"%s\" in sizes, and its default \"%s\" is no "
              "size: %s; wanted an expression over config.json's keys",
              size.name, size.otherwise,
              number.ok() ? absl::StrFormat("%d is not %d to %d", *number,
                                            range.min, range.max)
                          : std::string(number.status().message())));
    }
  }
  scope_.sizes.emplace_back(size.name, value);
  return value.value_or(size.max == 1 ? 0 : 1);
}

template <typename Sizes, size_t N>
std::optional<Sizes> RulesReader::ReadPart(const KnownSize<Sizes> (&sizes)[N],
                                           absl::Span<const JsonMember> members,
                                           const Place& place) {
  const int64_t errors_before = diagnostics().error_count();
  Sizes part;
  for (const KnownSize<Sizes>& size : sizes) {
    part.*size.member = ReadKnownSize(size, members, place);
  }
  if (diagnostics().error_count() != errors_before) return part;
  const auto has = [&](const auto& size) { return part.*size.member > 0; };
  const auto* const given =
      std::find_if(std::begin(sizes), std::end(sizes), has);
  if (given == std::end(sizes)) return std::nullopt;
  const auto* const lacks =
      std::find_if_not(std::begin(sizes), std::end(sizes), has);
  if (lacks != std::end(sizes)) {
    diagnostics().Error(
        place, absl::StrFormat("sizes.%s is %d and sizes.%s is 0; wanted both "
                               "above 0, or neither",
                               given->name, part.*given->member, lacks->name));
  }
  return part;
}

void RulesReader::ReadSizes() {
  const JsonValue* value = reader_.Find("sizes");
  const absl::Span<const JsonMember> members = Members("sizes");
  const Place place =
      value == nullptr ? reader_.place() : values_.PlaceOf(*value);
  for (const KnownSize<Architecture>& size : kSizes) {
    architecture().*size.member = ReadKnownSize(size, members, place);
  }
  mtp_layers_ = architecture().mtp_layers;
  if (!model_.mtp) architecture().mtp_layers = 0;
  architecture().tied = ReadTied(members, place);
  architecture().index_rope_interleaved =
      ReadKnownSize<Architecture>(
          {"index_rope_interleaved", "0", 0, 1, nullptr}, members, place) != 0;
  architecture().output_gate =
      ReadKnownSize<Architecture>({"output_gate", "0", 0, 1, nullptr}, members,
                                  place) != 0;
  architecture().delta = ReadPart(kDeltaSizes, members, place);
  architecture().latent = ReadPart(kLatentSizes, members, place);
  const int64_t query_rank = ReadKnownSize(kQueryRank, members, place);
  if (architecture().latent.has_value()) {
    architecture().latent->query_rank = query_rank;
  }
  architecture().mamba = ReadPart(kMambaSizes, members, place);
  if (architecture().mamba.has_value()) {
    architecture().mamba->sglang_groups = architecture().mamba->groups;
  }
  ReadOwnSizes(members);
  const auto check_divides = [&](std::string_view name,
                                 std::string_view of_name) {
    const absl::StatusOr<int64_t> size = Evaluate(name, scope_);
    const absl::StatusOr<int64_t> of = Evaluate(of_name, scope_);
    if (!size.ok() || !of.ok() || *size == 0 || *of % *size == 0) return;
    constexpr std::string_view kKey = "num_key_value_heads";
    if (is_compiled_in_ && name == "kv_heads" && config_.Has(kKey)) {
      config_.Error(kKey, absl::StrFormat("%s %d does not divide "
                                          "num_attention_heads %d",
                                          kKey, *size, *of));
      return;
    }
    diagnostics().Error(place,
                        absl::StrFormat("sizes.%s %d does not divide sizes.%s "
                                        "%d",
                                        name, *size, of_name, *of));
  };
  check_divides("mamba_groups", "mamba_heads");
  check_divides("delta_key_heads", "delta_value_heads");
  if (architecture().latent.has_value()) {
    // Which have no meaning there.
    architecture().kv_heads = 0;
    architecture().head_dim = 0;
  } else {
    check_divides("kv_heads", "heads");
  }
}

void RulesReader::ReadOwnSizes(absl::Span<const JsonMember> members) {
  const size_t of_layouts = scope_.sizes.size();
  for (const JsonMember& member : members) {
    const auto end = scope_.sizes.begin() + static_cast<ptrdiff_t>(of_layouts);
    if (std::any_of(scope_.sizes.begin(), end, [&](const auto& size) {
          return size.first == member.key;
        })) {
      continue;
    }
    scope_.sizes.emplace_back(
        member.key, Number(member.value, reader_.PathOf("sizes." + member.key),
                           {.min = 0, .max = kExtentMax}));
  }
}

void RulesReader::ReadTower() {
  const JsonValue* value = reader_.Find(kTower);
  if (value == nullptr || !values_.IsObject(*value, kTower)) return;
  ObjectReader reader(values_, *value, std::string(kTower));
  // Of a tower without params nothing is known but that checkpoints have it.
  const JsonValue* params = reader.Find("params");
  own_->family.tower = params != nullptr;
  bool always_cut = false;
  ReadFlag(reader, "always_cut", always_cut);
  own_->family.whole_tower = !always_cut;
  if (model_.vision && params != nullptr) {
    ConfigReader vision = whole_.Vision();
    CheckTowerDType(vision, config_);
    RulesReader tower(*value, vision, *this);
    tower.ReadAsTower();
    rules_ = std::move(tower.rules_);
    names_ = std::move(tower.names_);
    for (const KnownSize<TowerSizes>& size : kTowerSizes) {
      scope_.sizes.emplace_back(absl::StrFormat("tower_%s", size.name),
                                tower.tower_.*size.member);
    }
    return;
  }
  Located<std::vector<std::string>> globs;
  reader.Read("stored_beside", {}, globs);
  model_.stored_beside = std::move(globs.value);
  if (params == nullptr || params->AsArray() == nullptr) return;
  for (const JsonValue& param : *params->AsArray()) {
    if (param.AsObject() == nullptr) continue;
    const JsonValue* name = ObjectReader(values_, param, "").Peek("name");
    if (name != nullptr && name->AsString() != nullptr) {
      names_.push_back(*name->AsString());
    }
  }
}

void RulesReader::ReadAsTower() {
  const int64_t errors_before = diagnostics().error_count();
  ReadKeys();
  const absl::Span<const JsonMember> members = Members("sizes");
  for (const KnownSize<TowerSizes>& size : kTowerSizes) {
    tower_.*size.member = ReadKnownSize(size, members, reader_.place());
  }
  architecture().tower_heads = tower_.heads;
  if (tower_.hidden % tower_.heads != 0) {
    const auto given =
        std::find_if(members.begin(), members.end(),
                     [](const JsonMember& m) { return m.key == "heads"; });
    std::string_view key = "num_attention_heads";
    if (given != members.end() && given->value.AsString() != nullptr) {
      key = *given->value.AsString();
      key = key.substr(0, key.find(" or "));
    }
    config_.Error(key, absl::StrFormat("%s %d does not divide hidden_size %d",
                                       key, tower_.heads, tower_.hidden));
  }
  ReadOwnSizes(members);
  ReadLayerSets();
  ReadRefusals();
  has_sizes_ = diagnostics().error_count() == errors_before;
  ReadParams();
  for (const std::string_view key :
       {"always_cut", "flat", "defaults", "needed", "only", "alike", "refuse",
        "sizes", "layers", "params", "stored_beside"}) {
    reader_.Find(key);
  }
  reader_.RejectOtherKeys();
}

void RulesReader::CheckKindOf(ParamRole role, const JsonValue& value,
                              const std::string& path) {
  const auto report = [&](std::string_view found, std::string_view wanted) {
    values_.Error(value, absl::StrFormat("%s is %s, and %s; wanted %s", path,
                                         WordOf(role), found, wanted));
  };
  const std::optional<LatentAttention>& latent = architecture().latent;
  if (IsTower(role) != is_tower_) {
    return report(
        is_tower_ ? "a tower has roles of its own"
                  : "only the params of \"tower\" have such roles",
        is_tower_ ? "a role that begins with \"tower_\"" : "another role");
  }
  if (WordOf(role).starts_with("mamba_") && !architecture().mamba.has_value()) {
    return report("the model has no Mamba mixers", "\"mamba_heads\" in sizes");
  }
  if (WordOf(role).starts_with("delta_") && !architecture().delta.has_value()) {
    return report("the model has no delta nets",
                  "\"delta_key_heads\" in sizes");
  }
  const bool is_latent =
      std::find(std::begin(kLatentRoles), std::end(kLatentRoles), role) !=
      std::end(kLatentRoles);
  if (is_latent && !latent.has_value()) {
    return report("the model has no latent attention",
                  "\"key_value_rank\" in sizes");
  }
  const std::string_view instead = InPlaceOf(role);
  if (!instead.empty() && latent.has_value()) {
    return report("sizes.key_value_rank makes attention latent",
                  absl::StrFormat("%s, or no such size", instead));
  }
  if (role == kLatentQuery && latent->query_rank > 0) {
    return report(absl::StrFormat("sizes.query_rank is %d", latent->query_rank),
                  "query_down and query_up, or no such size");
  }
  if ((role == kQueryDown || role == kQueryUp) && latent->query_rank == 0) {
    return report("sizes.query_rank is 0",
                  "latent_query, or the rank of queries");
  }
}

void RulesReader::ReadLayerSets() {
  const absl::Span<const JsonMember> sizes = Members("sizes");
  if (std::any_of(sizes.begin(), sizes.end(), [](const JsonMember& size) {
        return size.key == "mtp_layers";
      })) {
    layer_sets_["mtp"] =
        Consecutive(static_cast<int32_t>(architecture().layers),
                    architecture().mtp_layers)
            .numbers;
  }
  for (const JsonMember& member : Members("layers")) {
    const std::string path = reader_.PathOf("layers." + member.key);
    if (!values_.IsObject(member.value, path)) continue;
    const std::vector<int32_t>& layers = layer_sets_[member.key] =
        LayerSet(member.value, path);
    scope_.sizes.emplace_back(member.key, static_cast<int64_t>(layers.size()));
  }
}

void RulesReader::ReadRefusals() {
  for (const JsonMember& member : Members("refuse")) {
    const std::string path = reader_.PathOf("refuse." + member.key);
    if (!values_.IsObject(member.value, path)) continue;
    ObjectReader reader(values_, member.value, path);
    const JsonValue* condition = reader.Require("if", "an expression");
    const JsonValue* because = reader.Require("because", "a string");
    reader.RejectOtherKeys();
    if (condition == nullptr || because == nullptr) continue;
    const std::string* text =
        values_.String(*because, reader.PathOf("because"));
    const bool refused =
        Number(*condition, reader.PathOf("if"), {}).value_or(0) != 0;
    if (!refused || text == nullptr) continue;
    const JsonValue* found = scope_.Find(member.key);
    config_.Error(
        member.key,
        absl::StrFormat("%s is %s, %s", member.key,
                        found == nullptr ? "missing" : found->Text(), *text));
  }
}

std::vector<std::string> RulesReader::WordsOfLayers(std::string_view key) {
  const std::string* letters = scope_.Find(key)->AsString();
  if (letters == nullptr) return config_.StringsOr(key, {});
  std::vector<std::string> words;
  for (const char letter : *letters) words.emplace_back(1, letter);
  return words;
}

std::vector<int32_t> RulesReader::LayerSet(const JsonValue& value,
                                           const std::string& path) {
  ObjectReader reader(values_, value, path);
  const int64_t layers = this->layers();
  const int64_t all_layers = this->all_layers();
  const auto bound = [&](std::string_view key, int64_t otherwise) {
    const JsonValue* bound = reader.Find(key);
    if (bound == nullptr) return otherwise;
    return Number(*bound, reader.PathOf(key), {.min = 0, .max = kCountMax})
        .value_or(otherwise);
  };
  const int64_t from = bound("from", 0);
  const int64_t to = bound("to", all_layers);
  int64_t every = bound("every", 1);
  const bool has_every = reader.Find("every") != nullptr;
  if (every == 0) {
    values_.Wrong(*reader.Find("every"), reader.PathOf("every"), "1 or more");
  }
  std::set<int64_t> left_out;
  if (const JsonValue* except = reader.Find("except")) {
    const std::string* key = values_.String(*except, reader.PathOf("except"),
                                            "a key of config.json");
    if (key != nullptr) {
      std::string_view name = *key;
      const bool may_lack = name.ends_with(kOrNone);
      if (may_lack) name.remove_suffix(kOrNone.size());
      if (scope_.Find(name) == nullptr && !may_lack) {
        values_.Error(
            *except,
            absl::StrFormat("%s is %s: config.json has no such key; wanted "
                            "one, or \"%s or []\"",
                            reader.PathOf("except"), Quoted(*key), name));
      }
      const std::vector<int64_t> numbers = config_.IntegersOr(name, {});
      left_out = {numbers.begin(), numbers.end()};
    }
  }
  const std::vector<int32_t>* besides = nullptr;
  if (const JsonValue* other = reader.Find("besides")) {
    const std::string* name =
        values_.String(*other, reader.PathOf("besides"), "a set of layers");
    if (name != nullptr) {
      const auto found = layer_sets_.find(*name);
      if (found == layer_sets_.end()) {
        std::vector<std::string_view> known;
        for (const auto& [set, numbers] : layer_sets_) known.push_back(set);
        values_.Error(*other,
                      absl::StrFormat("%s is %s, which is no set of layers "
                                      "before it%s",
                                      reader.PathOf("besides"), Quoted(*name),
                                      known.empty() ? "" : Hint(*name, known)));
      } else {
        besides = &found->second;
      }
    }
  }
  std::vector<std::string> types;
  std::string type;
  if (const JsonValue* where = reader.Find("where")) {
    const std::string where_path = reader.PathOf("where");
    if (values_.IsObject(*where, where_path)) {
      const JsonValue::Object& pair = *where->AsObject();
      if (pair.size() != 1 || pair[0].value.AsString() == nullptr) {
        values_.Wrong(*where, where_path,
                      "one key of config.json and the word of its list");
      } else if (scope_.Find(pair[0].key) == nullptr && has_every) {
        // The list is made of it.
      } else if (scope_.Find(pair[0].key) == nullptr) {
        values_.Error(*where, absl::StrFormat("%s: %s", where_path,
                                              scope_.NoKey(pair[0].key)));
      } else {
        type = *pair[0].value.AsString();
        types = WordsOfLayers(pair[0].key);
        every = 1;
        if (scope_.Find(pair[0].key)->AsString() != nullptr &&
            type.size() != 1) {
          values_.Error(
              *where,
              absl::StrFormat("%s: config.json's %s is a string, and %s is "
                              "no letter; wanted one",
                              where_path, Quoted(pair[0].key), Quoted(type)));
          types.clear();
        } else if (Evaluate("layers", scope_).ok() &&
                   static_cast<int64_t>(types.size()) != layers) {
          values_.Error(*where,
                        absl::StrFormat("%s: config.json's %s has %d words; "
                                        "wanted %d, one per layer",
                                        where_path, Quoted(pair[0].key),
                                        types.size(), layers));
          types.clear();
        }
      }
    }
  }
  const JsonValue* alike = reader.Find("alike");
  // The key of the config that says which layers these are.
  std::string by = "the count of its words";
  for (const std::string_view key : {"to", "every"}) {
    const JsonValue* bound = reader.Find(key);
    if (bound == nullptr || bound->AsString() == nullptr) continue;
    const std::string& text = *bound->AsString();
    const std::string first = text.substr(0, text.find(" or "));
    if (Evaluate(first, scope_).ok()) by = first;
  }
  reader.RejectOtherKeys();
  std::vector<int32_t> numbers;
  // Parts of a tower are counted by a number of their own.
  const int64_t end = is_tower_ ? to : std::min(to, all_layers);
  for (int64_t layer = from; layer < end; ++layer) {
    if (every > 1 && (layer + 1) % every != 0) continue;
    if (left_out.contains(layer)) continue;
    if (!types.empty() && (layer >= layers || types[layer] != type)) continue;
    const auto number = static_cast<int32_t>(layer);
    if (besides != nullptr &&
        std::binary_search(besides->begin(), besides->end(), number)) {
      continue;
    }
    numbers.push_back(number);
  }
  const std::string alike_path = reader.PathOf("alike");
  if (alike != nullptr && values_.IsObject(*alike, alike_path)) {
    for (const JsonMember& list : *alike->AsObject()) {
      CheckLayersAlike(list, alike_path, numbers, by);
    }
  }
  return numbers;
}

void RulesReader::CheckLayersAlike(const JsonMember& list,
                                   const std::string& path,
                                   const std::vector<int32_t>& layers,
                                   const std::string& by) {
  if (list.value.AsBool() != nullptr)
    return CheckNumbersAlike(list, layers, by);
  const std::string* word =
      values_.String(list.value, absl::StrCat(path, ".", list.key));
  const int64_t count = this->layers();
  if (word == nullptr || scope_.Find(list.key) == nullptr) return;
  if (!Evaluate("layers", scope_).ok()) return;
  const std::vector<std::string> words = WordsOfLayers(list.key);
  const auto report = [&](const std::string& mistake) {
    // Sets that leave each other out make one mistake twice.
    if (reported_.insert(list.key).second) config_.Error(list.key, mistake);
  };
  if (static_cast<int64_t>(words.size()) != count) {
    return report(absl::StrFormat("%s has %d words; wanted %d, one per layer",
                                  list.key, words.size(), count));
  }
  for (int32_t layer = 0; layer < count; ++layer) {
    const bool has = std::binary_search(layers.begin(), layers.end(), layer);
    if (has == (words[layer] == *word)) continue;
    return report(absl::StrFormat(
        "%s of layer %d is %s, and by %s it is %s%s: frameworks differ in "
        "which they read; wanted both alike",
        list.key, layer, Quoted(words[layer]), by, has ? "" : "not ",
        Quoted(*word)));
  }
}

void RulesReader::CheckNumbersAlike(const JsonMember& list,
                                    const std::vector<int32_t>& layers,
                                    const std::string& by) {
  if (scope_.Find(list.key) == nullptr) return;
  std::vector<int64_t> listed = config_.IntegersOr(list.key, {});
  std::sort(listed.begin(), listed.end());
  if (std::equal(listed.begin(), listed.end(), layers.begin(), layers.end())) {
    return;
  }
  config_.Error(list.key,
                absl::StrFormat("%s names other layers than %s does: "
                                "frameworks differ in which they read; wanted "
                                "both alike",
                                list.key, by));
}

void RulesReader::ReadParams() {
  const JsonValue* value = reader_.Require("params", "an array of parameters");
  if (value == nullptr) return;
  const JsonValue::Array* array =
      values_.Array(*value, "params", "an array of parameters");
  if (array == nullptr) return;
  if (!is_compiled_in_) model_.place = values_.PlaceOf(*value);
  for (size_t i = 0; i < array->size(); ++i) {
    ReadParam((*array)[i], reader_.PathOf(absl::StrFormat("params[%d]", i)));
  }
  if (architecture().tied && !head_.empty()) {
    const auto embedding = std::find_if(
        model_.params.begin(), model_.params.end(),
        [](const Param& param) { return param.role == kEmbedding; });
    if (embedding == model_.params.end()) {
      values_.Error(*value,
                    "params have no embedding, which the tied head is; wanted "
                    "one of role embedding");
      return;
    }
    model_.skips.push_back(
        {.name = head_,
         .reason = SkipReason::kTied,
         .detail = absl::StrFormat("tie_word_embeddings: the head is %s",
                                   embedding->name)});
  }
  if (diagnostics().error_count() == 0 && model_.params.empty()) {
    values_.Error(*value,
                  "params give this config.json no parameter; wanted at least "
                  "one");
  }
}

void RulesReader::ReadParam(const JsonValue& value, const std::string& path) {
  if (!values_.IsObject(value, path)) return;
  const int64_t errors_before = diagnostics().error_count();
  ObjectReader reader(values_, value, path);
  const JsonValue* name = reader.Require("name", "a string");
  const JsonValue* shape = reader.Require("shape", "an array");
  const JsonValue* role = reader.Require("role", "a role");
  const JsonValue* layers = reader.Find("layers");
  const JsonValue* condition = reader.Find("if");
  Located<DType> dtype = {.value = dtype_};
  ReadMember(reader, {.name = "dtype"}, dtype);
  Located<bool> rotary_pairs;
  reader.Read("rotary_pairs", {}, rotary_pairs);
  reader.RejectOtherKeys();
  if (name == nullptr || shape == nullptr || role == nullptr) return;

  Param param;
  param.dtype = dtype.value;
  const std::string* name_text = values_.String(*name, reader.PathOf("name"));
  const std::string* role_text = values_.String(*role, reader.PathOf("role"));
  const JsonValue::Array* extents =
      values_.Array(*shape, reader.PathOf("shape"), "an array of sizes");
  if (name_text == nullptr || role_text == nullptr || extents == nullptr)
    return;
  names_.push_back(*name_text);

  const auto* const known =
      std::find_if(std::begin(kRoles), std::end(kRoles),
                   [&](const auto& pair) { return pair.first == *role_text; });
  if (known == std::end(kRoles)) {
    values_.Error(*role, absl::StrFormat("%s is %s%s", reader.PathOf("role"),
                                         Quoted(*role_text),
                                         Hint(*role_text, RoleWords())));
    return;
  }
  param.role = known->second;
  if (param.role == kRouterCorrection && !dtype.given) {
    param.dtype = DType::kFp32;
  }

  // A param that this config does not have needs no sizes.
  bool present = true;
  if (condition != nullptr) {
    present =
        Number(*condition, reader.PathOf("if"), {.min = 0, .max = kExtentMax})
            .value_or(1) != 0;
  }

  param.name = *name_text;
  const auto replace = [&](std::string_view mark, std::string_view number) {
    const size_t at = param.name.find(mark);
    if (at == std::string::npos) return false;
    param.name.replace(at, mark.size(), number);
    return true;
  };
  const std::string without = [&] {
    std::string rest = *name_text;
    for (const std::string_view mark : {kLayer, kExpert}) {
      const size_t at = rest.find(mark);
      if (at != std::string::npos) rest.erase(at, mark.size());
    }
    return rest;
  }();
  if (without.find_first_of("{}") != std::string::npos) {
    values_.Error(*name,
                  absl::StrFormat("%s is %s; wanted no braces but one {layer} "
                                  "and one {expert}",
                                  reader.PathOf("name"), Quoted(*name_text)));
    return;
  }
  const bool of_layer = replace(kLayer, "{0}");
  const bool of_expert = replace(kExpert, "{1}");
  const RoleForm form = FormOf(param.role);
  // A tower has numbered parts and others, of the same roles.
  const bool layer_wanted = form.scope == RoleScope::kTower
                                ? of_layer
                                : form.scope != RoleScope::kModel;
  const bool expert_wanted = form.scope == RoleScope::kExpert;
  if (of_layer != layer_wanted || of_expert != expert_wanted) {
    values_.Error(
        *name,
        absl::StrFormat("%s is %s; the role %s wants a name with %s",
                        reader.PathOf("name"), Quoted(*name_text), *role_text,
                        expert_wanted  ? "{layer} and {expert}"
                        : layer_wanted ? "{layer} and no {expert}"
                                       : "neither {layer} nor {expert}"));
    return;
  }
  if (of_layer) {
    param.index.push_back(Consecutive(0, all_layers()));
  }
  if (layers != nullptr) {
    const std::string* set =
        values_.String(*layers, reader.PathOf("layers"), "a set of layers");
    if (set == nullptr) return;
    const auto found = layer_sets_.find(*set);
    if (found == layer_sets_.end()) {
      std::vector<std::string_view> sets;
      for (const auto& [word, numbers] : layer_sets_) sets.push_back(word);
      values_.Error(
          *layers,
          absl::StrFormat("%s is %s, which is no set of \"layers\"%s",
                          reader.PathOf("layers"), Quoted(*set),
                          sets.empty() ? "; wanted one of them defined there"
                                       : Hint(*set, sets)));
      return;
    }
    if (!of_layer) {
      values_.Error(*layers, absl::StrFormat("%s is of a parameter without "
                                             "{layer}; wanted no such key",
                                             reader.PathOf("layers")));
      return;
    }
    param.index[0].numbers = found->second;
    present &= !found->second.empty();
  }
  if (!present) return;
  bool has_shape = has_sizes_;
  for (size_t i = 0; i < extents->size(); ++i) {
    const std::optional<int64_t> extent = Number(
        (*extents)[i], absl::StrFormat("%s[%d]", reader.PathOf("shape"), i),
        {.min = 1, .max = kExtentMax});
    param.shape.push_back(extent.value_or(1));
    has_shape &= extent.has_value();
  }
  if (!has_shape) return;
  if (of_expert) {
    if (architecture().experts == 0) {
      values_.Error(*name, absl::StrFormat("%s has {expert}, and the model has "
                                           "no experts; wanted \"experts\" in "
                                           "sizes",
                                           reader.PathOf("name")));
      return;
    }
    param.index.push_back(Consecutive(0, architecture().experts));
  }
  CheckKindOf(param.role, *role, reader.PathOf("role"));
  if (diagnostics().error_count() != errors_before) return;
  CheckStackSize(param, values_.PlaceOf(value), diagnostics());
  if (diagnostics().error_count() != errors_before) return;
  if (param.role == kFusedExpertGateUp ||
      param.role == kFusedExpertGateUpBias) {
    if (param.shape.empty() || param.shape.back() % 2 != 0) {
      values_.Error(*shape, absl::StrFormat("%s: gate and up alternate; wanted "
                                            "an even last size",
                                            reader.PathOf("shape")));
      return;
    }
    param.shape.back() /= 2;
    param.shape.push_back(2);
    param.split = Split::kLastInPairs;
  }
  if (rotary_pairs.value) {
    if (param.role != kQuery && param.role != kKey) {
      values_.Error(*role, absl::StrFormat("%s is %s, which has no rotary "
                                           "pairs; wanted query or key",
                                           reader.PathOf("role"), *role_text));
      return;
    }
    const int64_t head_dim = architecture().head_dim;
    if (head_dim % 2 != 0) {
      if (!reported_.insert("head_dim").second) return;
      config_.Error("head_dim",
                    absl::StrFormat("head_dim %d is odd; wanted an even one, "
                                    "of rotary pairs",
                                    head_dim));
      return;
    }
    param.shape[0] /= head_dim;
    param.shape.insert(param.shape.begin() + 1, {head_dim / 2, 2});
    param.split = Split::kRowsInHeadPairs;
  }
  const std::string mistake = ShapeMistake(param, architecture());
  if (!mistake.empty()) {
    values_.Error(*shape,
                  absl::StrFormat("%s: parameter %s %s", reader.PathOf("shape"),
                                  Quoted(*name_text), mistake));
    return;
  }
  if (param.role == kOutputHead && architecture().tied) {
    head_ = param.name;
    return;
  }
  rules_.push_back({.param = model_.params.size(), .value = &value});
  model_.params.push_back(std::move(param));
}

void RulesReader::ReadMtpLayers() {
  const int64_t layers = mtp_layers_;
  const auto has_role = [](const Param& param) {
    return param.role == kMtpProjection;
  };
  if (layers == 0) return;
  if (model_.mtp) {
    own_->family.knows_mtp =
        std::any_of(model_.params.begin(), model_.params.end(), has_role);
    if (!own_->family.knows_mtp) architecture().mtp_layers = 0;
    return;
  }
  const auto of_layer = std::find_if(
      model_.params.begin(), model_.params.end(), [](const Param& param) {
        return !param.index.empty() && !IsTower(param.role);
      });
  if (of_layer == model_.params.end()) return;
  const std::string prefix =
      of_layer->name.substr(0, of_layer->name.find("{0}"));
  for (int64_t i = 0; i < layers; ++i) {
    model_.stored_beside.push_back(
        absl::StrFormat("%s%d.*", prefix, architecture().layers + i));
  }
}

// Names are compared one by one only of stacks that could have equal ones: a
// model has millions of names.
void RulesReader::CheckNoNameTwice() {
  std::map<std::string, int> alike;  // how many have the pattern
  for (const Rule& rule : rules_) {
    ++alike[WithoutNumbers(model_.params[rule.param].name)];
  }
  std::vector<NamedTensor> tensors;
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    const bool is_alone = alike.at(WithoutNumbers(param.name)) == 1 &&
                          !HasNumbersSideBySide(param.name);
    std::vector<std::string> names = {param.FirstName()};
    if (!is_alone) names = MemberNames(param);
    for (std::string& name : names) {
      tensors.push_back({.name = std::move(name),
                         .shape = {},
                         .dtype = DType::kUnspecified,
                         .place = values_.PlaceOf(*rule.value)});
    }
  }
  CheckNames(tensors, diagnostics());
}

// Each layer has one param of a role; of plain modules any number.
void RulesReader::CheckRolesOfLayers() {
  std::map<std::pair<ParamRole, int32_t>, const Rule*> seen;
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    if (IsPlainModule(param.role) || IsTower(param.role)) continue;
    std::vector<int32_t> layers = {-1};
    if (!param.index.empty()) layers = param.index[0].numbers;
    for (const int32_t layer : layers) {
      if (IsOfPrediction(param.role) &&
          layer + param.first_layer < architecture().layers) {
        values_.Error(*rule.value,
                      absl::StrFormat(
                          "params[%s] is the role %s of layer %d, which is no "
                          "layer of multi-token prediction; wanted "
                          "\"layers\": \"mtp\"",
                          Quoted(param.name), WordOf(param.role), layer));
        break;
      }
      const auto [it, is_new] = seen.try_emplace({param.role, layer}, &rule);
      if (is_new) continue;
      values_.Error(
          *rule.value,
          absl::StrFormat(
              "params[%s] is the role %s%s a second time, after %s; wanted "
              "each once (column, row, replicated, first_stage and last_stage "
              "may stand often)",
              Quoted(param.name), WordOf(param.role),
              layer < 0 ? "" : absl::StrCat(" of layer ", layer),
              Quoted(model_.params[it->second->param].name)));
      break;
    }
  }
}

void RulesReader::CheckTowerProjections() {
  constexpr std::string_view kProjections[] = {"q_proj", "k_proj", "v_proj"};
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    const std::string_view module = ModuleOf(param.name);
    if (!IsTower(param.role) || param.index.empty() ||
        std::find(std::begin(kProjections), std::end(kProjections), module) ==
            std::end(kProjections)) {
      continue;
    }
    for (const std::string_view beside : kProjections) {
      const std::string name = WithModule(param.name, beside);
      const bool fits =
          param.role == kTowerColumn &&
          std::any_of(model_.params.begin(), model_.params.end(),
                      [&](const Param& other) {
                        return other.name == name && other.role == param.role &&
                               other.index == param.index &&
                               other.shape.size() == param.shape.size() &&
                               std::equal(other.shape.begin() + 1,
                                          other.shape.end(),
                                          param.shape.begin() + 1);
                      });
      if (fits) continue;
      values_.Error(*rule.value,
                    absl::StrFormat("engines join parameter %s with %s; wanted "
                                    "both of role tower_column, with equal "
                                    "columns and layers",
                                    Quoted(param.name), Quoted(name)));
      return;
    }
  }
}

void RulesReader::CheckJoined() {
  for (const JoinedRoles& together : kJoined) {
    std::map<int32_t, const Rule*> first;
    for (const ParamRole role : together.roles) {
      for (const Rule& rule : rules_) {
        const Param& param = model_.params[rule.param];
        if (param.role != role) continue;
        for (const int32_t layer : param.index[0].numbers) {
          const auto [it, is_new] = first.try_emplace(layer, &rule);
          const Param& other = model_.params[it->second->param];
          const auto begin = static_cast<ptrdiff_t>(together.from_dim);
          const Dims shape = param.StoredShape();
          const Dims of_other = other.StoredShape();
          if (std::equal(shape.begin() + begin, shape.end(),
                         of_other.begin() + begin, of_other.end())) {
            continue;
          }
          values_.Error(
              *rule.value,
              absl::StrFormat(
                  "parameter %s has %d x %d elements, and %s, which frameworks "
                  "join with it, %d x %d; wanted equal %s",
                  Quoted(param.name), shape[0], shape[1], Quoted(other.name),
                  of_other[0], of_other[1],
                  together.from_dim == 0 ? "shapes" : "columns"));
          return;
        }
      }
    }
  }
}

void RulesReader::CheckCompanions() {
  using RuleOfLayer = std::map<int32_t, const Rule*>;
  const auto layers_of = [&](ParamRole role) {
    RuleOfLayer layers;
    for (const Rule& rule : rules_) {
      const Param& param = model_.params[rule.param];
      const bool is_other_order =
          role == kFusedExpertGateUp && param.role == kFusedExpertGateThenUp;
      if (param.role != role && !is_other_order) continue;
      for (const int32_t layer : param.index[0].numbers) layers[layer] = &rule;
    }
    return layers;
  };
  const auto check = [&](const RuleOfLayer& have, const RuleOfLayer& want,
                         ParamRole role, ParamRole other) {
    for (const auto& [layer, rule] : have) {
      if (want.contains(layer)) continue;
      values_.Error(*rule->value,
                    absl::StrFormat("layer %d has the role %s and no %s; "
                                    "wanted both",
                                    layer, WordOf(role), WordOf(other)));
      return;
    }
  };
  for (const auto& [role, of_heads, back] : kCompanions) {
    const bool is_latent =
        role == kAttentionOutput && architecture().latent.has_value();
    const ParamRole other = is_latent ? kKeyValueUp : of_heads;
    const RuleOfLayer of_role = layers_of(role);
    const RuleOfLayer of_other = layers_of(other);
    check(of_role, of_other, role, other);
    if (back == kBack || (back == kBackIfThere && !of_role.empty())) {
      check(of_other, of_role, other, role);
    }
  }
}

// Experts of one tensor. Of stacked ones, gate and up rows are as many as the
// columns of down; of fused ones, gate and up columns as many as the rows. What
// stands before ".experts." names the engines' own tensors.
void RulesReader::CheckStackedExperts() {
  const auto down = std::find_if(model_.params.begin(), model_.params.end(),
                                 [](const Param& param) {
                                   return param.role == kStackedExpertDown ||
                                          param.role == kFusedExpertDown;
                                 });
  if (down == model_.params.end()) return;
  const bool fused = down->role == kFusedExpertDown;
  const int64_t experts = down->shape[0];
  const int64_t hidden = down->shape[fused ? 2 : 1];
  const int64_t gate_and_up = 2 * down->shape[fused ? 1 : 2];
  const std::map<ParamRole, Dims> wanted = {
      {kStackedExpertGateUp, {experts, gate_and_up, hidden}},
      {kFusedExpertGateUp, {experts, hidden, gate_and_up}},
      {kFusedExpertGateThenUp, {experts, hidden, gate_and_up}},
      {kFusedExpertGateUpBias, {experts, gate_and_up}},
      {kStackedExpertDown, down->shape},
      {kFusedExpertDown, down->shape},
      {kFusedExpertDownBias, {experts, hidden}},
  };
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    if (param.role == kExpertUp) {
      values_.Error(*rule.value,
                    "experts one by one beside stacked ones; wanted one form");
      return;
    }
    const auto of_role = wanted.find(param.role);
    if (of_role == wanted.end()) continue;
    if (param.name.find(".experts.") == std::string::npos) {
      values_.Error(*rule.value,
                    absl::StrFormat("parameter %s holds all experts of a layer;"
                                    " wanted \".experts.\" in its name",
                                    Quoted(param.name)));
      return;
    }
    const Dims found = param.StoredShape();
    if (found == of_role->second) continue;
    values_.Error(
        *rule.value,
        absl::StrFormat("parameter %s has the shape [%s]; wanted [%s], as %s "
                        "has [%s]",
                        Quoted(param.name), absl::StrJoin(found, ", "),
                        absl::StrJoin(of_role->second, ", "),
                        Quoted(down->name), absl::StrJoin(down->shape, ", ")));
    return;
  }
}

Renames RulesReader::ReadNames(ObjectReader& traits) {
  const JsonValue* value = traits.Find("names");
  if (value == nullptr || !values_.IsObject(*value, traits.PathOf("names"))) {
    return {};
  }
  std::vector<Rename>& renames = own_->renames.emplace_back();
  for (const JsonMember& member : *value->AsObject()) {
    const std::string path =
        absl::StrFormat("%s.%s", traits.PathOf("names"), member.key);
    const std::string* to = member.value.AsString();
    if (to == nullptr) {
      values_.Wrong(member.value, path, "a string");
      continue;
    }
    const bool occurs =
        std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
          return name.find(member.key) != std::string::npos;
        });
    const std::string from = absl::StrReplaceAll(member.key, {{"{layer}", ""}});
    const std::string into = absl::StrReplaceAll(*to, {{"{layer}", ""}});
    if ((from + into).find_first_of("{}") != std::string::npos) {
      values_.Error(member.value,
                    absl::StrFormat("%s is %s; wanted no braces but those of "
                                    "{layer}",
                                    path, member.value.Text()));
      continue;
    }
    if (member.key.empty() || !occurs) {
      diagnostics().Error(
          values_.document().PlaceAt(member.key_offset),
          absl::StrFormat("%s renames %s, which is in no name of params; "
                          "wanted a part of one",
                          traits.PathOf("names"), Quoted(member.key)));
      continue;
    }
    renames.emplace_back(
        Keep(absl::StrReplaceAll(member.key, {{"{layer}", "{0}"}})),
        Keep(absl::StrReplaceAll(*to, {{"{layer}", "{0}"}})));
  }
  return renames;
}

absl::Span<const Fusion> RulesReader::ReadFused(ObjectReader& traits) {
  const JsonValue* value = traits.Find("fused");
  const std::string path = traits.PathOf("fused");
  if (value == nullptr || !values_.IsObject(*value, path)) return {};
  std::vector<Fusion>& fusions = own_->fusions.emplace_back();
  for (const JsonMember& member : *value->AsObject()) {
    const std::string of_path = absl::StrFormat("%s.%s", path, member.key);
    const std::optional<std::vector<std::string>> modules =
        values_.Strings(member.value, of_path);
    if (!modules.has_value()) continue;
    if (member.key.empty() ||
        member.key.find_first_of("{}.") != std::string::npos) {
      diagnostics().Error(
          values_.document().PlaceAt(member.key_offset),
          absl::StrFormat("%s has a module %s; wanted a name without braces "
                          "and dots",
                          path, Quoted(member.key)));
      continue;
    }
    if (modules->size() < 2) {
      values_.Error(
          member.value,
          absl::StrFormat("%s has fewer than two modules; wanted two or more",
                          of_path));
      continue;
    }
    std::vector<std::string>& kept = own_->texts.emplace_back(*modules);
    const Fusion fusion = {.into = Keep(member.key), .modules = kept};
    CheckFusion(fusion, member.value, of_path);
    fusions.push_back(fusion);
  }
  return fusions;
}

// Each module of the fusion stands beside the others, and is cut alike.
void RulesReader::CheckFusion(const Fusion& fusion, const JsonValue& value,
                              const std::string& path) {
  bool found = false;
  for (const Param& first : model_.params) {
    if (!IsPlainModule(first.role) || first.index.empty()) continue;
    if (ModuleOf(first.name) != fusion.modules[0]) continue;
    found = true;
    for (const std::string& module : fusion.modules) {
      const std::string name = WithModule(first.name, module);
      const auto other =
          std::find_if(model_.params.begin(), model_.params.end(),
                       [&](const Param& p) { return p.name == name; });
      const auto report = [&](std::string_view what) {
        values_.Error(value, absl::StrFormat("%s: parameter %s %s; wanted it "
                                             "beside %s",
                                             path, Quoted(name), what,
                                             Quoted(first.name)));
      };
      if (other == model_.params.end()) return report("is not in params");
      if (other->role != first.role || first.role == kRow) {
        return report(first.role == kRow ? "is of role row, which cannot be "
                                           "fused"
                                         : "has another role");
      }
      if (other->index != first.index) return report("is of other layers");
      if (!std::equal(other->shape.begin() + 1, other->shape.end(),
                      first.shape.begin() + 1, first.shape.end())) {
        return report("has other columns");
      }
    }
  }
  if (found) return;
  std::vector<std::string_view> modules;
  for (const Param& param : model_.params) {
    if (IsPlainModule(param.role) && !param.index.empty()) {
      modules.push_back(ModuleOf(param.name));
    }
  }
  values_.Error(
      value,
      absl::StrFormat("%s: %s is no module of a parameter of role column or "
                      "replicated%s (other roles are joined as their "
                      "framework does)",
                      path, Quoted(fusion.modules[0]),
                      modules.empty() ? "" : Hint(fusion.modules[0], modules)));
}

template <typename T, size_t N>
void RulesReader::ReadWord(ObjectReader& traits, std::string_view key,
                           const TraitWord<T> (&words)[N], T& target) {
  std::vector<std::string_view> names;
  for (const TraitWord<T>& word : words) names.push_back(word.word);
  Place place;
  const size_t found = traits.Word(key, names, Alternatives(names), place);
  if (found < N) target = words[found].value;
}

void RulesReader::ReadFlag(ObjectReader& traits, std::string_view key,
                           bool& target) {
  Located<bool> flag = {.value = target};
  traits.Read(key, {}, flag);
  target = flag.value;
}

void RulesReader::ReadVllm(const JsonValue& value) {
  if (!values_.IsObject(value, "vllm")) return;
  ObjectReader reader(values_, value, "vllm");
  VllmTraits& traits = own_->family.vllm;
  traits.known = true;
  traits.renames = ReadNames(reader);
  traits.fused = ReadFused(reader);
  ReadWord(reader, "every_stage", kEveryStageWords, traits.every_stage);
  ReadFlag(reader, "output_bias", traits.output_bias);
  ReadFlag(reader, "fp32_router", traits.fp32_router);
  ReadFlag(reader, "cuts_shared_experts_of_token_parts",
           traits.cuts_shared_experts_of_token_parts);
  ReadFlag(reader, "pipeline_parallel", traits.pipeline_parallel);
  reader.RejectOtherKeys();
}

void RulesReader::ReadSglang(const JsonValue& value) {
  if (!values_.IsObject(value, "sglang")) return;
  ObjectReader reader(values_, value, "sglang");
  SglangTraits& traits = own_->family.sglang;
  traits.known = true;
  traits.renames = ReadNames(reader);
  traits.fused = ReadFused(reader);
  const JsonValue* router = reader.Find("fp32_router");
  if (router != nullptr && router->AsString() != nullptr) {
    traits.fp32_router_since = Keep(*router->AsString());
  } else {
    bool fp32_router = false;
    ReadFlag(reader, "fp32_router", fp32_router);
    if (fp32_router) traits.fp32_router_since = "0";
  }
  ReadWord(reader, "head", kHeadWords, traits.head);
  ReadWord(reader, "embedding", kEmbeddingWords, traits.embedding);
  ReadWord(reader, "shared_fusion", kSharedFusionWords, traits.shared_fusion);
  if (const JsonValue* experts = reader.Find("shared_fusion_experts")) {
    traits.shared_fusion_experts =
        Number(*experts, reader.PathOf("shared_fusion_experts"),
               {.min = 0, .max = kCountMax})
            .value_or(0);
  }
  ReadFlag(reader, "pipeline_parallel", traits.pipeline_parallel);
  ReadFlag(reader, "dp_attention", traits.dp_attention);
  ReadFlag(reader, "redundant_experts", traits.redundant_experts);
  ReadFlag(reader, "dense_layers", traits.dense_layers);
  ReadFlag(reader, "plain_tower", traits.plain_tower);
  Located<std::string> whole_in_tower;
  reader.Read("whole_in_tower", {}, whole_in_tower);
  traits.whole_in_tower = Keep(std::move(whole_in_tower.value));
  ReadFlag(reader, "loads_expert_parallel", traits.loads_expert_parallel);
  reader.RejectOtherKeys();
}

// A framework that the file does not name is refused: nobody has looked at its
// class.
void RulesReader::ReadTraits() {
  own_->family.vllm.known = false;
  own_->family.sglang.known = false;
  own_->family.megatron.known = false;
  if (const JsonValue* vllm = reader_.Find("vllm")) ReadVllm(*vllm);
  if (const JsonValue* sglang = reader_.Find("sglang")) ReadSglang(*sglang);
  if (const JsonValue* megatron = reader_.Find("megatron")) {
    if (!values_.IsObject(*megatron, "megatron")) return;
    if (!megatron->AsObject()->empty()) {
      values_.Error(*megatron, "megatron has keys; wanted {}");
    }
    own_->family.megatron.known = true;
  }
  if (const JsonValue* transformers = reader_.Find("transformers")) {
    if (!values_.IsObject(*transformers, "transformers")) return;
    ObjectReader reader(values_, *transformers, "transformers");
    Located<std::string> name;
    reader.Read("class", {}, name);
    if (reader.Find("names") != nullptr) {
      own_->family.transformers.renames_since_5 = ReadNames(reader);
    }
    ReadFlag(reader, "transposes_experts",
             own_->family.transformers.transposes_experts_since_5);
    ReadFlag(reader, "knows_tower",
             own_->family.transformers.knows_tower_since_5);
    reader.RejectOtherKeys();
  }
}

// A family with a tower has the language model's keys in a part of the config,
// unless older files have them beside the tower's part.
void ReadRules(const ValueReader& values, const JsonValue& root,
               bool is_compiled_in, ConfigReader& config, Model& model) {
  const JsonValue* tower = nullptr;
  if (root.AsObject() != nullptr) {
    tower = ObjectReader(values, root, "").Peek(kTower);
  }
  bool is_flat = tower == nullptr;
  if (!is_flat && tower->AsObject() != nullptr) {
    const JsonValue* flat = ObjectReader(values, *tower, "").Peek("flat");
    is_flat = flat != nullptr && flat->Text() == "true" &&
              !config.IsThere("text_config");
  }
  if (is_flat) {
    RulesReader(values, root, is_compiled_in, config, config, model).Read();
    return;
  }
  ConfigReader text = config.Text();
  RulesReader(values, root, is_compiled_in, text, config, model).Read();
}

}  // namespace

void BuildByRules(const std::string& path, const Place& asked,
                  ConfigReader& config, Model& model) {
  Diagnostics& diagnostics = config.diagnostics();
  const std::optional<JsonDocument> document =
      ReadJsonFile(path, asked, kRulesBytesMax, "rules", diagnostics);
  if (!document.has_value()) return;
  const ValueReader values(*document, diagnostics);
  const std::optional<JsonValue> root = CompleteRules(document->root, values);
  if (!root.has_value()) return;
  ReadRules(values, *root, /*is_compiled_in=*/false, config, model);
}

void BuildByRules(const BuiltInRules& rules, ConfigReader& config,
                  Model& model) {
  Diagnostics& diagnostics = config.diagnostics();
  auto source = std::make_shared<const SourceFile>(
      SourceFile{.path = absl::StrFormat("families/%s.json", rules.model_type),
                 .text = std::string(rules.text)});
  const JsonDocument document = *ParseJson(source, source->text, diagnostics);
  const ValueReader values(document, diagnostics);
  const JsonValue root = *CompleteRules(document.root, values);
  ReadRules(values, root, /*is_compiled_in=*/true, config, model);
  diagnostics.Redirect(*source, config.place());
}

const BuiltInRules* FindBuiltInRules(std::string_view model_type) {
  const absl::Span<const BuiltInRules> all = AllBuiltInRules();
  const auto* const found =
      std::find_if(all.begin(), all.end(), [&](const BuiltInRules& rules) {
        return rules.model_type == model_type;
      });
  return found == all.end() ? nullptr : found;
}

std::vector<std::string_view> RoleWords() { return WordsOf(kRoles); }
std::string_view RoleWord(ParamRole role) { return WordOf(role); }

}  // namespace refit
