#include "simulator/simulation.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "simulator/all_ranks.h"
#include "simulator/event_queue.h"

namespace refit::simulator {
namespace {

// Ends that are nearer to each other are one event: what was alike by the plan
// is not told apart by rounding. Far below any start-up.
constexpr double kSimultaneousSeconds = 1e-7;

// A message on its way.
struct Transit {
  uint32_t task = kNone;
  double bytes_left = 0;
  double rate = 0;
  double since = 0;         // when bytes_left was so many
  uint32_t bottleneck = 0;  // position in the message's links
  // How long each of its links held its rate down.
  std::array<float, kMostLinks> held_seconds = {};
};

std::vector<double> Capacities(const std::vector<Link>& links) {
  std::vector<double> capacities;
  for (const Link& link : links) capacities.push_back(link.bytes_per_second);
  return capacities;
}

class Loop {
 public:
  explicit Loop(Simulation& simulation)
      : simulation_(simulation),
        graph_(simulation.graph),
        network_(Capacities(graph_.links)),
        flows_(graph_.messages.size()),
        events_(graph_.tasks.size()),
        shares_(graph_.links.size(), 0),
        is_recorded_(graph_.links.size(), simulation.options.record_rates) {
    if (const uint32_t link = BindingLink(graph_.links); link != kNone) {
      is_recorded_[SimulatedLink(graph_, link)] = true;
    }
  }

  absl::Status Run();

 private:
  void IndexWaits();
  void Ready(uint32_t task, double now);
  void End(uint32_t task, double now);
  void EndReady();
  void Depart(uint32_t task, double now);
  void Arrive(uint32_t task, double now);
  void ShareLinks(double now);
  static void Progress(Transit& transit, double now);

