#include "simulator/simulation.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "tests/plan/plan_spec.h"

namespace refit::simulator {
namespace {

// A byte a second, and nothing else takes time.
Options BytesAlone() {
  Options options;
  options.peer_bytes_per_second = 1;
  options.network_bytes_per_second = 1;
  options.local_bytes_per_second = 1;
  options.direct_round_seconds = 0;
  options.network_round_seconds = 0;
  options.peer_message_seconds = 0;
  options.peer_round_seconds = 0;
  options.quantized_message_seconds = 0;
  options.dealt_message_seconds = 0;
  options.copy_bytes_per_second = 1e30;
  options.quantized_elements_per_second = 1e30;
  return options;
}

// Ranks that send bytes of one tensor to others. What is moved is not right;
// only the loader has to take it.
class Traffic {
 public:
  Traffic(uint32_t sources, uint32_t ranks) {
    spec_.source_ranks = sources;
    spec_.params = {{.name = "w", .index = {}, .shape = {1024}}};
    spec_.buffers = {{.name = "w",
                      .index = {},
                      .shape = {1024},
                      .fragments = {},
                      .regions = {}}};
    spec_.copy_lists = {{}};
    spec_.programs.resize(ranks);
    for (PlanSpec::Program& program : spec_.programs) {
      program.buffers = {0};
      program.staging_bytes = 1 << 20;
    }
    spec_.bucket_bytes = 1 << 20;
    spec_.staging_bytes = 1 << 20;
    spec_.slots = 2;
    spec_.operations_per_round = 32;
  }

  Traffic& Round(fb::Route route, fb::Mechanism mechanism) {
    spec_.rounds.push_back(route);
    spec_.mechanisms.push_back(mechanism);
    return *this;
  }
  // In the last round. Messages of a rank come by peer, receives first.
  Traffic& Send(uint32_t from, uint32_t to, uint64_t bytes) {
    const auto round = static_cast<uint32_t>(spec_.rounds.size() - 1);
    Add(spec_.programs[from], SendTo(to, round, 0, 0, bytes));
    Add(spec_.programs[to], RecvFrom(from, round, 0, 0, bytes));
    return *this;
  }
  Traffic& Host(uint32_t rank, uint32_t host) {
    spec_.programs[rank].host = host;
    return *this;
  }
  // Both ends of all messages pack and unpack.
  Traffic& Packed() {
    spec_.copy_lists.push_back({{.slot = 0, .loops = {}},
                                {.slot = 0, .loops = {}, .staging_offset = 2}});
    for (PlanSpec::Program& program : spec_.programs) {
      for (fb::Message& message : program.messages) {
        const auto make =
            message.kind() == fb::MessageKind::kSend ? SendTo : RecvFrom;
        message =
            make(message.peer(), message.round(), 1, 0, message.size_bytes());
      }
    }
    return *this;
  }
  PlanSpec& spec() { return spec_; }

 private:
  static void Add(PlanSpec::Program& program, const fb::Message& message) {
    program.messages.push_back(message);
  }

