// Quantization in waves: how it is cut, and the windows that plans get.
#include "compiler/passes/quantize_waves.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile.h"
#include "gtest/gtest.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

// Two layers' attention, three experts of four layers each, a last odd matrix.
std::vector<QuantizedBox> SomeBoxes() {
  const auto box = [](Dims lo, Dims hi, int64_t element_bytes) {
    return QuantizedBox{.box = {.lo = lo, .hi = hi},
                        .scheme = kFp8Block128,
                        .element_bytes = element_bytes};
  };
  return {box({0, 0, 0}, {2, 512, 256}, 1),
          box({4, 3, 0, 0}, {8, 6, 384, 256}, 1),
          box({0, 0, 0}, {1, 300, 256}, 2)};
}

std::vector<int64_t> WaveBytes(const std::vector<QuantizedBox>& boxes,
                               int32_t waves,
                               int64_t uneven_part = kUnevenPart) {
  std::vector<int64_t> bytes(static_cast<size_t>(waves), 0);
  for (const WavePart& part : CutIntoWaves(boxes, waves, uneven_part)) {
    bytes[static_cast<size_t>(part.wave)] +=
        part.box.Volume() * boxes[part.of].element_bytes;
  }
  return bytes;
}

TEST(CutIntoWavesTest, PartsTileTheBoxesInWholeBlocks) {
  const std::vector<QuantizedBox> boxes = SomeBoxes();
  const Dims rows = {512, 384, 300};
  for (const int32_t waves : {1, 2, 3, 7, 20, 200}) {
    SCOPED_TRACE(waves);
    std::vector<int64_t> volume(boxes.size(), 0);
    const std::vector<WavePart> parts = CutIntoWaves(boxes, waves);
    for (size_t i = 0; i < parts.size(); ++i) {
      const WavePart& part = parts[i];
      EXPECT_TRUE(Contains(boxes[part.of].box, part.box));
      EXPECT_TRUE(HoldsWholeBlocks(part.box, {rows[part.of], 256},
                                   boxes[part.of].scheme))
          << BoxText(part.box);
      EXPECT_TRUE(i == 0 || parts[i - 1].wave <= part.wave);
      EXPECT_LT(part.wave, waves);
      for (size_t k = 0; k < i; ++k) {
        EXPECT_FALSE(parts[k].of == part.of &&
                     Intersect(parts[k].box, part.box).has_value());
      }
      volume[part.of] += part.box.Volume();
    }
    for (size_t i = 0; i < boxes.size(); ++i) {
      EXPECT_EQ(volume[i], boxes[i].box.Volume());
    }
  }
}

TEST(CutIntoWavesTest, WavesAreNearlyEqual) {
  for (const int32_t waves : {2, 3, 5}) {
    const std::vector<int64_t> bytes = WaveBytes(SomeBoxes(), waves);
    const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
    // A row of blocks is 64 KiB of the last matrix, in bf16.
    EXPECT_LE(*most - *least, 2 * 65536 + *most / 8) << waves << " waves";
  }
}

// Of 36 layers a wave has two and a quarter: 63 rows of blocks.
TEST(CutIntoWavesTest, WavesThatMustBeAlikeAreCutInsideLayers) {
  const std::vector<QuantizedBox> boxes = {
      {.box = {.lo = {0, 0, 0}, .hi = {36, 28 * 128, 256}},
       .scheme = kFp8Block128}};
  const auto most = [&](int64_t uneven_part) {
    const std::vector<int64_t> bytes = WaveBytes(boxes, 16, uneven_part);
    return *std::max_element(bytes.begin(), bytes.end()) / (128 * 256);
  };
  EXPECT_EQ(most(256), 63);
  EXPECT_GT(most(8), 63);
}

TEST(CutIntoWavesTest, MoreWavesThanBlocksLeaveSomeEmpty) {
  const std::vector<int64_t> bytes = WaveBytes(SomeBoxes(), 1000);
  EXPECT_EQ(*std::max_element(bytes.begin(), bytes.end()), 65536);
}

