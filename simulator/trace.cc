#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "plan/text/trace_events.h"
#include "simulator/all_ranks.h"
#include "simulator/link_shares.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

constexpr size_t kBins = 250;  // of a counter, over the whole refit
// Changes of a counter that nobody would see.
constexpr double kVisibleShare = 0.005;

class TracePrinter {
 public:
  TracePrinter(const PlanFile& plan, const Simulation& simulation,
               const TextSink& sink)
      : plan_(plan),
        simulation_(simulation),
        graph_(simulation.graph),
        events_(plan, /*first_process=*/0, /*kind=*/"", sink) {}

  void Print();

 private:
  void NameSwitches();
  void PrintTask(RankTask of_rank);
  void PrintMessage(RankTask of_rank);
  void PrintCounters();
  uint32_t ProcessOf(const Link& link) const;

  const PlanFile& plan_;
  const Simulation& simulation_;
  const TaskGraph& graph_;
  TraceEvents events_;
  uint32_t messages_ = 0;  // printed
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

void TracePrinter::PrintMessage(RankTask of_rank) {
  const Message message = MessageOf(graph_, of_rank);
  const Times& times = simulation_.times[of_rank.number];
  const uint32_t link =
      simulation_.bottlenecks[graph_.tasks[of_rank.number].message];
  events_.Message(
      {.number = messages_++,
       .source = message.source,
       .destination = message.destination,
       .round = message.round,
       .size_bytes = message.size_bytes,
       .begin = times.begin,
       .end = times.end,
       .held_by =
           link == kNone
               ? ""
               : LinkText(graph_.links[LinkOf(graph_, link, of_rank.rank)])});
}

void TracePrinter::PrintTask(RankTask of_rank) {
  const Task task = TaskOf(graph_, of_rank);
  const Times& times = simulation_.times[of_rank.number];
  switch (task.kind) {
    case TaskKind::kMessage:
      PrintMessage(of_rank);
      break;
    case TaskKind::kStart: {
      // Its round ends with the point that follows it.
      uint32_t end = of_rank.number + 1;
      if (graph_.tasks[end].kind == TaskKind::kDealtStart) ++end;
      events_.Round(task.rank, task.round, times.begin,
                    simulation_.times[end].end);
      break;
    }
    case TaskKind::kDealtStart:  // in the same round
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
      // That of a round is a part of it.
      if (task.round != kNone) break;
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

// The mean of each bin, where it differs from that of the one before.
void TracePrinter::PrintCounters() {
  const double width = simulation_.seconds / kBins;
  if (!(width > 0)) return;
  const LinkShares shares(simulation_, kBins);
  for (uint32_t i = 0; i < graph_.links.size(); ++i) {
    const Link& link = graph_.links[i];
    const std::vector<double>& of_link = shares[i];
    double shown = 0;
    for (size_t bin = 0; bin <= kBins; ++bin) {
      const double share = bin == kBins ? 0 : of_link[bin];
      if (std::abs(share - shown) < kVisibleShare) continue;
      shown = share;
      events_.Share(ProcessOf(link), LinkKindText(link.kind),
                    static_cast<double>(bin) * width, share);
    }
  }
}

void TracePrinter::Print() {
  NameSwitches();
  ForEachTask(graph_, [&](RankTask task) { PrintTask(task); });
  PrintCounters();
  events_.End();
}

}  // namespace

void WriteTrace(const PlanFile& plan, const Simulation& simulation,
                const TextSink& sink) {
  TracePrinter(plan, simulation, sink).Print();
}

}  // namespace refit::simulator
