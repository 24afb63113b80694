// Whole refits over NcclTransport: every element is right, and NCCL is used as
// it wants to be used.
#include <algorithm>
#include <atomic>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/schedule/rank_schedule.h"
#include "runner/rank_threads.h"
#include "tests/compiler/make_compact.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr char kStaged[] = R"("peer": "staged", )";
constexpr char kSmallBuckets[] =
    R"("bucket_bytes": 4096, "staging_bytes": 65536)";

class NcclRefitTest : public testing::Test {
 protected:
  NcclRefitTest() { fake_nccl_reset(); }

  // Connects, and refits a few times.
  static void ExpectRefits(const PlanFile& plan) {
    NcclWorld world(plan);
    world.Bind();
    const uint64_t connected = fake_nccl_lazy_connects();
    for (int refit = 0; refit < 3; ++refit) world.ExpectEveryElementRight(plan);
    EXPECT_EQ(fake_nccl_violations(), 0) << fake_nccl_first_violation();
    EXPECT_EQ(fake_nccl_group_mismatches(), 0) << fake_nccl_first_violation();
    EXPECT_EQ(fake_nccl_cut_groups(), 0);
    EXPECT_EQ(fake_nccl_lazy_connects(), connected)
        << "edges that Connect did not touch";
    EXPECT_EQ(fake_nccl_messages() > 0, Stages(plan));
  }

  static bool Stages(const PlanFile& plan) {
    for (const fb::Round* round : *plan.body().rounds()) {
      if (round->mechanism() == fb::Mechanism::kStaged) return true;
    }
    return false;
  }

  static std::set<fb::Route> RoutesOf(const PlanFile& plan) {
    std::set<fb::Route> routes;
    for (const fb::Round* round : *plan.body().rounds()) {
      routes.insert(round->route());
    }
    return routes;
  }
};

// An event that is recorded while NCCL has yet to take what was issued before
// it may be reached too early.
TEST_F(NcclRefitTest, NoEventIsRecordedBeforeNcclHasTakenTheGroup) {
  class WatchfulDevice : public HostDevice {
   public:
    absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
      class Event : public DeviceEvent {
       public:
        explicit Event(std::atomic<int>& records) : records_(records) {}
        absl::Status Record(Stream) override {
          ++records_;
          EXPECT_EQ(fake_nccl_unawaited(), 0);
          return absl::OkStatus();
        }
        absl::Status Await(Stream) override { return absl::OkStatus(); }
        absl::StatusOr<bool> Reached() override { return true; }

       private:
        std::atomic<int>& records_;
      };
      return std::make_unique<Event>(records);
    }
    std::atomic<int> records = 0;
  };
  fake_nccl_set_connect_delay(2000);
  const PlanFile plan = ReshardPlan({.source_ranks = 2,
                                     .destination_ranks = 3,
                                     .layers = 4,
                                     .rows = 12,
                                     .columns = 30})
                            .Open();
  WatchfulDevice device;
  NcclWorld world(plan, {.device = &device});
  for (int32_t rank = 0; rank < 5; ++rank) fake_nccl_delay(rank, 500);
  world.Bind();
  world.ExpectEveryElementRight(plan);
  EXPECT_GE(device.records, 5 * 4);
}

TEST_F(NcclRefitTest, TwoRanksFeedThree) {
  ExpectRefits(ReshardPlan({.source_ranks = 2,
                            .destination_ranks = 3,
                            .layers = 4,
                            .rows = 12,
                            .columns = 30,
                            .padding = 3})
                   .Open());
}

TEST_F(NcclRefitTest, SlotsKeepRoundsApart) {
  for (const int slots : {1, 2, 3}) {
    SCOPED_TRACE(slots);
    fake_nccl_reset();
    const PlanFile plan =
        CompiledPlan(ReshardJob(2, 3, std::string(kStaged) + kSmallBuckets), "",
                     [&](Limits& limits) { limits.slots = slots; });
    EXPECT_GE(plan.body().rounds()->size(), 3);
    ExpectRefits(plan);
  }
}

TEST_F(NcclRefitTest, HostsAreReachedThroughTheWorldsCommunicator) {
  const PlanFile plan =
      CompiledPlan(ReshardJob(3, 2, std::string(kSmallBuckets),
                              R"(, "topology": {"hosts": [0, 0, 0, 1, 2]})"));
  EXPECT_EQ(RoutesOf(plan), std::set<fb::Route>{fb::Route::kNetwork});
  ExpectRefits(plan);
}

bool Broadcasts(const PlanFile& plan) {
  return (plan.plan().required_features() & kFeatureBroadcasts) != 0;
}

TEST_F(NcclRefitTest, OneRankBroadcastsToOneRankOfEachHost) {
  const PlanFile plan = HostsPlan("0, 1, 2, 3, 4, 5", kSmallBuckets);
  ASSERT_TRUE(Broadcasts(plan));
  ExpectRefits(plan);
}

TEST_F(NcclRefitTest, WhatIsBroadcastIsDealtOutInsideHosts) {
  const PlanFile plan = HostsPlan("0, 1, 1, 2, 2, 3", kSmallBuckets);
  ASSERT_TRUE(Broadcasts(plan));
  EXPECT_NE(plan.plan().required_features() & kFeatureDealing, 0u);
  ExpectRefits(plan);
}

