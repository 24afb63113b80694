// Direct refits whose receivers read from their senders: since their memory
// cannot be shared, or since the plan says so. Over the local and the NCCL
// transport.
#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "refit/local_transport.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

using std::chrono::milliseconds;

using Ranks = std::vector<int32_t>;

// Memory that only some can map.
class PrivateDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<ExportedMemory>> Export(
      absl::Span<const MemoryRange> ranges) override {
    if (fails_to_export) return absl::InternalError("no export today");
    absl::StatusOr<std::unique_ptr<ExportedMemory>> exported =
        HostDevice::Export(ranges);
    if (!exported.ok()) return exported.status();
    return std::make_unique<Marked>(is_private ? "private" : "shared ",
                                    *std::move(exported));
  }
  absl::StatusOr<std::unique_ptr<MappedMemory>> Import(
      std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
      std::chrono::steady_clock::time_point deadline) override {
    if (exported.substr(0, 7) == "private" && !reaches_private) {
      return absl::FailedPreconditionError("private memory");
    }
    return HostDevice::Import(exported.substr(7), sizes_bytes, deadline);
  }

  // Set while no rank is in a call.
  bool is_private = false;
  bool reaches_private = false;
  bool fails_to_export = false;

 private:
  class Marked : public ExportedMemory {
   public:
    Marked(const char* mark, std::unique_ptr<ExportedMemory> memory)
        : ExportedMemory(absl::StrCat(mark, memory->bytes())),
          memory_(std::move(memory)) {}

   private:
    const std::unique_ptr<ExportedMemory> memory_;
  };
};

enum class Over { kLocal, kNccl };

class PrivateWorld : public ExecutorWorld {
 public:
  PrivateWorld(const PlanFile& plan, Over over, const Ranks& private_ranks)
      : PrivateWorld(plan, over, private_ranks,
                     std::make_shared<LocalFabric>(plan.world_size())) {}
  ~PrivateWorld() override {
    for (int32_t rank = 0; rank < world_size(); ++rank) CloseRank(rank);
  }

  std::vector<absl::Status> OnAllRanks(
      const std::function<absl::Status(int32_t)>& body) override {
    return ExecutorWorld::OnAllRanks([&](int32_t rank) {
      fake_nccl_set_rank(rank);
      return body(rank);
    });
  }

  PrivateDevice& device(int32_t rank) { return *devices_[rank]; }

 private:
  PrivateWorld(const PlanFile& plan, Over over, const Ranks& private_ranks,
               const std::shared_ptr<LocalFabric>& fabric)
      : ExecutorWorld(plan.world_size(), fabric) {
    std::vector<std::unique_ptr<Transport>> transports;
    if (over == Over::kNccl) {
      transports = MakeNcclTransports(
          device_, std::vector<uint32_t>(plan.world_size(), 0));
    }
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      devices_.push_back(std::make_unique<PrivateDevice>());
      devices_.back()->is_private =
          std::find(private_ranks.begin(), private_ranks.end(), rank) !=
          private_ranks.end();
      ExecutorOptions options;
      options.device = devices_.back().get();
      AddRank(plan,
              over == Over::kNccl ? std::move(transports[rank])
                                  : *fabric->CreateTransport(rank),
              options);
    }
  }

  std::vector<std::unique_ptr<PrivateDevice>> devices_;
};

class PulledRefitTest : public testing::TestWithParam<Over> {
 protected:
  PulledRefitTest() { fake_nccl_reset(); }

  // Sources 0, 1; destinations 2, 3, 4.
  static PlanBuilder Builder(ReshardOptions options = {}) {
    options.source_ranks = 2;
    options.destination_ranks = 3;
    options.layers = 3;
    options.rows = 12;
    options.columns = 30;
    options.mechanism = fb::Mechanism::kDirect;
    return ReshardPlan(options);
  }
  static PlanFile Plan(const ReshardOptions& options = {}) {
    return Builder(options).Open();
  }

  static void ExpectRefits(PrivateWorld& world, const PlanFile& plan) {
    for (int refit = 0; refit < 3; ++refit) world.ExpectEveryElementRight(plan);
    EXPECT_EQ(fake_nccl_messages(), 0);
  }

