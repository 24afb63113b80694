// What a profiler sees of a refit.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <sstream>
#include <string>

#include "plan/enum_text.h"
#include "runner/checked_run.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr size_t kTextBytes = size_t{1} << 20;

TEST(NvtxTest, EveryStepAndRoundIsARange) {
  setenv("NVTX_INJECTION64_PATH", NVTX_RECORDER, /*overwrite=*/1);
  const PlanFile plan =
      ReshardPlan({.layers = 2, .mechanism = fb::Mechanism::kDirect}).Open();
  const auto result = RunChecked(plan, {.iterations = 2});
  ASSERT_TRUE(result.ok()) << result.status();

  void* recorder = dlopen(NVTX_RECORDER, RTLD_LAZY | RTLD_NOLOAD);
  ASSERT_NE(recorder, nullptr) << "NVTX did not load it";
  auto* const read = reinterpret_cast<int (*)(char*, size_t)>(
      dlsym(recorder, "nvtx_recorder_read"));
  ASSERT_NE(read, nullptr);
  std::string text(kTextBytes, '\0');
  EXPECT_EQ(read(text.data(), text.size()), 0) << "ranges that did not end";
  std::multiset<std::string> seen;
  std::istringstream lines(text.c_str());
  for (std::string line; std::getline(lines, line);) seen.insert(line);
  const std::string route =
      RouteText(plan.body().rounds()->Get(0)->route(), fb::Mechanism::kDirect);
  std::multiset<std::string> wanted;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    wanted.insert({"refit connect", "refit bind"});
    for (int refit = 0; refit < 2; ++refit) {
      wanted.insert(
          {"refit run", "refit round 0 " + route, "refit round 1 " + route});
    }
  }
  EXPECT_EQ(seen, wanted);
}

}  // namespace
}  // namespace refit
