#include "executor/transport/host_comparison.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "control/waiting.h"

namespace refit {
namespace {

using Ranks = std::vector<int32_t>;

// Hosts that a line names, and lines: all ranks are told them.
constexpr size_t kNamedMax = 8;

// The first of `hosts`, and how many more there are.
std::string FirstHosts(std::vector<std::string> hosts) {
  const size_t more = hosts.size() - std::min(hosts.size(), kNamedMax);
  hosts.resize(hosts.size() - more);
  return absl::StrCat(absl::StrJoin(hosts, "; "),
                      more > 0 ? absl::StrCat("; and ", more, " more") : "");
}

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
                     parts.size(), ": ", FirstHosts(std::move(hosts)),
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
                     FirstHosts(std::move(hosts)),
                     ": what moves between them takes the way of the network"));
  }
  if (lines.size() > kNamedMax) {
    const size_t more = lines.size() - kNamedMax;
    lines.resize(kNamedMax);
    lines.push_back(absl::StrCat(more, " more hosts differ from the plan"));
  }
  return lines;
}

std::vector<std::string> CompareGpus(int32_t rank, absl::Span<const Edge> edges,
                                     absl::Span<const std::string> gpus) {
  const std::string& mine = gpus[static_cast<size_t>(rank)];
  if (mine.empty()) return {};
  std::set<int32_t> apart;
  std::set<int32_t> together;
  for (const Edge& edge : edges) {
    const std::string& theirs = gpus[static_cast<size_t>(edge.peer)];
    if (theirs.empty()) continue;
    const bool is_local = edge.route == fb::Route::kLocal;
    if (is_local && theirs != mine) apart.insert(edge.peer);
    if (!is_local && theirs == mine) together.insert(edge.peer);
  }
  const auto text = [](const std::set<int32_t>& ranks) {
    return RanksText(Ranks(ranks.begin(), ranks.end()));
  };
  std::vector<std::string> lines;
  if (!apart.empty()) {
    lines.push_back(absl::StrCat(
        "the plan has rank ", rank, " and ", text(apart),
        " on one GPU, but rank ", rank, " runs on ", mine, " and rank ",
        *apart.begin(), " on ", gpus[static_cast<size_t>(*apart.begin())],
        ": what moves between them takes the way between GPUs"));
  }
  if (!together.empty()) {
    lines.push_back(absl::StrCat(
        "rank ", rank, " and ", text(together), " run on one GPU, ", mine,
        ", but the plan has them on several: they wait for each other in "
        "turns, "
        "and NCCL refuses them. Give each rank a GPU of its own, or the job "
        "\"colocated\": true"));
  }
  return lines;
}

}  // namespace refit
