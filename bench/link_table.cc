#include "bench/link_table.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/run_bench.h"
#include "plan/text/json_writer.h"

namespace refit {
namespace {

constexpr double kSlow = 0.8;  // times the median
constexpr size_t kSlowPairsMost = 8;

struct Pair {
  size_t from = 0;
  size_t to = 0;
  double gigabytes_per_second = 0;
};

// Those inside a host, or those between hosts.
std::vector<Pair> PairsOf(const LinkTable& table, bool inside) {
  std::vector<Pair> pairs;
  for (size_t from = 0; from < table.hosts.size(); ++from) {
    for (size_t to = 0; to < table.hosts.size(); ++to) {
      if (from == to || (table.hosts[from] == table.hosts[to]) != inside) {
        continue;
      }
      pairs.push_back({from, to, table.bytes_per_second[from][to] / 1e9});
    }
  }
  return pairs;
}

std::optional<double> MedianOf(const std::vector<Pair>& pairs) {
  if (pairs.empty()) return std::nullopt;
  std::vector<double> speeds;
  for (const Pair& pair : pairs) speeds.push_back(pair.gigabytes_per_second);
  return Median(std::move(speeds));
}

// What a job says of these ranks.
struct MeasuredTopology {
  std::optional<size_t> gpus_per_host;  // without a value `hosts` says it
  std::vector<size_t> hosts;            // by rank
  std::optional<double> peer;           // GB/s
  std::optional<double> network;
};

MeasuredTopology TopologyOf(const LinkTable& table) {
  MeasuredTopology topology;
  std::map<std::string, size_t> numbers;
  for (const std::string& host : table.hosts) {
    topology.hosts.push_back(
        numbers.try_emplace(host, numbers.size()).first->second);
  }
  const std::vector<size_t>& hosts = topology.hosts;
  const auto per_host =
      static_cast<size_t>(std::count(hosts.begin(), hosts.end(), size_t{0}));
  bool in_order = true;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    in_order &= hosts[rank] == rank / per_host;
  }
  if (in_order) topology.gpus_per_host = per_host;
  topology.peer = MedianOf(PairsOf(table, /*inside=*/true));
  topology.network = MedianOf(PairsOf(table, /*inside=*/false));
  return topology;
}

void WriteTopology(const LinkTable& table, JsonWriter& json) {
  const MeasuredTopology topology = TopologyOf(table);
  json.OpenObject("topology");
  if (topology.gpus_per_host.has_value()) {
    json.Number("gpus_per_host", *topology.gpus_per_host);
  } else {
    json.Line("hosts", topology.hosts);
  }
  const auto write = [&](const char* key, std::optional<double> speed) {
    if (!speed.has_value()) return;
    // Four digits: a measurement has no more.
    double rounded = 0;
    if (absl::SimpleAtod(absl::StrFormat("%.4g", *speed), &rounded)) {
      json.Real(key, rounded);
    }
  };
  write("peer_gigabytes_per_second", topology.peer);
  write("network_gigabytes_per_second", topology.network);
  json.CloseObject();
}

std::string TestName(const LinkTable& table) {
  return absl::StrCat("rank_to_rank_", table.wire);
}

std::string Description(const LinkTable& table) {
  return absl::StrCat("memcpy ", table.wire,
                      " rank(row) -> rank(column) bandwidth (GB/s)");
}

double SumOf(const LinkTable& table) {
  double sum = 0;
  for (const std::vector<double>& row : table.bytes_per_second) {
    for (const double speed : row) sum += speed / 1e9;
  }
  return sum;
}

}  // namespace

std::string LinkTopology(const LinkTable& table) {
  JsonWriter json;
  json.OpenObject();
  WriteTopology(table, json);
  json.CloseObject();
  return json.Take();
}

