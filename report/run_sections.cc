#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "plan/enum_text.h"
#include "report/sections.h"
#include "simulator/all_ranks.h"
#include "simulator/idle_time.h"
#include "simulator/link_shares.h"
#include "simulator/output.h"

namespace refit::report {
namespace {

using simulator::kNone;
using simulator::Link;
using simulator::Message;
using simulator::RankTask;
using simulator::Simulation;
using simulator::Task;
using simulator::TaskKind;

constexpr size_t kBins = 120;  // of a link's timeline
constexpr size_t kMostLinks = 1024;
constexpr size_t kMostSlowest = 40;
constexpr size_t kMostParts = 400;  // of the critical path
constexpr size_t kMostTensors = 4;  // named of a message

// A character for a share: 64 of them, and "A" for none at all.
std::string ShareText(const std::vector<double>& shares) {
  static constexpr char kDigits[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  std::string text;
  for (const double share : shares) {
    const long digit = std::lround(std::clamp(share, 0.0, 1.0) * 63);
    text += kDigits[share > 0 ? std::max(digit, 1L) : 0];
  }
  return text;
}

void WriteLink(const Link& link, DataWriter& data) {
  data.Text("name", simulator::LinkText(link));
  data.Number("bytes", link.bytes);
  data.Real("bytes_per_second", link.bytes_per_second);
  data.Real("busy_seconds", link.BusySeconds());
}

// "rank": whose the link is, less its number.
std::string OwnerText(const Link& link) {
  std::string text = simulator::LinkText(link);
  text.resize(text.find_last_of(' '));
  return text.substr(text.find_last_of(' ') + 1);
}

double SecondsOf(const Simulation& simulation, uint32_t task) {
  return simulation.times[task].end - simulation.times[task].begin;
}

void WriteTask(const PlanFile& plan, const Simulation& simulation,
               RankTask of_rank, DataWriter& data) {
  const Task task = simulator::TaskOf(simulation.graph, of_rank);
  data.Name("kind", simulator::TaskKindText(task.kind));
  data.Number("rank", task.rank);
  data.Real("begin", simulation.times[of_rank.number].begin);
  data.Real("end", simulation.times[of_rank.number].end);
  if (task.round != kNone) data.Number("round", task.round);
  if (task.kind == TaskKind::kMessage) {
    const Message message = simulator::MessageOf(simulation.graph, of_rank);
    data.Number("to", message.destination);
    data.Number("bytes", message.size_bytes);
    if (const uint32_t link = simulation.bottlenecks[task.message];
        link != kNone) {
      data.Name("held_by",
                simulator::LinkText(simulation.graph.links[simulator::LinkOf(
                    simulation.graph, link, of_rank.rank)]));
    }
    std::vector<std::string> tensors = simulator::TensorsOf(plan, message);
    if (tensors.size() > kMostTensors) {
      data.Number("more_tensors", tensors.size() - kMostTensors);
      tensors.resize(kMostTensors);
    }
    data.Names("tensors", tensors);
  }
}

// The longest `most` of the tasks; of equals those that come first.
std::vector<uint32_t> Longest(const Simulation& simulation,
                              std::vector<uint32_t> tasks, size_t most) {
  std::stable_sort(tasks.begin(), tasks.end(), [&](uint32_t a, uint32_t b) {
    return SecondsOf(simulation, a) > SecondsOf(simulation, b);
  });
  if (tasks.size() > most) tasks.resize(most);
  return tasks;
}

// The same of the work of all ranks.
std::vector<RankTask> LongestOfAll(const Simulation& simulation, size_t most) {
  std::vector<std::pair<double, RankTask>> longest;  // descending
  simulator::ForEachTask(simulation.graph, [&](RankTask task) {
    const TaskKind kind = simulation.graph.tasks[task.number].kind;
    if (kind == TaskKind::kPoint || kind == TaskKind::kStart ||
        kind == TaskKind::kDealtStart) {
      return;
    }
    const double seconds = SecondsOf(simulation, task.number);
    if (longest.size() == most) {
      if (seconds <= longest.back().first) return;
      longest.pop_back();
    }
    const auto place =
        std::upper_bound(longest.begin(), longest.end(), seconds,
                         [](double a, const auto& b) { return a > b.first; });
    longest.insert(place, {seconds, task});
  });
  std::vector<RankTask> tasks;
  for (const auto& [seconds, task] : longest) tasks.push_back(task);
  return tasks;
}

}  // namespace

void WriteTimes(const ReportInputs& inputs, DataWriter& data) {
  const Estimates estimates = EstimatesOf(inputs.plan);
  const Simulation& simulation = inputs.simulation;
  data.OpenObject("times");
  data.Real("lower_bound", estimates.lower_bound_seconds);
  data.Real("predicted", estimates.predicted_seconds);
  data.Text("predicted_binding_link", estimates.binding_link);
  data.Real("simulated", simulation.seconds);
  data.Text("executor", simulator::ExecutorText(simulation.options.executor));
  data.Bool("plan_speeds", simulation.options.has_plan_speeds);
  if (const uint32_t binding = simulator::BindingLink(simulation.graph.links);
      binding != kNone) {
    data.OpenObject("binding_link");
    WriteLink(simulation.graph.links[binding], data);
    data.CloseObject();
  }
  const auto idle_times = simulator::IdleTimes(inputs.plan, simulation);
  data.Objects("idle", idle_times, [&](const simulator::IdleTime& idle) {
    data.Text("during", idle.during);
    data.Real("seconds", idle.seconds);
    data.Number("parts", idle.parts);
    data.Text("most_of", idle.most_of);
  });
  data.CloseObject();
}

void WriteLinks(const Simulation& simulation, DataWriter& data) {
  const std::vector<Link>& links = simulation.graph.links;
  std::vector<uint32_t> shown(links.size());
  std::iota(shown.begin(), shown.end(), 0);
  if (shown.size() > kMostLinks) {
    std::stable_sort(shown.begin(), shown.end(), [&](uint32_t a, uint32_t b) {
      return links[a].BusySeconds() > links[b].BusySeconds();
    });
    shown.resize(kMostLinks);
  }
  std::stable_sort(shown.begin(), shown.end(), [&](uint32_t a, uint32_t b) {
    return std::make_pair(links[a].kind, links[a].owner) <
           std::make_pair(links[b].kind, links[b].owner);
  });
  const simulator::LinkShares shares(simulation, kBins);
  data.OpenObject("links");
  data.Number("all", links.size());
  data.Objects("list", shown, [&](uint32_t number) {
    const Link& link = links[number];
    data.Name("kind", simulator::LinkKindText(link.kind));
    data.Name("of", OwnerText(link));
    data.Number("owner", link.owner);
    data.Number("bytes", link.bytes);
    data.Real("speed", link.bytes_per_second);
    data.Text("shares", ShareText(shares[number]));
  });
  data.CloseObject();
}

void WriteRounds(const ReportInputs& inputs, DataWriter& data) {
  const std::vector<simulator::RoundTimes>& rounds = inputs.simulation.rounds;
  const uint32_t rounds_per_group = RoundsPerGroup(inputs.plan);
  std::vector<double> begins, ends;
  std::vector<uint64_t> messages, bytes;
  std::vector<std::string> routes;
  for (uint32_t i = 0; i < rounds.size(); ++i) {
    const simulator::RoundTimes& round = rounds[i];
    if (i % rounds_per_group == 0) {
      begins.push_back(round.begin);
      ends.push_back(round.end);
      messages.push_back(0);
      bytes.push_back(0);
      routes.push_back(RouteText(round.route, round.mechanism));
    }
    begins.back() = std::min(begins.back(), round.begin);
    ends.back() = std::max(ends.back(), round.end);
    messages.back() += round.messages;
    bytes.back() += round.size_bytes;
  }
  data.OpenObject("rounds");
  data.Number("per_group", rounds_per_group);
  data.Line("begin", begins);
  data.Line("end", ends);
  data.Line("messages", messages);
  data.Line("bytes", bytes);
  data.Names("route", routes);
  data.CloseObject();
}

void WriteSlowest(const ReportInputs& inputs, DataWriter& data) {
  const Simulation& simulation = inputs.simulation;
  data.Objects(
      "slowest", LongestOfAll(simulation, kMostSlowest),
      [&](RankTask task) { WriteTask(inputs.plan, simulation, task, data); });
}

void WriteCriticalPath(const ReportInputs& inputs, DataWriter& data) {
  const Simulation& simulation = inputs.simulation;
  std::vector<uint32_t> shown =
      Longest(simulation, simulation.critical_path, kMostParts);
  std::sort(shown.begin(), shown.end(), [&](uint32_t a, uint32_t b) {
    return std::make_pair(simulation.times[a].begin, a) <
           std::make_pair(simulation.times[b].begin, b);
  });
  double left_out_seconds = 0;
  for (const uint32_t task : simulation.critical_path) {
    left_out_seconds += SecondsOf(simulation, task);
  }
  for (const uint32_t task : shown) {
    left_out_seconds -= SecondsOf(simulation, task);
  }
  const size_t left_out = simulation.critical_path.size() - shown.size();
  data.OpenObject("critical_path");
  data.Number("left_out", left_out);
  data.Real("left_out_seconds", left_out == 0 ? 0 : left_out_seconds);
  data.Objects("parts", shown, [&](uint32_t task) {
    WriteTask(inputs.plan, simulation,
              {.number = task, .rank = simulation.graph.tasks[task].rank},
              data);
  });
  data.CloseObject();
}

}  // namespace refit::report
