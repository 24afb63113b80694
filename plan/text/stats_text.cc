#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/text/plan_view.h"
#include "plan/text/stats.h"
#include "plan/text/text.h"

namespace refit {
namespace {

// For a rank's first network peer; further ones share them. As
// bench/nccl_peers.py measured it on H100s, with 2.30.7 4 MiB less.
constexpr uint64_t kNcclNetworkBytes = uint64_t{248} << 20;

// "1.17 GiB"; "" below 1 KiB, where the exact number says it all.
std::string HumanBytes(double bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return "";
  size_t unit = 0;
  bytes /= 1024;
  while (bytes >= 1023.995 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.2f %s", bytes, kUnits[unit]);
}

std::string HumanSeconds(double seconds) {
  if (seconds >= 1) return absl::StrFormat("%.3f s", seconds);
  if (seconds >= 1e-3) return absl::StrFormat("%.3f ms", seconds * 1e3);
  return absl::StrFormat("%.3f us", seconds * 1e6);
}

// Rows of label, exact value, unit, and a remark, in columns.
class StatsTable {
 public:
  void Add(const std::string& label, const std::string& value,
           const std::string& unit, const std::string& remark = "") {
    rows_.push_back({label, value, unit, remark});
  }
  void AddBytes(const std::string& label, uint64_t bytes,
                const std::string& remark = "") {
    const std::string human = HumanBytes(static_cast<double>(bytes));
    Add(label, absl::StrCat(bytes), "bytes",
        absl::StrCat(human, human.empty() || remark.empty() ? "" : ", ",
                     remark));
  }
  void AddCount(const std::string& label, uint64_t count,
                const std::string& remark = "") {
    Add(label, absl::StrCat(count), "", remark);
  }
  void AddSeconds(const std::string& label, double seconds,
                  const std::string& remark = "") {
    Add(label, absl::StrFormat("%.6g", seconds), "s",
        absl::StrCat(HumanSeconds(seconds), remark.empty() ? "" : ", ",
                     remark));
  }
  std::string Text() const;

 private:
  struct Row {
    std::string label, value, unit, remark;
  };
  std::vector<Row> rows_;
};

std::string StatsTable::Text() const {
  size_t label_width = 0;
  size_t value_width = 0;
  for (const Row& row : rows_) {
    label_width = std::max(label_width, row.label.size());
    // A name in the value column is no number to line up with.
    if (!row.unit.empty())
      value_width = std::max(value_width, row.value.size());
  }
  std::string text;
  for (const Row& row : rows_) {
    std::string line =
        absl::StrFormat("%-*s  %*s %-5s  %s", label_width, row.label,
                        value_width, row.value, row.unit, row.remark);
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

void AddBalance(const std::string& label, const Balance& balance,
                StatsTable& table) {
  table.AddBytes(absl::StrCat(label, ", max"), balance.max_bytes,
                 absl::StrCat("rank ", balance.busiest));
  table.Add(absl::StrCat(label, ", mean"),
            absl::StrFormat("%.0f", balance.mean_bytes), "bytes",
            HumanBytes(balance.mean_bytes));
  table.Add("  imbalance", absl::StrFormat("%.3f", balance.imbalance()), "",
            "max / mean");
}

void AddTraffic(const PlanFile& plan, const PlanStats& stats,
                StatsTable& table) {
  const Totals& totals = stats.totals;
  const auto route_bytes = [&](fb::Route route) {
    return totals.route_bytes[static_cast<size_t>(route)];
  };
  const int32_t destinations = plan.world_size() - plan.source_ranks();
  table.Add("ranks", absl::StrCat(plan.world_size()), "",
            absl::StrCat(plan.source_ranks(), " source, ", destinations,
                         " destination, on ", stats.hosts,
                         stats.hosts == 1 ? " host" : " hosts"));
  table.AddBytes("moved", totals.moved_bytes());
  table.AddBytes("  local", route_bytes(fb::Route::kLocal), "on one GPU");
  table.AddBytes("  peer", route_bytes(fb::Route::kPeer), "inside a host");
  table.AddBytes("  network", route_bytes(fb::Route::kNetwork),
                 "between hosts");
  table.AddBytes("  direct", totals.direct_bytes,
                 "stored into mapped tensors, without staging");
  if (totals.relayed_bytes > 0) {
    table.AddBytes("  relayed", totals.relayed_bytes,
                   "passed on between destination ranks");
  }
  if (stats.dealt.bytes > 0) {
    table.AddBytes("  dealt", stats.dealt.bytes,
                   absl::StrCat("of these, beside what the network brings, by ",
                                stats.dealt.ranks,
                                stats.dealt.ranks == 1 ? " rank" : " ranks"));
  }
  if (plan.source_ranks() > 0) {
    AddBalance("sent per source rank", stats.sent, table);
  }
  if (destinations > 0) {
    AddBalance("received per destination rank", stats.received, table);
  }
}

void AddTime(const Estimates& estimates, StatsTable& table) {
  table.AddSeconds("lower bound", estimates.lower_bound_seconds);
  table.AddSeconds("predicted", estimates.predicted_seconds,
                   estimates.lower_bound_seconds > 0
                       ? absl::StrFormat("%.3f x the lower bound",
                                         estimates.predicted_seconds /
                                             estimates.lower_bound_seconds)
                       : "");
  if (!estimates.binding_link.empty()) {
    table.Add("  binding link", "", "", estimates.binding_link);
  }
}

void AddSchedule(const fb::Body& body, const PlanStats& stats,
                 StatsTable& table) {
  const Totals& totals = stats.totals;
  table.AddCount("messages", totals.messages);
  table.AddBytes("  largest staged", totals.largest_message_bytes,
                 absl::StrCat("limit ", body.limits()->bucket_bytes()));
  table.AddCount("rounds", body.rounds()->size());
  table.AddCount(
      "  operations of a rank, max", totals.most_operations,
      absl::StrCat("rank ", totals.most_operations_rank, " in round ",
                   totals.most_operations_round, ", limit ",
                   body.limits()->operations_per_round()));
  if (stats.most_network_peers > 0) {
    const uint32_t limit = body.limits()->network_peers();
    table.AddCount(
        "network peers of a rank, max", stats.most_network_peers,
        absl::StrCat("rank ", stats.most_network_peers_rank,
                     limit == 0 ? "" : absl::StrCat(", limit ", limit)));
    table.AddBytes("  NCCL's buffers for all", kNcclNetworkBytes,
                   "of a GPU's memory, with NCCL 2.28.9 over sockets");
  }
  if (body.programs()->size() > 0) {
    table.AddBytes("staging of a rank, max", stats.largest_staging_bytes,
                   absl::StrCat("rank ", stats.largest_staging_rank, ", limit ",
                                body.limits()->staging_bytes()));
  }
}

// What is quantized costs its ranks memory, at the source or the destination.
void AddScratch(const PlanStats& stats, StatsTable& table) {
  for (const fb::Side side : {fb::Side::kSource, fb::Side::kDestination}) {
    const ScratchUse& scratch = stats.scratch[static_cast<size_t>(side)];
    if (scratch.bytes == 0) continue;
    table.AddBytes(absl::StrCat("scratch of a ", EnumText(side), " rank, max"),
                   scratch.bytes,
                   absl::StrCat("rank ", scratch.rank, ", to quantize"));
    if (scratch.waves.count == 0) continue;
    table.AddCount("  in waves", scratch.waves.count,
                   absl::StrCat("each in windows of at most ",
                                scratch.waves.largest_bytes, " bytes"));
  }
}

// How refits of a plan with deltas find what changed, and what that costs.
void AddDelta(const PlanFile& plan, const PlanStats& stats, StatsTable& table) {
  const fb::Delta* const delta = plan.body().delta();
  if (delta == nullptr) return;
  const std::string dense =
      delta->dense_every() == 0
          ? ""
          : absl::StrCat(", dense every ", delta->dense_every(), " refits");
  if (delta->changes() == fb::DeltaChanges::kSnapshot) {
    table.AddBytes("delta snapshot of a rank, max", stats.snapshot_bytes,
                   absl::StrCat("rank ", stats.snapshot_rank, dense));
  } else {
    table.Add("delta", "", "", "workers mark what changed" + dense);
  }
  if (delta->rungs() == nullptr || delta->rungs()->size() == 0) return;
  std::string rungs = "rungs";
  for (const uint8_t rung : *delta->rungs()) {
    absl::StrAppend(&rungs, " 1/", uint64_t{1} << rung);
  }
  table.Add("delta staged rounds", "", "", rungs);
}

void AddTables(const PlanFile& plan, const PlanStats& stats,
               StatsTable& table) {
  const fb::Body& body = plan.body();
  table.AddCount("params", stats.params,
                 absl::StrCat("in ", body.params()->size(), " stacks"));
  table.AddCount(
      "tensors of all ranks", stats.tensors,
      absl::StrCat("in ", body.buffers()->size(), " buffer entries"));
  table.AddCount("fragments", stats.fragments);
  table.AddCount("copies", body.copies()->size(),
                 absl::StrCat("in ", body.copy_lists()->size(), " lists"));
  table.AddCount("skips", stats.skips);
  // A line for each kind; most plans have none.
  for (const auto& [name, count] : stats.post_hooks) {
    table.AddCount(absl::StrCat("post-hook ", name), count,
                   "tensors of all ranks");
  }
  table.AddBytes("plan file", plan.bytes().size());
}

}  // namespace

std::string StatsText(const PlanFile& plan) {
  const PlanStats stats = StatsOf(plan);
  StatsTable table;
  AddTraffic(plan, stats, table);
  AddTime(EstimatesOf(plan), table);
  AddSchedule(plan.body(), stats, table);
  AddScratch(stats, table);
  AddDelta(plan, stats, table);
  AddTables(plan, stats, table);
  return table.Text();
}

}  // namespace refit
