#include "executor/transport/host_comparison.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "executor/waiting.h"

namespace refit {
namespace {

using Ranks = std::vector<int32_t>;

// The ranks of each value of `inner`, for each value of `outer`.
template <typename Outer, typename Inner>
std::map<Outer, std::map<Inner, Ranks>> Group(absl::Span<const Outer> outer,
                                              absl::Span<const Inner> inner) {
  std::map<Outer, std::map<Inner, Ranks>> groups;
  for (size_t rank = 0; rank < outer.size(); ++rank) {
    groups[outer[rank]][inner[rank]].push_back(static_cast<int32_t>(rank));
  }
  return groups;
}

}  // namespace

std::vector<std::string> CompareHosts(absl::Span<const uint32_t> planned,
                                      absl::Span<const std::string> real,
                                      absl::Span<const std::string> names) {
  const auto name = [&](const Ranks& ranks) {
    return names[static_cast<size_t>(ranks.front())];
  };
  std::vector<std::string> lines;
  for (const auto& [host, parts] : Group(planned, real)) {
    if (parts.size() == 1) continue;
    std::vector<std::string> hosts;
    for (const auto& [where, ranks] : parts) {
      hosts.push_back(
          absl::StrCat(RanksText(ranks), " on \"", name(ranks), "\""));
    }
    lines.push_back(
        absl::StrCat("the plan has these ranks on one host, but they run on ",
                     parts.size(), ": ", absl::StrJoin(hosts, "; "),
                     ". Give the job a topology that says where ranks are"));
  }
  for (const auto& [where, parts] : Group(real, planned)) {
    if (parts.size() == 1) continue;
    std::vector<std::string> hosts;
    std::string host;
    for (const auto& [plan_host, ranks] : parts) {
      hosts.push_back(absl::StrCat(RanksText(ranks), " on host ", plan_host));
      host = name(ranks);
    }
    lines.push_back(
        absl::StrCat("these ranks all run on \"", host, "\", but the plan has ",
                     absl::StrJoin(hosts, "; "),
                     ": what moves between them takes the way of the network"));
  }
  return lines;
}

}  // namespace refit
