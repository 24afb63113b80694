#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/enum_text.h"
#include "simulator/link_shares.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

// Tracks of a rank. Slices of one track do not overlap: Perfetto wants that.
enum Track { kRounds = 1, kPacks, kUnpacks, kQuantizes, kReceived };

constexpr size_t kBins = 250;  // of a counter, over the whole refit
// Changes of a counter that nobody would see.
constexpr double kVisibleShare = 0.005;

class TracePrinter {
 public:
  TracePrinter(const PlanFile& plan, const Simulation& simulation)
      : plan_(plan), simulation_(simulation), graph_(simulation.graph) {}

  std::string Print();

 private:
  void Name(uint32_t process, std::optional<int> track,
            const std::string& name);
  void PrintNames();
  void PrintSlice(int32_t rank, Track track, const std::string& name,
                  double begin, double end);
  void PrintTasks();
  void PrintMessage(uint32_t number, const Times& times);
  void PrintCounters();
  uint32_t ProcessOf(const Link& link) const;

  template <typename... Args>
  void Event(const absl::FormatSpec<Args...>& format, const Args&... args) {
    absl::StrAppend(&text_, is_first_ ? "" : ",\n");
    is_first_ = false;
    absl::StrAppendFormat(&text_, format, args...);
  }

  const PlanFile& plan_;
  const Simulation& simulation_;
  const TaskGraph& graph_;
  std::string text_;
  bool is_first_ = true;
};

void TracePrinter::Name(uint32_t process, std::optional<int> track,
                        const std::string& name) {
  Event(R"({"ph":"M","pid":%d,"tid":%d,"name":"%s","args":{"name":"%s"}})",
        process, track.value_or(0),
        track.has_value() ? "thread_name" : "process_name", name);
}

// Hosts and leaves, of which a simulation has one kind, come after the ranks.
uint32_t TracePrinter::ProcessOf(const Link& link) const {
  return link.owner + (IsOfSwitch(link.kind)
                           ? static_cast<uint32_t>(plan_.world_size())
                           : 0);
}

void TracePrinter::PrintNames() {
  for (int32_t rank = 0; rank < plan_.world_size(); ++rank) {
    const auto process = static_cast<uint32_t>(rank);
    Name(process, std::nullopt,
         absl::StrCat("rank ", rank, " ", EnumText(plan_.side(rank)), ", host ",
                      plan_.body().programs()->Get(process)->host()));
    Name(process, kRounds, "rounds");
    Name(process, kPacks, "pack");
    Name(process, kUnpacks, "unpack");
    Name(process, kQuantizes, "quantize");
    Name(process, kReceived, "received");
  }
  // A host or a leaf may have an uplink, a downlink, or both.
  std::set<uint32_t> named;
  for (const Link& link : graph_.links) {
    if (!IsOfSwitch(link.kind) || !named.insert(link.owner).second) continue;
    Name(ProcessOf(link), std::nullopt, LinkOwnerText(link));
  }
}

void TracePrinter::PrintSlice(int32_t rank, Track track,
                              const std::string& name, double begin,
                              double end) {
  Event(R"({"ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"name":"%s"})",
        rank, static_cast<int>(track), begin * 1e6, (end - begin) * 1e6, name);
}

// A message lasts while others of its rank do, so it has no slice but a span of
// its own.
void TracePrinter::PrintMessage(uint32_t number, const Times& times) {
  const Message& message = graph_.messages[number];
  const std::string name =
      absl::StrCat("to rank ", message.destination, ", round ", message.round);
  const uint32_t link = simulation_.bottlenecks[number];
  Event(
      R"({"ph":"b","cat":"message","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"%s","args":{"bytes":%d,"held by":"%s"}})",
      number, message.source, static_cast<int>(kRounds), times.begin * 1e6,
      name, message.size_bytes,
      link == kNone ? "" : LinkText(graph_.links[link]));
  Event(
      R"({"ph":"e","cat":"message","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"%s"})",
      number, message.source, static_cast<int>(kRounds), times.end * 1e6, name);
  PrintSlice(
      message.destination, kReceived,
      absl::StrCat("from rank ", message.source, ", round ", message.round),
      times.end, times.end);
  Event(
      R"({"ph":"s","cat":"flow","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"message"})",
      number, message.source, static_cast<int>(kRounds), times.begin * 1e6);
  Event(
      R"({"ph":"f","bp":"e","cat":"flow","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"message"})",
      number, message.destination, static_cast<int>(kReceived),
      times.end * 1e6);
}

void TracePrinter::PrintTasks() {
  for (uint32_t i = 0; i < graph_.tasks.size(); ++i) {
    const Task& task = graph_.tasks[i];
    const Times& times = simulation_.times[i];
    switch (task.kind) {
      case TaskKind::kMessage:
        PrintMessage(task.message, times);
        break;
      case TaskKind::kStart:
        // Its round ends with the point that follows it.
        PrintSlice(task.rank, kRounds,
                   absl::StrCat("refit ", RoundText(plan_, task.round)),
                   times.begin, simulation_.times[i + 1].end);
        break;
      case TaskKind::kPack:
        PrintSlice(task.rank, kPacks, absl::StrCat("round ", task.round),
                   times.begin, times.end);
        break;
      case TaskKind::kUnpack:
        PrintSlice(task.rank, kUnpacks, absl::StrCat("round ", task.round),
                   times.begin, times.end);
        break;
      case TaskKind::kQuantize:
        PrintSlice(task.rank, kQuantizes, "quantize", times.begin, times.end);
        break;
      case TaskKind::kPoint:
        break;
    }
  }
}

// The mean of each bin, where it differs from that of the one before.
void TracePrinter::PrintCounters() {
  const double width = simulation_.seconds / kBins;
  if (!(width > 0)) return;
  const std::vector<std::vector<double>> shares =
      LinkShares(simulation_, kBins);
  for (size_t i = 0; i < shares.size(); ++i) {
    const Link& link = graph_.links[i];
    double shown = 0;
    for (size_t bin = 0; bin <= kBins; ++bin) {
      const double share = bin == kBins ? 0 : shares[i][bin];
      if (std::abs(share - shown) < kVisibleShare) continue;
      shown = share;
      Event(
          R"({"ph":"C","pid":%d,"ts":%.3f,"name":"%s","args":{"share":%.3f}})",
          ProcessOf(link), static_cast<double>(bin) * width * 1e6,
          LinkKindText(link.kind), share);
    }
  }
}

std::string TracePrinter::Print() {
  text_ = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  PrintNames();
  PrintTasks();
  PrintCounters();
  absl::StrAppend(&text_, "\n]}\n");
  return std::move(text_);
}

}  // namespace

std::string SimulationTrace(const PlanFile& plan,
                            const Simulation& simulation) {
  return TracePrinter(plan, simulation).Print();
}

}  // namespace refit::simulator