  PlanSpec spec_;
};

constexpr auto kStaged = fb::Mechanism::kStaged;
constexpr auto kDirect = fb::Mechanism::kDirect;

Simulation SimulateSpec(const PlanSpec& spec, const Options& options) {
  const PlanFile plan = OpenSpec(spec);
  absl::StatusOr<Simulation> simulation = Simulate(plan, options);
  EXPECT_TRUE(simulation.ok()) << simulation.status();
  return simulation.ok() ? *std::move(simulation) : Simulation();
}

std::string MistakeOf(const PlanSpec& spec, const Options& options) {
  const PlanFile plan = OpenSpec(spec);
  return std::string(Simulate(plan, options).status().message());
}

// Nothing that a CPU does is as fast as on a GPU.
TEST(Simulation, ACpusCostsAreItsOwn) {
  const Options gpu = OptionsOf(Executor::kGpu);
  const Options cpu = OptionsOf(Executor::kCpu);
  EXPECT_EQ(cpu.executor, Executor::kCpu);
  EXPECT_LT(cpu.peer_bytes_per_second, gpu.peer_bytes_per_second);
  EXPECT_LT(cpu.local_bytes_per_second, gpu.local_bytes_per_second);
  EXPECT_LT(cpu.copy_bytes_per_second, gpu.copy_bytes_per_second);
  EXPECT_LT(cpu.quantized_elements_per_second,
            gpu.quantized_elements_per_second);
}

// What the compiler assumes of links and rounds, the simulator does too.
TEST(Simulation, AssumesWhatTheCompilerDoes) {
  const Options options;
  const TopologySpec topology;
  EXPECT_EQ(options.direct_round_seconds, refit::kDirectRoundSeconds);
  EXPECT_EQ(options.network_round_seconds, refit::kStagedRoundSeconds);
  EXPECT_EQ(options.peer_bytes_per_second,
            topology.peer_gigabytes_per_second.value * 1e9);
  EXPECT_EQ(options.network_bytes_per_second,
            topology.network_gigabytes_per_second.value * 1e9);
}

// Ranks 1 and 2 of a host: 1 receives 100 bytes, then as many while it deals
// out the first to 2, then deals out the second.
TEST(Simulation, WhatIsDealtOutTravelsBesideTheNetwork) {
  Traffic traffic(1, 3);
  traffic.Host(1, 1).Host(2, 1);
  traffic.Round(fb::Route::kNetwork, kStaged).Send(0, 1, 100);
  traffic.Round(fb::Route::kNetwork, kStaged).Send(0, 1, 100).Send(1, 2, 100);
  traffic.Round(fb::Route::kNetwork, kStaged).Send(1, 2, 100);
  Options options = BytesAlone();
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 300);
  options.peer_bytes_per_second = 10;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 210);
  // A message inside a host starts on its own.
  options.dealt_message_seconds = 50;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 260);
}

TEST(Simulation, OneMessageTakesItsBytesAtTheLinksSpeed) {
  Traffic traffic(1, 2);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100);
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), BytesAlone()).seconds, 100);
  Options options = BytesAlone();
  options.peer_bytes_per_second = 4;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 25);
}

std::string BindingText(const Simulation& simulation) {
  const std::vector<Link>& links = simulation.graph.links;
  return LinkText(links[BindingLink(links)]);
}

// 0 sends 90 bytes to 2 and 30 to 3, 1 sends 60 to 3. All three go at 1/2: two
// share the egress of 0, two the ingress of 3. After 60 s the 30 bytes are
// there, 60 of the 90 are left and 30 of the 60, and both go at 1.
TEST(Simulation, MessagesShareEgressAndIngressMaxMinFairly) {
  Traffic traffic(2, 4);
  traffic.Round(fb::Route::kPeer, kStaged)
      .Send(0, 2, 90)
      .Send(0, 3, 30)
      .Send(1, 3, 60);
  const Simulation simulation = SimulateSpec(traffic.spec(), BytesAlone());
  std::vector<double> ends;
  for (size_t i = 0; i < simulation.graph.tasks.size(); ++i) {
    if (simulation.graph.tasks[i].kind != TaskKind::kMessage) continue;
    ends.push_back(simulation.times[i].end);
  }
  ASSERT_EQ(ends.size(), 3u);
  EXPECT_DOUBLE_EQ(ends[0], 120);
  EXPECT_DOUBLE_EQ(ends[1], 60);
  EXPECT_DOUBLE_EQ(ends[2], 90);
  EXPECT_DOUBLE_EQ(simulation.seconds, 120);
  const uint32_t binding = BindingLink(simulation.graph.links);
  EXPECT_EQ(LinkText(simulation.graph.links[binding]), "peer egress of rank 0");
  EXPECT_EQ(simulation.graph.links[binding].bytes, 120u);
}

