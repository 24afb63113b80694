// Worlds too large for a sanitizer.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "runner/checked_run.h"
#include "tests/executor/plan_builder.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

TEST(ManyRanksTest, FiveHundredAndTwelveRanksRunAsThreads) {
  // Each source sends to each destination in every round, which is too much for
  // a group.
  if (kSanitized) GTEST_SKIP() << "a minute with a sanitizer";
  const PlanFile plan = ReshardPlan({.source_ranks = 256,
                                     .destination_ranks = 256,
                                     .layers = 2,
                                     .rows = 256,
                                     .columns = 512,
                                     .mechanism = fb::Mechanism::kDirect})
                            .Open();
  const auto result =
      RunChecked(plan, {.iterations = 2, .timeout = std::chrono::seconds(60)});
  ASSERT_TRUE(result.ok()) << result.status();
  for (const std::string& mismatch : result->check.mismatches) {
    ADD_FAILURE() << mismatch;
  }
  EXPECT_EQ(result->check.checked_bytes, result->destination_bytes);
  EXPECT_EQ(result->refits.size(), 2);
}

}  // namespace
}  // namespace refit
