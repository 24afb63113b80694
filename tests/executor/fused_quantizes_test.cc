// Quantizing straight into peers' tensors gives what quantizing in scratch and
// copying from there gives, to the bit.
#include "plan/schedule/fused_quantizes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/schedule/copy_batches.h"
#include "tests/executor/host_batches.h"
#include "tests/executor/local_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/observed_device.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

using Random = std::mt19937_64;

uint64_t DrawBetween(Random& random, uint64_t least, uint64_t most) {
  return least + random() % (most - least + 1);
}

// One operation of a rank, and the copies of what it writes to two peers.
class RandomQuantize {
 public:
  explicit RandomQuantize(uint64_t seed) : random_(seed) {
    op_.block_rows = static_cast<uint32_t>(1) << DrawBetween(random_, 0, 2);
    op_.block_columns = static_cast<uint32_t>(4) << DrawBetween(random_, 0, 1);
    op_.format = DrawBetween(random_, 0, 1) == 0 ? fb::ScaleFormat::kFp32
                                                 : fb::ScaleFormat::kE8m0;
    op_.rows = DrawBetween(random_, 1, 14);
    op_.columns = DrawBetween(random_, 1, 40);
    matrices_ = DrawBetween(random_, 1, 4);
    down_ = (op_.rows + op_.block_rows - 1) / op_.block_rows;
    across_ = (op_.columns + op_.block_columns - 1) / op_.block_columns;
    scale_dtype_ =
        op_.format == fb::ScaleFormat::kE8m0 ? DType::kUint8 : DType::kFp32;
    const uint64_t scale_bytes = DTypeBytes(scale_dtype_);
    for (uint64_t m = 0; m < matrices_; ++m) {
      std::vector<std::byte>& input = Tensor(op_.rows * op_.columns * 2);
      for (uint64_t i = 0; i < input.size(); i += 2) {
        const auto bits = static_cast<uint16_t>((random_() & 0x80ff) | 0x3f00);
        std::memcpy(&input[i], &bits, 2);
      }
    }
    op_.input = {0, 0, DType::kBf16};
    op_.output = {matrices_, 0, DType::kFp8E4m3};
    op_.scales = {matrices_ + 1, 0, scale_dtype_};
    Tensor(matrices_ * op_.rows * op_.columns);
    Tensor(matrices_ * down_ * across_ * scale_bytes);
    op_.input_row_bytes = op_.columns * 2;
    op_.output_row_bytes = op_.columns;
    op_.scale_row_bytes = across_ * scale_bytes;
    batches_.resize(3);
    batches_[0].kind = CopyKind::kQuantize;
    if (matrices_ > 1) {
      op_.loops_count = 1;
      batches_[0].quantize_loops = {
          {.extent = matrices_,
           .input = {.entries = 1},
           .output = {.bytes = op_.rows * op_.columns},
           .scales = {.bytes = down_ * across_ * scale_bytes}}};
    }
    batches_[0].quantizes = {op_};
    for (uint32_t peer = 0; peer < 2; ++peer) AddPeer(peer);
  }

  // Whether each copy is of whole blocks and stands beside its scales.
  bool is_whole() const { return is_whole_; }

  void Check() {
    QuantizeFusion fusion(batches_, {0});
    for (size_t b = 1; b < batches_.size(); ++b) {
      for (size_t i = 0; i < batches_[b].copies.size(); ++i) {
        fusion.AddCopy({.batch = b, .copy = i});
      }
    }
    const std::vector<CopyBatch> fused = fusion.Fuse();
    const std::vector<std::vector<std::byte>> expected =
        AfterBatches(tensors_, batches_);
    const std::vector<std::vector<std::byte>> actual =
        AfterBatches(tensors_, fused);
    ASSERT_EQ(fusion.is_fused().size(), 1);
    is_fused_ = fusion.is_fused()[0];
    for (size_t t = 0; t < expected.size(); ++t) {
      const bool is_scratch = t == matrices_ || t == matrices_ + 1;
      const auto& wanted = is_scratch && is_fused_ ? tensors_[t] : expected[t];
      ASSERT_TRUE(actual[t] == wanted) << "tensor " << t;
    }
  }
  bool is_fused() const { return is_fused_; }

 private:
  std::vector<std::byte>& Tensor(uint64_t bytes) {
    return tensors_.emplace_back(bytes, std::byte{0xa5});
  }

  // Where [0, extent) is cut: at multiples of `unit`, or anywhere.
  std::vector<uint64_t> Cuts(uint64_t extent, uint64_t unit) {
    std::vector<uint64_t> cuts = {0};
    const uint64_t units = (extent + unit - 1) / unit;
    if (units > 1 && DrawBetween(random_, 0, 1) == 1) {
      cuts.push_back(DrawBetween(random_, 1, units - 1) * unit);
    }
    cuts.push_back(extent);
    return cuts;
  }

