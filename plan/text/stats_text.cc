#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/scratch_windows.h"
#include "plan/text/plan_view.h"
#include "plan/text/text.h"

namespace refit {
namespace {

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

// What the messages of a plan add up to.
struct Totals {
  uint64_t route_bytes[4] = {};      // by fb::Route
  uint64_t direct_bytes = 0;         // of all routes
  uint64_t relayed_bytes = 0;        // sent by destination ranks
  std::vector<uint64_t> sent_bytes;  // by rank
  std::vector<uint64_t> received_bytes;
  uint64_t messages = 0;
  uint64_t largest_message_bytes = 0;
  uint64_t most_operations = 0;  // of one rank in one round
  uint32_t most_operations_rank = 0;
  uint32_t most_operations_round = 0;
};

Totals TotalsOf(const fb::Body& body) {
  const std::vector<uint64_t> payload_bytes = PayloadBytesByList(body);
  Totals totals;
  totals.sent_bytes.resize(body.programs()->size());
  totals.received_bytes.resize(body.programs()->size());
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    uint64_t operations = 0;
    uint32_t round = 0;
    for (const fb::Message* message : *body.programs()->Get(rank)->messages()) {
      operations = message->round() == round ? operations + 1 : 1;
      round = message->round();
      const bool direct =
          body.rounds()->Get(round)->mechanism() == fb::Mechanism::kDirect;
      if (!direct && operations > totals.most_operations) {
        totals.most_operations = operations;
        totals.most_operations_rank = rank;
        totals.most_operations_round = round;
      }
      // Each message stands in two programs; it counts at its sender.
      if (message->kind() != fb::MessageKind::kSend) continue;
      const uint64_t bytes = payload_bytes[message->copies()];
      totals.route_bytes[static_cast<size_t>(
          body.rounds()->Get(round)->route())] += bytes;
      totals.sent_bytes[rank] += bytes;
      totals.received_bytes[message->peer()] += bytes;
      totals.messages += 1;
      if (rank >= body.source_ranks()) totals.relayed_bytes += bytes;
      if (direct) {
        totals.direct_bytes += bytes;
        continue;
      }
      totals.largest_message_bytes =
          std::max(totals.largest_message_bytes, message->size_bytes());
    }
  }
  return totals;
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

// The busiest of the ranks [begin, end), and how far it is above their mean.
void AddBalance(const std::string& label, absl::Span<const uint64_t> bytes,
                uint32_t begin, uint32_t end, StatsTable& table) {
  if (begin == end) return;
  uint32_t busiest = begin;
  uint64_t sum = 0;
  for (uint32_t rank = begin; rank < end; ++rank) {
    sum += bytes[rank];
    if (bytes[rank] > bytes[busiest]) busiest = rank;
  }
  const double mean = static_cast<double>(sum) / (end - begin);
  table.AddBytes(absl::StrCat(label, ", max"), bytes[busiest],
                 absl::StrCat("rank ", busiest));
  table.Add(absl::StrCat(label, ", mean"), absl::StrFormat("%.0f", mean),
            "bytes", HumanBytes(mean));
  table.Add("  imbalance",
            sum == 0 ? "1.000" : absl::StrFormat("%.3f", bytes[busiest] / mean),
            "", "max / mean");
}

void AddTraffic(const PlanFile& plan, const Totals& totals, StatsTable& table) {
  const auto route_bytes = [&](fb::Route route) {
    return totals.route_bytes[static_cast<size_t>(route)];
  };
  uint64_t moved_bytes = 0;
  for (const uint64_t bytes : totals.route_bytes) moved_bytes += bytes;
  table.AddBytes("moved", moved_bytes);
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
  const auto source_ranks = static_cast<uint32_t>(plan.source_ranks());
  const auto world_size = static_cast<uint32_t>(plan.world_size());
  AddBalance("sent per source rank", totals.sent_bytes, 0, source_ranks, table);
  AddBalance("received per destination rank", totals.received_bytes,
             source_ranks, world_size, table);
}

void AddTime(const fb::Stats& stats, StatsTable& table) {
  table.AddSeconds("lower bound", stats.lower_bound_seconds());
  table.AddSeconds("predicted", stats.predicted_seconds(),
                   stats.lower_bound_seconds() > 0
                       ? absl::StrFormat("%.3f x the lower bound",
                                         stats.predicted_seconds() /
                                             stats.lower_bound_seconds())
                       : "");
  if (stats.binding_link() != nullptr && stats.binding_link()->size() > 0) {
    table.Add("  binding link", "", "", stats.binding_link()->str());
  }
}

void AddSchedule(const fb::Body& body, const Totals& totals,
                 StatsTable& table) {
  table.AddCount("messages", totals.messages);
  table.AddBytes("  largest staged", totals.largest_message_bytes,
                 absl::StrCat("limit ", body.limits()->bucket_bytes()));
  table.AddCount("rounds", body.rounds()->size());
  table.AddCount(
      "  operations of a rank, max", totals.most_operations,
      absl::StrCat("rank ", totals.most_operations_rank, " in round ",
                   totals.most_operations_round, ", limit ",
                   body.limits()->operations_per_round()));
  uint32_t largest_staging = 0;
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    if (body.programs()->Get(rank)->staging_bytes() >
        body.programs()->Get(largest_staging)->staging_bytes()) {
      largest_staging = rank;
    }
  }
  if (body.programs()->size() > 0) {
    table.AddBytes("staging of a rank, max",
                   body.programs()->Get(largest_staging)->staging_bytes(),
                   absl::StrCat("rank ", largest_staging, ", limit ",
                                body.limits()->staging_bytes()));
  }
}

// What a rank quantises at once, in windows of its scratch that last as long.
struct Waves {
  uint64_t count = 0;
  uint64_t largest_bytes = 0;
};

// None in a program without windows.
Waves WavesOf(const fb::Body& body, const fb::RankProgram& program) {
  if (Length(program.scratch_windows()) == 0) return {};
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> bytes;  // by rounds
  for (const ScratchPlace& place : ScratchPlaces(body, program)) {
    bytes[{place.begin, place.end}] += place.end_byte - place.begin_byte;
  }
  Waves waves = {.count = bytes.size()};
  for (const auto& [rounds, of_wave] : bytes) {
    waves.largest_bytes = std::max(waves.largest_bytes, of_wave);
  }
  return waves;
}

// What is quantised costs its ranks memory, at the source or the destination.
void AddScratch(const PlanFile& plan, StatsTable& table) {
  uint64_t largest_bytes[2] = {0, 0};
  int32_t largest_rank[2] = {0, 0};
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const auto side = static_cast<size_t>(plan.side(rank));
    const uint64_t bytes = ScratchBytes(plan, rank);
    if (bytes <= largest_bytes[side]) continue;
    largest_bytes[side] = bytes;
    largest_rank[side] = rank;
  }
  for (const fb::Side side : {fb::Side::kSource, fb::Side::kDestination}) {
    const auto i = static_cast<size_t>(side);
    if (largest_bytes[i] == 0) continue;
    table.AddBytes(absl::StrCat("scratch of a ", EnumText(side), " rank, max"),
                   largest_bytes[i],
                   absl::StrCat("rank ", largest_rank[i], ", to quantise"));
    const auto rank = static_cast<uint32_t>(largest_rank[i]);
    const Waves waves =
        WavesOf(plan.body(), *plan.body().programs()->Get(rank));
    if (waves.count == 0) continue;
    table.AddCount("  in waves", waves.count,
                   absl::StrCat("each in windows of at most ",
                                waves.largest_bytes, " bytes"));
  }
}

