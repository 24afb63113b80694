// JSON with one line for each value, or for each list of numbers.
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

namespace refit {

// Every object and array that is opened must be closed before Take. Inside an
// object all values have a key; inside an array none has.
class JsonWriter {
 public:
  // Spaces for each level.
  explicit JsonWriter(unsigned indent = 2) { writer_.SetIndent(' ', indent); }

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
    writer_.SetFormatOptions(rapidjson::kFormatSingleLineArray);
  }
  void OpenLine(std::string_view key) {
    Key(key);
    writer_.SetFormatOptions(rapidjson::kFormatSingleLineArray);
    writer_.StartArray();
  }
  void CloseLine() {
    writer_.EndArray();
    writer_.SetFormatOptions(rapidjson::kFormatDefault);
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
  // In one line.
  template <typename Values>
  void Numbers(std::string_view key, const Values& values) {
    OpenLine(key);
    for (const auto value : values) Number(value);
    CloseLine();
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
  void Text(std::string_view value) {
    writer_.String(value.data(),
                   static_cast<rapidjson::SizeType>(value.size()));
  }
  void Text(std::string_view key, std::string_view value) {
    Key(key);
    Text(value);
  }

  // The text, with a line break at its end.
  std::string Take() const {
    return std::string(buffer_.GetString(), buffer_.GetSize()) + "\n";
  }

 private:
  void Key(std::string_view key) {
    writer_.Key(key.data(), static_cast<rapidjson::SizeType>(key.size()));
  }

  rapidjson::StringBuffer buffer_;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> writer_{buffer_};
};

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_JSON_WRITER_H_