  // Each matrix is a tensor of the peer's, of rows that may have gaps.
  void AddPeer(uint32_t peer) {
    const uint64_t scale_bytes = DTypeBytes(scale_dtype_);
    const uint64_t gap = DrawBetween(random_, 0, 1) * op_.block_columns;
    const uint64_t row = op_.columns + gap;
    const uint64_t scale_row = (across_ + gap / op_.block_columns);
    const uint64_t first = tensors_.size();
    for (uint64_t m = 0; m < matrices_; ++m) {
      Tensor(op_.rows * row);
      Tensor(down_ * scale_row * scale_bytes);
    }
    const bool cuts_blocks = DrawBetween(random_, 0, 7) == 0;
    const auto rows = Cuts(op_.rows, cuts_blocks ? 1 : op_.block_rows);
    const auto columns = Cuts(op_.columns, op_.block_columns);
    const auto matrices = Cuts(matrices_, 1);
    // Scales in as many copies, or in one.
    const bool joins = DrawBetween(random_, 0, 2) == 0;
    const bool is_apart = DrawBetween(random_, 0, 9) == 0;
    for (const uint64_t at : rows) {
      is_whole_ &= at % op_.block_rows == 0 || at == op_.rows;
    }
    is_whole_ &= !is_apart;
    const auto add = [&](bool scales, uint64_t m, uint64_t m_end, uint64_t r,
                         uint64_t r_end, uint64_t c, uint64_t c_end,
                         CopyBatch& batch) {
      const uint64_t bytes = scales ? scale_bytes : 1;
      const uint64_t across = scales ? across_ : op_.columns;
      const uint64_t down = scales ? down_ : op_.rows;
      const uint64_t to_row = scales ? scale_row : row;
      TensorBox from, to;
      from.first = scales ? op_.scales : op_.output;
      from.first.byte_offset = ((m * down + r) * across + c) * bytes;
      to.first = {first + 2 * m + scales, (r * to_row + c) * bytes,
                  from.first.dtype};
      from.loops = {{m_end - m, {.bytes = down * across * bytes}},
                    {r_end - r, {.bytes = across * bytes}},
                    {c_end - c, {.bytes = bytes}}};
      to.loops = {{m_end - m, {.entries = 2}},
                  {r_end - r, {.bytes = to_row * bytes}},
                  {c_end - c, {.bytes = bytes}}};
      DropLoopsOfOne(from);
      DropLoopsOfOne(to);
      ASSERT_TRUE(AppendCopy(from, to, peer, batch));
    };
    CopyBatch& batch = batches_[1 + DrawBetween(random_, 0, 1)];
    CopyBatch& of_scales =
        is_apart ? batches_[&batch == &batches_[1] ? 2 : 1] : batch;
    const bool all_scales = joins || cuts_blocks;
    for (size_t i = 0; i + 1 < matrices.size(); ++i) {
      for (size_t j = 0; j + 1 < rows.size(); ++j) {
        for (size_t k = 0; k + 1 < columns.size(); ++k) {
          add(false, matrices[i], matrices[i + 1], rows[j], rows[j + 1],
              columns[k], columns[k + 1], batch);
          if (all_scales) continue;
          const auto blocks = [](uint64_t n, uint64_t block) {
            return (n + block - 1) / block;
          };
          add(true, matrices[i], matrices[i + 1],
              blocks(rows[j], op_.block_rows),
              blocks(rows[j + 1], op_.block_rows),
              blocks(columns[k], op_.block_columns),
              blocks(columns[k + 1], op_.block_columns), of_scales);
        }
      }
    }
    if (all_scales) add(true, 0, matrices_, 0, down_, 0, across_, of_scales);
  }

  Random random_;
  BlockQuantize op_;
  uint64_t matrices_ = 1;
  uint64_t down_ = 1;
  uint64_t across_ = 1;
  DType scale_dtype_ = DType::kFp32;
  std::vector<std::vector<std::byte>> tensors_;
  std::vector<CopyBatch> batches_;  // quantize, then two rounds
  bool is_whole_ = true;
  bool is_fused_ = false;
};

TEST(FusedQuantizesTest, RandomOperationsAreFusedWhereBlocksAreWhole) {
  constexpr int kDraws = kSanitized ? 300 : 3000;
  int fused = 0, kept = 0;
  for (int seed = 0; seed < kDraws; ++seed) {
    SCOPED_TRACE(seed);
    RandomQuantize quantize(seed);
    quantize.Check();
    if (HasFatalFailure()) return;
    ASSERT_EQ(quantize.is_fused(), quantize.is_whole());
    ++(quantize.is_fused() ? fused : kept);
  }
  EXPECT_GT(fused, kDraws / 3);
  EXPECT_GT(kept, kDraws / 10);
}

