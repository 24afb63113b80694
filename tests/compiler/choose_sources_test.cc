// The pass that chooses the rank that sends each piece.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

// Bytes that each source sends of a job whose sources are replicas.
std::vector<double> SentBytes(int sources, int receivers,
                              const std::string& topology) {
  const PlanFile plan = OpenJob(GenericJob(
      R"({"name": "w", "shape": [1024, 64], "dtype": "bf16"},
                    {"name": "v", "shape": [64, 2], "dtype": "bf16"})",
      GenericSide(sources, "Replicate"), GenericSide(receivers, "Shard(0)"),
      ", \"topology\": {" + topology + "}"));
  std::vector<double> sent;
  for (int32_t rank = 0; rank < plan.source_ranks(); ++rank) {
    sent.push_back(0);
    for (const fb::Message* message : plan.messages().Of(rank)) {
      sent.back() += static_cast<double>(message->size_bytes());
    }
  }
  return sent;
}

constexpr double kAll = 2 * (1024 * 64 + 64 * 2);

TEST(ChooseSourcesTest, ReplicasShareTheSending) {
  for (const double sent : SentBytes(4, 3, R"("gpus_per_host": 4)")) {
    EXPECT_LE(sent, kAll / 4 * 1.05);
  }
}

// Ranks 0 and 1 have one, rank 2 another.
TEST(ChooseSourcesTest, NicsShareTheSending) {
  const std::vector<double> sent =
      SentBytes(3, 4, R"("hosts": [0, 0, 1, 2, 3, 4, 5], "gpus_per_nic": 2)");
  EXPECT_LE(sent[0], kAll / 4 * 1.05);
  EXPECT_LE(sent[1], kAll / 4 * 1.05);
  EXPECT_LE(sent[2], kAll / 2 * 1.05);
}

}  // namespace
}  // namespace refit
