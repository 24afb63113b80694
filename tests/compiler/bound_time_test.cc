// The pass that computes a time that no plan beats.
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_format.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

constexpr double kBytes = 960 * 64 * 2;
constexpr double kPeer = 0.1e9;
constexpr double kNetwork = 0.01e9;
constexpr double kStart = 120e-6;  // of a round between hosts

double LowerBoundOf(const std::string& source, const std::string& destination,
                    const std::string& hosts, const std::string& more = "") {
  return EstimatesOf(
             OpenJob(GenericJob(
                 R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                 source, destination,
                 absl::StrFormat(
                     R"(, "topology": {"peer_gigabytes_per_second": 0.1,
                "network_gigabytes_per_second": 0.01, "hosts": %s}%s)",
                     hosts, more))))
      .lower_bound_seconds;
}

// Four replicas of a host need the bytes once over the network, and each has a
// NIC.
TEST(BoundTimeTest, WhatADomainWantsEntersItOnce) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                   "[0, 0, 0, 0, 1, 1, 1, 1]"),
      kBytes / kNetwork / 4 + kStart);
}

// A source does not receive, so its NIC brings nothing into its host.
TEST(BoundTimeTest, OnlyNicsOfReceiversBringBytesIn) {
  EXPECT_DOUBLE_EQ(LowerBoundOf(GenericSide(4, "Shard(0)"),
                                GenericSide(1, "Replicate"), "[0, 1, 1, 1, 0]"),
                   kBytes * 3 / 4 / kNetwork + kStart);
}

// Hosts of an NVLink domain exchange over NVLink.
TEST(BoundTimeTest, ADomainOfSeveralHostsIsEnteredOnce) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                   R"([0, 0, 1, 1, 2, 2, 3, 3], "hosts_per_nvlink_domain": 2)"),
      kBytes / kNetwork / 4 + kStart);
}

// Two hosts of two ranks are on a leaf. Its way to the others has half the
// speed of its four NICs.
TEST(BoundTimeTest, WhatALeafWantsEntersItOnce) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Shard(0)"),
                   R"([0, 0, 1, 1, 2, 2, 3, 3], "hosts_per_leaf": 2,
                      "spine_oversubscription": 2)"),
      kBytes / kNetwork / 2 + kStart);
  // What hosts of a leaf exchange does not leave it.
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Replicate"), GenericSide(4, "Shard(0)"),
                   R"([0, 0, 2, 2, 1, 1, 3, 3], "hosts_per_leaf": 2,
                      "spine_oversubscription": 2)"),
      kBytes / kNetwork / 4 + kStart);
}

// Of a folded job too, where no leaf has ranks of two of its parts.
TEST(BoundTimeTest, WhatALeafOfAPartWantsEntersItOnce) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(2, "Replicate"), GenericSide(6, "Replicate"),
                   R"([8, 9, 0, 1, 2, 3, 4, 5], "hosts_per_leaf": 1,
                      "spine_oversubscription": 8)"),
      kBytes / (kNetwork / 8) + kStart);
}

// Each of the domain's two hosts has a leaf, whose way to the others has a
// quarter of the speed of two NICs.
TEST(BoundTimeTest, ADomainOfSeveralLeavesIsEnteredOverTheirWays) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                   R"([0, 0, 1, 1, 2, 2, 3, 3], "hosts_per_nvlink_domain": 2,
                      "hosts_per_leaf": 1, "spine_oversubscription": 4)"),
      kBytes / kNetwork + kStart);
}

// All that a rank receives comes over its links, from wherever.
TEST(BoundTimeTest, ARankReceivesOverAllItsLinks) {
  EXPECT_DOUBLE_EQ(LowerBoundOf(GenericSide(1, "Replicate"),
                                GenericSide(1, "Replicate"), "[0, 0]"),
                   kBytes / kPeer);
}

// A round of the network starts before its bytes, and staging holds no more.
TEST(BoundTimeTest, RoundsOfTheNetworkStartOneAfterTheOther) {
  // Half of the bytes leave each source, in four rounds at least.
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(
          GenericSide(2, "Replicate"), GenericSide(4, "Shard(0)"),
          "[0, 0, 1, 1, 1, 1]",
          R"(, "options": {"bucket_bytes": 4096, "staging_bytes": 16384})"),
      kBytes / 2 / kNetwork + 4 * kStart);
}

// What two sources alone hold leaves them, however many receive it.
TEST(BoundTimeTest, WhatSomeSourcesHoldLeavesThemOverTheNetwork) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(2, "Replicate"), GenericSide(4, "Shard(0)"),
                   "[0, 0, 1, 1, 1, 1]"),
      kBytes / 2 / kNetwork + kStart);
}

// Ranks 0 and 1 share a NIC, rank 2 has one of its own.
TEST(BoundTimeTest, SourcesThatShareANicSendOverOne) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(3, "Replicate"), GenericSide(4, "Shard(0)"),
                   R"([0, 0, 1, 2, 3, 4, 5], "gpus_per_nic": 2)"),
      kBytes / 2 / kNetwork + kStart);
}

// Two sources on the receivers' host have a NIC, over which nothing is
// received.
TEST(BoundTimeTest, ReceiversThatShareANicReceiveOverOne) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(8, "Shard(0)"), GenericSide(2, "Shard(1)"),
                   R"([0, 0, 1, 1, 2, 2, 3, 3, 0, 0], "gpus_per_nic": 2)"),
      kBytes * 3 / 4 / kNetwork + kStart);
}

// Each of two sources has a leaf, whose way to the others has half the speed of
// a NIC.
TEST(BoundTimeTest, WhatSourcesHoldLeavesTheirLeaves) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(2, "Replicate"), GenericSide(8, "Shard(0)"),
                   R"([0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
                                   "hosts_per_leaf": 1,
                                   "spine_oversubscription": 2)"),
      kBytes / kNetwork + kStart);
}

// A receiver beside them might pass it on over a NIC of its own. A host of
// one receiver still takes in all bytes.
TEST(BoundTimeTest, AReceiverOfTheHostMayPassOnWhatItsSourceHolds) {
  EXPECT_DOUBLE_EQ(LowerBoundOf(GenericSide(1, "Replicate"),
                                GenericSide(3, "Replicate"), "[0, 0, 1, 2]"),
                   kBytes / kNetwork + kStart);
  EXPECT_LT(LowerBoundOf(GenericSide(1, "Replicate"),
                         GenericSide(5, "Replicate"), "[0, 0, 1, 1, 1, 1]"),
            kBytes / kNetwork);
}

}  // namespace
}  // namespace refit