// Two operations of one block each, in two entries. Each is copied alone, and
// a copy or another read has both.
TEST(FusedQuantizesTest, ReadsOfSeveralTensorsKeepAllOperations) {
  constexpr uint64_t kRows = 4, kColumns = 8;
  CopyBatch quantizes, round;
  quantizes.kind = CopyKind::kQuantize;
  for (const uint64_t i : {0, 1}) {
    BlockQuantize op;
    op.input = {i, 0, DType::kBf16};
    op.output = {2 + i, 0, DType::kFp8E4m3};
    op.scales = {4 + i, 0, DType::kFp32};
    op.rows = op.block_rows = kRows;
    op.columns = op.block_columns = kColumns;
    op.input_row_bytes = kColumns * 2;
    op.output_row_bytes = kColumns;
    op.scale_row_bytes = 4;
    op.format = fb::ScaleFormat::kFp32;
    quantizes.quantizes.push_back(op);
    const TensorBox values = {op.output, {{kRows * kColumns, {.bytes = 1}}}};
    TensorBox to = values;
    to.first.entry += 4;
    ASSERT_TRUE(AppendCopy(values, to, /*link=*/1, round));
    to.first = {8 + i, 0, DType::kFp32};
    ASSERT_TRUE(AppendCopy({op.scales, {}}, {to.first, {}}, 1, round));
  }
  const CopyAddress first = quantizes.quantizes.front().output;
  const auto fuse = [&](bool copies, bool reads) {
    std::vector<CopyBatch> batches = {quantizes, round};
    if (copies) {
      TensorBox both = {
          first, {{2, {.entries = 1}}, {kRows * kColumns, {.bytes = 1}}}};
      TensorBox to = both;
      to.first.entry = 10;
      EXPECT_TRUE(AppendCopy(both, to, /*link=*/2, batches[1]));
    }
    QuantizeFusion fusion(batches, {0});
    for (size_t i = 0; i < batches[1].copies.size(); ++i) {
      fusion.AddCopy({.batch = 1, .copy = i});
    }
    if (reads) {
      fusion.AddRead(first, {.entries = 2, .bytes = kRows * kColumns});
    }
    fusion.Fuse();
    return fusion.is_fused();
  };
  EXPECT_EQ(fuse(false, false), std::vector<bool>({true, true}));
  EXPECT_EQ(fuse(true, false), std::vector<bool>({false, false}));
  EXPECT_EQ(fuse(false, true), std::vector<bool>({false, false}));
}

class FusedWorld : public LocalWorld {
 public:
  using LocalWorld::LocalWorld;

  // Of all ranks: the elements that are quantized into peers' tensors.
  uint64_t Refit(const PlanFile& plan, uint32_t multiprocessors) {
    ValueCheck(plan).PoisonDestinations(tensors);
    RunOptions options;
    options.timeout = kTimeout;
    options.direct_multiprocessors = multiprocessors;
    EXPECT_TRUE(AllOk(OnAllRanks(
        [&](int32_t rank) { return ExecutorWorld::Refit(rank, options); })));
    uint64_t fused = 0;
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      fused += executor(rank).counters().fused_elements;
    }
    return fused;
  }
};

// Of 384 rows of the MLP, TP2 cuts 192: the last block is not whole. Experts
// have 256.
PlanFile RandomPlan(Random& random, const std::string& dtype) {
  const auto one_of = [&](std::vector<std::string> texts) {
    return texts[random() % texts.size()];
  };
  const bool experts = DrawBetween(random, 0, 1) == 1;
  const bool colocated = DrawBetween(random, 0, 2) == 0;
  const std::string source =
      experts ? one_of({R"("expert_parallel": 4, "data_parallel": 4)",
                        R"("tensor_parallel": 2, "data_parallel": 2,
                           "expert_parallel": 2)",
                        R"("tensor_parallel": 2, "pipeline_parallel": 2)"})
              : one_of({R"("tensor_parallel": 2, "data_parallel": 2)",
                        R"("data_parallel": 4)",
                        R"("tensor_parallel": 2, "pipeline_parallel": 2)"});
  const std::string destination =
      one_of({R"("tensor_parallel": 2, "replicas": 2)",
              R"("tensor_parallel": 1, "replicas": 4)"});
  return CompiledPlan(
      absl::StrCat(
          R"({"model": "config.json", "source": {"layout": "megatron",
 )",
          source, R"(}, "destination": {"layout": "vllm", )", destination,
          R"(, "dtype": ")", dtype, "\"},",
          colocated ? R"( "colocated": true,)"
                    : one_of({"", R"("topology": {"gpus_per_host": 3},)"}),
          R"( "options": {)", one_of({"", R"("scratch_bytes": 400000)"}), "}}"),
      absl::StrCat(
          R"({"hidden_size": 256, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
 "vocab_size": 40, "tie_word_embeddings": true, "torch_dtype": "bfloat16", )",
          experts ? R"("model_type": "qwen3_moe", "num_experts": 4,
 "num_experts_per_tok": 2, "moe_intermediate_size": 256,
 "intermediate_size": 256, "decoder_sparse_step": 1, "norm_topk_prob": true,
 "mlp_only_layers": []})"
                  : R"("model_type": "qwen3", "intermediate_size": 512})"));
}

