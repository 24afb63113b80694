// The list of a rank's steps, and that it orders all that touches the same
// bytes.
#include "plan/schedule/steps.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/executor/delta_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"
#include "tests/executor/refit_order.h"

namespace refit {
namespace {

struct OrderCase {
  std::string name;
  std::function<PlanFile()> plan;
  RefitOrderOptions options = {};
};

std::vector<OrderCase> OrderCases() {
  const auto reshard = [](ReshardOptions options) {
    return [=] { return ReshardPlan(options).Open(); };
  };
  const auto hosts = [](std::string at, std::string options, int32_t slots) {
    return [=] { return HostsPlan(at, options, slots); };
  };
  const auto windows = [](std::string options) {
    return [=] { return WindowsPlan(options); };
  };
  return {
      {"Staged", reshard({.layers = 9, .rows = 12, .columns = 30})},
      {"Direct", reshard({.layers = 4, .mechanism = fb::Mechanism::kDirect})},
      {"DirectInParts",
       reshard({.layers = 4, .mechanism = fb::Mechanism::kDirect}),
       {.direct = DirectRounds::kSent}},
      {"StagedRelays", hosts("0, 1, 2, 3, 4, 5",
                             R"("peer": "staged", "bucket_bytes": 4096)", 2)},
      {"DealtInHosts", hosts("0, 1, 1, 2, 2, 3",
                             R"("peer": "staged", "bucket_bytes": 4096)", 3)},
      {"StoredRelays", [] { return RelayPlan({}).Open(); }},
      {"DirectRelays", hosts("0, 1, 1, 1, 2, 2", R"("bucket_bytes": 4096)", 2)},
      {"QuantizedThroughScratch", windows(R"("scratch_bytes": 150000)")},
      {"QuantizedByStores",
       windows(R"("scratch_bytes": 150000)"),
       {.fuses = true}},
      {"QuantizedByPulls",
       windows(R"("direct": "pull", "scratch_bytes": 150000)")},
      {"QuantizedStaged",
       windows(R"("peer": "staged", "scratch_bytes": 150000)")},
      {"Colocated",
       [] {
         return CompiledPlan(ReshardJob(3, 3, "", R"(, "colocated": true)"));
       }},
  };
}

class StepOrderTest : public testing::TestWithParam<OrderCase> {};

// What is fused, or sent in parts, is decided when tensors are bound, so the
// proof does not see it.
TEST_P(StepOrderTest, WhatTouchesTheSameBytesIsOrdered) {
  const OrderCase& of = GetParam();
  if (of.options.fuses || of.options.direct == DirectRounds::kSent) {
    EXPECT_EQ(RefitOrder(of.plan(), of.options).FirstRace(), "");
    return;
  }
  const PlanFile plan = of.plan();
  for (const proof::Movers movers :
       {proof::Movers::kSenders, proof::Movers::kReceivers}) {
    const OrderMutations mutations = MutateOrder(plan, movers);
    EXPECT_EQ(mutations.missed, "");
    EXPECT_GT(mutations.noticed, 0);
    std::cout << mutations.tried << " waits and fences, " << mutations.noticed
              << " noticed\n";
    if (!HasDirectRounds(plan)) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, StepOrderTest, testing::ValuesIn(OrderCases()),
                         [](const auto& info) { return info.param.name; });

// Layouts of frameworks, relays, trees, folded jobs and fp8, in plans that the
// golden files show. The compiler has proved that the rest is ordered.
TEST(StepsTest, GoldenPlansAreOrdered) {
  size_t plans = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(REFIT_GOLDEN_JOBS)) {
    const std::string name = file.path().filename().string();
    if (!absl::EndsWith(name, ".json") || absl::EndsWith(name, ".config.json"))
      continue;
    SCOPED_TRACE(name);
    std::ifstream stream(file.path());
    const PlanFile plan =
        PlanOfJob(std::string(std::istreambuf_iterator<char>(stream), {}),
                  REFIT_GOLDEN_JOBS);
    ++plans;
    for (const RefitOrderOptions& options :
         {RefitOrderOptions{.fuses = true},
          RefitOrderOptions{.direct = DirectRounds::kSent}}) {
      EXPECT_EQ(RefitOrder(plan, options).FirstRace(), "");
    }
  }
  EXPECT_GE(plans, 12);
}

// Without it two steps race, in some plan.
TEST(StepsTest, EveryKindOfWaitIsNeeded) {
  std::set<std::string> kinds;
  std::set<std::string> needed;
  for (const OrderCase& of : OrderCases()) {
    const RefitOrder order(of.plan(), of.options);
    for (size_t wait = 0; wait < order.waits(); ++wait) {
      const std::string kind = order.KindOfWait(wait);
      kinds.insert(kind);
      if (!needed.contains(kind) && !order.FirstRace(wait).empty()) {
        needed.insert(kind);
      }
    }
  }
  EXPECT_GT(kinds.size(), 15);
  EXPECT_EQ(needed, kinds);
}

}  // namespace
}  // namespace refit
