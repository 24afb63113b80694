#include "simulator/idle_time.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/text/dealt.h"
#include "simulator/all_ranks.h"

namespace refit::simulator {
namespace {

// The simulator takes ends that are nearly simultaneous for one. So a part of
// the critical path has idle time only if it is more than this share of it.
constexpr double kRounding = 1e-4;

// For how long a link was in use, as if at its whole speed.
class BusyTime {
 public:
  BusyTime(const Simulation& simulation, uint32_t link) {
    for (const RateChange& change : simulation.rates) {
      if (change.link != link) continue;
      MoveTo(change.seconds);
      share_ = change.share;
      changes_.push_back({now_, busy_, share_});
    }
    MoveTo(simulation.seconds);
    // Ends that are nearly simultaneous are one event. So the sum is a little
    // more than the link's bytes take.
    if (busy_ > 0) {
      scale_ = simulation.graph.links[link].BusySeconds() / busy_;
    }
  }

  // From the start until then.
  double Until(double seconds) const {
    const auto next = std::upper_bound(
        changes_.begin(), changes_.end(), seconds,
        [](double value, const Change& change) { return value < change.at; });
    if (next == changes_.begin()) return 0;
    const Change& last = *std::prev(next);
    return scale_ * (last.busy + last.share * (seconds - last.at));
  }

 private:
  struct Change {
    double at = 0;
    double busy = 0;   // until then
    double share = 0;  // of the link's speed, from then on
  };

  void MoveTo(double seconds) {
    busy_ += share_ * (seconds - now_);
    now_ = seconds;
  }

  std::vector<Change> changes_;  // ascending
  double now_ = 0;
  double busy_ = 0;
  double share_ = 0;
  double scale_ = 1;
};

// Whose a part of the critical path is. The lowest number comes first.
struct Owner {
  uint32_t number = 0;
  std::string text;

  bool operator<(const Owner& other) const {
    return std::tie(number, text) < std::tie(other.number, other.text);
  }
};

// What the task does, and whose it is.
std::pair<std::string, Owner> NamesOf(const PlanFile& plan,
                                      const Simulation& simulation,
                                      const Task& task) {
  const Owner rank = {.number = static_cast<uint32_t>(task.rank),
                      .text = absl::StrCat("rank ", task.rank)};
  if (task.kind == TaskKind::kStart) return {"starts of rounds", rank};
  if (task.kind == TaskKind::kDealtStart) {
    return {"starts of dealt messages", rank};
  }
  if (task.kind == TaskKind::kAgree) {
    return {TaskKindText(task.kind), {.text = "all ranks"}};
  }
  if (task.kind != TaskKind::kMessage) {
    return {TaskKindText(task.kind, simulation.options.change_rate.has_value()),
            rank};
  }
  const Message& message = simulation.graph.messages[task.message];
  const bool is_dealt =
      IsDealt(plan.body(), message.round, static_cast<uint32_t>(message.source),
              static_cast<uint32_t>(message.destination));
  const uint32_t number = simulation.bottlenecks[task.message];
  const char* const messages = is_dealt ? "dealt messages" : "messages";
  if (number == kNone) return {messages, rank};  // without bytes
  const Link& link = simulation.graph.links[number];
  return {absl::StrCat(messages, " that wait for ", LinkKindText(link.kind)),
          {.number = link.owner, .text = LinkOwnerText(link)}};
}

// The one with most. Sums that differ by rounding alone are equal.
const std::string& MostOf(const std::map<Owner, double>& seconds_of) {
  auto most = seconds_of.begin();
  for (auto next = most; next != seconds_of.end(); ++next) {
    if (next->second > most->second * (1 + kRounding)) most = next;
  }
  return most->first.text;
}

}  // namespace

std::vector<IdleTime> IdleTimes(const PlanFile& plan,
                                const Simulation& simulation) {
  const uint32_t binding = BindingLink(simulation.graph.links);
  if (binding == kNone) return {};
  const BusyTime busy(simulation, SimulatedLink(simulation.graph, binding));
  struct Sum {
    IdleTime time;
    std::map<Owner, double> seconds_of;
  };
  std::map<std::string, Sum> sums;
  for (const uint32_t number : simulation.critical_path) {
    const Times& times = simulation.times[number];
    const double seconds = times.end - times.begin - busy.Until(times.end) +
                           busy.Until(times.begin);
    const auto [during, whose] =
        NamesOf(plan, simulation, simulation.graph.tasks[number]);
    Sum& sum = sums[during];
    sum.time.during = during;
    sum.time.seconds += seconds;
    sum.time.parts += seconds > kRounding * (times.end - times.begin) ? 1 : 0;
    sum.seconds_of[whose] += seconds;
  }
  std::vector<IdleTime> idle;
  for (auto& [during, sum] : sums) {
    if (sum.time.parts == 0) continue;
    sum.time.most_of = MostOf(sum.seconds_of);
    idle.push_back(std::move(sum.time));
  }
  std::stable_sort(idle.begin(), idle.end(),
                   [](const IdleTime& a, const IdleTime& b) {
                     return a.seconds > b.seconds;
                   });
  return idle;
}

std::string PartsText(const IdleTime& idle) {
  if (idle.parts == 1) return absl::StrCat("1 part, ", idle.most_of);
  return absl::StrCat(idle.parts, " parts, mostly ", idle.most_of);
}

}  // namespace refit::simulator
