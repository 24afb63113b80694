#include "report/data_writer.h"

#include <cmath>

#include "plan/utf8.h"

namespace refit::report {
namespace {

// Seconds to a nanosecond, so that the page stays small.
constexpr int kDecimals = 9;

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// With U+FFFD for each byte that is not UTF-8.
std::string AsUtf8(std::string_view text) {
  std::string result;
  while (true) {
    const size_t bad = FirstNotUtf8(text);
    if (bad == std::string_view::npos) break;
    result += text.substr(0, bad);
    result += kReplacement;
    text.remove_prefix(bad + 1);
  }
  result += text;
  return result;
}

}  // namespace

DataWriter::DataWriter() { writer_.SetMaxDecimalPlaces(kDecimals); }

void DataWriter::Key(std::string_view key) {
  writer_.Key(key.data(), static_cast<rapidjson::SizeType>(key.size()));
}

void DataWriter::String(std::string_view value) {
  const std::string text = AsUtf8(value);
  writer_.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}

void DataWriter::Value(double value) {
  if (std::isfinite(value)) {
    writer_.Double(value);
  } else {
    writer_.Null();
  }
}

uint32_t DataWriter::NumberOf(const std::string& name) {
  const auto [found, is_new] =
      numbers_.try_emplace(name, static_cast<uint32_t>(names_.size()));
  if (is_new) names_.push_back(name);
  return found->second;
}

void DataWriter::Open(std::string_view key) {
  if (!key.empty()) Key(key);
  writer_.StartObject();
}

void DataWriter::OpenList(std::string_view key) {
  Key(key);
  writer_.StartArray();
}

void DataWriter::Number(std::string_view key, uint64_t value) {
  Key(key);
  writer_.Uint64(value);
}

void DataWriter::Real(std::string_view key, double value) {
  Key(key);
  Value(value);
}

void DataWriter::Flag(std::string_view key, bool value) {
  Key(key);
  writer_.Bool(value);
}

void DataWriter::Text(std::string_view key, std::string_view value) {
  Key(key);
  String(value);
}

void DataWriter::FileName(std::string_view key, std::string_view path) {
  Text(key, path == "-" ? "standard input"
                        : path.substr(path.find_last_of('/') + 1));
}

void DataWriter::Name(std::string_view key, const std::string& name) {
  Number(key, NumberOf(name));
}

void DataWriter::Numbers(std::string_view key,
                         absl::Span<const uint64_t> values) {
  OpenList(key);
  for (const uint64_t value : values) writer_.Uint64(value);
  CloseList();
}

void DataWriter::Reals(std::string_view key, absl::Span<const double> values) {
  OpenList(key);
  for (const double value : values) Value(value);
  CloseList();
}

void DataWriter::Texts(std::string_view key,
                       absl::Span<const std::string> values) {
  OpenList(key);
  for (const std::string& value : values) String(value);
  CloseList();
}

void DataWriter::Names(std::string_view key,
                       absl::Span<const std::string> names) {
  OpenList(key);
  for (const std::string& name : names) writer_.Uint(NumberOf(name));
  CloseList();
}

void DataWriter::WriteNames(std::string_view key) { Texts(key, names_); }

}  // namespace refit::report