// Ranks 0 and 1 send 100 bytes each, rank 0 in two rounds and rank 1 in five.
TEST(Simulation, OfEquallyBusyLinksTheFirstBinds) {
  Traffic traffic(2, 4);
  for (int round = 0; round < 5; ++round) {
    traffic.Round(fb::Route::kPeer, kStaged);
    if (round < 2) traffic.Send(0, 2, 50);
    traffic.Send(1, 3, 20);
  }
  Options options = BytesAlone();
  options.peer_round_seconds = 10;
  Simulation simulation = SimulateSpec(traffic.spec(), options);
  EXPECT_EQ(BindingText(simulation), "peer egress of rank 0");
  EXPECT_DOUBLE_EQ(simulation.seconds, 150);
  traffic.Round(fb::Route::kPeer, kStaged).Send(1, 2, 1);
  simulation = SimulateSpec(traffic.spec(), options);
  EXPECT_EQ(BindingText(simulation), "peer egress of rank 1");
}

// Ranks 2 and 3 share the GPUs of ranks 0 and 1.
TEST(Simulation, OfASharedGpuTheDestinationReceives) {
  Traffic traffic(2, 4);
  traffic.spec().colocated = true;
  traffic.Round(fb::Route::kPeer, kStaged)
      .Send(0, 3, 10)
      .Send(3, 2, 20)
      .Send(1, 2, 30);
  const Simulation simulation = SimulateSpec(traffic.spec(), BytesAlone());
  std::vector<std::string> names;
  for (const Link& link : simulation.graph.links) {
    names.push_back(LinkText(link));
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{
                       "peer egress of rank 0", "peer egress of rank 1",
                       "peer ingress of rank 2", "peer ingress of rank 3"}));
}

TEST(Simulation, BothDirectionsOfARankAreLinksOfTheirOwn) {
  Traffic traffic(1, 3);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100).Send(1, 2, 100);
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), BytesAlone()).seconds, 200);
}

// No fence stands between the rounds of all ranks: 2 to 3 need not wait for 0.
TEST(Simulation, ARankWaitsForItsOwnRoundsAlone) {
  Traffic traffic(2, 4);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 2, 100);
  traffic.Round(fb::Route::kPeer, kStaged).Send(1, 3, 100);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 3, 10);
  const Simulation simulation = SimulateSpec(traffic.spec(), BytesAlone());
  EXPECT_DOUBLE_EQ(simulation.seconds, 110);
  EXPECT_DOUBLE_EQ(simulation.rounds[1].begin, 0);
  EXPECT_DOUBLE_EQ(simulation.rounds[1].end, 100);
  EXPECT_DOUBLE_EQ(simulation.rounds[2].begin, 100);
}

TEST(Simulation, RoundsCostWhatTheyCostBeforeTheirBytes) {
  Traffic traffic(1, 3);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 10).Send(0, 2, 10);
  traffic.Round(fb::Route::kPeer, kDirect).Send(0, 1, 10);
  Options options = BytesAlone();
  options.peer_message_seconds = 3;  // for each of two
  options.direct_round_seconds = 5;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds,
                   (6 + 20) + (5 + 10));
  traffic.Host(1, 1).Host(2, 1);
  for (fb::Route& route : traffic.spec().rounds) route = fb::Route::kNetwork;
  traffic.spec().mechanisms = {kStaged, kStaged};
  options.network_round_seconds = 7;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds,
                   (7 + 20) + (7 + 10));
}

// 100 bytes of one tensor are sent from it, or received into it; where they are
// cast, or come from several tensors, they are packed or unpacked.
TEST(Simulation, PacksWhatIsNotOneRunOfATensor) {
  Traffic traffic(1, 2);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100);
  PlanSpec& spec = traffic.spec();
  spec.copy_lists = {{{.slot = 0, .loops = {{50, 1}}}}, {}};
  for (PlanSpec::Program& program : spec.programs) program.fills = 1;
  spec.casts = {{fb::DType::kFp32, fb::DType::kBf16}};
  Options options = BytesAlone();
  options.copy_bytes_per_second = 10;
  EXPECT_DOUBLE_EQ(SimulateSpec(spec, options).seconds, 100);
  // The source's tensor is fp32: it casts.
  spec.buffers.push_back(spec.buffers[0]);
  spec.buffers[1].dtype = fb::DType::kFp32;
  spec.programs[0].buffers = {1};
  EXPECT_DOUBLE_EQ(SimulateSpec(spec, options).seconds, 10 + 100);
  // 25 tensors of two elements.
  spec.buffers[1] = {.name = "w{0}",
                     .index = {{.first = 0, .count = 25}},
                     .shape = {2},
                     .fragments = {},
                     .regions = {}};
  spec.copy_lists = {{
                         {.slot = 0, .loops = {{50, 1}}},
                     },
                     {},
                     {{.slot = 0, .loops = {{25, 2}, {2, 1}}}}};
  spec.programs[0].messages = {SendTo(1, 0, 2, 0, 100)};
  EXPECT_DOUBLE_EQ(SimulateSpec(spec, options).seconds, 10 + 100);
}