  // Binds with the tensors of `private_ranks` kept from others, and refits.
  void ExpectRefits(const PlanFile& plan, const Ranks& private_ranks) {
    PrivateWorld world(plan, GetParam(), private_ranks);
    world.Bind();
    ExpectRefits(world, plan);
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      EXPECT_EQ(!world.executor(rank).pulls_from().empty(),
                world.device(rank).is_private)
          << "rank " << rank;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, PulledRefitTest,
                         testing::Values(Over::kLocal, Over::kNccl),
                         [](const auto& info) {
                           return info.param == Over::kLocal ? "Local" : "Nccl";
                         });

TEST_P(PulledRefitTest, ReceiversThatCannotShareReadTheirSenders) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {2, 3, 4});
  world.Bind();
  ExpectRefits(world, plan);
  for (const int32_t rank : {2, 3, 4}) {
    EXPECT_EQ(world.executor(rank).pulls_from(), (Ranks{0, 1}));
    ASSERT_EQ(world.executor(rank).notices().size(), 1);
    EXPECT_EQ(world.executor(rank).notices()[0].text,
              absl::StrCat("rank ", rank,
                           " reads the tensors of ranks 0, 1, which cannot map "
                           "its own; the senders' notices say why"));
  }
  for (const int32_t rank : {0, 1}) {
    EXPECT_EQ(world.executor(rank).pulls_from(), Ranks{});
  }
}

TEST_P(PulledRefitTest, OthersOfTheRoundAreStoredInto) {
  const PlanFile plan = Plan();
  for (const int32_t rank : {2, 3, 4}) ExpectRefits(plan, {rank});
}

TEST_P(PulledRefitTest, EachPairIsDecidedByItself) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {3, 4});
  world.device(0).reaches_private = true;
  world.Bind();
  ExpectRefits(world, plan);
  EXPECT_EQ(world.executor(2).pulls_from(), Ranks{});
  EXPECT_EQ(world.executor(3).pulls_from(), Ranks{1});
  EXPECT_EQ(world.executor(4).pulls_from(), Ranks{1});
}

// The private one of them moves what it is given and what it gives.
TEST_P(PulledRefitTest, RelaysAreReadFrom) {
  for (const uint32_t replicas : {2, 3, 5}) {
    SCOPED_TRACE(replicas);
    const PlanFile plan = RelayPlan({.replicas = replicas, .layers = 9}).Open();
    for (int32_t rank = 1; rank < plan.world_size(); ++rank) {
      ExpectRefits(plan, {rank});
    }
  }
}

// Each reads from the ranks before it, and the others read from it.
TEST_P(PulledRefitTest, RankMayReadFromARelayThatReadsToo) {
  const PlanFile plan = RelayPlan({.replicas = 3, .layers = 9}).Open();
  PrivateWorld world(plan, GetParam(), {1, 2});
  world.device(2).reaches_private = true;
  world.Bind();
  ExpectRefits(world, plan);
  EXPECT_EQ(world.executor(1).pulls_from(), (Ranks{0, 3}));
  EXPECT_EQ(world.executor(2).pulls_from(), (Ranks{0, 1, 3}));
  EXPECT_EQ(world.executor(3).pulls_from(), Ranks{});
}

TEST_P(PulledRefitTest, CastsAndPaddingAreRight) {
  const DType floats[] = {DType::kBf16, DType::kFp16, DType::kFp32};
  for (const DType from : floats) {
    for (const DType to : floats) {
      ExpectRefits(
          Plan({.padding = 3, .source_dtype = from, .destination_dtype = to}),
          {2, 4});
    }
  }
}

TEST_P(PulledRefitTest, RanksThatShareAGpuPull) {
  const PlanFile plan =
      CompiledPlan(ReshardJob(3, 3, "", R"(, "colocated": true)"));
  EXPECT_TRUE(plan.body().rounds()->Get(0)->mechanism() ==
              fb::Mechanism::kDirect);
  ExpectRefits(plan, {3, 4, 5});
}

