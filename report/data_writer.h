// JSON of the data part, with names that are written once.
#ifndef REFIT_REPORT_DATA_WRITER_H_
#define REFIT_REPORT_DATA_WRITER_H_

#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "plan/text/json_writer.h"

namespace refit::report {

class DataWriter
    : public JsonWriterOf<rapidjson::Writer<rapidjson::StringBuffer>> {
 public:
  // Seconds to a nanosecond, so that the page stays small.
  DataWriter() { writer_.SetMaxDecimalPlaces(9); }

  // The last part of the path: pages are mailed to others.
  void FileName(std::string_view key, std::string_view path) {
    Text(key, path == "-" ? "standard input"
                          : path.substr(path.find_last_of('/') + 1));
  }
  // The text's position in the table of names.
  void Name(std::string_view key, const std::string& name) {
    Number(key, NumberOf(name));
  }
  void Names(std::string_view key, const std::vector<std::string>& names) {
    std::vector<uint32_t> numbers;
    for (const std::string& name : names) numbers.push_back(NumberOf(name));
    Line(key, numbers);
  }
  // The table of names, at `key`.
  void WriteNames(std::string_view key) { Line(key, names_); }

 private:
  uint32_t NumberOf(const std::string& name) {
    const auto [found, is_new] =
        numbers_.try_emplace(name, static_cast<uint32_t>(names_.size()));
    if (is_new) names_.push_back(name);
    return found->second;
  }

  std::vector<std::string> names_;
  absl::flat_hash_map<std::string, uint32_t> numbers_;
};

}  // namespace refit::report

#endif  // REFIT_REPORT_DATA_WRITER_H_
