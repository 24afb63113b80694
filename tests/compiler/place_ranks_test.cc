// The pass that gives ranks their hosts.
#include <gtest/gtest.h>

#include <string>

#include "absl/status/statusor.h"
#include "compiler/ir/module.h"
#include "compiler/simulated_seconds.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

TEST(PlaceRanksTest, ColocatedRanksTakeAHostList) {
  const auto with_hosts = [](const std::string& hosts) {
    return ErrorsOf(GenericJob(
        R"({"name": "w", "shape": [8, 8], "dtype": "bf16"})",
        GenericSide(2, "Shard(0)"), GenericSide(2, "Shard(1)"),
        R"(, "colocated": true, "topology": {"hosts": )" + hosts + "}"));
  };
  EXPECT_EQ(with_hosts("[0, 1, 0, 1]"), "");
  EXPECT_NE(with_hosts("[0, 1, 1, 1]")
                .find("topology.hosts puts rank 0 on host 0 and rank 2, which "
                      "shares its GPU, on host 1; wanted one host"),
            std::string::npos);
}

// Two trainers share a NIC, and each engine has one alone.
TEST(EstimateCostTest, NicsAreAsFastAsThoseWhoShareThem) {
  const PlanFile plan = OpenJob(GenericJob(
      R"({"name": "w", "shape": [8192, 65536], "dtype": "bf16"})",
      GenericSide(2, "Shard(0)"), GenericSide(4, "Shard(0)"),
      R"(, "topology": {"hosts": [0, 0, 1, 2, 3, 4], "gpus_per_nic": 4})"));
  const absl::StatusOr<double> simulated =
      SimulatedSeconds(plan, Topology{.host = {}, .fabric = {}});
  ASSERT_TRUE(simulated.ok());
  EXPECT_NEAR(EstimatesOf(plan).predicted_seconds / *simulated, 1, 0.05);
}

}  // namespace
}  // namespace refit
