// JSON from values in order.
#ifndef REFIT_PLAN_TEXT_JSON_WRITER_H_
#define REFIT_PLAN_TEXT_JSON_WRITER_H_

#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "plan/utf8.h"

namespace refit {

// Every object and array that is opened must be closed before Take. Inside an
// object all values have a key; inside an array none has.
template <typename Writer>
class JsonWriterOf {
 public:
  void OpenObject() { writer_.StartObject(); }
  void OpenObject(std::string_view key) {
    Key(key);
    writer_.StartObject();
  }
  void CloseObject() { writer_.EndObject(); }
  void OpenArray() { writer_.StartArray(); }
  void OpenArray(std::string_view key) {
    Key(key);
    writer_.StartArray();
  }
  void CloseArray() { writer_.EndArray(); }
  // An array in one line.
  void OpenLine() {
    writer_.StartArray();
    SetFormat(rapidjson::kFormatSingleLineArray);
  }
  void OpenLine(std::string_view key) {
    Key(key);
    SetFormat(rapidjson::kFormatSingleLineArray);
    writer_.StartArray();
  }
  void CloseLine() {
    writer_.EndArray();
    SetFormat(rapidjson::kFormatDefault);
  }

  void Number(std::integral auto value) {
    if constexpr (std::is_signed_v<decltype(value)>) {
      writer_.Int64(value);
    } else {
      writer_.Uint64(value);
    }
  }
  void Number(std::string_view key, std::integral auto value) {
    Key(key);
    Number(value);
  }
  // null where the value is not finite: JSON has no word for it.
  void Real(double value) {
    if (std::isfinite(value)) {
      writer_.Double(value);
    } else {
      writer_.Null();
    }
  }
  void Real(std::string_view key, double value) {
    Key(key);
    Real(value);
  }
  void Bool(std::string_view key, bool value) {
    Key(key);
    writer_.Bool(value);
  }
  void Null(std::string_view key) {
    Key(key);
    writer_.Null();
  }
  // With U+FFFD for each byte that is not UTF-8.
  void Text(std::string_view value) {
    const std::string text = AsUtf8(value);
    writer_.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
  }
  void Text(std::string_view key, std::string_view value) {
    Key(key);
    Text(value);
  }
  // An array of objects: one for each of `things`, which `write` fills.
  template <typename Things, typename Write>
  void Objects(std::string_view key, const Things& things, Write write) {
    OpenArray(key);
    for (const auto& thing : things) {
      OpenObject();
      write(thing);
      CloseObject();
    }
    CloseArray();
  }
  // Numbers or texts in one line.
  template <typename Values>
  void Line(std::string_view key, const Values& values) {
    OpenLine(key);
    for (const auto& value : values) {
      using Value = std::remove_cvref_t<decltype(value)>;
      if constexpr (std::integral<Value>) {
        Number(value);
      } else if constexpr (std::floating_point<Value>) {
        Real(value);
      } else {
        Text(value);
      }
    }
    CloseLine();
  }

  std::string Take() const {
    return std::string(buffer_.GetString(), buffer_.GetSize());
  }

 protected:
  JsonWriterOf() = default;

  rapidjson::StringBuffer buffer_;
  Writer writer_{buffer_};

 private:
  void Key(std::string_view key) {
    writer_.Key(key.data(), static_cast<rapidjson::SizeType>(key.size()));
  }
  void SetFormat(rapidjson::PrettyFormatOptions format) {
    if constexpr (requires { writer_.SetFormatOptions(format); }) {
      writer_.SetFormatOptions(format);
    }
  }
};

// With one line for each value, or for each list of numbers.
class JsonWriter
    : public JsonWriterOf<rapidjson::PrettyWriter<rapidjson::StringBuffer>> {
 public:
  // Spaces for each level.
  explicit JsonWriter(unsigned indent = 2) { writer_.SetIndent(' ', indent); }

  // The text, with a line break at its end.
  std::string Take() const { return JsonWriterOf::Take() + "\n"; }
};

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_JSON_WRITER_H_