// Packing takes 10 s a round, the wire 100 s. With two slots the third round is
// packed when the first is over; with one, each waits for the one before.
TEST(Simulation, SlotsOverlapPackingAndWire) {
  Traffic traffic(1, 2);
  for (int round = 0; round < 3; ++round) {
    traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100);
  }
  traffic.Packed();
  Options options = BytesAlone();
  options.copy_bytes_per_second = 10;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds,
                   10 + 3 * 100 + 10);
  traffic.spec().slots = 1;
  // The receiver's arena is busy while it unpacks, and the sender's too.
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds,
                   3 * (10 + 100) + 10);
}

TEST(Simulation, ACpuDoesOneThingAtATime) {
  Traffic traffic(1, 2);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100);
  traffic.Packed();
  Options options = BytesAlone();
  options.executor = Executor::kCpu;
  options.copy_bytes_per_second = 10;
  // The sender packs the second while the receiver unpacks the first.
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds,
                   10 + 100 + 10 + 100 + 10);
}

// UCX's requests wait on the connection that they share with messages.
TEST(Simulation, OfTwoCpusThatSendToEachOtherOneWaits) {
  Traffic traffic(1, 3);
  for (uint32_t rank = 0; rank < 3; ++rank) traffic.Host(rank, rank);
  traffic.Round(fb::Route::kNetwork, kStaged);
  traffic.spec().programs[1].messages = {RecvFrom(2, 0, 0, 0, 100),
                                         SendTo(2, 0, 0, 0, 50)};
  traffic.spec().programs[2].messages = {RecvFrom(1, 0, 0, 0, 50),
                                         SendTo(1, 0, 0, 0, 100)};
  Options options = BytesAlone();
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 100);
  options.executor = Executor::kCpu;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 150);
}

// What a destination rank passes on it must have received and, in a round of
// its own, granted.
TEST(Simulation, ARelayPassesOnAfterItReceived) {
  for (const fb::Mechanism mechanism : {kStaged, kDirect}) {
    Traffic traffic(1, 3);
    traffic.Round(fb::Route::kPeer, mechanism).Send(0, 1, 100);
    traffic.Round(fb::Route::kPeer, mechanism).Send(1, 2, 50);
    const Simulation simulation = SimulateSpec(traffic.spec(), BytesAlone());
    EXPECT_DOUBLE_EQ(simulation.seconds, 150);
    ASSERT_GE(simulation.critical_path.size(), 2u);
    const Task& last = simulation.graph.tasks[simulation.critical_path.back()];
    ASSERT_EQ(last.kind, TaskKind::kMessage);
    EXPECT_EQ(last.rank, 1);
    EXPECT_DOUBLE_EQ(simulation.times[simulation.critical_path.back()].begin,
                     100);
  }
}

// In each round one of the two ranks starts, and the bytes travel after that.
TEST(Simulation, RanksThatReadWaitAsThoseThatStore) {
  for (const bool pulls : {false, true}) {
    SCOPED_TRACE(pulls);
    Traffic traffic(1, 3);
    traffic.Round(fb::Route::kPeer, kDirect).Send(0, 1, 100);
    traffic.Round(fb::Route::kPeer, kDirect).Send(1, 2, 50);
    traffic.spec().direct_pulls = pulls;
    Options options = BytesAlone();
    options.direct_round_seconds = 5;
    const Simulation simulation = SimulateSpec(traffic.spec(), options);
    EXPECT_DOUBLE_EQ(simulation.seconds, (5 + 100) + (5 + 50));
    EXPECT_DOUBLE_EQ(simulation.rounds[1].begin, 5 + 100);
  }
}

