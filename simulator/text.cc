#include "plan/text/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "plan/enum_text.h"
#include "plan/network_peers.h"
#include "plan/text/dealt.h"
#include "plan/text/plan_view.h"
#include "simulator/idle_time.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

constexpr size_t kShownMessages = 8;  // of the critical path
// Less is 0.000 ms.
constexpr double kShownSeconds = 0.5e-6;

double SecondsOf(const Simulation& simulation, uint32_t task) {
  return simulation.times[task].end - simulation.times[task].begin;
}

std::string MilliText(double seconds) {
  return absl::StrFormat("%.3f ms", seconds * 1e3);
}

std::string ShareText(double part, double whole) {
  return absl::StrFormat("%.1f %%", whole > 0 ? 100 * part / whole : 0);
}

// "1.083 x the lower bound"
std::string RatioText(double seconds, double reference, const char* name) {
  if (!(reference > 0)) return "";
  return absl::StrFormat(", %.3f x the %s", seconds / reference, name);
}

bool IsDealtOut(const PlanFile& plan, const Message& message) {
  return IsDealt(plan.body(), message.round,
                 static_cast<uint32_t>(message.source),
                 static_cast<uint32_t>(message.destination));
}

void AddCriticalPath(const PlanFile& plan, const Simulation& simulation,
                     std::string& text) {
  // By kind of work; messages by the kind of link that held them.
  std::map<std::string, double> seconds;
  std::vector<uint32_t> messages;
  for (const uint32_t number : simulation.critical_path) {
    const Task& task = simulation.graph.tasks[number];
    std::string what =
        TaskKindText(task.kind, simulation.options.change_rate.has_value());
    if (task.kind == TaskKind::kMessage) {
      messages.push_back(number);
      const uint32_t link = simulation.bottlenecks[task.message];
      if (link == kNone) continue;  // it has no bytes
      what = absl::StrCat("messages that wait for ",
                          LinkKindText(simulation.graph.links[link].kind));
    }
    seconds[what] += SecondsOf(simulation, number);
  }
  std::vector<std::pair<double, std::string>> parts;
  for (const auto& [what, sum] : seconds) parts.emplace_back(sum, what);
  std::stable_sort(
      parts.begin(), parts.end(),
      [](const auto& a, const auto& b) { return a.first > b.first; });
  absl::StrAppend(&text, "critical path\n");
  for (const auto& [sum, what] : parts) {
    absl::StrAppendFormat(&text, "  %12s  %7s  %s\n", MilliText(sum),
                          ShareText(sum, simulation.seconds), what);
  }
  std::stable_sort(messages.begin(), messages.end(),
                   [&](uint32_t a, uint32_t b) {
                     return SecondsOf(simulation, a) > SecondsOf(simulation, b);
                   });
  if (messages.size() > kShownMessages) messages.resize(kShownMessages);
  if (messages.empty()) return;
  absl::StrAppend(&text, "its longest messages\n");
  for (const uint32_t number : messages) {
    const Message& message =
        simulation.graph.messages[simulation.graph.tasks[number].message];
    const uint32_t link =
        simulation.bottlenecks[simulation.graph.tasks[number].message];
    const std::vector<std::string> tensors = TensorsOf(plan, message);
    absl::StrAppendFormat(
        &text, "  %12s  %s, rank %d %s %d, %d bytes%s\n",
        MilliText(SecondsOf(simulation, number)),
        RoundText(plan, message.round), message.source,
        IsDealtOut(plan, message) ? "deals to" : "to", message.destination,
        message.size_bytes,
        link == kNone
            ? ""
            : absl::StrCat(", by ", LinkText(simulation.graph.links[link])));
    if (tensors.empty()) continue;
    absl::StrAppendFormat(
        &text, "  %12s  %s%s\n", "", tensors.front(),
        tensors.size() == 1
            ? ""
            : absl::StrCat(" and ", tensors.size() - 1, " more"));
  }
}

// From the lower bound, where it is of the same links, to the simulated time.
void AddIdleTimes(const PlanFile& plan, const Simulation& simulation,
                  bool has_bound, std::string& text) {
  const std::vector<IdleTime> idle_times = IdleTimes(plan, simulation);
  if (idle_times.empty()) return;
  const double busy =
      simulation.graph.links[BindingLink(simulation.graph.links)].BusySeconds();
  const auto add = [&](const char* sign, double seconds,
                       const std::string& what) {
    absl::StrAppendFormat(&text, "  %12s  %s\n",
                          absl::StrCat(sign, MilliText(seconds)), what);
  };
  if (has_bound) {
    const double bound = EstimatesOf(plan).lower_bound_seconds;
    absl::StrAppend(&text, "from the lower bound to the simulated time\n");
    add("", bound, "lower bound");
    if (std::abs(busy - bound) >= kShownSeconds) {
      add(busy < bound ? "-" : "+", std::abs(busy - bound),
          absl::StrCat("bytes of the binding link: ", MilliText(busy)));
    }
  } else {
    absl::StrAppend(&text,
                    "from the bytes of the binding link to the simulated "
                    "time\n");
    add("", busy, "bytes of the binding link");
  }
  for (const IdleTime& idle : idle_times) {
    if (idle.seconds < kShownSeconds) continue;
    add("+", idle.seconds, absl::StrCat(idle.during, ", ", PartsText(idle)));
  }
  add("", simulation.seconds, "simulated");
}

