#include "simulator/idle_time.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/plan/plan_spec.h"

namespace refit::simulator {
namespace {

// A byte takes a microsecond between hosts, and half of one inside a host.
Options Slow() {
  Options options;
  options.network_bytes_per_second = 1e6;
  options.peer_bytes_per_second = 2e6;
  options.network_round_seconds = 1e-6;
  options.dealt_message_seconds = 3e-6;
  options.copy_bytes_per_second = 1e15;
  return options;
}

Simulation SimulatePlan(const PlanFile& plan, const Options& options) {
  absl::StatusOr<Simulation> simulation = Simulate(plan, options);
  EXPECT_TRUE(simulation.ok()) << simulation.status();
  return simulation.ok() ? *std::move(simulation) : Simulation();
}

const IdleTime& Find(const std::vector<IdleTime>& times,
                     const std::string& during) {
  for (const IdleTime& time : times) {
    if (time.during == during) return time;
  }
  static const IdleTime none;
  ADD_FAILURE() << "nothing is " << during;
  return none;
}

// Rank 0 sends 16 bytes in each of two rounds. Rank 1 deals the second ones out
// to rank 2.
TEST(IdleTimes, NameWhatTheCriticalPathDoesMeanwhile) {
  const PlanFile plan = OpenSpec(DealtSpec());
  const Simulation simulation = SimulatePlan(plan, Slow());
  EXPECT_EQ(LinkText(simulation.graph.links[simulation.BusiestLink()]),
            "network egress of rank 0");
  EXPECT_NEAR(simulation.seconds, 45e-6, 1e-7);
  const std::vector<IdleTime> times = IdleTimes(plan, simulation);
  const IdleTime& starts = Find(times, "starts of rounds");
  EXPECT_NEAR(starts.seconds, 2e-6, 1e-7);
  EXPECT_EQ(starts.parts, 2u);
  const IdleTime& dealt_start = Find(times, "starts of dealt messages");
  EXPECT_NEAR(dealt_start.seconds, 3e-6, 1e-7);
  const IdleTime& dealt =
      Find(times, "dealt messages that wait for peer egress");
  EXPECT_NEAR(dealt.seconds, 8e-6, 1e-7);
  EXPECT_EQ(dealt.most_of, "rank 1");
  EXPECT_EQ(times.front().during, dealt.during);
}

// While its messages wait for another link, it has a part of its speed.
TEST(IdleTimes, CountWhatIsLeftOfTheLinksSpeed) {
  Options options = Slow();
  options.slow_ranks = {{1, 4}};
  const PlanFile plan = OpenSpec(DealtSpec());
  const Simulation simulation = SimulatePlan(plan, options);
  const IdleTime& waits = Find(IdleTimes(plan, simulation),
                               "messages that wait for slow network ingress");
  EXPECT_EQ(waits.most_of, "rank 1");
}

TEST(IdleTimes, FillWhatTheBusiestLinkLeavesOfTheTime) {
  for (const PlanSpec& spec : {SampleSpec(), FoldedSpec(), QuantizedSpec(),
                               WindowedSpec(), DealtSpec()}) {
    const PlanFile plan = OpenSpec(spec);
    for (const bool records : {false, true}) {
      Options options = Slow();
      options.record_rates = records;
      options.folds_equal_ranks = true;
      const Simulation simulation = SimulatePlan(plan, options);
      double seconds =
          simulation.graph.links[simulation.BusiestLink()].BusySeconds();
      for (const IdleTime& time : IdleTimes(plan, simulation)) {
        EXPECT_GT(time.seconds, -1e-9) << time.during;
        seconds += time.seconds;
      }
      EXPECT_NEAR(seconds, simulation.seconds, 1e-12);
    }
  }
}

TEST(IdleTimes, OfNothingAreNone) {
  PlanSpec spec = DealtSpec();
  for (auto& program : spec.programs) program.messages.clear();
  spec.programs[1].relays.clear();
  const PlanFile plan = OpenSpec(spec);
  EXPECT_TRUE(IdleTimes(plan, SimulatePlan(plan, Slow())).empty());
}

}  // namespace
}  // namespace refit::simulator