TEST(Simulation, QuantizingWaitsUntilItsWindowIsFree) {
  Options options = BytesAlone();
  options.quantized_elements_per_second = 1;
  // Both windows lie in the same bytes, so the second is quantized after the
  // round of the first. Nothing overlaps.
  for (const PlanSpec& spec : {QuantizedSpec(), WindowedSpec()}) {
    const Simulation simulation = SimulateSpec(spec, options);
    double bytes = 0;
    for (const Message& message : simulation.graph.messages) {
      bytes += static_cast<double>(message.size_bytes);
    }
    EXPECT_DOUBLE_EQ(simulation.seconds, 2 * 18 + bytes);
  }
}

TEST(Simulation, WhatIfARankOrANicIsSlow) {
  Traffic traffic(2, 4);
  for (uint32_t rank = 2; rank < 4; ++rank) traffic.Host(rank, 1);
  traffic.Round(fb::Route::kNetwork, kStaged).Send(0, 2, 100).Send(1, 3, 100);
  Options options = BytesAlone();
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 100);
  options.slow_nics = {{3, 4}};
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 400);
  options.slow_nics.clear();
  options.slow_ranks = {{0, 3}};
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 300);
  options.slow_ranks.clear();
  options.dead_nics = {3};  // it shares the NIC of rank 2
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 200);
  options.dead_nics.clear();
  options.oversubscription = 2;  // two NICs, one byte a second to the spine
  const Simulation simulation = SimulateSpec(traffic.spec(), options);
  EXPECT_DOUBLE_EQ(simulation.seconds, 200);
  EXPECT_EQ(BindingText(simulation), "uplink of host 0");
}

// Four hosts of two ranks each. Rank 0 sends 100 bytes to rank 2 of the next
// host and rank 1 to rank 3, each over a NIC of its own.
Traffic TwoRails() {
  Traffic traffic(4, 8);
  for (uint32_t rank = 0; rank < 8; ++rank) traffic.Host(rank, rank / 2);
  traffic.Round(fb::Route::kNetwork, kStaged).Send(0, 2, 100).Send(1, 3, 100);
  traffic.spec().topology = PlanSpec::Topology();
  return traffic;
}

// Six links: the NICs, those of both slow ranks, an uplink and a downlink.
TEST(Simulation, TheLastOfALongWaysLinksCanHoldAMessage) {
  Traffic traffic(1, 2);
  traffic.Host(1, 1);
  traffic.Round(fb::Route::kNetwork, kStaged).Send(0, 1, 100);
  Options options = BytesAlone();
  options.oversubscription = 2;
  options.slow_ranks = {{0, 3}, {1, 4}};
  const Simulation simulation = SimulateSpec(traffic.spec(), options);
  EXPECT_DOUBLE_EQ(simulation.seconds, 400);
  ASSERT_EQ(simulation.bottlenecks.size(), 1u);
  EXPECT_EQ(LinkText(simulation.graph.links[simulation.bottlenecks[0]]),
            "slow network ingress of rank 1");
}

TEST(Simulation, HostsOfAnNvlinkDomainReachEachOtherOverNvlink) {
  Traffic traffic = TwoRails();
  Options options = BytesAlone();
  options.peer_bytes_per_second = 4;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 100);
  traffic.spec().topology->hosts_per_nvlink_domain = 2;
  const Simulation simulation = SimulateSpec(traffic.spec(), options);
  EXPECT_DOUBLE_EQ(simulation.seconds, 25);
  EXPECT_EQ(LinkText(simulation.graph.links[0]), "peer egress of rank 0");
}