TEST(FusedQuantizesTest, RandomRefitsAreThoseThroughScratch) {
  constexpr int kDraws = kSanitized ? 3 : 16;
  int fused = 0, compared = 0;
  for (int seed = 0; seed < kDraws; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const PlanFile plan =
        RandomPlan(random, seed % 2 == 0 ? "fp8_e4m3_block128" : "mxfp8_e4m3");
    FusedWorld world(plan);
    world.Bind();
    ValueCheck check(plan);
    check.FillSources(world.tensors);
    const uint64_t elements = world.Refit(plan, 0);
    EXPECT_EQ(check.Check(world.tensors).wrong_elements, 0);
    const auto bytes = world.Destinations(plan);
    fused += elements > 0;
    // Bounded rounds between GPUs go through scratch.
    if (elements > 0 && world.Refit(plan, 8) < elements) {
      ++compared;
      EXPECT_TRUE(world.Destinations(plan) == bytes);
    }
    check.PoisonDestinations(world.tensors);
    ASSERT_TRUE(AllOk(world.CheckedRefit()));
    EXPECT_TRUE(world.Destinations(plan) == bytes);
  }
  // Compilers draw differently, so few draws may miss what is rare.
  EXPECT_GE(fused, kSanitized ? 1 : 7);
  EXPECT_GE(compared, kSanitized ? 0 : 3);
}

// As in a graph: no stream may wait for what the refit did not record.
class CapturedEventsDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    class Event : public DeviceEvent {
     public:
      absl::Status Record(Stream) override {
        is_recorded_ = true;
        return absl::OkStatus();
      }
      absl::Status Await(Stream) override {
        return is_recorded_ ? absl::OkStatus()
                            : absl::InternalError("awaits what is outside");
      }
      absl::StatusOr<bool> Reached() override { return true; }

     private:
      bool is_recorded_ = false;
    };
    return std::make_unique<Event>();
  }
};

// A source stores all that it quantizes, and sends the tied embedding to the
// other host.
TEST(FusedQuantizesTest, StagedRoundsDoNotWaitForWhatIsNotLaunched) {
  const PlanFile plan = CompiledPlan(
      R"({"model": "config.json",
 "source": {"layout": "megatron", "pipeline_parallel": 2},
 "destination": {"layout": "vllm", "pipeline_parallel": 2,
                 "dtype": "fp8_e4m3_block128"},
 "topology": {"gpus_per_host": 3}})",
      R"({"hidden_size": 256, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
 "vocab_size": 40, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "model_type": "qwen3", "intermediate_size": 512})");
  CapturedEventsDevice device;
  LocalWorld world(plan, {.device = &device});
  world.Bind();
  world.ExpectEveryElementRight(plan);
  const RunCounters& first = world.executor(0).counters();
  EXPECT_GT(first.fused_elements, 0);
  EXPECT_GT(first.by(fb::Route::kNetwork, fb::Mechanism::kStaged).bytes_sent,
            0);
}

// One source stores all that it has, in rounds that nobody waits for.
PlanFile PlanOfWaves() {
  return CompiledPlan(
      R"({"model": "config.json", "source": {"layout": "megatron"},
 "destination": {"layout": "vllm", "dtype": "fp8_e4m3_block128"},
 "options": {"scratch_bytes": 400000}})",
      R"({"hidden_size": 256, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
 "vocab_size": 40, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "model_type": "qwen3", "intermediate_size": 512})");
}

TEST(FusedQuantizesTest, RoundsWithoutFencesBetweenThemAreOneLaunch) {
  const PlanFile plan = PlanOfWaves();
  const size_t rounds = plan.body().rounds()->size();
  ASSERT_GT(rounds, 3);
  for (const bool time_rounds : {false, true}) {
    ObservedDevice device;
    std::atomic<size_t> launches = 0;  // that move something
    device.on_enqueue = [&](const ObservedDevice::Enqueued& enqueued) {
      launches += !enqueued.is_step && enqueued.kind != CopyKind::kZero &&
                  (enqueued.copies || enqueued.quantizes);
      return true;
    };
    LocalWorld world(plan, {.device = &device, .time_rounds = time_rounds});
    world.Bind();
    world.ExpectEveryElementRight(plan);
    EXPECT_EQ(launches, time_rounds ? rounds : 1);
  }
}

}  // namespace
}  // namespace refit