TEST(CutIntoWavesTest, AFewWavesEndBetweenLayers) {
  const std::vector<QuantizedBox> boxes = {
      {.box = {.lo = {0, 0, 0}, .hi = {36, 256, 256}}, .scheme = kFp8Block128}};
  std::vector<std::string> cuts;
  for (const WavePart& part : CutIntoWaves(boxes, 3)) {
    cuts.push_back(absl::StrCat(part.wave, " ", BoxText(part.box)));
  }
  EXPECT_EQ(cuts, (std::vector<std::string>{"0 [0:12, 0:256, 0:256]",
                                            "1 [12:24, 0:256, 0:256]",
                                            "2 [24:36, 0:256, 0:256]"}));
}

TEST(CutIntoWavesTest, AnotherStageOfAPipelineIsCutAtTheSamePositions) {
  std::vector<QuantizedBox> boxes = SomeBoxes();
  const std::vector<WavePart> first = CutIntoWaves(boxes, 5);
  for (QuantizedBox& box : boxes) {
    box.box.lo[0] += 8;
    box.box.hi[0] += 8;
  }
  const std::vector<WavePart> second = CutIntoWaves(boxes, 5);
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(second[i].box.lo[0], first[i].box.lo[0] + 8);
    EXPECT_EQ(second[i].wave, first[i].wave);
  }
}

constexpr char kConfig[] = R"({"model_type": "qwen3_moe", "hidden_size": 256,
 "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
 "head_dim": 128, "intermediate_size": 512, "moe_intermediate_size": 256,
 "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
 "mlp_only_layers": [], "vocab_size": 64, "tie_word_embeddings": false,
 "torch_dtype": "bfloat16"})";

// The plan of a job with this model; its errors go to `errors`.
absl::StatusOr<PlanFile> CompileMoe(
    const std::string& source, const std::string& destination,
    const std::string& options, std::string* errors = nullptr,
    const std::function<void(Limits&)>& change_limits = {}) {
  const TemporaryDirectory directory;
  directory.Write("config.json", kConfig);
  const std::string path =
      directory.Write("job.json", absl::StrCat(R"({"model": "config.json",
 "source": {"layout": "megatron", )",
                                               source, R"(},
 "destination": {"layout": "vllm", "dtype": "fp8_e4m3_block128", )",
                                               destination, R"(},
 "options": {)",
                                               options, "}}"));
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(path, {.change_limits = change_limits}, diagnostics);
  if (errors != nullptr) *errors = diagnostics.Render();
  if (!bytes.ok()) return bytes.status();
  return PlanFile::FromBytes(*std::move(bytes));
}

// Bytes of each scratch buffer of the rank, in order.
std::vector<uint64_t> ScratchSizes(const PlanFile& plan, int32_t rank) {
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  std::vector<uint64_t> sizes;
  const uint32_t slots = program.buffers()->size();
  for (uint32_t slot = slots - program.scratch_buffers(); slot < slots;
       ++slot) {
    const fb::Buffer& buffer =
        *plan.body().buffers()->Get(program.buffers()->Get(slot));
    sizes.push_back(buffer.shape()->Get(0) * DTypeBytes(buffer.dtype()));
  }
  return sizes;
}

void ExpectWindowsInTurns(const PlanFile& plan, int32_t rank,
                          uint64_t scratch_bytes) {
  SCOPED_TRACE(absl::StrCat("rank ", rank));
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  if (program.scratch_buffers() == 0) return;
  ASSERT_NE(program.scratch_windows(), nullptr);
  const auto& windows = *program.scratch_windows();
  const std::vector<uint64_t> sizes = ScratchSizes(plan, rank);
  ASSERT_EQ(windows.size(), sizes.size());
  EXPECT_LE(program.scratch_arena_bytes(), scratch_bytes);
  bool shared = false;
  for (uint32_t i = 0; i < windows.size(); ++i) {
    const fb::ScratchWindow& a = *windows.Get(i);
    EXPECT_LE(a.offset() + sizes[i], program.scratch_arena_bytes());
    for (uint32_t k = 0; k < i; ++k) {
      const fb::ScratchWindow& b = *windows.Get(k);
      if (a.offset() >= b.offset() + sizes[k] ||
          b.offset() >= a.offset() + sizes[i]) {
        continue;
      }
      shared = true;
      EXPECT_TRUE(a.end() <= b.begin() || b.end() <= a.begin());
    }
  }
  EXPECT_TRUE(shared) << "no bytes are used twice";
}