// Attention is quantized at the source, the MLP at the destination, each in
// windows of scratch that are used again.
TEST_P(PulledRefitTest, ScratchIsReadFromAndInto) {
  const PlanFile plan = WindowsPlan(R"("scratch_bytes": 150000)");
  ExpectRefits(plan, {4, 5});
}

// Of plans of options.direct "pull".
class PullingPlanTest : public PulledRefitTest {
 protected:
  static PlanFile Pulling(PlanBuilder plan) {
    plan.direct_pulls = true;
    return plan.Open();
  }
  static PlanFile Plan() { return Pulling(Builder()); }
};

INSTANTIATE_TEST_SUITE_P(Transports, PullingPlanTest,
                         testing::Values(Over::kLocal, Over::kNccl),
                         [](const auto& info) {
                           return info.param == Over::kLocal ? "Local" : "Nccl";
                         });

TEST_P(PullingPlanTest, ReceiversReadTheirSendersWithoutANotice) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {2, 3, 4});
  world.Bind();
  ExpectRefits(world, plan);
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    EXPECT_EQ(world.executor(rank).pulls_from(),
              rank < 2 ? Ranks{} : (Ranks{0, 1}));
    EXPECT_TRUE(world.executor(rank).notices().empty());
  }
}

TEST_P(PullingPlanTest, SendersThatCannotBeReadStore) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {1});
  world.device(4).reaches_private = true;
  world.Bind();
  ExpectRefits(world, plan);
  const auto notice = [&](int32_t rank) {
    const std::vector<Notice> notices = world.executor(rank).notices();
    return notices.size() == 1 ? notices[0].text : "";
  };
  EXPECT_EQ(notice(0), "");
  EXPECT_EQ(notice(1),
            "rank 1 stores into the tensors of ranks 2, 3, which cannot map "
            "its own; the receivers' notices say why");
  EXPECT_EQ(notice(2),
            "rank 1 stores into the tensors of rank 2, which cannot map theirs "
            "to read them: private memory");
  EXPECT_EQ(world.executor(3).pulls_from(), (Ranks{0}));
  EXPECT_EQ(world.executor(4).pulls_from(), (Ranks{0, 1}));
}

TEST_P(PullingPlanTest, RelaysAreReadFrom) {
  for (const uint32_t replicas : {2, 3, 5}) {
    SCOPED_TRACE(replicas);
    const PlanFile plan =
        Pulling(RelayPlan({.replicas = replicas, .layers = 9}));
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      PrivateWorld world(plan, GetParam(), {rank});
      world.Bind();
      ExpectRefits(world, plan);
    }
  }
}

TEST_P(PullingPlanTest, ScratchIsReadFromAndInto) {
  const PlanFile plan =
      WindowsPlan(R"("direct": "pull", "scratch_bytes": 150000)");
  for (const Ranks& private_ranks : {Ranks{}, Ranks{0, 3}, Ranks{4, 5}}) {
    PrivateWorld world(plan, GetParam(), private_ranks);
    world.Bind();
    ExpectRefits(world, plan);
  }
}

TEST_P(PullingPlanTest, PairsOfWhichNeitherCanShareAreRefusedByBoth) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {});
  world.Bind();
  world.device(1).is_private = true;
  world.device(4).is_private = true;
  const std::vector<absl::Status> statuses = world.BindAll();
  EXPECT_EQ(statuses[1],
            absl::FailedPreconditionError(
                "rank 1: tensors of rank 4, which cannot map those of rank 1: "
                "private memory. One of the two has to hold its tensors in "
                "memory that can be shared; else compile the plan with "
                "options.peer \"staged\", if they do not share a GPU"));
  EXPECT_EQ(statuses[4],
            absl::AbortedError(
                "rank 4: rank 1 cannot go on; its own error says why (rank 1 "
                "was to map tensors of rank 4, which cannot map its: private "
                "memory)"));
  // The earlier one is in place.
  ExpectRefits(world, plan);
}

