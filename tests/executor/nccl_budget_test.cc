// NCCL cuts a group that is too large for one kernel, on every rank for itself:
// ranks whose cuts differ wait for each other for ever. Plans keep groups below
// that.
#include <array>
#include <atomic>
#include <thread>

#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr int32_t kSources = 3;
constexpr int32_t kDestinations = 3;
constexpr size_t kBudget = 2;
constexpr uint64_t kElements = 8;  // of a message

struct Pair {
  uint32_t source = 0;
  uint32_t destination = 0;
  uint32_t messages = 0;
};
// With two operations per kernel each rank takes one message of a pair after
// the other. Then rank 2 comes to its only one for rank 5 in its fourth kernel,
// rank 5 to those of rank 0 in its second, rank 0 to its second for rank 4 in
// its second, and rank 4 to the third of rank 2 in its third. So rank 2 waits
// in its third for rank 4, rank 4 in its second for rank 0, rank 0 in its first
// for rank 5, and rank 5 in its first for rank 2.
constexpr std::array<Pair, 6> kHazard = {
    {{0, 4, 2}, {0, 5, 2}, {1, 5, 1}, {2, 3, 3}, {2, 4, 3}, {2, 5, 1}}};

// One round with the messages of kHazard, each with a parameter of its own.
PlanBuilder HazardPlan() {
  PlanBuilder plan;
  plan.source_ranks = kSources;
  plan.ranks.resize(kSources + kDestinations);
  constexpr uint64_t kStride = 256;  // of staging
  for (const Pair& pair : kHazard) {
    for (uint32_t i = 0; i < pair.messages; ++i) {
      const auto param = static_cast<uint32_t>(plan.params.size());
      const std::string name = "w" + std::to_string(param);
      plan.params.push_back({.name = name, .shape = {kElements}});
      plan.buffers.push_back({.name = name,
                              .shape = {kElements},
                              .fragments = {{.param = param,
                                             .lo = {0},
                                             .extent = {kElements},
                                             .offset = 0,
                                             .stride = {1}}}});
      for (const bool send : {true, false}) {
        PlanBuilder::Rank& rank =
            plan.ranks[send ? pair.source : pair.destination];
        rank.buffers.push_back(param);
        rank.messages.push_back(
            {.round = 0,
             .kind = send ? fb::MessageKind::kSend : fb::MessageKind::kRecv,
             .peer = send ? pair.destination : pair.source,
             .staging_offset = rank.staging_bytes,
             .size_bytes = kElements * DTypeBytes(DType::kBf16),
             .copies = {{.slot = static_cast<uint32_t>(rank.buffers.size() - 1),
                         .loops = {{kElements, 1}}}}});
        rank.staging_bytes += kStride;
      }
    }
  }
  return plan;
}

class NcclBudgetTest : public testing::Test {
 protected:
  NcclBudgetTest() { fake_nccl_reset(); }
};

TEST_F(NcclBudgetTest, RoundOverTheBudgetHangsAndEndsAtTheDeadline) {
  const PlanFile plan = HazardPlan().Open();
  NcclWorld world(plan);
  world.Bind();
  fake_nccl_set_budget(kBudget);
  std::atomic<bool> over = false;
  std::atomic<bool> was_deadlocked = false;
  std::thread observer([&] {
    while (!over && !was_deadlocked) {
      was_deadlocked = fake_nccl_is_deadlocked();
      std::this_thread::yield();
    }
  });
  const auto statuses = world.OnAllRanks([&](int32_t rank) {
    RunOptions options;
    options.timeout = std::chrono::milliseconds(500);
    return world.Refit(rank, options);
  });
  over = true;
  observer.join();
  EXPECT_TRUE(was_deadlocked);
  EXPECT_GT(fake_nccl_cut_groups(), 0);
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_NE(status.message().find("round 0: "), std::string::npos) << status;
  }
  EXPECT_EQ(fake_nccl_live_communicators(), 0);

  // The same plan, below the budget.
  fake_nccl_set_budget(fake_nccl_largest_group());
  ASSERT_TRUE(AllOk(world.ConnectAll()));
  world.ExpectEveryElementRight(plan);
}

TEST_F(NcclBudgetTest, CompiledPlanKeepsBelowTheBudget) {
  for (const int operations : {1, 2, 3, 7}) {
    SCOPED_TRACE(operations);
    fake_nccl_reset();
    fake_nccl_set_budget(operations);
    const PlanFile plan = CompiledPlan(
        ReshardJob(
            kSources, kDestinations,
            R"("peer": "staged", "bucket_bytes": 4096, "staging_bytes": 65536)"),
        "", [&](Limits& limits) { limits.operations_per_round = operations; });
    NcclWorld world(plan);
    world.Bind();
    world.ExpectEveryElementRight(plan);
    EXPECT_EQ(fake_nccl_cut_groups(), 0);
    EXPECT_LE(fake_nccl_largest_group(), operations);
    EXPECT_EQ(fake_nccl_violations(), 0) << fake_nccl_first_violation();
  }
}

}  // namespace
}  // namespace refit
