#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/text/json_writer.h"
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

// Says each number once: in JSON at its key, and in a row of text with its
// label, exact value, unit and a remark. A number without a label has no row.
class StatsPrinter : JsonWriter {
 public:
  explicit StatsPrinter(const PlanFile& plan);

  std::string Table() const;
  using JsonWriter::Take;

 private:
  struct Row {
    std::string label, value, unit, remark;
  };

  void Add(const std::string& label, const std::string& value,
           const std::string& unit, const std::string& remark) {
    if (!label.empty()) rows_.push_back({label, value, unit, remark});
  }
  void AddBytes(const std::string& label, uint64_t bytes,
                const std::string& remark) {
    const std::string human = HumanBytes(static_cast<double>(bytes));
    Add(label, absl::StrCat(bytes), "bytes",
        absl::StrCat(human, human.empty() || remark.empty() ? "" : ", ",
                     remark));
  }
  void Bytes(const char* key, const std::string& label, uint64_t bytes,
             const std::string& remark = "") {
    Number(key, bytes);
    AddBytes(label, bytes, remark);
  }
  void Count(const std::string& key, const std::string& label, uint64_t count,
             const std::string& remark = "") {
    Number(key, count);
    Add(label, absl::StrCat(count), "", remark);
  }
  void Seconds(const char* key, const std::string& label, double seconds,
               const std::string& remark = "") {
    Real(key, seconds);
    Add(label, absl::StrFormat("%.6g", seconds), "s",
        absl::StrCat(HumanSeconds(seconds), remark.empty() ? "" : ", ",
                     remark));
  }

  void SayTraffic(const PlanFile& plan);
  void SayBalance(const char* key, const std::string& label,
                  const Balance& balance, bool has_ranks);
  void SayTime(const Estimates& estimates);
  void SaySchedule(const fb::Body& body);
  void SayScratch(fb::Side side);
  void SayDelta(const fb::Delta& delta);
  void SayTables(const PlanFile& plan);

  const PlanStats stats_;
  std::vector<Row> rows_;
};

StatsPrinter::StatsPrinter(const PlanFile& plan) : stats_(StatsOf(plan)) {
  OpenObject();
  SayTraffic(plan);
  SayTime(EstimatesOf(plan));
  SaySchedule(plan.body());
  SayScratch(fb::Side::kSource);
  SayScratch(fb::Side::kDestination);
  if (plan.body().delta() != nullptr) SayDelta(*plan.body().delta());
  SayTables(plan);
  CloseObject();
}