TEST_P(PulledRefitTest, CountersAreThoseOfThePlan) {
  const PlanFile plan = Plan();
  PrivateWorld pushed(plan, GetParam(), {});
  PrivateWorld pulled(plan, GetParam(), {2, 3, 4});
  for (PrivateWorld* world : {&pushed, &pulled}) {
    world->Bind();
    world->ExpectEveryElementRight(plan);
  }
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const RunCounters& a = pushed.executor(rank).counters();
    const RunCounters& b = pulled.executor(rank).counters();
    EXPECT_GT(a.bytes_sent + a.bytes_received, 0);
    EXPECT_EQ(a.bytes_sent, b.bytes_sent);
    EXPECT_EQ(a.bytes_received, b.bytes_received);
    EXPECT_EQ(a.messages_sent, b.messages_sent);
    EXPECT_EQ(a.messages_received, b.messages_received);
  }
}

TEST_P(PulledRefitTest, BindDecidesAnew) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {});
  world.Bind();
  for (const bool is_private : {false, true, false, true}) {
    world.device(3).is_private = is_private;
    ASSERT_TRUE(AllOk(world.BindAll()));
    ExpectRefits(world, plan);
    EXPECT_EQ(world.executor(3).pulls_from(),
              is_private ? (Ranks{0, 1}) : Ranks{});
  }
}

TEST_P(PulledRefitTest, PairsOfWhichNeitherCanShareAreRefusedByBoth) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {});
  world.Bind();
  world.device(1).is_private = true;
  world.device(4).is_private = true;
  const std::vector<absl::Status> statuses = world.BindAll();
  EXPECT_EQ(statuses[4],
            absl::FailedPreconditionError(
                "rank 4: tensors of rank 1, which cannot map those of rank 4: "
                "private memory. One of the two has to hold its tensors in "
                "memory that can be shared; else compile the plan with "
                "options.peer \"staged\", if they do not share a GPU"));
  EXPECT_EQ(statuses[1],
            absl::AbortedError(
                "rank 1: rank 4 cannot go on; its own error says why (rank 4 "
                "was to map tensors of rank 1, which cannot map its: private "
                "memory)"));
  for (const int32_t rank : {2, 3}) {
    EXPECT_EQ(
        statuses[rank],
        absl::AbortedError(absl::StrCat(
            "rank ", rank, ": rank 4 cannot go on; its own error says why")));
  }
  // The earlier one is in place.
  ExpectRefits(world, plan);
  world.device(1).is_private = false;
  ASSERT_TRUE(AllOk(world.BindAll()));
  ExpectRefits(world, plan);
}

TEST_P(PulledRefitTest, RankThatCannotExportStopsAllOthers) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, GetParam(), {3});
  world.Bind();
  // A receiver, and a sender that is to be read.
  for (const int32_t failing : {3, 1}) {
    world.device(failing).fails_to_export = true;
    const std::vector<absl::Status> statuses = world.BindAll();
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      EXPECT_EQ(statuses[rank].code(), rank == failing
                                           ? absl::StatusCode::kInternal
                                           : absl::StatusCode::kAborted)
          << statuses[rank];
    }
    world.device(failing).fails_to_export = false;
    ASSERT_TRUE(AllOk(world.BindAll()));
    ExpectRefits(world, plan);
  }
}

// The absent one is read from, reads, or does neither.
TEST_P(PulledRefitTest, RankThatDoesNotComeFailsTheOthersAtTheDeadline) {
  const PlanFile plan = Plan();
  for (const int32_t absent : {0, 2, 3}) {
    SCOPED_TRACE(absent);
    PrivateWorld world(plan, GetParam(), {3, 4});
    world.Bind();
    RunOptions options;
    options.timeout = milliseconds(200);
    const auto refit = [&](int32_t rank) { return world.Refit(rank, options); };
    const std::vector<absl::Status> statuses =
        world.OnAllRanks([&](int32_t rank) {
          return rank == absent ? absl::OkStatus() : refit(rank);
        });
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      if (rank == absent) continue;
      EXPECT_FALSE(statuses[rank].ok());
      EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
    }
    // It is told when it comes.
    EXPECT_FALSE(world
                     .OnAllRanks([&](int32_t rank) {
                       return rank == absent ? refit(rank) : absl::OkStatus();
                     })[absent]
                     .ok());
    ASSERT_TRUE(AllOk(world.ConnectAll()));
    ExpectRefits(world, plan);
  }
}

}  // namespace
}  // namespace refit
