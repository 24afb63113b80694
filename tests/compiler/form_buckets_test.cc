// The pass that cuts transfers into buckets.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

TEST(FormBucketsTest, OneParameterFillsTensOfThousandsOfBuckets) {
  const std::string job = GenericJob(
      R"({"name": "w", "shape": [65536, 1024], "dtype": "bf16"})",
      GenericSide(1, "Replicate"), GenericSide(1, "Replicate"),
      R"(, "options": {"bucket_bytes": 4096, "staging_bytes": 65536})");
  EXPECT_EQ(ErrorsOf(job), "");
}

TEST(FormBucketsTest,
     BucketsThatMakeTooManyMessagesAreRefusedBeforeTheyAreMade) {
  const auto errors = [](const std::string& options) {
    return ErrorsOf(GenericJob(
        R"({"name": "w", "shape": [1048576, 16384], "dtype": "bf16"})",
        GenericSide(1, "Replicate"), GenericSide(2, "Replicate"),
        R"(, "options": {"peer": "staged", "delta": true, )" + options + "}"));
  };
  // 32 GiB for each of two ranks.
  EXPECT_NE(errors(R"("bucket_bytes": 4096)")
                .find("error: options.bucket_bytes 4096 cuts this job into "
                      "16777216 messages; wanted at least 32768, which makes "
                      "2097152\n"),
            std::string::npos)
      << errors(R"("bucket_bytes": 4096)");
  EXPECT_NE(errors(R"("bucket_bytes": 4096, "staging_bytes": 8192)")
                .find("wanted at least 32768 (and staging_bytes 65536), which"),
            std::string::npos);
  EXPECT_EQ(errors(R"("bucket_bytes": 67108864)"), "");
}

// The largest message of 256 MiB for one rank, from rank 0 on another host or
// the same.
uint64_t LargestMessage(const std::string& hosts, const std::string& options) {
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [131072, 1024], "dtype": "bf16"})",
                 GenericSide(1, "Replicate"), GenericSide(1, "Replicate"),
                 R"(, "topology": {"hosts": )" + hosts +
                     R"(}, "options": {"peer": "staged")" + options + "}"));
  uint64_t largest = 0;
  for (const fb::Message* message : plan.messages().Of(0)) {
    largest = std::max(largest, message->size_bytes());
  }
  return largest;
}

TEST(FormBucketsTest, MessagesBetweenHostsAreSmallerUnlessTheJobSaysTheirSize) {
  constexpr uint64_t kMiB = 1 << 20;
  EXPECT_EQ(LargestMessage("[0, 1]", ""), 64 * kMiB);
  EXPECT_EQ(LargestMessage("[0, 0]", ""), 256 * kMiB);
  EXPECT_EQ(LargestMessage("[0, 1]", R"(, "bucket_bytes": 268435456)"),
            256 * kMiB);
}

}  // namespace
}  // namespace refit
