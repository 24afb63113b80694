// JSON of the data part: keys and values, and names that are written once.
#ifndef REFIT_REPORT_DATA_WRITER_H_
#define REFIT_REPORT_DATA_WRITER_H_

#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

namespace refit::report {

class DataWriter {
 public:
  DataWriter();

  // Of an object, at `key` unless it is "".
  void Open(std::string_view key = "");
  void Close() { writer_.EndObject(); }
  void OpenList(std::string_view key);
  void CloseList() { writer_.EndArray(); }

  void Number(std::string_view key, uint64_t value);
  // JSON has no word for what is not finite: null.
  void Real(std::string_view key, double value);
  void Flag(std::string_view key, bool value);
  void Text(std::string_view key, std::string_view value);
  // The last part of the path: pages are mailed to others.
  void FileName(std::string_view key, std::string_view path);
  // The text's position in the table of names.
  void Name(std::string_view key, const std::string& name);

  void Numbers(std::string_view key, absl::Span<const uint64_t> values);
  void Reals(std::string_view key, absl::Span<const double> values);
  void Texts(std::string_view key, absl::Span<const std::string> values);
  void Names(std::string_view key, absl::Span<const std::string> names);

  // The table of names, at `key`.
  void WriteNames(std::string_view key);

  std::string Take() { return buffer_.GetString(); }

 private:
  void Key(std::string_view key);
  void String(std::string_view value);
  void Value(double value);
  uint32_t NumberOf(const std::string& name);

  rapidjson::StringBuffer buffer_;
  rapidjson::Writer<rapidjson::StringBuffer> writer_{buffer_};
  std::vector<std::string> names_;
  absl::flat_hash_map<std::string, uint32_t> numbers_;
};

}  // namespace refit::report

#endif  // REFIT_REPORT_DATA_WRITER_H_