  Simulation& simulation_;
  const TaskGraph& graph_;
  FlowNetwork network_;
  std::vector<uint32_t> first_;      // of each task, in followers_
  std::vector<uint32_t> followers_;  // tasks that wait for it
  std::vector<uint32_t> awaited_;    // how many each task still waits for
  std::vector<Transit> transits_;    // by flow
  std::vector<uint32_t> flows_;      // by message
  std::vector<std::pair<uint32_t, double>> ended_;  // tasks, to be told
  EventQueue events_;
  std::vector<float> shares_;      // of links, as recorded last
  std::vector<bool> is_recorded_;  // by link
  size_t left_ = 0;                // tasks that have not ended
};

void Loop::IndexWaits() {
  const size_t count = graph_.tasks.size();
  first_.assign(count + 1, 0);
  awaited_.assign(count, 0);
  for (const Wait& wait : graph_.waits) {
    ++first_[wait.from + 1];
    ++awaited_[wait.to];
  }
  for (size_t i = 0; i < count; ++i) first_[i + 1] += first_[i];
  followers_.resize(graph_.waits.size());
  std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
  for (const Wait& wait : graph_.waits) followers_[next[wait.from]++] = wait.to;
}

void Loop::Ready(uint32_t task, double now) {
  simulation_.times[task].begin = now;
  const Task& work = graph_.tasks[task];
  if (work.kind == TaskKind::kMessage) {
    Depart(task, now);
  } else if (work.seconds > 0) {
    events_.Set({.seconds = now + work.seconds, .task = task});
  } else {
    ended_.emplace_back(task, now);
  }
}

void Loop::End(uint32_t task, double now) {
  simulation_.times[task].end = now;
  simulation_.seconds = std::max(simulation_.seconds, now);
  --left_;
  for (uint32_t i = first_[task]; i < first_[task + 1]; ++i) {
    const uint32_t follower = followers_[i];
    if (--awaited_[follower] > 0) continue;
    simulation_.times[follower].after = task;
    Ready(follower, now);
  }
}

// Work that takes no time ends as soon as it may begin.
void Loop::EndReady() {
  for (size_t i = 0; i < ended_.size(); ++i) {
    const auto [task, now] = ended_[i];
    End(task, now);
  }
  ended_.clear();
}

void Loop::Depart(uint32_t task, double now) {
  const uint32_t number = graph_.tasks[task].message;
  const Message& message = graph_.messages[number];
  if (message.size_bytes == 0) {
    ended_.emplace_back(task, now);
    return;
  }
  const uint32_t flow = network_.Add(message.links);
  if (flow >= transits_.size()) transits_.resize(flow + 1);
  flows_[number] = flow;
  transits_[flow] = {.task = task,
                     .bytes_left = static_cast<double>(message.size_bytes),
                     .since = now};
}

// Moves it on at the rate that it had.
void Loop::Progress(Transit& transit, double now) {
  const double seconds = now - transit.since;
  transit.bytes_left =
      std::max(0.0, transit.bytes_left - transit.rate * seconds);
  transit.held_seconds[transit.bottleneck] += static_cast<float>(seconds);
  transit.since = now;
}

void Loop::Arrive(uint32_t task, double now) {
  const uint32_t message = graph_.tasks[task].message;
  Transit& transit = transits_[flows_[message]];
  Progress(transit, now);
  const auto& held = transit.held_seconds;
  simulation_.bottlenecks[message] =
      graph_.messages[message].links[static_cast<size_t>(
          std::max_element(held.begin(), held.end()) - held.begin())];
  network_.Remove(flows_[message]);
  End(task, now);
}

void Loop::ShareLinks(double now) {
  for (const uint32_t flow : network_.Share()) {
    Transit& transit = transits_[flow];
    Progress(transit, now);
    transit.rate = network_.rate(flow);
    transit.bottleneck = network_.bottleneck(flow);
    events_.Set({.seconds = now + transit.bytes_left / transit.rate,
                 .task = transit.task});
  }
  for (const uint32_t link : network_.SharedLinks()) {
    if (!is_recorded_[link]) continue;
    const auto share = static_cast<float>(network_.LinkRate(link) /
                                          graph_.links[link].bytes_per_second);
    if (share == shares_[link]) continue;
    shares_[link] = share;
    simulation_.rates.push_back({.seconds = now, .link = link, .share = share});
  }
}

absl::Status Loop::Run() {
  IndexWaits();
  left_ = graph_.tasks.size();
  simulation_.times.assign(left_, Times());
  simulation_.bottlenecks.assign(graph_.messages.size(), kNone);
  for (uint32_t task = 0; task < graph_.tasks.size(); ++task) {
    if (awaited_[task] == 0) Ready(task, 0);
  }
  EndReady();
  ShareLinks(0);
  std::vector<Event> events;
  while (!events_.empty()) {
    // Those that are simultaneous, at the time of the last.
    const double until = events_.top().seconds + kSimultaneousSeconds;
    events.clear();
    while (!events_.empty() && events_.top().seconds <= until) {
      events.push_back(events_.top());
      events_.Pop();
    }
    const double now = events.back().seconds;
    for (const Event& event : events) {
      if (graph_.tasks[event.task].kind == TaskKind::kMessage) {
        Arrive(event.task, now);
      } else {
        End(event.task, now);
      }
      EndReady();
    }
    ShareLinks(now);
  }
  if (left_ == 0) return absl::OkStatus();
  for (uint32_t task = 0; task < graph_.tasks.size(); ++task) {
    const Task& work = graph_.tasks[task];
    if (awaited_[task] == 0 || work.round == kNone) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("round ", work.round, ": rank ", work.rank,
                     " waits for ever: ranks wait for each other"));
  }
  return absl::InvalidArgumentError("ranks wait for each other for ever");
}

std::vector<RoundTimes> RoundsOf(const PlanFile& plan,
                                 const Simulation& simulation) {
  const TaskGraph& graph = simulation.graph;
  const auto& rounds = *plan.body().rounds();
  std::vector<RoundTimes> times(rounds.size());
  for (uint32_t i = 0; i < rounds.size(); ++i) {
    times[i] = {.route = rounds.Get(i)->route(),
                .mechanism = rounds.Get(i)->mechanism(),
                .begin = simulation.seconds};
  }
  for (size_t i = 0; i < graph.tasks.size(); ++i) {
    const Task& task = graph.tasks[i];
    if (task.kind == TaskKind::kPoint || task.round == kNone) continue;
    RoundTimes& round = times[task.round];
    round.begin = std::min(round.begin, simulation.times[i].begin);
    round.end = std::max(round.end, simulation.times[i].end);
    if (task.kind != TaskKind::kMessage) continue;
    const uint64_t equal = graph.equal_ranks.CountOf(task.rank);
    round.messages += equal;
    round.size_bytes += equal * graph.messages[task.message].size_bytes;
  }
  return times;
}

// From the task that ended last back to one that waited for nothing.
std::vector<uint32_t> CriticalPath(const Simulation& simulation) {
  std::vector<uint32_t> path;
  uint32_t last = kNone;
  for (uint32_t i = 0; i < simulation.times.size(); ++i) {
    if (last == kNone || simulation.times[i].end > simulation.times[last].end) {
      last = i;
    }
  }
  for (; last != kNone; last = simulation.times[last].after) {
    if (simulation.graph.tasks[last].kind != TaskKind::kPoint) {
      path.push_back(last);
    }
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace

const char* ExecutorText(Executor executor) {
  switch (executor) {
    case Executor::kGpu:
      return "gpu";
    case Executor::kCpu:
      return "cpu";
  }
  return "unknown";
}

Options OptionsOf(Executor executor) {
  Options options;
  if (executor == Executor::kGpu) return options;
  options.executor = executor;
  options.peer_bytes_per_second = kCpuPeerBytesPerSecond;
  options.local_bytes_per_second = kCpuPeerBytesPerSecond;
  options.network_round_seconds = kCpuRoundSeconds;
  options.peer_round_seconds = 0;
  options.peer_message_seconds = kCpuRoundSeconds;
  options.dealt_message_seconds = kCpuRoundSeconds;
  options.quantized_message_seconds = kCpuRoundSeconds;
  options.copy_bytes_per_second = kCpuCopyBytesPerSecond;
  options.quantized_elements_per_second = kCpuQuantizedElementsPerSecond;
  return options;
}

const char* TaskKindText(TaskKind kind, bool is_delta) {
  switch (kind) {
    case TaskKind::kMessage:
      return "message";
    case TaskKind::kPack:
      return is_delta ? "encode" : "pack";
    case TaskKind::kStart:
      return "start";
    case TaskKind::kDealtStart:
      return "start of dealt messages";
    case TaskKind::kUnpack:
      return is_delta ? "apply" : "unpack";
    case TaskKind::kQuantize:
      return "quantize";
    case TaskKind::kFind:
      return "find";
    case TaskKind::kAgree:
      return "agree";
    case TaskKind::kKeep:
      return "keep";
    case TaskKind::kCheck:
      return "check";
    case TaskKind::kPoint:
      return "point";
  }
  return "unknown";
}

absl::StatusOr<Simulation> Simulate(const PlanFile& plan,
                                    const Options& options) {
  absl::StatusOr<TaskGraph> graph = BuildTaskGraph(plan, options);
  if (!graph.ok()) return graph.status();
  Simulation simulation;
  simulation.options = options;
  simulation.graph = *std::move(graph);
  const absl::Status status = Loop(simulation).Run();
  if (!status.ok()) return status;
  simulation.rounds = RoundsOf(plan, simulation);
  simulation.critical_path = CriticalPath(simulation);
  if (options.change_rate.has_value()) {
    Options dense = options;
    dense.change_rate.reset();
    dense.record_rates = false;
    const absl::StatusOr<Simulation> whole = Simulate(plan, dense);
    if (!whole.ok()) return whole.status();
    simulation.dense_seconds = whole->seconds;
    simulation.dense_every = plan.body().delta()->dense_every();
    simulation.average_seconds = simulation.seconds;
    if (simulation.dense_every > 0) {
      simulation.average_seconds +=
          (whole->seconds - simulation.seconds) / simulation.dense_every;
    }
  }
  return simulation;
}

}  // namespace refit::simulator