// Of a refit that sends only what changed.
std::string ChangeText(const Simulation& simulation) {
  const uint64_t bytes = simulation.graph.stored_bytes;
  // In the words of refit-run's reports.
  std::string text = absl::StrFormat(
      "delta          rung %s, change rate %g %%, stored %d of dense %d bytes "
      "(%.3f %%); %.3f x a dense refit of this plan, %.6g s",
      RungText(simulation.graph.rung), 100 * *simulation.options.change_rate,
      bytes, simulation.graph.dense_bytes,
      simulation.graph.dense_bytes == 0
          ? 0
          : 100 * static_cast<double>(bytes) /
                static_cast<double>(simulation.graph.dense_bytes),
      simulation.seconds / simulation.dense_seconds, simulation.dense_seconds);
  if (simulation.dense_every > 0) {
    absl::StrAppendFormat(
        &text,
        "\naverage        %.6g s, with a dense refit in %d (dense_every)",
        simulation.average_seconds, simulation.dense_every);
  }
  return text;
}

// "rank 3 slow 2 x, NIC of rank 5 dead"; "" if nothing is asked for.
std::string WhatIfText(const Options& options) {
  std::vector<std::string> parts;
  for (const auto& [rank, factor] : options.slow_ranks) {
    parts.push_back(absl::StrFormat("rank %d slow %g x", rank, factor));
  }
  for (const auto& [rank, factor] : options.slow_nics) {
    parts.push_back(absl::StrFormat("NIC of rank %d slow %g x", rank, factor));
  }
  for (const int32_t rank : options.dead_nics) {
    parts.push_back(absl::StrFormat("NIC of rank %d dead", rank));
  }
  if (options.oversubscription.has_value()) {
    parts.push_back(absl::StrFormat("spine oversubscribed %g : 1",
                                    *options.oversubscription));
  }
  return absl::StrJoin(parts, ", ");
}

void AddRounds(const Simulation& simulation, std::string& text) {
  absl::StrAppend(&text,
                  "rounds       begin ms      end ms  messages"
                  "             bytes  route\n");
  for (uint32_t i = 0; i < simulation.rounds.size(); ++i) {
    const RoundTimes& round = simulation.rounds[i];
    absl::StrAppendFormat(&text, "%6d  %13.3f %11.3f  %8d  %16d  %s\n", i,
                          round.begin * 1e3, round.end * 1e3, round.messages,
                          round.size_bytes,
                          RouteText(round.route, round.mechanism));
  }
}

}  // namespace

std::vector<std::string> TensorsOf(const PlanFile& plan,
                                   const Message& message) {
  const fb::Body& body = plan.body();
  const SentCopies sent = SentCopiesOf(
      plan.messages(), static_cast<uint32_t>(message.source), message.position);
  const fb::RankProgram& packer = *body.programs()->Get(sent.packer);
  std::map<uint32_t, uint64_t> elements;  // by entry of Body.buffers
  for (const fb::Copy* copy : sent.copies) {
    elements[packer.buffers()->Get(copy->buffer_slot())] +=
        CopyElements(body, *copy);
  }
  std::vector<std::pair<uint64_t, uint32_t>> largest;
  for (const auto& [buffer, count] : elements)
    largest.emplace_back(count, buffer);
  std::stable_sort(
      largest.begin(), largest.end(),
      [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> names;
  for (const auto& [count, buffer] : largest) {
    names.push_back(body.buffers()->Get(buffer)->name()->str());
  }
  return names;
}

std::string SimulationText(const PlanFile& plan, const Simulation& simulation,
                           bool rounds) {
  const Estimates estimates = EstimatesOf(plan);
  std::string text =
      absl::StrFormat("simulated      %.6g s", simulation.seconds);
  const bool has_bound = estimates.lower_bound_seconds > 0 &&
                         simulation.options.has_plan_speeds &&
                         !simulation.options.change_rate.has_value();
  if (has_bound) {
    absl::StrAppend(&text,
                    RatioText(simulation.seconds, estimates.lower_bound_seconds,
                              "lower bound"),
                    RatioText(simulation.seconds, estimates.predicted_seconds,
                              "prediction"));
  }
  if (simulation.options.change_rate.has_value()) {
    absl::StrAppend(&text, "\n", ChangeText(simulation));
  }
  absl::StrAppendFormat(&text,
                        "\nlinks          peer %g GB/s, network %g GB/s, per "
                        "rank and direction\n",
                        simulation.options.peer_bytes_per_second / 1e9,
                        simulation.options.network_bytes_per_second / 1e9);
  if (const fb::Topology* const topology = plan.body().topology()) {
    absl::StrAppend(&text, "topology       ", TopologyText(*topology), "\n");
  }
  if (const std::string what_if = WhatIfText(simulation.options);
      !what_if.empty()) {
    absl::StrAppend(&text, "what if        ", what_if, "\n");
  }
  const std::vector<uint32_t> peers = NetworkPeers(plan.body());
  if (const auto most = std::max_element(peers.begin(), peers.end());
      most != peers.end() && *most > 0) {
    absl::StrAppendFormat(&text, "network peers  %d at most, of rank %d\n",
                          *most, most - peers.begin());
  }
  if (const Dealt dealt = DealtOf(plan); dealt.bytes > 0) {
    absl::StrAppend(&text, "dealt          ", DealtText(dealt), "\n");
  }
  if (const uint32_t binding = BindingLink(simulation.graph.links);
      binding != kNone) {
    const Link& link = simulation.graph.links[binding];
    absl::StrAppendFormat(
        &text, "binding link   %s: %d bytes take %s, %s of the time\n",
        LinkText(link), link.bytes, MilliText(link.BusySeconds()),
        ShareText(link.BusySeconds(), simulation.seconds));
  }
  AddIdleTimes(plan, simulation, has_bound, text);
  AddCriticalPath(plan, simulation, text);
  if (rounds) AddRounds(simulation, text);
  return text;
}

}  // namespace refit::simulator
