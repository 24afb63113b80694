#include "topology/nccl_topology.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace refit {
namespace {

// Far more than the bridges of a host. What is read grows with its square.
constexpr size_t kDeepest = 100;

// Of a tag, which is what stands between its angle brackets.
std::string NameOf(absl::string_view tag) {
  return std::string(tag.substr(0, tag.find_first_of(" \t\r\n/")));
}

// "" if the tag does not have the attribute.
std::string AttributeOf(absl::string_view tag, absl::string_view name) {
  for (size_t at = tag.find(name); at != absl::string_view::npos;
       at = tag.find(name, at + 1)) {
    const size_t begin = at + name.size() + 2;
    if (at == 0 || !absl::ascii_isspace(tag[at - 1])) continue;
    if (!absl::StartsWith(tag.substr(at + name.size()), "=\"")) continue;
    const size_t end = tag.find('"', begin);
    if (end == absl::string_view::npos) return "";
    return absl::AsciiStrToLower(tag.substr(begin, end - begin));
  }
  return "";
}

class Reader {
 public:
  explicit Reader(absl::string_view text) : text_(text) {}

  absl::StatusOr<BridgesByBusId> Read() {
    size_t begin = text_.find('<');
    while (begin != absl::string_view::npos) {
      const bool is_comment = absl::StartsWith(text_.substr(begin), "<!--");
      const absl::string_view mark = is_comment ? "-->" : ">";
      const size_t end = text_.find(mark, begin);
      if (end == absl::string_view::npos) {
        return Error(begin, "this tag does not end");
      }
      const absl::string_view tag = text_.substr(begin + 1, end - begin - 1);
      if (!is_comment && !absl::StartsWith(tag, "?")) {
        const absl::Status status = Take(tag, begin);
        if (!status.ok()) return status;
      }
      begin = text_.find('<', end + mark.size());
    }
    if (!open_.empty()) {
      return Error(text_.size(), absl::StrCat(open_.back(), " does not end"));
    }
    if (!has_system_) return Error(0, "no element \"system\", as NCCL has it");
    return std::move(bridges_);
  }

 private:
  absl::Status Error(size_t at, absl::string_view what) const {
    const auto line =
        1 + std::count(text_.begin(),
                       text_.begin() + static_cast<ptrdiff_t>(at), '\n');
    return absl::InvalidArgumentError(absl::StrCat("line ", line, ": ", what));
  }

  absl::Status Take(absl::string_view tag, size_t at) {
    if (absl::StartsWith(tag, "/")) {
      const std::string name = NameOf(tag.substr(1));
      if (open_.empty() || open_.back() != name) {
        return Error(at, absl::StrCat(name, " ends where it did not begin"));
      }
      open_.pop_back();
      chain_.pop_back();
      return absl::OkStatus();
    }
    if (open_.size() == kDeepest) {
      return Error(at, absl::StrCat("this tag is in ", kDeepest, " others"));
    }
    const std::string name = NameOf(tag);
    has_system_ |= name == "system" && open_.empty();
    open_.push_back(name);
    chain_.push_back(name == "cpu"
                         ? absl::StrCat("cpu ", AttributeOf(tag, "host_hash"),
                                        " ", AttributeOf(tag, "numaid"))
                     : name == "pci" ? AttributeOf(tag, "busid")
                                     : "");
    if (name == "pci" && !chain_.back().empty()) {
      std::vector<std::string>& bridges = bridges_[chain_.back()];
      for (const std::string& part : chain_) {
        if (!part.empty()) bridges.push_back(part);
      }
    }
    if (absl::EndsWith(tag, "/")) {
      open_.pop_back();
      chain_.pop_back();
    }
    return absl::OkStatus();
  }

  const absl::string_view text_;
  BridgesByBusId bridges_;
  std::vector<std::string> open_;
  std::vector<std::string> chain_;  // by `open_`: "" if it is no bridge
  bool has_system_ = false;
};

}  // namespace

absl::StatusOr<BridgesByBusId> ParseNcclTopology(absl::string_view text) {
  return Reader(text).Read();
}

}  // namespace refit