// A destination rank shares the source's host, and broadcasts what it got.
TEST_F(NcclRefitTest, ReceiversOfTheSourcesHostBroadcastToo) {
  const PlanFile plan = HostsPlan("0, 0, 1, 2, 3, 4", kSmallBuckets);
  ASSERT_TRUE(Broadcasts(plan));
  const fb::RankProgram& receiver = *plan.body().programs()->Get(1);
  EXPECT_TRUE(std::any_of(receiver.messages()->begin(),
                          receiver.messages()->end(),
                          [](const fb::Message* message) {
                            return message->broadcast() != 0 &&
                                   message->kind() == fb::MessageKind::kSend;
                          }));
  ExpectRefits(plan);
}

TEST_F(NcclRefitTest, RoutesOfBothKindsUseOneCommunicatorAtATime) {
  const PlanFile plan = CompiledPlan(
      ReshardJob(4, 4, std::string(kStaged) + kSmallBuckets,
                 R"(, "topology": {"hosts": [0, 0, 1, 1, 0, 1, 1, 2]})"));
  EXPECT_EQ(RoutesOf(plan),
            (std::set<fb::Route>{fb::Route::kPeer, fb::Route::kNetwork}));
  ExpectRefits(plan);
}

TEST_F(NcclRefitTest, SixteenRanksOfThreeHosts) {
  ExpectRefits(
      CompiledPlan(ReshardJob(8, 8, std::string(kStaged) + kSmallBuckets,
                              R"(, "topology": {"gpus_per_host": 6})")));
}

// The first that asks writes a list out, while the others read it or wait. This
// is where ThreadSanitizer sees that.
TEST_F(NcclRefitTest, RanksThatAreThreadsShareAPackedPlan) {
  const PlanFile plan = CompiledPlan(
      ReshardJob(4, 4, std::string(kStaged) + kSmallBuckets), "", MakeCompact);
  ASSERT_NE(plan.plan().required_features() & kFeaturePackedMessages, 0u);
  std::atomic<size_t> operations = 0;
  ASSERT_TRUE(RunRankThreads(16, [&](int32_t thread) {
                operations +=
                    RankSchedule(plan, thread % 8).operations().size();
              }).ok());
  EXPECT_GT(operations, 0u);
  ExpectRefits(plan);
}

TEST_F(NcclRefitTest, ColocatedRanksStageToo) {
  const PlanFile plan = CompiledPlan(ReshardJob(
      3, 3, std::string(kStaged) + kSmallBuckets, R"(, "colocated": true)"));
  EXPECT_TRUE(RoutesOf(plan).contains(fb::Route::kLocal));
  ExpectRefits(plan);
}

// Attention is quantized at the source, the MLP, whose blocks it cuts, at the
// destination; both in more windows than fit side by side.
TEST_F(NcclRefitTest, WhatIsQuantizedTravelsInWindows) {
  ExpectRefits(WindowsPlan(
      R"("peer": "staged", "bucket_bytes": 32768, "staging_bytes": 131072,
         "scratch_bytes": 150000)"));
}

// Messages take their time, so that ranks are in different rounds.
TEST_F(NcclRefitTest, SlowRanksAreWaitedFor) {
  const PlanFile plan =
      CompiledPlan(ReshardJob(2, 3, std::string(kStaged) + kSmallBuckets));
  fake_nccl_delay(1, 2000);
  fake_nccl_delay(4, 500);
  ExpectRefits(plan);
}

TEST_F(NcclRefitTest, RanksOfOneHostStoreIntoEachOther) {
  const PlanFile plan = ReshardPlan({.source_ranks = 3,
                                     .destination_ranks = 4,
                                     .layers = 3,
                                     .rows = 24,
                                     .columns = 40,
                                     .mechanism = fb::Mechanism::kDirect})
                            .Open();
  EXPECT_FALSE(Stages(plan));
  ExpectRefits(plan);
}

// One rank's tensors for `replicas`. Slow links, so that relays are worth their
// rounds.
PlanFile ReplicasPlan(int replicas, std::string_view topology,
                      std::string_view options = "{}") {
  return CompiledPlan(absl::StrFormat(
      R"({
    "model": {"parameters": [
      {"name": "w", "shape": [960, 16], "dtype": "bf16"},
      {"name": "norm", "shape": [8], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"x": %d}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "topology": {%s
      "peer_gigabytes_per_second": 0.1,
      "network_gigabytes_per_second": 0.01},
    "options": %s})",
      replicas, topology, options));
}

TEST_F(NcclRefitTest, HostsRelayWhatTheNetworkBrought) {
  const PlanFile plan = ReplicasPlan(5, R"("hosts": [0, 0, 0, 1, 1, 1],)");
  EXPECT_TRUE(Stages(plan));
  EXPECT_TRUE(plan.plan().required_features() & kFeatureRelays);
  fake_nccl_delay(2, 500);
  ExpectRefits(plan);
}

// A relay inside a host packs what it has unpacked, in staging that it has used
// before; between hosts it passes on what lies there.
TEST_F(NcclRefitTest, ReplicasRelayInStages) {
  for (const std::string_view topology :
       {"", R"("transport": "ucx", "hosts": [0, 1, 2, 3, 4, 5],)",
        R"("transport": "ucx", "hosts": [0, 1, 1, 2, 2, 2],)"}) {
    SCOPED_TRACE(topology);
    fake_nccl_reset();
    const PlanFile plan = ReplicasPlan(
        5, topology,
        R"({"peer": "staged", "bucket_bytes": 4096, "staging_bytes": 65536})");
    EXPECT_TRUE(plan.plan().required_features() &
                (topology.empty() ? kFeatureStagedRelays : kFeatureDealing));
    fake_nccl_delay(2, 500);
    ExpectRefits(plan);
  }
}

}  // namespace
}  // namespace refit
