#include "plan/schedule/round_copies.h"

#include <gtest/gtest.h>

#include "plan/plan_file.h"
#include "plan/schedule/tensor_table.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

using Shares = std::vector<DeviceShare>;

// Of what the rank packs, or unpacks, by round.
Shares SharesOf(const PlanFile& plan, int32_t rank, bool packs) {
  const RankSchedule schedule(plan, rank);
  // Addresses are not followed, but added to.
  std::vector<std::byte> memory(1 << 16);
  const std::vector<std::byte*> tensors(TensorTable(plan, rank).size(),
                                        memory.data());
  const absl::StatusOr<RoundCopies> copies = BuildRoundCopies(
      plan, rank, schedule, tensors, memory.data(), {}, {}, false);
  Shares shares;
  if (!copies.ok()) return shares;
  for (const RoundWork& work : schedule.rounds()) {
    const std::optional<size_t> batch =
        packs ? work.pack_batch : work.unpack_batch;
    if (batch.has_value()) shares.push_back(copies->batches[*batch].share);
  }
  return shares;
}

TEST(RoundCopiesTest, PackingBesideAnExchangeTakesLittleOfTheDevice) {
  const PlanFile plan = ReshardPlan({.layers = 4, .padding = 2}).Open();
  const auto link = DeviceShare::kLink;
  EXPECT_EQ(SharesOf(plan, 0, true),
            Shares({DeviceShare::kAll, link, link, link}));
  EXPECT_EQ(SharesOf(plan, 0, false), Shares());
  EXPECT_EQ(SharesOf(plan, 2, true), Shares());
  EXPECT_EQ(SharesOf(plan, 2, false),
            Shares({link, link, link, DeviceShare::kAll}));
}

TEST(RoundCopiesTest, RelaysPackAndUnpackOnTwiceAsMuch) {
  PlanBuilder builder = RelayPlan({.replicas = 2, .layers = 4});
  builder.mechanisms.clear();
  for (PlanBuilder::Rank& rank : builder.ranks) {
    for (PlanBuilder::Message& message : rank.messages) {
      message.staging_offset = rank.staging_bytes;
      rank.staging_bytes += kStagingAlignmentBytes * message.size_bytes;
    }
  }
  const PlanFile plan = builder.Open();
  const Shares packs = SharesOf(plan, 1, true);
  ASSERT_GT(packs.size(), 1);
  EXPECT_EQ(packs.front(), DeviceShare::kAll);
  for (size_t i = 1; i < packs.size(); ++i) {
    EXPECT_EQ(packs[i], DeviceShare::kTwoLinks) << i;
  }
  EXPECT_EQ(SharesOf(plan, 1, false).back(), DeviceShare::kAll);
}

}  // namespace
}  // namespace refit
