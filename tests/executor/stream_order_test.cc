// That each part of a refit waits for what it needs: on devices whose streams
// put work off as long as they may.
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/executor/lazy_device.h"
#include "tests/executor/local_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

// Whose rounds on one GPU go beside others.
class LazyBulkDevice : public LazyDevice {
 public:
  bool CopiesInBulk() const override { return true; }
};

template <typename OfRank = LazyDevice>
void ExpectRefits(const PlanFile& plan) {
  LocalWorldOf<OfRank> world(plan);
  world.Bind();
  for (int refit = 0; refit < 3; ++refit) world.ExpectEveryElementRight(plan);
}

TEST(StreamOrderTest, StagedRoundsReuseTheirStagingInOrder) {
  ExpectRefits(ReshardPlan({.layers = 9, .rows = 12, .columns = 30}).Open());
}

TEST(StreamOrderTest, StagedRelaysPackWhatWasUnpacked) {
  for (const std::string_view hosts :
       {"0, 0, 0, 0, 0, 0", "0, 1, 2, 3, 4, 5", "0, 1, 1, 2, 2, 3"}) {
    for (const int slots : {1, 2, 3}) {
      for (const std::string_view transport : {"nccl", "ucx"}) {
        SCOPED_TRACE(
            absl::StrFormat("hosts %s, %d slots, %s", hosts, slots, transport));
        const PlanFile plan = HostsPlan(
            hosts,
            absl::StrFormat(
                R"("peer": "staged", "bucket_bytes": 4096, "staging_bytes": %d)",
                32768 * slots),
            slots, transport);
        ASSERT_NE(
            plan.plan().required_features() &
                (kFeatureStagedRelays | kFeatureDealing | kFeatureBroadcasts),
            0u);
        ExpectRefits(plan);
      }
    }
  }
}

TEST(StreamOrderTest, DirectRelaysOfTheNetworkReadWhatWasUnpacked) {
  for (const std::string_view hosts :
       {"0, 0, 0, 1, 1, 1", "0, 1, 1, 2, 2, 2"}) {
    SCOPED_TRACE(hosts);
    ExpectRefits(
        HostsPlan(hosts, R"("bucket_bytes": 4096, "staging_bytes": 16384)"));
  }
}

TEST(StreamOrderTest, RefitsEndBehindRoundsBesideOthers) {
  for (const char* options : {"", R"("direct": "pull")"}) {
    ExpectRefits<LazyBulkDevice>(
        CompiledPlan(ReshardJob(3, 3, options, R"(, "colocated": true)")));
  }
}

}  // namespace
}  // namespace refit
