#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "plan/text/trace_events.h"
#include "simulator/link_shares.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

constexpr size_t kBins = 250;  // of a counter, over the whole refit
// Changes of a counter that nobody would see.
constexpr double kVisibleShare = 0.005;

class TracePrinter {
 public:
  TracePrinter(const PlanFile& plan, const Simulation& simulation)
      : plan_(plan),
        simulation_(simulation),
        graph_(simulation.graph),
        events_(plan, /*first_process=*/0, /*kind=*/"") {}

  std::string Print();

 private:
  void NameSwitches();
  void PrintTasks();
  void PrintMessage(uint32_t number, const Times& times);
  void PrintCounters();
  uint32_t ProcessOf(const Link& link) const;

  const PlanFile& plan_;
  const Simulation& simulation_;
  const TaskGraph& graph_;
  TraceEvents events_;
};

// Hosts and leaves, of which a simulation has one kind, come after the ranks.
uint32_t TracePrinter::ProcessOf(const Link& link) const {
  return link.owner + (IsOfSwitch(link.kind)
                           ? static_cast<uint32_t>(plan_.world_size())
                           : 0);
}

void TracePrinter::NameSwitches() {
  // A host or a leaf may have an uplink, a downlink, or both.
  std::set<uint32_t> named;
  for (const Link& link : graph_.links) {
    if (!IsOfSwitch(link.kind) || !named.insert(link.owner).second) continue;
    events_.NameProcess(ProcessOf(link), LinkOwnerText(link));
  }
}

void TracePrinter::PrintMessage(uint32_t number, const Times& times) {
  const Message& message = graph_.messages[number];
  const uint32_t link = simulation_.bottlenecks[number];
  events_.Message(
      {.number = number,
       .source = message.source,
       .destination = message.destination,
       .round = message.round,
       .size_bytes = message.size_bytes,
       .begin = times.begin,
       .end = times.end,
       .held_by = link == kNone ? "" : LinkText(graph_.links[link])});
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
        events_.Round(task.rank, task.round, times.begin,
                      simulation_.times[i + 1].end);
        break;
      case TaskKind::kPack:
        events_.Slice(task.rank, Track::kPacks,
                      "round " + std::to_string(task.round), times.begin,
                      times.end);
        break;
      case TaskKind::kUnpack:
        events_.Slice(task.rank, Track::kUnpacks,
                      "round " + std::to_string(task.round), times.begin,
                      times.end);
        break;
      case TaskKind::kQuantize:
        events_.Slice(task.rank, Track::kQuantizes, "quantize", times.begin,
                      times.end);
        break;
      case TaskKind::kFind:
      case TaskKind::kAgree:
      case TaskKind::kKeep:
      case TaskKind::kCheck:
        events_.Slice(task.rank, Track::kPacks, TaskKindText(task.kind),
                      times.begin, times.end);
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
      events_.Share(ProcessOf(link), LinkKindText(link.kind),
                    static_cast<double>(bin) * width, share);
    }
  }
}

std::string TracePrinter::Print() {
  NameSwitches();
  PrintTasks();
  PrintCounters();
  return events_.Take();
}

}  // namespace

std::string SimulationTrace(const PlanFile& plan,
                            const Simulation& simulation) {
  return TracePrinter(plan, simulation).Print();
}

}  // namespace refit::simulator