TEST(Simulation, GpusOfANicShareIt) {
  Traffic traffic = TwoRails();
  traffic.spec().topology->gpus_per_nic = 2;
  const Simulation simulation = SimulateSpec(traffic.spec(), BytesAlone());
  EXPECT_DOUBLE_EQ(simulation.seconds, 200);
  ASSERT_EQ(simulation.graph.links.size(), 2u);
  EXPECT_EQ(LinkText(simulation.graph.links[1]), "network ingress of rank 2");
  Options options = BytesAlone();
  options.slow_nics = {{1, 3}};  // that of rank 0
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 600);
  // A slow rank slows its own flow, and not the other's of its NIC.
  for (const int32_t slow : {0, 1}) {
    options = BytesAlone();
    options.slow_ranks = {{slow, 4}};
    const Simulation one_slow = SimulateSpec(traffic.spec(), options);
    EXPECT_DOUBLE_EQ(one_slow.seconds, 400) << slow;
    const std::vector<Task>& tasks = one_slow.graph.tasks;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (tasks[i].kind != TaskKind::kMessage) continue;
      EXPECT_NEAR(one_slow.times[i].end, tasks[i].rank == slow ? 400 : 133.3,
                  0.1);
    }
  }
  options = BytesAlone();
  options.dead_nics = {1};
  EXPECT_EQ(MistakeOf(traffic.spec(), options),
            "--dead-nic names rank 1; its host 0 has no other NIC for its "
            "messages");
}

// A leaf of two hosts has four NICs and, at 4 : 1, a byte a second to others.
TEST(Simulation, LeavesReachEachOtherOverTheSpine) {
  Traffic traffic = TwoRails();
  PlanSpec::Topology& topology = *traffic.spec().topology;
  topology.hosts_per_leaf = 2;
  topology.spine_oversubscription = 4;
  // One leaf.
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), BytesAlone()).seconds, 100);
  topology.hosts_per_leaf = 1;  // two leaves of two NICs: half a byte a second
  Simulation simulation = SimulateSpec(traffic.spec(), BytesAlone());
  EXPECT_DOUBLE_EQ(simulation.seconds, 400);
  EXPECT_EQ(BindingText(simulation), "uplink of leaf 0");
  Options options = BytesAlone();
  options.oversubscription = 2;  // in the place of the plan's
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), options).seconds, 200);
  topology.spine_oversubscription = 1;  // links that do not bind are left out
  EXPECT_EQ(SimulateSpec(traffic.spec(), BytesAlone()).graph.links.size(), 4u);
}

TEST(Simulation, RailsHaveLeavesOfTheirOwn) {
  Traffic traffic = TwoRails();
  PlanSpec::Topology& topology = *traffic.spec().topology;
  topology.rails = true;
  topology.spine_oversubscription = 8;
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), BytesAlone()).seconds, 100);
  // From rail 0 to rail 1: a rail has four NICs here.
  traffic.Round(fb::Route::kNetwork, kStaged).Send(0, 3, 100);
  EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), BytesAlone()).seconds,
                   100 + 200);
}

TEST(Simulation, TakesTheSpeedsThatThePlanSays) {
  PlanSpec spec = SampleSpec();
  Options options;
  UseSpeedsOf(OpenSpec(spec), options);
  EXPECT_FALSE(options.has_plan_speeds);
  spec.topology = {.peer_bytes_per_second = 7, .network_bytes_per_second = 3};
  UseSpeedsOf(OpenSpec(spec), options);
  EXPECT_TRUE(options.has_plan_speeds);
  EXPECT_EQ(options.peer_bytes_per_second, 7);
  EXPECT_EQ(options.network_bytes_per_second, 3);
}

TEST(Simulation, RanksOfOneGpuShareItsLinks) {
  Traffic traffic(2, 4);
  traffic.spec().colocated = true;
  traffic.Round(fb::Route::kPeer, kDirect).Send(0, 3, 100).Send(2, 3, 100);
  const Simulation simulation = SimulateSpec(traffic.spec(), BytesAlone());
  EXPECT_DOUBLE_EQ(simulation.seconds, 200);  // ranks 0 and 2 share an egress
  EXPECT_EQ(simulation.graph.links.size(), 2u);
}

