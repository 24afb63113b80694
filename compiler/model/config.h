// The keys of a Hugging Face config.json, and the JSON files that models are
// made of.
#ifndef REFIT_COMPILER_MODEL_CONFIG_H_
#define REFIT_COMPILER_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compiler/diagnostics.h"
#include "compiler/job/json.h"
#include "compiler/job/object_reader.h"
#include "plan/dtype.h"

namespace refit {

// The object in the file `path`, of at most `size_bytes_max` bytes, that was
// named at `asked`. `what` is what messages call it. Nullopt after an error.
std::optional<JsonDocument> ReadJsonFile(const std::string& path,
                                         const Place& asked,
                                         int64_t size_bytes_max,
                                         std::string_view what,
                                         Diagnostics& diagnostics);

// Reads keys and reports those that are missing or wrong; null counts as
// missing, as Transformers writes it for "not set". After a report a harmless
// value is returned, so that one run finds all mistakes. Keys that nobody asks
// for are not mistakes: a config.json says much that no weight depends on.
class ConfigReader {
 public:
  // `root` is an object.
  ConfigReader(const ValueReader& values, const JsonValue& root)
      : object_(values, root, "") {}

  // A size, at least 1.
  int64_t Size(std::string_view key);
  // A number of layers or experts.
  int64_t Count(std::string_view key);
  bool FlagOr(std::string_view key, bool otherwise);
  std::vector<int64_t> IntegersOr(std::string_view key,
                                  std::vector<int64_t> otherwise);
  // "" when missing.
  std::string String(std::string_view key);
  std::vector<std::string> StringsOr(std::string_view key,
                                     std::vector<std::string> otherwise);
  // The dtype of the weights: "dtype", in older files "torch_dtype"; bf16 when
  // neither is there.
  DType WeightDType();
  // quantization_config.quant_method; "unknown" if that is no string. Not given
  // without a quantization_config.
  Located<std::string> QuantMethod();

  // The keys of the language model where the model has other parts too: those
  // of "text_config", and those here that it lacks. This reader outlives it.
  // Reports a dtype that is not the one here: vLLM and transformers take this
  // one, SGLang the other.
  ConfigReader Text();
  // Those of "vision_config", and no others.
  ConfigReader Vision();

  // nullptr: missing.
  const JsonValue* FindSet(std::string_view key);
  bool Has(std::string_view key) { return FindSet(key) != nullptr; }
  // Whether the file has the key, be it null.
  bool IsThere(std::string_view key);
  // Reports a key that the file lacks.
  void RequireNumberOrNone(std::string_view key) {
    object_.Require(key, "an integer, or null for none");
  }
  // Reports two keys that the file has for one size, and that differ.
  void CheckAlike(std::string_view key, std::string_view other);
  // Reports that the value of `key` does not fit.
  void Error(std::string_view key, std::string message);
  template <typename... Args>
  void Error(std::string_view key, const absl::FormatSpec<Args...>& format,
             const Args&... args) {
    Error(key, absl::StrFormat(format, args...));
  }
  const JsonValue::Object& members() const { return object_.members(); }
  Place place() const { return object_.place(); }
  Diagnostics& diagnostics() const { return object_.values().diagnostics(); }

 private:
  ConfigReader(const ValueReader& values, const JsonValue& root,
               std::string_view key, ConfigReader* outer)
      : object_(values, root, std::string(key)), outer_(outer) {}

  // The reader of an object in this one; of this one where there is none.
  ConfigReader Part(std::string_view key, ConfigReader* outer);

  // The dtype's key and value; nullptr: there is none.
  std::pair<std::string_view, const JsonValue*> FindDType();
  const JsonValue* Require(std::string_view key, std::string_view wanted);
  int64_t IntegerIn(std::string_view key, IntegerRange range);

  ObjectReader object_;
  ConfigReader* outer_ = nullptr;
};

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_CONFIG_H_