// What the rank's scratch takes in each wave, in order.
std::vector<uint64_t> WaveSizes(const PlanFile& plan, int32_t rank) {
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  const std::vector<uint64_t> sizes = ScratchSizes(plan, rank);
  std::map<uint32_t, uint64_t> by_begin;
  for (uint32_t i = 0; i < sizes.size(); ++i) {
    by_begin[program.scratch_windows()->Get(i)->begin()] += sizes[i];
  }
  std::vector<uint64_t> waves;
  for (const auto& [begin, bytes] : by_begin) waves.push_back(bytes);
  return waves;
}

TEST(QuantizeWavesTest, SourcesTakeTurnsInTheirScratch) {
  const absl::StatusOr<PlanFile> plan = CompileMoe(
      R"("tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2,
 "pipeline_parallel": 3)",
      R"("tensor_parallel": 2)", R"("scratch_bytes": 150000)");
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int32_t rank = 0; rank < plan->source_ranks(); ++rank) {
    ExpectWindowsInTurns(*plan, rank, 150000);
  }
}

TEST(QuantizeWavesTest, DestinationsTakeTurnsInTheirScratch) {
  const absl::StatusOr<PlanFile> plan =
      CompileMoe(R"("tensor_parallel": 4, "expert_tensor_parallel": 4)",
                 R"("tensor_parallel": 2)", R"("scratch_bytes": 600000)");
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int32_t rank = plan->source_ranks(); rank < plan->world_size(); ++rank) {
    ExpectWindowsInTurns(*plan, rank, 600000);
  }
}

// Two engines on a host of their own, which relay after the network's rounds.
fb::Route LastRoute(const fb::Body& body) {
  return body.rounds()->Get(body.rounds()->size() - 1)->route();
}
int64_t RunsOf(const fb::Body& body, fb::Route route) {
  int64_t runs = 0;
  for (uint32_t i = 0; i < body.rounds()->size(); ++i) {
    const auto is_route = [&](uint32_t round) {
      return body.rounds()->Get(round)->route() == route;
    };
    runs += is_route(i) && (i == 0 || !is_route(i - 1)) ? 1 : 0;
  }
  return runs;
}

// All waves come over the network first: what sources quantize is nowhere in
// scratch where it is relayed.
TEST(QuantizeWavesTest, ReceiversStoreToEachOtherAfterTheLastWave) {
  const auto compile = [](const std::string& source, const std::string& scratch,
                          const std::string& hosts) {
    return CompileMoe(
        source, R"("replicas": 2)",
        absl::StrCat(R"("scratch_bytes": )", scratch,
                     R"(}, "topology": {"peer_gigabytes_per_second": 0.1,
                         "network_gigabytes_per_second": 0.01, "hosts": )",
                     hosts),
        /*errors=*/nullptr,
        [](Limits& limits) { limits.operations_per_round = 3; });
  };
  const absl::StatusOr<PlanFile> plan =
      compile(R"("tensor_parallel": 2)", "500000", "[0, 0, 1, 1]");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_GT(WaveSizes(*plan, 0).size(), 2u);
  EXPECT_EQ(LastRoute(plan->body()), fb::Route::kPeer);
  EXPECT_EQ(RunsOf(plan->body(), fb::Route::kPeer), 1);
  // What receivers quantize leaves their scratch wave by wave.
  const absl::StatusOr<PlanFile> at_destination =
      compile(R"("tensor_parallel": 4, "expert_tensor_parallel": 4)", "900000",
              "[0, 0, 0, 0, 1, 1]");
  ASSERT_TRUE(at_destination.ok()) << at_destination.status();
  EXPECT_GT(RunsOf(at_destination->body(), fb::Route::kPeer), 1);
}

