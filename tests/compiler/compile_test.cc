// Whole compilations of jobs that once went wrong.
#include "compiler/compile.h"

#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "plan/plan_file.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

// Compiles (which proves) the job; its errors, or "".
std::string ErrorsOf(const std::string& job_text,
                     std::vector<uint8_t>* plan = nullptr) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("job.json", job_text);
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(path, CompileOptions(), diagnostics);
  if (!diagnostics.ok()) return diagnostics.Render();
  if (!bytes.ok()) return std::string(bytes.status().message());
  if (plan != nullptr) *plan = *std::move(bytes);
  return "";
}

// A side on a one-dimensional mesh of `ranks`, every parameter placed alike.
std::string GenericSide(int ranks, const std::string& placement) {
  return R"({"layout": "generic", "meshes": {"m": {"axes": {"x": )" +
         std::to_string(ranks) +
         R"(}}}, "tensors": [{"match": "*", "mesh": "m", "placements": [")" +
         placement + R"("]}]})";
}

std::string GenericJob(const std::string& parameters, const std::string& source,
                       const std::string& destination,
                       const std::string& more = "") {
  return R"({"model": {"parameters": [)" + parameters + R"(]}, "source": )" +
         source + R"(, "destination": )" + destination + more + "}";
}

TEST(CompileTest, OneParameterFillsTensOfThousandsOfBuckets) {
  const std::string job = GenericJob(
      R"({"name": "w", "shape": [65536, 1024], "dtype": "bf16"})",
      GenericSide(1, "Replicate"), GenericSide(1, "Replicate"),
      R"(, "options": {"bucket_bytes": 4096, "staging_bytes": 65536})");
  EXPECT_EQ(ErrorsOf(job), "");
}

TEST(CompileTest, ColocatedRanksTakeAHostList) {
  const auto with_hosts = [](const std::string& hosts) {
    return ErrorsOf(GenericJob(
        R"({"name": "w", "shape": [8, 8], "dtype": "bf16"})",
        GenericSide(2, "Shard(0)"), GenericSide(2, "Shard(1)"),
        R"(, "colocated": true, "topology": {"hosts": )" + hosts + "}"));
  };
  EXPECT_EQ(with_hosts("[0, 1, 0, 1]"), "");
  EXPECT_NE(with_hosts("[0, 1, 1, 1]")
                .find("topology.hosts puts rank 0 on host 0 and rank 2, which "
                      "shares its GPU, on host 1; wanted one host"),
            std::string::npos);
}

// 256 FSDP ranks name the same tensors: names are checked once, not by rank.
TEST(CompileTest, ManyRanksMayHoldTheSameNames) {
  std::string parameters;
  for (int expert = 0; expert < 20000; ++expert) {
    parameters += (expert == 0 ? "" : ",\n");
    parameters += R"({"name": "e.)" + std::to_string(expert) +
                  R"(.w", "shape": [256, 8], "dtype": "bf16"})";
  }
  EXPECT_EQ(ErrorsOf(GenericJob(parameters, GenericSide(256, "Shard(0)"),
                                GenericSide(1, "Replicate"))),
            "");
}

TEST(CompileTest, ReplicasShareTheSending) {
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
    for (const fb::Message* message :
         *plan->body().programs()->Get(rank)->messages()) {
      sent += static_cast<double>(message->size_bytes());
    }
    EXPECT_LE(sent, mean * 1.05) << "rank " << rank;
  }
}

}  // namespace
}  // namespace refit
