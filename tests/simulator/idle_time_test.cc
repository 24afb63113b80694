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

IdleTime Find(const std::vector<IdleTime>& times, const std::string& during) {
  for (const IdleTime& time : times) {
    if (time.during == during) return time;
  }
  ADD_FAILURE() << "nothing is " << during;
  return {};
}

// Rank 0 sends 16 bytes in each of two rounds. Rank 1 deals the second ones out
// to rank 2.
TEST(IdleTimes, NameWhatTheCriticalPathDoesMeanwhile) {
  const PlanFile plan = OpenSpec(DealtSpec());
  const Simulation simulation = SimulatePlan(plan, Slow());
  EXPECT_EQ(
      LinkText(simulation.graph.links[BindingLink(simulation.graph.links)]),
      "network egress of rank 0");
  EXPECT_NEAR(simulation.seconds, 45e-6, 1e-7);
  const std::vector<IdleTime> times = IdleTimes(plan, simulation);
  const IdleTime starts = Find(times, "starts of rounds");
  EXPECT_NEAR(starts.seconds, 2e-6, 1e-7);
  EXPECT_EQ(starts.parts, 2u);
  const IdleTime dealt_start = Find(times, "starts of dealt messages");
  EXPECT_NEAR(dealt_start.seconds, 3e-6, 1e-7);
  const IdleTime dealt =
      Find(times, "dealt messages that wait for peer egress");
  EXPECT_NEAR(dealt.seconds, 8e-6, 1e-7);
  EXPECT_EQ(dealt.most_of, "rank 1");
  EXPECT_EQ(times.front().during, dealt.during);
}

// For two seconds a message has half of the speed of the first link, since it
// waits for the second. Then another one has all of it.
TEST(IdleTimes, CountWhatIsLeftOfTheLinksSpeed) {
  const PlanFile plan = OpenSpec(SampleSpec());
  Simulation simulation;
  simulation.graph.links = {{.kind = LinkKind::kPeerEgress,
                             .owner = 0,
                             .bytes_per_second = 1,
                             .bytes = 2},
                            {.kind = LinkKind::kPeerIngress,
                             .owner = 3,
                             .bytes_per_second = 1,
                             .bytes = 1}};
  simulation.graph.messages = {
      {.destination = 3, .size_bytes = 1, .links = {0, 1}},
      {.destination = 2, .size_bytes = 1, .links = {0}}};
  simulation.graph.tasks = {{.kind = TaskKind::kMessage, .message = 0},
                            {.kind = TaskKind::kMessage, .message = 1}};
  simulation.times = {{.begin = 0, .end = 2}, {.begin = 2, .end = 3}};
  simulation.bottlenecks = {1, 0};
  simulation.critical_path = {0, 1};
  simulation.rates = {{.seconds = 0, .link = 0, .share = 0.5F},
                      {.seconds = 0, .link = 1, .share = 1},
                      {.seconds = 2, .link = 0, .share = 1}};
  simulation.seconds = 3;
  const std::vector<IdleTime> times = IdleTimes(plan, simulation);
  const IdleTime ingress = Find(times, "messages that wait for peer ingress");
  EXPECT_DOUBLE_EQ(ingress.seconds, 1);
  EXPECT_EQ(ingress.parts, 1u);
  EXPECT_EQ(ingress.most_of, "rank 3");
  EXPECT_EQ(times.size(), 1u);
}

// Rank 10 packs for as long as rank 9, and rounding gives it a little more.
TEST(IdleTimes, AreMostlyOfTheLowestRankAndOfAllIfAllRanksAgree) {
  const PlanFile plan = OpenSpec(SampleSpec());
  Simulation simulation;
  simulation.graph.links = {
      {.kind = LinkKind::kPeerEgress, .bytes_per_second = 1, .bytes = 1}};
  simulation.graph.tasks = {{.kind = TaskKind::kAgree},
                            {.kind = TaskKind::kPack, .rank = 10},
                            {.kind = TaskKind::kPack, .rank = 9}};
  simulation.times = {{.begin = 0, .end = 3},
                      {.begin = 3, .end = 4 + 1e-12},
                      {.begin = 4 + 1e-12, .end = 5}};
  simulation.critical_path = {0, 1, 2};
  simulation.seconds = 5;
  const std::vector<IdleTime> times = IdleTimes(plan, simulation);
  EXPECT_EQ(PartsText(Find(times, "agree")), "1 part, all ranks");
  EXPECT_EQ(PartsText(Find(times, "pack")), "2 parts, mostly rank 9");
}

TEST(IdleTimes, FillWhatTheBindingLinkLeavesOfTheTime) {
  for (const PlanSpec& spec : {SampleSpec(), FoldedSpec(), QuantizedSpec(),
                               WindowedSpec(), DealtSpec()}) {
    const PlanFile plan = OpenSpec(spec);
    for (const bool records : {false, true}) {
      Options options = Slow();
      options.record_rates = records;
      options.folds_equal_ranks = true;
      const Simulation simulation = SimulatePlan(plan, options);
      double seconds =
          simulation.graph.links[BindingLink(simulation.graph.links)]
              .BusySeconds();
      for (const IdleTime& time : IdleTimes(plan, simulation)) {
        EXPECT_GT(time.seconds, 0) << time.during;
        EXPECT_GT(time.parts, 0u) << time.during;
        seconds += time.seconds;
      }
      EXPECT_NEAR(seconds, simulation.seconds, 1e-4 * simulation.seconds);
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
