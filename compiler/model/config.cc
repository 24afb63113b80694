#include "compiler/model/config.h"

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/job/text_file.h"

namespace refit {
namespace {

// Each layer and expert is a number in memory.
constexpr IntegerRange kCountRange = {.min = 1, .max = 100'000};

// Of the dtype "torch.bfloat16"; "": it is none.
std::string_view DTypeWord(const JsonValue* dtype) {
  if (dtype == nullptr || dtype->AsString() == nullptr) return "";
  const std::string_view word = *dtype->AsString();
  return word.substr(word.starts_with("torch.") ? 6 : 0);
}

}  // namespace

std::optional<JsonDocument> ReadJsonFile(const std::string& path,
                                         const Place& asked,
                                         int64_t size_bytes_max,
                                         std::string_view what,
                                         Diagnostics& diagnostics) {
  const absl::StatusOr<std::shared_ptr<const SourceFile>> file =
      ReadTextFile(path, size_bytes_max);
  if (!file.ok()) {
    diagnostics.Error(asked, "%s: %s", Quoted(path), file.status().message());
    return std::nullopt;
  }
  std::optional<JsonDocument> document =
      ParseJson(*file, (*file)->text, diagnostics);
  if (!document.has_value()) return std::nullopt;
  if (!ValueReader(*document, diagnostics).IsObject(document->root, what)) {
    return std::nullopt;
  }
  return document;
}

const JsonValue* ConfigReader::FindSet(std::string_view key) {
  const JsonValue* value = object_.Find(key);
  if (value != nullptr && !value->IsNull()) return value;
  return outer_ == nullptr ? nullptr : outer_->FindSet(key);
}

ConfigReader ConfigReader::Part(std::string_view key, ConfigReader* outer) {
  const JsonValue* value = Require(key, "an object");
  if (value == nullptr || !object_.values().IsObject(*value, key)) {
    return *this;
  }
  return ConfigReader(object_.values(), *value, key, outer);
}

ConfigReader ConfigReader::Text() {
  ConfigReader text = Part("text_config", this);
  const auto [key, value] = text.FindDType();
  const JsonValue* beside = FindDType().second;
  const std::string_view name = DTypeWord(value), other = DTypeWord(beside);
  if (!name.empty() && !other.empty() && name != other) {
    diagnostics().Error(
        object_.values().PlaceOf(*value),
        "%s of text_config is %s, and the one beside it %s: frameworks differ "
        "in which they take; wanted both alike",
        key, name, other);
  }
  return text;
}

ConfigReader ConfigReader::Vision() { return Part("vision_config", nullptr); }

const JsonValue* ConfigReader::Require(std::string_view key,
                                       std::string_view wanted) {
  if (const JsonValue* value = FindSet(key); value != nullptr) return value;
  const JsonValue* value = object_.Require(key, wanted);
  if (value == nullptr || !value->IsNull()) return value;
  object_.values().Wrong(*value, key, wanted);
  return nullptr;
}

int64_t ConfigReader::IntegerIn(std::string_view key, IntegerRange range) {
  const JsonValue* value = Require(key, "an integer");
  if (value == nullptr) return 1;
  return object_.values().Integer(*value, key, range).value_or(1);
}

bool ConfigReader::IsThere(std::string_view key) {
  return object_.Find(key) != nullptr ||
         (outer_ != nullptr && outer_->IsThere(key));
}

int64_t ConfigReader::Size(std::string_view key) {
  return IntegerIn(key, kExtentRange);
}

int64_t ConfigReader::Count(std::string_view key) {
  return IntegerIn(key, kCountRange);
}

void ConfigReader::CheckAlike(std::string_view key, std::string_view other) {
  if (!Has(key) || !Has(other)) return;
  const int64_t value = Count(key);
  const int64_t value_of_other = Count(other);
  if (value == value_of_other) return;
  Error(other, absl::StrFormat("%s is %d, and %s is %d: frameworks differ in "
                               "which they read; wanted both alike",
                               other, value_of_other, key, value));
}

bool ConfigReader::FlagOr(std::string_view key, bool otherwise) {
  const JsonValue* value = FindSet(key);
  if (value == nullptr) return otherwise;
  return object_.values().Bool(*value, key).value_or(otherwise);
}

std::vector<int64_t> ConfigReader::IntegersOr(std::string_view key,
                                              std::vector<int64_t> otherwise) {
  const JsonValue* value = FindSet(key);
  if (value == nullptr) return otherwise;
  return object_.values()
      .Integers(*value, key, {.min = 0, .max = kCountRange.max})
      .value_or(std::move(otherwise));
}

std::string ConfigReader::String(std::string_view key) {
  const JsonValue* value = Require(key, "a string");
  if (value == nullptr) return "";
  const std::string* string = object_.values().String(*value, key);
  return string == nullptr ? "" : *string;
}

std::vector<std::string> ConfigReader::StringsOr(
    std::string_view key, std::vector<std::string> otherwise) {
  const JsonValue* value = FindSet(key);
  if (value == nullptr) return otherwise;
  return object_.values().Strings(*value, key).value_or(std::move(otherwise));
}

std::pair<std::string_view, const JsonValue*> ConfigReader::FindDType() {
  for (const std::string_view key : {"dtype", "torch_dtype"}) {
    const JsonValue* value = object_.Find(key);
    if (value != nullptr && !value->IsNull()) return {key, value};
  }
  if (outer_ == nullptr) return {"", nullptr};
  return outer_->FindDType();
}

DType ConfigReader::WeightDType() {
  constexpr std::string_view kWanted = "bfloat16, float16 or float32";
  constexpr std::array<std::pair<std::string_view, DType>, 3> kNames = {{
      {"bfloat16", DType::kBf16},
      {"float16", DType::kFp16},
      {"float32", DType::kFp32},
  }};
  const auto [key, value] = FindDType();
  if (value == nullptr) return DType::kBf16;
  const std::string* text = object_.values().String(*value, key, kWanted);
  if (text == nullptr) return DType::kBf16;
  for (const auto& [known, dtype] : kNames) {
    if (known == DTypeWord(value)) return dtype;
  }
  object_.values().Error(*value, "unknown %s %s; wanted %s", key, Quoted(*text),
                         kWanted);
  return DType::kBf16;
}

Located<std::string> ConfigReader::QuantMethod() {
  const JsonValue* value = FindSet("quantization_config");
  if (value == nullptr || value->AsObject() == nullptr) return {};
  Located<std::string> method = {.value = "unknown",
                                 .place = object_.values().PlaceOf(*value),
                                 .given = true};
  for (const JsonMember& member : *value->AsObject()) {
    const std::string* text = member.value.AsString();
    if (member.key != "quant_method" || text == nullptr) continue;
    method.value = *text;
    method.place = object_.values().PlaceOf(member.value);
  }
  return method;
}

void ConfigReader::Error(std::string_view key, std::string message) {
  const JsonValue* value = FindSet(key);
  if (value == nullptr) value = object_.Find(key);
  diagnostics().Error(
      value == nullptr ? place() : object_.values().PlaceOf(*value),
      std::move(message));
}

}  // namespace refit
