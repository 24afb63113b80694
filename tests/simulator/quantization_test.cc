// What quantization costs in direct rounds, which do it while they copy.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "simulator/simulation.h"
#include "tests/compiler/compile_testing.h"

namespace refit::simulator {
namespace {

// Two layers: attention of 4 x 1024 x 1024, an MLP of 3 x 1024 x 4096.
constexpr char kConfig[] = R"({"model_type": "qwen3", "hidden_size": 1024,
 "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
 "head_dim": 128, "vocab_size": 40, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "intermediate_size": 4096})";
constexpr double kMlpElements = 2.0 * 3 * 1024 * 4096;
constexpr double kElements = kMlpElements + 2.0 * 4 * 1024 * 1024;

// `sources` ranks feed one of vLLM, in fp8. `mlp`: rules that place it.
PlanFile Fp8Plan(int sources, const std::string& mlp, const std::string& more) {
  const TemporaryDirectory directory;
  directory.Write("config.json", kConfig);
  const std::string path = directory.Write(
      "job.json",
      R"({"model": "config.json", "source": {"layout": "generic", "meshes":
       {"m": {"axes": {"x": )" +
          std::to_string(sources) + R"(}}}, "tensors": [)" + mlp +
          R"({"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
       "destination": {"layout": "vllm", "dtype": "fp8_e4m3_block128"})" +
          more + "}");
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(path, CompileOptions(), diagnostics);
  EXPECT_TRUE(bytes.ok()) << diagnostics.Render();
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(*std::move(bytes));
  EXPECT_TRUE(plan.ok());
  return *std::move(plan);
}

Simulation Simulated(const PlanFile& plan, const Options& options) {
  absl::StatusOr<Simulation> simulation = Simulate(plan, options);
  EXPECT_TRUE(simulation.ok()) << simulation.status();
  return *std::move(simulation);
}

std::vector<Times> TimesOf(const Simulation& simulation, TaskKind kind) {
  std::vector<Times> times;
  for (size_t i = 0; i < simulation.times.size(); ++i) {
    const Task& task = simulation.graph.tasks[i];
    if (task.kind == kind) times.push_back(simulation.times[i]);
  }
  return times;
}

// A GPU that copies to itself quantizes at the speed of its memory.
TEST(Quantization, OfCopiesInsideAGpuTakesAsLongAsItsMemory) {
  const PlanFile plan = Fp8Plan(1, "", R"(, "colocated": true)");
  Options options;
  options.fused_elements_per_second = 1e9;
  EXPECT_NEAR(Simulated(plan, options).seconds / (kElements / 1e9), 1, 0.01);
}

TEST(Quantization, OfStoresIsHiddenByASlowerLink) {
  const PlanFile plan = Fp8Plan(1, "", "");
  Options options;
  options.peer_bytes_per_second = 1e9;
  options.fused_elements_per_second = 2e9;
  EXPECT_NEAR(Simulated(plan, options).seconds / (kElements / 1e9), 1, 0.01);
  options.fused_elements_per_second = 0.5e9;
  EXPECT_NEAR(Simulated(plan, options).seconds / (kElements / 0.5e9), 1, 0.01);
}

// Two sources hold rows in turns of 64, which cuts blocks.
PlanFile PulledPlan(const std::string& more = "") {
  return Fp8Plan(2,
                 R"x({"match": "*.mlp.down_proj.weight", "mesh": "m",
                      "placements": ["StridedShard(0, split_factor=8)"]},
                     {"match": "*.mlp.*_proj.weight", "mesh": "m",
                      "placements": ["StridedShard(0, split_factor=32)"]},)x",
                 more);
}

TEST(Quantization, ADestinationReadsItsSourcesBehindTheRounds) {
  Options options;
  options.peer_bytes_per_second = 1e9;
  const Simulation simulation = Simulated(PulledPlan(), options);
  std::vector<Times> reads;
  double others_end = 0;
  for (size_t i = 0; i < simulation.times.size(); ++i) {
    const Task& task = simulation.graph.tasks[i];
    if (task.kind != TaskKind::kMessage) continue;
    const Times& times = simulation.times[i];
    if (static_cast<double>(
            simulation.graph.messages[task.message].size_bytes) ==
        kMlpElements) {
      reads.push_back(times);
    } else {
      others_end = std::max(others_end, times.end);
    }
  }
  // Half of the bf16 of each, at once.
  ASSERT_EQ(reads.size(), 2u);
  EXPECT_EQ(reads[0].begin, reads[1].begin);
  EXPECT_NEAR(reads[0].begin, others_end + kDirectRoundSeconds, 1e-9);
  EXPECT_EQ(reads[0].end, simulation.seconds);
  EXPECT_NEAR(reads[0].end - reads[0].begin, 2 * kMlpElements / 1e9, 1e-6);
  // Slow memory takes longer than the links.
  options.fused_elements_per_second = 0.1e9;
  EXPECT_GT(Simulated(PulledPlan(), options).seconds, kMlpElements / 0.1e9);
}

// Staged rounds unpack into scratch. On CPUs direct rounds do so as well.
TEST(Quantization, ElsewhereDestinationsQuantizeLast) {
  const Simulation staged =
      Simulated(PulledPlan(R"(, "options": {"peer": "staged"})"), {});
  const Simulation on_cpus = Simulated(PulledPlan(), OptionsOf(Executor::kCpu));
  for (const Simulation* simulation : {&staged, &on_cpus}) {
    const std::vector<Times> quantizes =
        TimesOf(*simulation, TaskKind::kQuantize);
    ASSERT_FALSE(quantizes.empty());
    EXPECT_EQ(quantizes.back().end, simulation->seconds);
    for (const Times& message : TimesOf(*simulation, TaskKind::kMessage)) {
      EXPECT_LT(message.end, quantizes.back().begin);
    }
  }
}

}  // namespace
}  // namespace refit::simulator
