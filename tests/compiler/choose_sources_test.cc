// The pass that chooses the rank that sends each piece.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

TEST(ChooseSourcesTest, ReplicasShareTheSending) {
  const std::string parameters =
      R"({"name": "w", "shape": [1024, 64], "dtype": "bf16"},
         {"name": "v", "shape": [64, 2], "dtype": "bf16"})";
  std::vector<uint8_t> bytes;
  ASSERT_EQ(ErrorsOf(GenericJob(parameters, GenericSide(4, "Replicate"),
                                GenericSide(3, "Shard(0)"),
                                R"(, "topology": {"gpus_per_host": 4})"),
                     &bytes),
            "");
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(bytes);
  ASSERT_TRUE(plan.ok());
  const double mean =
      static_cast<double>(plan->body().stats()->moved_bytes()) / 4;
  for (int32_t rank = 0; rank < plan->source_ranks(); ++rank) {
    double sent = 0;
    for (const fb::Message *message : plan->messages().Of(rank)) {
      sent += static_cast<double>(message->size_bytes());
    }
    EXPECT_LE(sent, mean * 1.05) << "rank " << rank;
  }
}

} // namespace
} // namespace refit
