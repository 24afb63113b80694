#include "executor/transport/host_comparison.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
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

// Each rank is told them.
TEST(HostComparisonTest, ManyHostsAreCounted) {
  Hosts together;
  Hosts apart;
  Names real;
  for (uint32_t host = 0; host < 100; ++host) {
    for (int rank = 0; rank < 2; ++rank) {
      together.push_back(0);
      apart.push_back(2 * host + static_cast<uint32_t>(rank));
      real.push_back(absl::StrCat("h", host));
    }
  }
  const Names one = CompareHosts(together, real, real);
  ASSERT_EQ(one.size(), 1u);
  EXPECT_NE(one[0].find("run on 100: ranks 0, 1 on \"h0\"; "),
            std::string::npos);
  EXPECT_NE(one[0].find("; ranks 30, 31 on \"h15\"; and 92 more. Give"),
            std::string::npos)
      << one[0];
  const Names many = CompareHosts(apart, real, real);
  ASSERT_EQ(many.size(), 9u);
  EXPECT_EQ(many[8], "92 more hosts differ from the plan");
}

Edge EdgeTo(int32_t peer, fb::Route route) {
  return {peer, fb::MessageKind::kSend, route, fb::Mechanism::kDirect};
}

TEST(GpuComparisonTest, GpusThatArePlannedAreNoNews) {
  const std::vector<Edge> edges = {EdgeTo(1, fb::Route::kLocal),
                                   EdgeTo(2, fb::Route::kPeer),
                                   EdgeTo(3, fb::Route::kNetwork)};
  EXPECT_EQ(CompareGpus(0, edges, Names{"a", "a", "b", "c"}), Names{});
  EXPECT_EQ(CompareGpus(0, edges, Names{"", "a", "", ""}), Names{});
  EXPECT_EQ(CompareGpus(0, edges, Names{"a", "", "", ""}), Names{});
}

TEST(GpuComparisonTest, RanksOfOneGpuThatRunOnSeveral) {
  EXPECT_EQ(CompareGpus(0, {EdgeTo(2, fb::Route::kLocal)},
                        Names{"GPU-a", "GPU-a", "GPU-b"}),
            Names{"the plan has rank 0 and rank 2 on one GPU, but rank 0 runs "
                  "on GPU-a and rank 2 on GPU-b: what moves between them takes "
                  "the way between GPUs"});
}

TEST(GpuComparisonTest, RanksOfSeveralGpusThatRunOnOne) {
  EXPECT_EQ(
      CompareGpus(1, {EdgeTo(0, fb::Route::kPeer), EdgeTo(2, fb::Route::kPeer)},
                  Names{"GPU-a", "GPU-a", "GPU-a"}),
      Names{"rank 1 and ranks 0, 2 run on one GPU, GPU-a, but the plan has "
            "them on several: they wait for each other in turns, and NCCL "
            "refuses them. Give each rank a GPU of its own, or the job "
            "\"colocated\": true"});
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
