#include <algorithm>

#include "absl/strings/str_cat.h"
#include "plan/enum_text.h"
#include "plan/network_peers.h"
#include "plan/text/dealt.h"
#include "plan/text/json_writer.h"
#include "simulator/idle_time.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

class SimulationPrinter : JsonWriter {
 public:
  SimulationPrinter(const PlanFile& plan, const Simulation& simulation)
      : JsonWriter(/*indent=*/1),
        plan_(plan),
        simulation_(simulation),
        graph_(simulation.graph) {}

  std::string Print();

 private:
  void PrintOptions();
  // The members of an object that is open.
  void PrintLink(const Link& link);
  void PrintCriticalPath();
  void PrintRounds();

  const PlanFile& plan_;
  const Simulation& simulation_;
  const TaskGraph& graph_;
};

// What was asked for. What-ifs that were not are left out.
void SimulationPrinter::PrintOptions() {
  const Options& options = simulation_.options;
  Text("executor", ExecutorText(options.executor));
  Bool("has_plan_speeds", options.has_plan_speeds);
  Real("peer_bytes_per_second", options.peer_bytes_per_second);
  Real("network_bytes_per_second", options.network_bytes_per_second);
  const auto print_factors = [&](const char* key,
                                 const std::map<int32_t, double>& factors) {
    if (factors.empty()) return;
    OpenObject(key);
    for (const auto& [rank, factor] : factors) {
      Real(absl::StrCat(rank), factor);
    }
    CloseObject();
  };
  print_factors("slow_ranks", options.slow_ranks);
  print_factors("slow_nics", options.slow_nics);
  if (!options.dead_nics.empty()) Line("dead_nics", options.dead_nics);
  if (options.oversubscription.has_value()) {
    Real("oversubscription", *options.oversubscription);
  }
  if (options.change_rate.has_value()) {
    Real("change_rate", *options.change_rate);
    Text("rung", RungText(graph_.rung));
    Number("stored_bytes", graph_.stored_bytes);
    Number("dense_bytes", graph_.dense_bytes);
    Real("dense_seconds", simulation_.dense_seconds);
    Number("dense_every", simulation_.dense_every);
    Real("average_seconds", simulation_.average_seconds);
  }
}

void SimulationPrinter::PrintLink(const Link& link) {
  Text("name", LinkText(link));
  Number("bytes", link.bytes);
  Real("bytes_per_second", link.bytes_per_second);
  Real("busy_seconds", link.BusySeconds());
}

void SimulationPrinter::PrintCriticalPath() {
  Objects("critical_path", simulation_.critical_path, [&](uint32_t number) {
    const Task& task = graph_.tasks[number];
    Text("kind",
         TaskKindText(task.kind, simulation_.options.change_rate.has_value()));
    Number("rank", task.rank);
    if (task.round != kNone) Number("round", task.round);
    Real("begin_seconds", simulation_.times[number].begin);
    Real("end_seconds", simulation_.times[number].end);
    if (task.kind == TaskKind::kMessage) {
      const Message& message = graph_.messages[task.message];
      Number("to_rank", message.destination);
      Number("size_bytes", message.size_bytes);
      if (const uint32_t link = simulation_.bottlenecks[task.message];
          link != kNone) {
        Text("held_by", LinkText(graph_.links[link]));
      }
      OpenArray("tensors");
      for (const std::string& name : TensorsOf(plan_, message)) Text(name);
      CloseArray();
    }
  });
}

void SimulationPrinter::PrintRounds() {
  uint32_t number = 0;
  Objects("rounds", simulation_.rounds, [&](const RoundTimes& round) {
    Number("round", number++);
    Text("route", EnumText(round.route));
    Text("mechanism", EnumText(round.mechanism));
    Number("messages", round.messages);
    Number("size_bytes", round.size_bytes);
    Real("begin_seconds", round.begin);
    Real("end_seconds", round.end);
  });
}

std::string SimulationPrinter::Print() {
  const Estimates estimates = EstimatesOf(plan_);
  OpenObject();
  Real("simulated_seconds", simulation_.seconds);
  Real("lower_bound_seconds", estimates.lower_bound_seconds);
  Real("predicted_seconds", estimates.predicted_seconds);
  PrintOptions();
  const std::vector<uint32_t> peers = NetworkPeers(plan_.body());
  Number("network_peers_max",
         peers.empty() ? 0 : *std::max_element(peers.begin(), peers.end()));
  if (const Dealt dealt = DealtOf(plan_); dealt.bytes > 0) {
    Number("dealt_bytes", dealt.bytes);
    Number("dealing_ranks", dealt.ranks);
  }
  if (const uint32_t binding = BindingLink(graph_.links); binding != kNone) {
    OpenObject("binding_link");
    PrintLink(graph_.links[binding]);
    CloseObject();
  }
  Objects("idle", IdleTimes(plan_, simulation_), [&](const IdleTime& idle) {
    Text("during", idle.during);
    Real("seconds", idle.seconds);
    Number("parts", idle.parts);
    Text("most_of", idle.most_of);
  });
  PrintCriticalPath();
  PrintRounds();
  Objects("links", graph_.links, [&](const Link& link) { PrintLink(link); });
  CloseObject();
  return Take();
}

}  // namespace

std::string SimulationJson(const PlanFile& plan, const Simulation& simulation) {
  return SimulationPrinter(plan, simulation).Print();
}

}  // namespace refit::simulator
