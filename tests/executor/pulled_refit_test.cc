// Direct refits whose receivers read from their senders: since their memory
// cannot be shared, or since the plan says so.
#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/executor/local_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

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

// Ranks of which some keep their memory from others.
class PrivateWorld : public LocalWorldOf<PrivateDevice> {
 public:
  PrivateWorld(const PlanFile& plan, const Ranks& private_ranks)
      : LocalWorldOf(plan) {
    for (const int32_t rank : private_ranks) device(rank).is_private = true;
  }
};

class PulledRefitTest : public testing::Test {
 protected:
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
  }

  // Binds with the tensors of `private_ranks` kept from others, and refits.
  void ExpectRefits(const PlanFile& plan, const Ranks& private_ranks) {
    PrivateWorld world(plan, private_ranks);
    world.Bind();
    ExpectRefits(world, plan);
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      EXPECT_EQ(!world.executor(rank).pulls_from().empty(),
                world.device(rank).is_private)
          << "rank " << rank;
    }
  }
};

TEST_F(PulledRefitTest, ReceiversThatCannotShareReadTheirSenders) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, {2, 3, 4});
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

TEST_F(PulledRefitTest, OthersOfTheRoundAreStoredInto) {
  const PlanFile plan = Plan();
  for (const int32_t rank : {2, 3, 4}) ExpectRefits(plan, {rank});
}

TEST_F(PulledRefitTest, EachPairIsDecidedByItself) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, {3, 4});
  world.device(0).reaches_private = true;
  world.Bind();
  ExpectRefits(world, plan);
  EXPECT_EQ(world.executor(2).pulls_from(), Ranks{});
  EXPECT_EQ(world.executor(3).pulls_from(), Ranks{1});
  EXPECT_EQ(world.executor(4).pulls_from(), Ranks{1});
}

// Each reads from the ranks before it, and the others read from it.
TEST_F(PulledRefitTest, RankMayReadFromARelayThatReadsToo) {
  const PlanFile plan = RelayPlan({.replicas = 3, .layers = 9}).Open();
  PrivateWorld world(plan, {1, 2});
  world.device(2).reaches_private = true;
  world.Bind();
  ExpectRefits(world, plan);
  EXPECT_EQ(world.executor(1).pulls_from(), (Ranks{0, 3}));
  EXPECT_EQ(world.executor(2).pulls_from(), (Ranks{0, 1, 3}));
  EXPECT_EQ(world.executor(3).pulls_from(), Ranks{});
}

TEST_F(PulledRefitTest, CastsAndPaddingAreRight) {
  const DType floats[] = {DType::kBf16, DType::kFp16, DType::kFp32};
  for (const DType from : floats) {
    for (const DType to : floats) {
      ExpectRefits(
          Plan({.padding = 3, .source_dtype = from, .destination_dtype = to}),
          {2, 4});
    }
  }
}

TEST_F(PulledRefitTest, RanksThatShareAGpuPull) {
  const PlanFile plan =
      CompiledPlan(ReshardJob(3, 3, "", R"(, "colocated": true)"));
  EXPECT_TRUE(plan.body().rounds()->Get(0)->mechanism() ==
              fb::Mechanism::kDirect);
  ExpectRefits(plan, {3, 4, 5});
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

TEST_F(PullingPlanTest, ReceiversReadTheirSendersWithoutANotice) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, {2, 3, 4});
  world.Bind();
  ExpectRefits(world, plan);
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    EXPECT_EQ(world.executor(rank).pulls_from(),
              rank < 2 ? Ranks{} : (Ranks{0, 1}));
    EXPECT_TRUE(world.executor(rank).notices().empty());
  }
}

TEST_F(PullingPlanTest, SendersThatCannotBeReadStore) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, {1});
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

// The private one of them moves what it is given and what it gives, or leaves
// that to the others.
TEST_F(PullingPlanTest, RelaysAreReadFrom) {
  for (const uint32_t replicas : {2, 3, 5}) {
    SCOPED_TRACE(replicas);
    const PlanBuilder relays = RelayPlan({.replicas = replicas, .layers = 9});
    for (int32_t rank = 0; rank <= static_cast<int32_t>(replicas); ++rank) {
      if (rank > 0) ExpectRefits(relays.Open(), {rank});
      const PlanFile plan = Pulling(relays);
      PrivateWorld world(plan, {rank});
      world.Bind();
      ExpectRefits(world, plan);
    }
  }
}

// Attention is quantized at the source, the MLP at the destination, each in
// windows of scratch that are used again.
TEST_F(PullingPlanTest, ScratchIsReadFromAndInto) {
  ExpectRefits(WindowsPlan(R"("scratch_bytes": 150000)"), {4, 5});
  const PlanFile plan =
      WindowsPlan(R"("direct": "pull", "scratch_bytes": 150000)");
  for (const Ranks& private_ranks : {Ranks{}, Ranks{0, 3}, Ranks{4, 5}}) {
    PrivateWorld world(plan, private_ranks);
    world.Bind();
    ExpectRefits(world, plan);
  }
}

TEST_F(PulledRefitTest, BindDecidesAnew) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, {});
  world.Bind();
  for (const bool is_private : {false, true, false, true}) {
    world.device(3).is_private = is_private;
    ASSERT_TRUE(AllOk(world.BindAll()));
    ExpectRefits(world, plan);
    EXPECT_EQ(world.executor(3).pulls_from(),
              is_private ? (Ranks{0, 1}) : Ranks{});
  }
}

TEST_F(PulledRefitTest, PairsOfWhichNeitherCanShareAreRefusedByBoth) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, {});
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

TEST_F(PulledRefitTest, RankThatCannotExportStopsAllOthers) {
  const PlanFile plan = Plan();
  PrivateWorld world(plan, {3});
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

}  // namespace
}  // namespace refit
