// Ranks that do the same are simulated once, and nothing that is printed tells.
#include "simulator/equal_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "simulator/links.h"
#include "simulator/output.h"
#include "simulator/simulation.h"
#include "tests/compiler/compile_testing.h"
#include "tests/compiler/make_compact.h"
#include "tests/simulator/collected_text.h"

namespace refit::simulator {
namespace {

// Three trainers of four ranks, ranks 0 .. 11, each feed two engines of two.
// Part p is ranks 4p .. 4p + 3 and 12 + 4p .. 12 + 4p + 3.
PlanFile ThreeParts(const std::string& hosts, const std::string& topology,
                    const std::string& options = "",
                    int32_t slots = kStagingSlots, int trainers = 3,
                    int engines = 6) {
  const auto side = [](int replicas, int shards) {
    return R"({"layout": "generic", "meshes": {"m": {"axes": {"dp": )" +
           std::to_string(replicas) + R"(, "tp": )" + std::to_string(shards) +
           R"(}}}, "tensors": [{"match": "*", "mesh": "m",)"
           R"x( "placements": ["Replicate", "Shard(0)"]}]})x";
  };
  const std::string job = GenericJob(
      R"({"name": "w", "shape": [960, 640], "dtype": "bf16"},
         {"name": "v", "shape": [240, 33], "dtype": "fp32"})",
      side(trainers, 4), side(engines, 2),
      R"(, "topology": {"peer_gigabytes_per_second": 0.1,
          "network_gigabytes_per_second": 0.01, "hosts": )" +
          hosts + topology + R"(}, "options": {"bucket_bytes": 65536)" +
          options + "}");
  return OpenJob(job, [&](Limits& limits) {
    MakeCompact(limits);
    limits.slots = slots;
  });
}
// Each trainer has a host, and so have the two engines that it feeds.
constexpr char kHosts[] =
    "[0,0,0,0, 2,2,2,2, 4,4,4,4, 1,1,1,1, 3,3,3,3, 5,5,5,5]";

// Each trainer shares a host with the engines that it feeds.
constexpr char kSharedHosts[] =
    "[0,0,0,0, 1,1,1,1, 2,2,2,2, 0,0,0,0, 1,1,1,1, 2,2,2,2]";
constexpr char kDelta[] = R"(, "delta": {})";

// How many of the three parts are simulated. Fails where what is printed of the
// simulation is not as if all were.
size_t PartsSimulated(const PlanFile& plan, Options options) {
  UseSpeedsOf(plan, options);
  options.record_rates = true;
  options.folds_equal_ranks = true;
  const absl::StatusOr<Simulation> folded = Simulate(plan, options);
  options.folds_equal_ranks = false;
  const absl::StatusOr<Simulation> whole = Simulate(plan, options);
  EXPECT_TRUE(folded.ok()) << folded.status();
  EXPECT_TRUE(whole.ok()) << whole.status();
  if (!folded.ok() || !whole.ok()) return 0;
  EXPECT_EQ(SimulationJson(plan, *folded), SimulationJson(plan, *whole));
  EXPECT_EQ(SimulationText(plan, *folded, /*rounds=*/true),
            SimulationText(plan, *whole, /*rounds=*/true));
  EXPECT_EQ(TraceOf(plan, *folded), TraceOf(plan, *whole));
  EXPECT_GT(whole->seconds, 0);
  return 3 * folded->graph.messages.size() / whole->graph.messages.size();
}

TEST(EqualRanks, EqualPartsAreSimulatedOnce) {
  const PlanFile plan = ThreeParts(kHosts, "");
  EXPECT_EQ(PartsSimulated(plan, {}), 1u);
  EXPECT_EQ(PartsSimulated(plan, OptionsOf(Executor::kCpu)), 1u);
  const PlanFile staged = ThreeParts(kHosts, "", R"(, "peer": "staged")");
  EXPECT_EQ(PartsSimulated(staged, {}), 1u);
  EXPECT_EQ(PartsSimulated(ThreeParts(kHosts, "", "", /*slots=*/3), {}), 1u);
}

TEST(EqualRanks, NicsAndHostsOfOnePartAreItsOwn) {
  for (const std::string topology :
       {R"(, "gpus_per_nic": 2)", R"(, "hosts_per_nvlink_domain": 2)"}) {
    EXPECT_EQ(PartsSimulated(ThreeParts(kHosts, topology), {}), 1u) << topology;
  }
  const PlanFile plan = ThreeParts(kHosts, "");
  Options options;
  options.oversubscription = 4;
  EXPECT_EQ(PartsSimulated(plan, options), 1u);
}

