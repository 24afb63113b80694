// The pass that gives ranks their hosts.
#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace refit
