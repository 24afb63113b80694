// The list of a rank's steps, and that it orders all that touches the same
// bytes.
#include "plan/schedule/steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "plan/schedule/issue_order.h"
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

// By rank, the staged steps of a list as they are issued.
std::map<int32_t, std::string> IssuedStaged(const PlanFile& plan) {
  std::map<int32_t, std::string> issued;
  const RefitOrder order(
      plan, {.edit = [&](int32_t rank, std::vector<Step>& steps) {
        for (const Step& step : InIssueOrder(steps)) {
          if (step.round == kNoRound) continue;
          absl::StrAppend(&issued[rank], issued[rank].empty() ? "" : ", ",
                          StepKindName(step.kind), " ", step.round);
        }
      }});
  return issued;
}

TEST(IssueOrderTest, WhatIsDoneBesideAnExchangeIsIssuedBeforeIt) {
  const PlanFile plan = HostsPlan(
      "0, 1, 2, 3, 4, 5", R"("peer": "staged", "bucket_bytes": 4096)", 2);
  const std::map<int32_t, std::string> issued = IssuedStaged(plan);
  const auto destination = static_cast<int32_t>(plan.body().source_ranks());
  EXPECT_THAT(issued.at(0),
              testing::StartsWith("pack 0, pack 1, exchange 0, pack 2, "
                                  "exchange 1, pack 3, exchange 2, "));
  EXPECT_THAT(issued.at(destination),
              testing::StartsWith("exchange 0, unpack 0, exchange 1, unpack 1, "
                                  "exchange 2, "));
}

// Nothing else changes: what was ordered still is.
TEST(IssueOrderTest, StepsOfALaneAndThoseThatWaitForPeersKeepTheirOrder) {
  for (const OrderCase& of : OrderCases()) {
    SCOPED_TRACE(of.name);
    RefitOrderOptions options = of.options;
    options.edit = [](int32_t, std::vector<Step>& steps) {
      const auto number_of = [](const Step& step) {
        return std::tuple(step.kind, step.lane, step.round, step.number);
      };
      const auto in_turn = [&](const std::vector<Step>& all, bool peers,
                               Lane lane) {
        std::vector<decltype(number_of(all.front()))> numbers;
        for (const Step& step : all) {
          const bool waits =
              step.lane == Lane::kMain || step.lane == Lane::kBeside;
          if (peers ? waits : step.lane == lane) {
            numbers.push_back(number_of(step));
          }
        }
        return numbers;
      };
      const std::vector<Step> listed = steps;
      steps = InIssueOrder(std::move(steps));
      EXPECT_EQ(in_turn(steps, true, Lane::kMain),
                in_turn(listed, true, Lane::kMain));
      for (size_t lane = 0; lane < kLanes; ++lane) {
        EXPECT_EQ(in_turn(steps, false, static_cast<Lane>(lane)),
                  in_turn(listed, false, static_cast<Lane>(lane)));
      }
      for (uint32_t i = 0; i < steps.size(); ++i) {
        for (const uint32_t other : steps[i].after) EXPECT_LT(other, i);
      }
    };
    EXPECT_EQ(RefitOrder(of.plan(), options).FirstRace(), "");
  }
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