TEST(QuantizeWavesTest, ScratchIsNoLargerThanTwoNeighbouringWaves) {
  const absl::StatusOr<PlanFile> plan =
      CompileMoe(R"("tensor_parallel": 2)", R"("tensor_parallel": 2)",
                 R"("scratch_bytes": 500000)");
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int32_t rank = 0; rank < plan->source_ranks(); ++rank) {
    const std::vector<uint64_t> waves = WaveSizes(*plan, rank);
    ASSERT_GT(waves.size(), 2u);
    uint64_t neighbours = 0;
    for (size_t i = 1; i < waves.size(); ++i) {
      neighbours = std::max(neighbours, waves[i - 1] + waves[i]);
    }
    EXPECT_EQ(plan->body().programs()->Get(rank)->scratch_arena_bytes(),
              neighbours);
  }
}

TEST(QuantizeWavesTest, WhatFitsNeedsNoWindows) {
  const absl::StatusOr<PlanFile> plan =
      CompileMoe(R"("tensor_parallel": 2)", R"("tensor_parallel": 2)", "");
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const fb::RankProgram* program : *plan->body().programs()) {
    EXPECT_EQ(program->scratch_windows(), nullptr);
  }
}

TEST(QuantizeWavesTest, SmallWindowsThatDoNotFitSayWhatToDo) {
  std::string errors;
  const absl::StatusOr<PlanFile> plan =
      CompileMoe(R"("tensor_parallel": 2)", R"("tensor_parallel": 2)",
                 R"("scratch_bytes": 4096)", &errors);
  EXPECT_FALSE(plan.ok());
  EXPECT_NE(errors.find("rank 0 needs 33280 bytes of scratch to quantize at "
                        "the source, in the smallest windows; "
                        "options.scratch_bytes is 4096, wanted 33280"),
            std::string::npos)
      << errors;
}

std::string CompileSmallQwen3(const std::string& source,
                              const std::string& destination,
                              const std::string& options,
                              std::vector<uint8_t>* plan) {
  const TemporaryDirectory directory;
  directory.Write("config.json",
                  R"({"model_type": "qwen3", "hidden_size": 128,
                      "num_hidden_layers": 2, "num_attention_heads": 1,
                      "num_key_value_heads": 1, "head_dim": 128,
                      "intermediate_size": 384, "vocab_size": 8,
                      "tie_word_embeddings": true, "torch_dtype": "bfloat16"})");
  const std::string job = directory.Write(
      "job.json", absl::StrCat(R"({"model": "config.json", "source": {)",
                               source, R"(}, "destination": {)", destination,
                               R"(}, "options": {)", options, "}}"));
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(job, CompileOptions(), diagnostics);
  if (!diagnostics.ok()) return diagnostics.Render();
  if (!bytes.ok()) return std::string(bytes.status().message());
  *plan = *std::move(bytes);
  return "";
}

// Two sources of one host hold all: each quantizes one half, in half of the
// scratch, and what it sends is as much.
TEST(QuantizeWavesTest, SourcesOfAHostDivideWhatAllHold) {
  const auto scratch_of = [](const std::string& topology) {
    std::vector<uint8_t> bytes;
    EXPECT_EQ(
        CompileSmallQwen3(R"("layout": "megatron", "data_parallel": 2)",
                          R"("layout": "vllm", "dtype": "fp8_e4m3_block128")",
                          R"(}, "topology": {"hosts": )" + topology, &bytes),
        "");
    const PlanFile plan = PlanFile::FromBytes(std::move(bytes)).value();
    std::vector<uint64_t> scratch;
    for (int32_t rank = 0; rank < plan.source_ranks(); ++rank) {
      uint64_t of_rank = 0;
      for (const uint64_t size : ScratchSizes(plan, rank)) of_rank += size;
      scratch.push_back(of_rank);
    }
    return scratch;
  };
  const std::vector<uint64_t> together = scratch_of("[0, 0, 1]");
  const std::vector<uint64_t> apart = scratch_of("[0, 1, 2]");
  EXPECT_LE(together[0], apart[0] * 6 / 10);
  EXPECT_LE(together[1], apart[0] * 6 / 10);
  // Values, and scales whose tensors are padded.
  EXPECT_GE(together[0] + together[1], apart[0]);
}