std::string StatsPrinter::Table() const {
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

void StatsPrinter::SayTraffic(const PlanFile& plan) {
  const Totals& totals = stats_.totals;
  const Dealt& dealt = stats_.dealt;
  const auto of_route = [&](fb::Route route) {
    return totals.route_bytes[static_cast<size_t>(route)];
  };
  const int32_t sources = plan.source_ranks();
  const int32_t destinations = plan.world_size() - sources;
  Number("source_ranks", sources);
  Number("destination_ranks", destinations);
  Number("hosts", stats_.hosts);
  Add("ranks", absl::StrCat(plan.world_size()), "",
      absl::StrCat(sources, " source, ", destinations, " destination, on ",
                   stats_.hosts, stats_.hosts == 1 ? " host" : " hosts"));
  Bytes("moved_bytes", "moved", totals.moved_bytes());
  Bytes("local_bytes", "  local", of_route(fb::Route::kLocal), "on one GPU");
  Bytes("peer_bytes", "  peer", of_route(fb::Route::kPeer), "inside a host");
  Bytes("network_bytes", "  network", of_route(fb::Route::kNetwork),
        "between hosts");
  Bytes("direct_bytes", "  direct", totals.direct_bytes,
        "stored into mapped tensors, without staging");
  Bytes("relayed_bytes", totals.relayed_bytes > 0 ? "  relayed" : "",
        totals.relayed_bytes, "passed on between destination ranks");
  Bytes("dealt_bytes", dealt.bytes > 0 ? "  dealt" : "", dealt.bytes,
        absl::StrCat("of these, beside what the network brings, by ",
                     dealt.ranks, dealt.ranks == 1 ? " rank" : " ranks"));
  Number("dealing_ranks", dealt.ranks);
  SayBalance("sent_by_source_ranks", "sent per source rank", stats_.sent,
             sources > 0);
  SayBalance("received_by_destination_ranks", "received per destination rank",
             stats_.received, destinations > 0);
}

void StatsPrinter::SayBalance(const char* key, const std::string& label,
                              const Balance& balance, bool has_ranks) {
  OpenObject(key);
  Number("rank", balance.busiest);
  Bytes("max_bytes", has_ranks ? label + ", max" : "", balance.max_bytes,
        absl::StrCat("rank ", balance.busiest));
  Real("mean_bytes", balance.mean_bytes);
  Real("imbalance", balance.imbalance());
  CloseObject();
  if (!has_ranks) return;
  Add(label + ", mean", absl::StrFormat("%.0f", balance.mean_bytes), "bytes",
      HumanBytes(balance.mean_bytes));
  Add("  imbalance", absl::StrFormat("%.3f", balance.imbalance()), "",
      "max / mean");
}

void StatsPrinter::SayTime(const Estimates& estimates) {
  Seconds("lower_bound_seconds", "lower bound", estimates.lower_bound_seconds);
  Seconds("predicted_seconds", "predicted", estimates.predicted_seconds,
          estimates.lower_bound_seconds > 0
              ? absl::StrFormat(
                    "%.3f x the lower bound",
                    estimates.predicted_seconds / estimates.lower_bound_seconds)
              : "");
  Text("binding_link", estimates.binding_link);
  Add(estimates.binding_link.empty() ? "" : "  binding link", "", "",
      estimates.binding_link);
}

void StatsPrinter::SaySchedule(const fb::Body& body) {
  const Totals& totals = stats_.totals;
  const fb::Limits& limits = *body.limits();
  Count("messages", "messages", totals.messages);
  Bytes("largest_staged_bytes", "  largest staged",
        totals.largest_message_bytes,
        absl::StrCat("limit ", limits.bucket_bytes()));
  Count("rounds", "rounds", body.rounds()->size());
  Count("operations_max", "  operations of a rank, max", totals.most_operations,
        absl::StrCat("rank ", totals.most_operations_rank, " in round ",
                     totals.most_operations_round, ", limit ",
                     limits.operations_per_round()));
  const bool has_peers = stats_.most_network_peers > 0;
  Count("network_peers_max", has_peers ? "network peers of a rank, max" : "",
        stats_.most_network_peers,
        absl::StrCat("rank ", stats_.most_network_peers_rank,
                     limits.network_peers() == 0
                         ? ""
                         : absl::StrCat(", limit ", limits.network_peers())));
  AddBytes(has_peers ? "  NCCL's buffers for all" : "", kNcclNetworkBytes,
           "of a GPU's memory, with NCCL 2.28.9 over sockets");
  Bytes("staging_bytes_max",
        body.programs()->size() > 0 ? "staging of a rank, max" : "",
        stats_.largest_staging_bytes,
        absl::StrCat("rank ", stats_.largest_staging_rank, ", limit ",
                     limits.staging_bytes()));
}

// What is quantized costs its ranks memory, at the source or the destination.
void StatsPrinter::SayScratch(fb::Side side) {
  const ScratchUse& scratch = stats_.scratch[static_cast<size_t>(side)];
  if (scratch.bytes == 0) return;
  OpenObject(absl::StrCat(EnumText(side), "_scratch"));
  Number("rank", scratch.rank);
  Bytes("bytes", absl::StrCat("scratch of a ", EnumText(side), " rank, max"),
        scratch.bytes, absl::StrCat("rank ", scratch.rank, ", to quantize"));
  Count("waves", scratch.waves.count == 0 ? "" : "  in waves",
        scratch.waves.count,
        absl::StrCat("each in windows of at most ", scratch.waves.largest_bytes,
                     " bytes"));
  Number("largest_wave_bytes", scratch.waves.largest_bytes);
  CloseObject();
}

// How refits of a plan with deltas find what changed, and what that costs.
void StatsPrinter::SayDelta(const fb::Delta& delta) {
  const std::string dense =
      delta.dense_every() == 0
          ? ""
          : absl::StrCat(", dense every ", delta.dense_every(), " refits");
  const bool snapshots = delta.changes() == fb::DeltaChanges::kSnapshot;
  OpenObject("delta");
  Text("changes", EnumText(delta.changes()));
  Number("dense_every", delta.dense_every());
  Bytes("snapshot_bytes_max", snapshots ? "delta snapshot of a rank, max" : "",
        stats_.snapshot_bytes,
        absl::StrCat("rank ", stats_.snapshot_rank, dense));
  Add(snapshots ? "" : "delta", "", "", "workers mark what changed" + dense);
  if (delta.rungs() != nullptr) {
    Line("rungs", *delta.rungs());
    std::string rungs;
    for (const uint8_t rung : *delta.rungs()) {
      absl::StrAppend(&rungs, " 1/", uint64_t{1} << rung);
    }
    Add(rungs.empty() ? "" : "delta staged rounds", "", "", "rungs" + rungs);
  }
  CloseObject();
}

void StatsPrinter::SayTables(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  Count("params", "params", stats_.params,
        absl::StrCat("in ", body.params()->size(), " stacks"));
  Number("param_stacks", body.params()->size());
  Count("tensors", "tensors of all ranks", stats_.tensors,
        absl::StrCat("in ", body.buffers()->size(), " buffer entries"));
  Number("buffers", body.buffers()->size());
  Count("fragments", "fragments", stats_.fragments);
  Count("copies", "copies", body.copies()->size(),
        absl::StrCat("in ", body.copy_lists()->size(), " lists"));
  Number("copy_lists", body.copy_lists()->size());
  Count("skips", "skips", stats_.skips);
  OpenObject("post_hooks");
  for (const auto& [name, count] : stats_.post_hooks) {
    Count(name, "post-hook " + name, count, "tensors of all ranks");
  }
  CloseObject();
  Bytes("file_bytes", "plan file", plan.bytes().size());
}

}  // namespace

std::string StatsText(const PlanFile& plan) {
  return StatsPrinter(plan).Table();
}

std::string StatsJson(const PlanFile& plan) {
  return StatsPrinter(plan).Take();
}

}  // namespace refit
