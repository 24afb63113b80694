// JSON with the place of every value and key, so that a mistake found late can
// still be shown where it was made. Comments are allowed.
#ifndef REFIT_COMPILER_JOB_JSON_H_
#define REFIT_COMPILER_JOB_JSON_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "compiler/diagnostics.h"

namespace refit {

struct JsonMember;

struct JsonValue {
  using Array = std::vector<JsonValue>;
  using Object = std::vector<JsonMember>;  // as written; keys are unique

  // Integers beyond int64_t, like all numbers with a point or an exponent, are
  // doubles.
  std::variant<std::monostate, bool, int64_t, double, std::string, Array,
               Object>
      data;
  int64_t offset = 0;  // of the first byte, in the text

  bool IsNull() const { return std::holds_alternative<std::monostate>(data); }
  // nullptr when the value has another type.
  const bool* AsBool() const { return std::get_if<bool>(&data); }
  const int64_t* AsInteger() const { return std::get_if<int64_t>(&data); }
  const double* AsDouble() const { return std::get_if<double>(&data); }
  const std::string* AsString() const {
    return std::get_if<std::string>(&data);
  }
  const Array* AsArray() const { return std::get_if<Array>(&data); }
  const Object* AsObject() const { return std::get_if<Object>(&data); }

  // The value as a message shows it: scalars as JSON, "an array", "an object".
  std::string Text() const;
};

struct JsonMember {
  std::string key;
  int64_t key_offset = 0;
  JsonValue value;
};

struct JsonDocument {
  std::shared_ptr<const SourceFile> file;
  JsonValue root;

  Place PlaceAt(int64_t offset) const {
    return {.file = file, .offset = offset};
  }
  Place PlaceOf(const JsonValue& value) const { return PlaceAt(value.offset); }
};

// Values nested deeper, or more values, than any job or checkpoint has are
// refused, to bound time and memory.
inline constexpr int64_t kJsonDepthMax = 64;
inline constexpr int64_t kJsonValuesMax = int64_t{1} << 22;

// Parses `text`: UTF-8 without NUL bytes (ReadTextFile checks). Diagnostics
// point into `file`; its text is `text`, or empty when the JSON is the header
// of a binary file. Nothing but the first mistake is reported; a key twice in
// one object is a mistake.
std::optional<JsonDocument> ParseJson(std::shared_ptr<const SourceFile> file,
                                      std::string_view text,
                                      Diagnostics& diagnostics);

// A word of the user in a message: in quotes, long ones cut.
std::string Quoted(std::string_view word);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_JSON_H_