// Rank 0 alone holds a layer's MLP, so that its waves are cut elsewhere than
// rank 1's: nobody sends some of them.
TEST(QuantizeWavesTest, WhatNoRankSendsIsNotQuantized) {
  std::vector<uint8_t> bytes;
  ASSERT_EQ(CompileSmallQwen3(
                R"("layout": "generic", "meshes": {
                     "both": {"axes": {"a": 2}},
                     "one": {"axes": {"a": 1}, "ranks": [0]}},
                   "tensors": [
                     {"match": "*layers.1.mlp.*", "mesh": "one",
                      "placements": ["Replicate"]},
                     {"match": "*", "mesh": "both",
                      "placements": ["Replicate"]}])",
                R"("layout": "vllm", "dtype": "fp8_e4m3_block128")",
                R"("scratch_bytes": 80000)", &bytes),
            "");
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const fb::RankProgram* program : *plan->body().programs()) {
    if (program->scratch_windows() == nullptr) continue;
    EXPECT_EQ(program->scratch_windows()->size(), program->scratch_buffers());
    for (const fb::ScratchWindow* window : *program->scratch_windows()) {
      EXPECT_LT(window->begin(), window->end());
    }
  }
}

TEST(QuantizeWavesTest, TensorsOfARuleWithADTypeAreNotQuantized) {
  constexpr char kSource[] = R"("layout": "megatron")";
  const auto destination = [](const std::string& match) {
    return absl::StrCat(
        R"("layout": "generic", "dtype": "fp8_e4m3_block128",
           "meshes": {"m": {"axes": {"a": 1}}}, "tensors": [
             {"match": ")",
        match,
        R"(", "mesh": "m", "placements": ["Replicate"], "dtype": "bf16"},
             {"match": "*", "mesh": "m", "placements": ["Replicate"]}])");
  };
  std::vector<uint8_t> bytes;
  ASSERT_EQ(
      CompileSmallQwen3(kSource, destination("*.o_proj.weight"), "", &bytes),
      "");
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const uint32_t id : *plan->body().programs()->Get(1)->buffers()) {
    const fb::Buffer* const buffer = plan->body().buffers()->Get(id);
    const std::string name = buffer->name()->str();
    if (name == "model.layers.{0}.self_attn.o_proj.weight") {
      EXPECT_EQ(buffer->dtype(), DType::kBf16);
    } else if (name == "model.layers.{0}.mlp.down_proj.weight") {
      EXPECT_EQ(buffer->dtype(), DType::kFp8E4m3);
    }
  }
  EXPECT_NE(CompileSmallQwen3(kSource, destination("*.0.mlp.up_proj.weight"),
                              "", &bytes)
                .find("give some of the stack \"model.layers.{0}.mlp.up_proj."
                      "weight\" a dtype; wanted all of it or none"),
            std::string::npos);
}

// The rank's scratch holds it once; both copies are quantized from there.
TEST(QuantizeWavesTest, AnExpertTwiceOnARankIsQuantizedIntoBoth) {
  for (const char* options : {"", R"("scratch_bytes": 600000)"}) {
    std::string errors;
    const absl::StatusOr<PlanFile> plan =
        CompileMoe(R"("tensor_parallel": 4, "expert_tensor_parallel": 4)",
                   R"("tensor_parallel": 2, "expert_parallel": true,
 "experts": {"physical_to_logical": [0, 0, 1, 2, 3, 3]})",
                   options, &errors);
    ASSERT_TRUE(plan.ok()) << plan.status() << errors;
    EXPECT_TRUE(Prove(*plan).valid);
  }
}

}  // namespace
}  // namespace refit