// A line for each kind; most plans have none.
void AddPostHooks(const fb::Body& body, StatsTable& table) {
  std::map<std::string, uint64_t> tensors;
  const std::vector<std::vector<int32_t>> holders = HoldersByBuffer(body);
  for (uint32_t id = 0; id < body.buffers()->size(); ++id) {
    const fb::Buffer& buffer = *body.buffers()->Get(id);
    for (uint32_t i = 0; i < Length(buffer.post_hooks()); ++i) {
      tensors[buffer.post_hooks()->Get(i)->name()->str()] +=
          TensorCount(buffer.index()) * holders[id].size();
    }
  }
  for (const auto& [name, count] : tensors) {
    table.AddCount(absl::StrCat("post-hook ", name), count,
                   "tensors of all ranks");
  }
}

void AddTables(const PlanFile& plan, StatsTable& table) {
  const fb::Body& body = plan.body();
  uint64_t params = 0;
  uint64_t skips = Length(body.skips());
  for (const fb::Param* param : *body.params()) {
    const uint64_t count = TensorCount(param->index());
    params += count;
    if (param->skip() != fb::SkipReason::kUnspecified) skips += count;
  }
  uint64_t fragments = 0;
  for (const fb::Buffer* buffer : *body.buffers())
    fragments += Length(buffer->fragments());
  uint64_t tensors = 0;
  for (const fb::RankProgram* program : *body.programs()) {
    for (const uint32_t buffer : *program->buffers()) {
      tensors += TensorCount(body.buffers()->Get(buffer)->index());
    }
  }
  table.AddCount("params", params,
                 absl::StrCat("in ", body.params()->size(), " stacks"));
  table.AddCount(
      "tensors of all ranks", tensors,
      absl::StrCat("in ", body.buffers()->size(), " buffer entries"));
  table.AddCount("fragments", fragments);
  table.AddCount("copies", body.copies()->size(),
                 absl::StrCat("in ", body.copy_lists()->size(), " lists"));
  table.AddCount("skips", skips);
  AddPostHooks(body, table);
  table.AddBytes("plan file", plan.bytes().size());
}

}  // namespace

std::string StatsText(const PlanFile& plan) {
  const Totals totals = TotalsOf(plan.body());
  StatsTable table;
  AddTraffic(plan, totals, table);
  AddTime(*plan.body().stats(), table);
  AddSchedule(plan.body(), totals, table);
  AddScratch(plan, table);
  AddTables(plan, table);
  return table.Text();
}

}  // namespace refit
