#include "plan/text/fact_writer.h"

#include <algorithm>

#include "plan/text/plan_view.h"

namespace refit {

void FactWriter::Line(std::string_view line) {
  if (is_json_) return;
  for (size_t end = 0; end != std::string_view::npos;) {
    end = line.find('|');
    AddPart(line.substr(0, end));
    line.remove_prefix(std::min(line.size(), end + 1));
  }
  text_ += '\n';
  said_.clear();
}

void FactWriter::AddPart(std::string_view part) {
  const size_t begin = text_.size();
  while (true) {
    const size_t open = part.find('{');
    text_ += part.substr(0, open);
    if (open == std::string_view::npos) return;
    const size_t close = part.find('}', open);
    const std::string_view key = part.substr(open + 1, close - open - 1);
    const auto fact =
        std::find_if(said_.begin(), said_.end(),
                     [&](const auto& said) { return said.first == key; });
    if (fact == said_.end()) return text_.resize(begin);
    text_ += fact->second;
    part.remove_prefix(close + 1);
  }
}

void FactWriter::Name(std::string_view key, std::string_view name) {
  is_json_ ? json_.Text(key, name) : Shown(key, QuotedText(name));
}

void FactWriter::Dims(std::string_view key,
                      const flatbuffers::Vector<uint64_t>* dims) {
  if (!is_json_) return Shown(key, DimsText(dims));
  dims == nullptr ? json_.Line(key, std::vector<uint64_t>())
                  : json_.Line(key, *dims);
}

void FactWriter::Ranks(std::string_view key,
                       const std::vector<int32_t>& ranks) {
  is_json_ ? json_.Line(key, ranks) : Shown(key, NumberSetText(ranks));
}

}  // namespace refit
