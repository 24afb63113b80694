#include "executor/transport/host_comparison.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "executor/device/host_identity.h"

namespace refit {
namespace {

using Hosts = std::vector<uint32_t>;
using Names = std::vector<std::string>;

TEST(HostComparisonTest, HostsThatArePlannedAreNoNews) {
  EXPECT_EQ(CompareHosts(Hosts{0, 0, 1, 1}, Names{"x", "x", "y", "y"},
                         Names{"a", "a", "b", "b"}),
            Names{});
  EXPECT_EQ(CompareHosts(Hosts{}, Names{}, Names{}), Names{});
}

TEST(HostComparisonTest, RanksThatThePlanHasTogetherAndTheWorldApart) {
  EXPECT_EQ(
      CompareHosts(Hosts{0, 0, 0}, Names{"x", "y", "y"}, Names{"a", "b", "b"}),
      Names{"the plan has these ranks on one host, but they run on 2: rank 0 "
            "on \"a\"; ranks 1, 2 on \"b\". Give the job a topology that says "
            "where ranks are"});
}

TEST(HostComparisonTest, RanksThatThePlanHasApartAndTheWorldTogether) {
  EXPECT_EQ(
      CompareHosts(Hosts{0, 1, 1}, Names{"x", "x", "x"}, Names{"a", "a", "a"}),
      Names{"these ranks all run on \"a\", but the plan has rank 0 on host 0; "
            "ranks 1, 2 on host 1: what moves between them takes the way of "
            "the network"});
}

TEST(HostIdentityTest, NcclsVariableGoesBeforeTheMachine) {
  unsetenv("NCCL_HOSTID");
  const std::string machine = ThisHost();
  EXPECT_FALSE(machine.empty());
  EXPECT_EQ(ThisHost(), machine);
  setenv("NCCL_HOSTID", "rack-7", /*overwrite=*/1);
  EXPECT_EQ(ThisHost(), "NCCL_HOSTID rack-7");
  EXPECT_EQ(ThisHostName(), "rack-7");
  unsetenv("NCCL_HOSTID");
  EXPECT_NE(ThisHostName(), "rack-7");
}

}  // namespace
}  // namespace refit