// Rank 0 copies to rank 2, which has the same GPU, while it sends to rank 3.
TEST(Simulation, RoundsOnOneGpuGoBesideOthersUnlessTheyAreMostOfThem) {
  for (const auto& [here, elsewhere, seconds] :
       {std::tuple(60, 100, 100), std::tuple(100, 60, 160)}) {
    Traffic traffic(2, 4);
    traffic.spec().colocated = true;
    traffic.Round(fb::Route::kLocal, kDirect)
        .Send(0, 2, here)
        .Round(fb::Route::kPeer, kDirect)
        .Send(0, 3, elsewhere);
    EXPECT_DOUBLE_EQ(SimulateSpec(traffic.spec(), BytesAlone()).seconds,
                     seconds);
  }
}

TEST(Simulation, TheSamePlanGivesTheSameTimesBitForBit) {
  const PlanFile plan = OpenSpec(SampleSpec());
  const absl::StatusOr<Simulation> a = Simulate(plan, {});
  const absl::StatusOr<Simulation> b = Simulate(plan, {});
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->seconds, b->seconds);
  EXPECT_EQ(a->critical_path, b->critical_path);
  for (size_t i = 0; i < a->times.size(); ++i) {
    EXPECT_EQ(a->times[i].end, b->times[i].end);
  }
}

TEST(Simulation, RefusesRanksThatAreNotThereAndNicsThatCannotBeReplaced) {
  Traffic traffic(1, 2);
  traffic.Host(1, 1).Round(fb::Route::kNetwork, kStaged).Send(0, 1, 100);
  Options options;
  options.slow_ranks = {{2, 2}};
  EXPECT_EQ(MistakeOf(traffic.spec(), options),
            "--slow-rank names rank 2; this plan has ranks 0..1");
  options = {};
  options.dead_nics = {1};
  EXPECT_EQ(MistakeOf(traffic.spec(), options),
            "--dead-nic names rank 1; its host 1 has no other NIC for its "
            "messages");
  options.dead_nics = {7};
  EXPECT_EQ(MistakeOf(traffic.spec(), options),
            "--dead-nic names rank 7; this plan has ranks 0..1");
  options.slow_nics = {{9, 2}};
  EXPECT_EQ(MistakeOf(traffic.spec(), options),
            "--slow-nic names rank 9; this plan has ranks 0..1");
}

// The loader does not compare the two ends of a message; the proof does.
TEST(Simulation, SaysWhichMessageItsRanksDoNotAgreeOn) {
  Traffic traffic(1, 3);
  traffic.Round(fb::Route::kPeer, kStaged).Send(0, 1, 100);
  PlanSpec spec = traffic.spec();
  spec.programs[1].messages.clear();
  EXPECT_EQ(
      MistakeOf(spec, {}),
      "round 0: rank 0 sends 100 bytes to rank 1, which receives nothing; "
      "refit-verify tells what is wrong with the plan");
  spec = traffic.spec();
  spec.programs[0].messages.clear();
  EXPECT_EQ(MistakeOf(spec, {}),
            "round 0: rank 1 receives 100 bytes from rank 0, which sends "
            "nothing; refit-verify tells what is wrong with the plan");
  spec = traffic.spec();
  spec.programs[1].messages = {RecvFrom(0, 0, 0, 0, 90)};
  EXPECT_EQ(MistakeOf(spec, {}),
            "round 0: rank 0 sends 100 bytes to rank 1, which receives 90; "
            "refit-verify tells what is wrong with the plan");
}

TEST(Simulation, RefusesMessagesOutOfOrder) {
  Traffic traffic(1, 3);
  traffic.Round(fb::Route::kPeer, kStaged)
      .Send(0, 1, 100)
      .Send(0, 2, 10)
      .Send(0, 1, 100);
  EXPECT_EQ(MistakeOf(traffic.spec(), {}),
            "round 0: rank 0 sends to rank 1 in two places, with other "
            "messages between them; refit-verify tells what is wrong with the "
            "plan");
}

}  // namespace
}  // namespace refit::simulator
