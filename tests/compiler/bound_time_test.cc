// The pass that computes a time that no plan beats.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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
                    const std::string& hosts, const std::string& more = "",
                    double peer = kPeer) {
  return EstimatesOf(
             OpenJob(GenericJob(
                 R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                 source, destination,
                 absl::StrFormat(
                     R"(, "topology": {"peer_gigabytes_per_second": %g,
                "network_gigabytes_per_second": 0.01, "hosts": %s}%s)",
                     peer / 1e9, hosts, more))))
      .lower_bound_seconds;
}

constexpr double kFastPeer = 100e9;

// Four replicas need the bytes once over the network and three times over
// NVLink. They deal out beside what they receive.
TEST(BoundTimeTest, NetworkAndNvlinkWorkSideBySideWhereRanksDeal) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                   "[0, 0, 0, 0, 1, 1, 1, 1]", "", kFastPeer),
      kBytes / kNetwork / 4 + kStart);
}

// Else each of them does one round after the other. One has a round of the
// network at least.
TEST(BoundTimeTest, NetworkAndNvlinkAddUpWhereNobodyDeals) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                   "[0, 0, 0, 0, 1, 1, 1, 1]",
                   R"(, "options": {"delta": true})"),
      (kBytes / kNetwork + kStart + 3 * kBytes / kPeer) / 4);
}

// A rank passes on in a round what came in earlier ones. Whatever the rounds,
// they take longer than the bound, and some hardly longer.
TEST(BoundTimeTest, NoStepsBeatTheBound) {
  const double each = kBytes / 4;
  for (const double peer : {0.2e9, 0.1e9, 0.05e9, 0.03e9}) {
    const double bound =
        LowerBoundOf(GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                     "[0, 0, 0, 0, 1, 1, 1, 1]", "", peer);
    const auto dealt = [&](double bytes) { return 20e-6 + 3 * bytes / peer; };
    double least = 1;
    // Each round has so much of the bytes of the one before.
    for (const double factor : {1.0, 0.97, 0.9, 0.8, 0.7, 0.5}) {
      for (int rounds = 1; rounds <= 20; ++rounds) {
        double sum = 0;
        for (int i = 0; i < rounds; ++i) sum += std::pow(factor, i);
        double seconds = 0;
        double before = 0;
        for (int i = 0; i < rounds; ++i) {
          const double bytes = each * std::pow(factor, i) / sum;
          seconds +=
              std::max(bytes / kNetwork + kStart, i > 0 ? dealt(before) : 0);
          before = bytes;
        }
        least = std::min(least, seconds + dealt(before));
      }
    }
    EXPECT_LE(bound, least) << peer;
    EXPECT_GE(bound, least * 0.9) << peer;
  }
}

// Slow NVLink: what is dealt out, what is stored, and what crosses the network
// more than once. No such division takes less than the bound, and one takes as
// much. A message of 4096 bytes takes 20 us to start, and so does a round
// without the network. A rank stages 12288 bytes a round, among them those that
// it deals out to the three others. So there are many rounds, and steps count
// less. At 0.03 GB/s both links are full, and steps count: it is left out here.
TEST(BoundTimeTest, NoDivisionBetweenTheLinksBeatsTheBound) {
  constexpr double kMessageStart = 20e-6 / 4096;  // a byte
  constexpr double kStaging = 12288;
  for (const double peer : {0.1e9, 0.05e9, 0.02e9, 0.011e9}) {
    const double bound = LowerBoundOf(
        GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
        "[0, 0, 0, 0, 1, 1, 1, 1]",
        R"(, "options": {"bucket_bytes": 4096, "staging_bytes": 12288})", peer);
    constexpr int kSteps = 300;
    double least = 1;
    for (int again = 0; again <= kSteps; ++again) {
      for (int dealt = 0; again + dealt <= kSteps; ++dealt) {
        const double part = 3 * kBytes / kSteps;
        const double stored = (kSteps - again - dealt) * part;
        const double network = kBytes + again * part;
        const double apart = network / kNetwork + stored / peer +
                             network / kStaging * kStart +
                             dealt * part * 4 / 3 / kStaging * 20e-6;
        const double beside = (dealt * part + stored) / peer +
                              dealt * part * kMessageStart + 4 * kStart;
        least = std::min(least, std::max(apart, beside) / 4);
      }
    }
    EXPECT_LE(bound, least * (1 + 1e-9)) << peer;
    EXPECT_GE(bound, least * 0.99) << peer;
  }
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

// Hosts of an NVLink domain exchange over NVLink in rounds of the network.
TEST(BoundTimeTest, NothingAddsUpInADomainOfSeveralHosts) {
  const std::string job =
      GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                 GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                 R"(, "topology": {"peer_gigabytes_per_second": 0.1,
           "network_gigabytes_per_second": 0.01, "hosts_per_nvlink_domain": 2,
           "hosts": [0, 0, 1, 1, 2, 2, 3, 3]})");
  EXPECT_DOUBLE_EQ(EstimatesOf(OpenJob(job)).lower_bound_seconds,
                   kBytes / kNetwork / 4 + kStart);
}

// What two sources alone hold leaves them, however many receive it.
TEST(BoundTimeTest, WhatSomeSourcesHoldLeavesThemOverTheNetwork) {
  EXPECT_DOUBLE_EQ(
      LowerBoundOf(GenericSide(2, "Replicate"), GenericSide(4, "Shard(0)"),
                   "[0, 0, 1, 1, 1, 1]"),
      kBytes / 2 / kNetwork + kStart);
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
