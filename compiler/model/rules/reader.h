// Reads a file of rules. One file of this folder for each of its parts.
#ifndef REFIT_COMPILER_MODEL_RULES_READER_H_
#define REFIT_COMPILER_MODEL_RULES_READER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/job/json.h"
#include "compiler/job/object_reader.h"
#include "compiler/model/config.h"
#include "compiler/model/model.h"
#include "compiler/model/rules/expression.h"
#include "compiler/model/rules/rules.h"

namespace refit {

inline constexpr int64_t kExtentMax = (int64_t{1} << 31) - 1;
inline constexpr int64_t kCountMax = 100'000;
inline constexpr std::string_view kTower = "tower";

// "; wanted" with the words, or the one that is meant.
std::string Hint(std::string_view word,
                 const std::vector<std::string_view>& words);

// The key of the config that says a size, if one alone does.
std::string KeyOfSize(std::string_view name,
                      absl::Span<const JsonMember> sizes);

template <typename Sizes>
struct KnownSize;
template <typename T>
struct TraitWord;

// What the file says of a param.
struct Rule {
  size_t param;  // of model.params
  const JsonValue* value;
};

// Reports a name twice, roles twice in a layer, roles that lack what belongs to
// them, and shapes that do not fit together.
void CheckRules(absl::Span<const Rule> rules, const Model& model,
                const ValueReader& values);

// Roles that the layers with one of them all have, and what such layers have
// too; `maybe` belongs to them in models that have it at all.
struct LayerPart {
  std::vector<ParamRole> roles;
  std::optional<ParamRole> too = std::nullopt;
  std::optional<ParamRole> maybe = std::nullopt;
};

// A role that layers lack, what they have `beside` it, and a param of that.
struct MissingRole {
  ParamRole role;
  std::set<int32_t> layers = {};
  ParamRole beside = ParamRole::kOther;
  const Param* param = nullptr;
};
std::vector<MissingRole> MissingRoles(const Model& model,
                                      absl::Span<const LayerPart> parts);

// The rules of the file `root`, with those of the family that its "like" names
// where it says nothing else. Values of that family stand where it is named.
// nullopt after a report.
std::optional<JsonValue> CompleteRules(const JsonValue& root,
                                       const ValueReader& values);

// The sizes of a vision tower, whose layers the model's do not count.
struct TowerSizes {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
};

// The words of layers from `first` on.
struct LayerWords {
  int64_t first = 0;
  std::vector<std::string> words;
};

// An entry of "params".
struct ParamEntry {
  ParamEntry(const ValueReader& values, const JsonValue& value,
             const std::string& path)
      : reader(values, value, path) {}

  ObjectReader reader;
  const JsonValue* name = nullptr;
  const JsonValue* shape = nullptr;
  const JsonValue* role = nullptr;
  const JsonValue* layers = nullptr;     // nullptr: all
  const JsonValue* condition = nullptr;  // nullptr: there is none
  const JsonValue::Array* extents = nullptr;
  bool rotary_pairs = false;
};

// What the numbers in a param's name count.
struct NumbersOfName {
  bool of_layer = false;
  bool of_expert = false;
  bool is_prediction = false;  // of the layers that predict, counted from 0
  bool is_only_prediction = false;  // which no number names
};

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
  // Reads the tower of the model that `text` reads.
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
  void ReadTowerSizes(absl::Span<const JsonMember> members);
  // The value of a size that layouts read, which all others may name.
  template <typename Sizes>
  int64_t ReadKnownSize(const KnownSize<Sizes>& size,
                        absl::Span<const JsonMember> members,
                        const Place& place);
  // Reads the sizes of a part; nullopt: the model lacks it.
  template <typename Sizes, size_t N>
  std::optional<Sizes> ReadPart(const KnownSize<Sizes> (&sizes)[N],
                                absl::Span<const JsonMember> members,
                                const Place& place);
  // Configs of which the file says that frameworks would differ.
  void ReadRefusals();
  void ReadLayerSets();
  std::vector<int32_t> LayerSet(const JsonValue& value,
                                const std::string& path);
  // The words that each list of the config has for layers of the sets.
  void ReadKnownWords();
  // One word, an integer, or several that mean the same.
  std::vector<std::string> WordsOfSet(const JsonValue& value,
                                      const std::string& path);
  // A word of each layer: of a list, or the letters of one string. A list of
  // one prediction's layers holds for all. Empty after a report by `report`.
  using Report = absl::FunctionRef<void(const std::string& mistake)>;
  LayerWords WordsOfLayers(std::string_view key, bool of_prediction,
                           Report report);
  // The layers that "where" names; nullopt: the config has none of its lists.
  std::optional<std::set<int64_t>> ReadWhere(const JsonValue& value,
                                             const std::string& path,
                                             bool of_prediction, bool may_lack);
  std::set<int64_t> ReadExcept(const JsonValue& value, const std::string& path);
  std::set<int64_t> ReadBesides(const JsonValue& value,
                                const std::string& path);
  // Reports a list of the config that has not its word for these layers alone.
  void CheckLayersAlike(const JsonMember& list, const std::string& path,
                        bool of_prediction, const std::set<int64_t>& layers,
                        const std::string& by);
  // Does the same with a list of layers' numbers.
  void CheckNumbersAlike(const JsonMember& list,
                         const std::set<int64_t>& layers,
                         const std::string& by);
  void ReadParams();
  // What is known of the layers that predict more tokens.
  void ReadMtpLayers();
  void ReadParam(const JsonValue& value, const std::string& path);
  // The parts of an entry of "params"; false: a mistake was reported, or sizes
  // that the shape is made of have one.
  bool ReadEntry(ParamEntry& entry, Param& param);
  bool ReadName(const ParamEntry& entry, Param& param, NumbersOfName& numbers);
  bool ReadLayers(const ParamEntry& entry, const NumbersOfName& numbers,
                  Param& param, bool& present);
  bool ReadShape(const ParamEntry& entry, Param& param);
  bool SplitPairs(const ParamEntry& entry, Param& param);
  // Reports a role of a kind of layer that the model's sizes do not have.
  void CheckKindOf(ParamRole role, const JsonValue& value,
                   const std::string& path);
  void ReadTraits();
  void ReadVllm(const JsonValue& value);
  void ReadSglang(const JsonValue& value);

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
  bool is_refused_ = false;            // so that shapes may have no sense
  bool names_predictions_ = false;     // by numbers of their own
  std::set<std::string> reported_;     // keys of the config
  // The words of all sets of layers, in their order, by key of the config.
  std::map<std::string, std::vector<std::string>, std::less<>> known_words_;
  std::shared_ptr<OwnFamily> own_ = std::make_shared<OwnFamily>();
  std::map<std::string, std::vector<int32_t>, std::less<>> layer_sets_;
  std::vector<Rule> rules_;         // of each param
  std::vector<std::string> names_;  // in the file, also of absent params
  std::string head_;                // the name of a tied one
};

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_RULES_READER_H_
