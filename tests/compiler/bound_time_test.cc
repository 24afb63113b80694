// The pass that computes a time that no plan beats.
#include <gtest/gtest.h>

#include <string>

#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

constexpr double kBytes = 960 * 64 * 2;
constexpr double kPeer = 0.1e9;
constexpr double kNetwork = 0.01e9;

double LowerBoundOf(const std::string& source, const std::string& destination,
                    const std::string& hosts, const std::string& more = "") {
  return OpenJob(
             GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                        source, destination,
                        R"(, "topology": {"peer_gigabytes_per_second": 0.1,
                "network_gigabytes_per_second": 0.01, "hosts": )" +
                            hosts + "}" + more))
      .body()
      .stats()
      ->lower_bound_seconds();
}

// Four replicas need the bytes once over the network and three times over
// NVLink. They deal out beside what they receive.
TEST(BoundTimeTest, NetworkAndNvlinkWorkSideBySideWhereRanksDeal) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                   "[0, 0, 0, 0, 1, 1, 1, 1]",
                   R"(, "options": {"deal": "relays"})"),
      kBytes / kNetwork / 4);
}

// Else each of them does one round after the other.
TEST(BoundTimeTest, NetworkAndNvlinkAddUpWhereNobodyDeals) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                   "[0, 0, 0, 0, 1, 1, 1, 1]"),
      (kBytes / kNetwork + 3 * kBytes / kPeer) / 4);
}

// What two sources alone hold leaves them, however many receive it.
TEST(BoundTimeTest, WhatSomeSourcesHoldLeavesThemOverTheNetwork) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(2, "Replicate"), GenericSide(4, "Shard(0)"),
                   "[0, 0, 1, 1, 1, 1]"),
      kBytes / 2 / kNetwork);
}

// A receiver beside them might pass it on over a NIC of its own. A host of
// one receiver still takes in all bytes.
TEST(BoundTimeTest, AReceiverOfTheHostMayPassOnWhatItsSourceHolds) {
  EXPECT_DOUBLE_EQ(LowerBoundOf(GenericSide(1, "Replicate"),
                                GenericSide(3, "Replicate"), "[0, 0, 1, 2]"),
                   kBytes / kNetwork);
  EXPECT_LT(LowerBoundOf(GenericSide(1, "Replicate"),
                         GenericSide(5, "Replicate"), "[0, 0, 1, 1, 1, 1]"),
            kBytes / kNetwork);
}

}  // namespace
}  // namespace refit