TEST(EqualRanks, APartThatDiffersIsSimulatedToo) {
  const PlanFile plan = ThreeParts(kHosts, "");
  for (const int32_t rank : {0, 5, 11, 13, 18, 23}) {
    Options options;
    options.slow_ranks = {{rank, 3}};
    EXPECT_EQ(PartsSimulated(plan, options), 2u) << rank;
    options.slow_ranks.clear();
    options.slow_nics = {{rank, 3}};
    EXPECT_EQ(PartsSimulated(plan, options), 2u) << rank;
    options.slow_nics.clear();
    options.dead_nics = {rank};
    EXPECT_EQ(PartsSimulated(plan, options), 2u) << rank;
    options.oversubscription = 2;
    EXPECT_EQ(PartsSimulated(plan, options), 2u) << rank;
  }
  Options options;
  // Rank 1 is to its part what 5 is to its own.
  options.slow_ranks = {{1, 2}, {5, 2}};
  EXPECT_EQ(PartsSimulated(plan, options), 2u);
  options.slow_ranks = {{1, 2}, {6, 2}};
  EXPECT_EQ(PartsSimulated(plan, options), 3u);
}

// The last of five trainers feeds one engine.
TEST(EqualRanks, APartThatIsLikeNoOtherIsSimulatedToo) {
  const PlanFile plan = ThreeParts(
      "[0,0,0,0, 1,1,1,1, 2,2,2,2, 3,3,3,3, 4,4,4,4, "
      "5,5,5,5, 6,6,6,6, 7,7,7,7, 8,8,8,8, 9,9]",
      "", "", kStagingSlots, /*trainers=*/5, /*engines=*/9);
  EXPECT_LT(PartsSimulated(plan, {}), 2u);
  for (const int32_t rank : {1, 13, 17, 25, 37}) {
    Options options;
    options.slow_ranks = {{rank, 3}};
    EXPECT_LT(PartsSimulated(plan, options), 2u) << rank;
  }
}

// Hosts 2p and 2p + 1 are those of part p.
TEST(EqualRanks, PartsThatShareALeafAreSimulatedTogether) {
  const std::string oversubscribed = R"(, "spine_oversubscription": 2)";
  const PlanFile apart =
      ThreeParts(kHosts, R"(, "hosts_per_leaf": 2)" + oversubscribed);
  EXPECT_EQ(PartsSimulated(apart, {}), 1u);
  const PlanFile of_hosts =
      ThreeParts(kHosts, R"(, "hosts_per_leaf": 1)" + oversubscribed);
  EXPECT_EQ(PartsSimulated(of_hosts, {}), 1u);
  const PlanFile shared =
      ThreeParts(kHosts, R"(, "hosts_per_leaf": 3)" + oversubscribed);
  EXPECT_EQ(PartsSimulated(shared, {}), 3u);
  const PlanFile rails =
      ThreeParts(kHosts, R"(, "rails": true)" + oversubscribed);
  EXPECT_EQ(PartsSimulated(rails, {}), 3u);
  // A spine as fast as its leaves holds nothing up.
  const PlanFile fast = ThreeParts(kHosts, R"(, "hosts_per_leaf": 3)");
  EXPECT_EQ(PartsSimulated(fast, {}), 1u);
  Options options;
  options.oversubscription = 2;
  EXPECT_EQ(PartsSimulated(fast, options), 3u);
}

TEST(EqualRanks, RefitsOfWhatChangedAreSimulatedOnce) {
  const PlanFile staged = ThreeParts(kHosts, "", kDelta);
  const PlanFile unchecked =
      ThreeParts(kHosts, "", R"(, "delta": {"check": false})");
  for (const double rate : {0.0, 0.001, 0.02, 0.3, 1.0}) {
    Options options;
    options.change_rate = rate;
    EXPECT_EQ(PartsSimulated(staged, options), 1u) << rate;
    EXPECT_EQ(PartsSimulated(unchecked, options), 1u) << rate;
    Options on_cpus = OptionsOf(Executor::kCpu);
    on_cpus.change_rate = rate;
    EXPECT_EQ(PartsSimulated(staged, on_cpus), 1u) << rate;
    // Ranks of one part find last, or an equal one of the last part.
    for (const int32_t rank : {0, 7, 9, 12, 22}) {
      options.slow_ranks = {{rank, 3}};
      EXPECT_EQ(PartsSimulated(staged, options), 2u) << rate << ", " << rank;
    }
  }
}

TEST(EqualRanks, WithoutSharedListsAllRanksAreSimulated) {
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                 GenericSide(2, "Shard(0)"), GenericSide(3, "Shard(0)")));
  const Options options;
  const Links links(SitesOf(plan), options);
  const EqualRanks equal(plan, links);
  EXPECT_FALSE(equal.any());
  EXPECT_EQ(equal.StandInOf(4), 4);
}

}  // namespace
}  // namespace refit::simulator