std::vector<std::string> SlowPairs(const LinkTable& table) {
  struct Slow {
    double share;
    std::string text;
  };
  std::vector<Slow> slow;
  for (const bool inside : {true, false}) {
    const std::vector<Pair> pairs = PairsOf(table, inside);
    const double median = MedianOf(pairs).value_or(0);
    for (const Pair& pair : pairs) {
      const double share = pair.gigabytes_per_second / median;
      if (share >= kSlow) continue;
      slow.push_back(
          {share, absl::StrFormat(
                      "slow pair: rank %d (%s) to rank %d (%s), %.4g GB/s, "
                      "%.2f of the median %s",
                      pair.from, table.names[pair.from], pair.to,
                      table.names[pair.to], pair.gigabytes_per_second, share,
                      inside ? "inside a host" : "between hosts")});
    }
  }
  std::stable_sort(slow.begin(), slow.end(), [](const Slow& a, const Slow& b) {
    return a.share < b.share;
  });
  std::vector<std::string> lines;
  for (const Slow& pair : slow) {
    if (lines.size() == kSlowPairsMost) break;
    lines.push_back(pair.text);
  }
  if (slow.size() > lines.size()) {
    lines.push_back(
        absl::StrCat("slow pairs: ", slow.size() - lines.size(), " more"));
  }
  return lines;
}

std::string LinkText(const LinkTable& table) {
  std::string text = absl::StrCat("Running ", TestName(table), ".\n",
                                  Description(table), "\n");
  const size_t ranks = table.hosts.size();
  absl::StrAppendFormat(&text, "%10s", "");
  for (size_t to = 0; to < ranks; ++to) {
    absl::StrAppendFormat(&text, "%10d", to);
  }
  for (size_t from = 0; from < ranks; ++from) {
    absl::StrAppendFormat(&text, "\n%10d", from);
    for (size_t to = 0; to < ranks; ++to) {
      const double speed = table.bytes_per_second[from][to] / 1e9;
      // Slow networks are below nvbandwidth's two digits.
      absl::StrAppendFormat(&text, "%10s",
                            from == to     ? "N/A"
                            : speed >= 0.1 ? absl::StrFormat("%.2f", speed)
                                           : absl::StrFormat("%.5f", speed));
    }
  }
  absl::StrAppendFormat(&text, "\n\nSUM %s %.2f\n\n", TestName(table),
                        SumOf(table));
  for (const std::string& line : SlowPairs(table)) {
    absl::StrAppend(&text, line, "\n");
  }
  return absl::StrCat(text, "for a job:\n", LinkTopology(table));
}

std::string LinkJson(const std::string& producer, const LinkTable& table) {
  JsonWriter json;
  json.OpenObject();
  json.OpenObject("nvbandwidth");
  json.Text("version", producer);
  json.OpenArray("GPU Device list");
  for (size_t rank = 0; rank < table.names.size(); ++rank) {
    json.Text(
        absl::StrCat(rank, ": rank ", rank, ": (", table.names[rank], ")"));
  }
  json.CloseArray();
  const std::vector<std::string> slow = SlowPairs(table);
  if (!slow.empty()) json.Text("warning", absl::StrJoin(slow, "; "));
  json.OpenArray("testcases");
  json.OpenObject();
  json.Text("name", TestName(table));
  json.Text("status", "Passed");
  json.Text("bandwidth_description", Description(table));
  json.OpenArray("bandwidth_matrix");
  for (size_t from = 0; from < table.hosts.size(); ++from) {
    json.OpenLine();
    for (size_t to = 0; to < table.hosts.size(); ++to) {
      json.Text(from == to
                    ? "N/A"
                    : absl::StrFormat("%.6g",
                                      table.bytes_per_second[from][to] / 1e9));
    }
    json.CloseLine();
  }
  json.CloseArray();
  json.Real("sum", SumOf(table));
  json.CloseObject();
  json.CloseArray();
  json.CloseObject();
  WriteTopology(table, json);
  json.CloseObject();
  return json.Take();
}

}  // namespace refit
