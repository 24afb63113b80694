// Quantizing straight from senders' tensors gives what quantizing from scratch
// gives, to the bit.
#include "plan/schedule/pulled_quantizes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/schedule/copy_batches.h"
#include "plan/schedule/direct_ends.h"
#include "tests/executor/host_batches.h"
#include "tests/executor/local_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

using Engine = std::mt19937_64;

uint64_t Pick(Engine& engine, uint64_t least, uint64_t most) {
  return least + engine() % (most - least + 1);
}

// One operation of a rank, and the copies that fill its input: rows in turns of
// several senders, whose tensors hold a matrix each.
class RandomPull {
 public:
  explicit RandomPull(uint64_t seed) : engine_(seed) {
    op_.block_rows = static_cast<uint32_t>(1) << Pick(engine_, 0, 3);
    op_.block_columns = 4;
    op_.format = fb::ScaleFormat::kFp32;
    op_.rows = Pick(engine_, 1, 24);
    op_.columns = Pick(engine_, 1, 12);
    matrices_ = Pick(engine_, 1, 4);
    const uint64_t down = (op_.rows + op_.block_rows - 1) / op_.block_rows;
    const uint64_t across = (op_.columns + 3) / 4;
    const uint64_t matrix = op_.rows * op_.columns;
    op_.input = {0, 0, DType::kBf16};
    op_.output = {1, 0, DType::kFp8E4m3};
    op_.scales = {2, 0, DType::kFp32};
    op_.input_row_bytes = op_.columns * 2;
    op_.output_row_bytes = op_.columns;
    op_.scale_row_bytes = across * 4;
    Tensor(matrices_ * matrix * 2);
    Tensor(matrices_ * matrix);
    Tensor(matrices_ * down * across * 4);
    quantizes_.kind = CopyKind::kQuantize;
    if (matrices_ > 1) {
      op_.loops_count = 1;
      quantizes_.quantize_loops = {{.extent = matrices_,
                                    .input = {.bytes = matrix * 2},
                                    .output = {.bytes = matrix},
                                    .scales = {.bytes = down * across * 4}}};
    }
    quantizes_.quantizes = {op_};
    // Of some matrices each.
    const uint64_t first = matrices_ > 1 && Pick(engine_, 0, 1) == 1
                               ? Pick(engine_, 1, matrices_ - 1)
                               : matrices_;
    AddSenders(0, first);
    if (first < matrices_) AddSenders(first, matrices_);
    if (Pick(engine_, 0, 9) == 0 && copies_.copies.size() > 1) {
      copies_.copies.pop_back();
      is_whole_ = false;
    }
  }

  // Whether the copies fill all rows, each whole.
  bool is_whole() const { return is_whole_; }

  void Check() {
    const PulledQuantizes pulled = PullQuantizes(quantizes_, copies_);
    ASSERT_EQ(pulled.is_pulled, std::vector<bool>({is_whole_}));
    if (!is_whole_) {
      EXPECT_TRUE(pulled.batch.quantizes.empty());
      return;
    }
    const auto expected = AfterBatches(tensors_, {copies_, quantizes_});
    const auto actual = AfterBatches(tensors_, {pulled.batch});
    EXPECT_TRUE(actual[0] == tensors_[0]) << "scratch was written";
    for (size_t t = 1; t < expected.size(); ++t) {
      EXPECT_TRUE(actual[t] == expected[t]) << "tensor " << t;
    }
  }

 private:
  void Tensor(uint64_t bytes) {
    std::vector<std::byte>& tensor =
        tensors_.emplace_back(bytes, std::byte{0xa5});
    for (uint64_t i = 0; i + 1 < bytes; i += 2) {
      const auto bits = static_cast<uint16_t>((engine_() & 0x80ff) | 0x3f00);
      std::memcpy(&tensor[i], &bits, 2);
    }
  }

  // Fills matrices [begin, end). What a sender holds of a matrix are turns of
  // so many rows, one behind the other.
  void AddSenders(uint64_t begin, uint64_t end) {
    const uint64_t senders = Pick(engine_, 1, 3);
    const uint64_t turn = Pick(engine_, 1, op_.rows);
    const uint64_t row_bytes = (op_.columns + Pick(engine_, 0, 1) * 3) * 2;
    const bool cuts_columns = op_.columns > 1 && Pick(engine_, 0, 9) == 0;
    is_whole_ &= !cuts_columns;
    const uint64_t turns = (op_.rows + turn - 1) / turn;
    for (uint64_t sender = 0; sender < senders && sender < turns; ++sender) {
      const uint64_t first = tensors_.size();
      for (uint64_t m = begin; m < end; ++m) {
        Tensor((turns + senders - 1) / senders * turn * row_bytes);
      }
      // Its whole turns as one copy, as plans have them; the last may be short.
      const uint64_t whole = op_.rows / turn;
      const uint64_t of_sender =
          whole > sender ? (whole - sender - 1) / senders + 1 : 0;
      const auto add = [&](uint64_t row, uint64_t at, uint64_t times,
                           uint64_t rows) {
        if (times == 0 || rows == 0) return;
        const auto add_columns = [&](uint64_t column, uint64_t columns) {
          TensorBox from, to;
          from.first = {first, at * row_bytes + column * 2, DType::kBf16};
          to.first = {0, ((begin * op_.rows + row) * op_.columns + column) * 2,
                      DType::kBf16};
          from.loops = {{end - begin, {.entries = 1}},
                        {times, {.bytes = turn * row_bytes}},
                        {rows, {.bytes = row_bytes}},
                        {columns, {.bytes = 2}}};
          to.loops = {{end - begin, {.bytes = op_.rows * op_.columns * 2}},
                      {times, {.bytes = senders * turn * op_.columns * 2}},
                      {rows, {.bytes = op_.columns * 2}},
                      {columns, {.bytes = 2}}};
          DropLoopsOfOne(from);
          DropLoopsOfOne(to);
          ASSERT_TRUE(AppendCopy(from, to, /*link=*/1, copies_));
        };
        if (cuts_columns) {
          add_columns(0, 1);
          add_columns(1, op_.columns - 1);
        } else {
          add_columns(0, op_.columns);
        }
      };
      add(sender * turn, 0, of_sender, turn);
      if (turns > whole && whole % senders == sender) {
        add(whole * turn, of_sender * turn, 1, op_.rows - whole * turn);
      }
    }
  }

  Engine engine_;
  BlockQuantize op_;
  uint64_t matrices_ = 1;
  std::vector<std::vector<std::byte>> tensors_;
  CopyBatch quantizes_;
  CopyBatch copies_;
  bool is_whole_ = true;
};

TEST(PulledQuantizesTest, RandomOperationsArePulledWhereRowsAreWhole) {
  int pulled = 0, kept = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    RandomPull pull(seed);
    pull.Check();
    if (testing::Test::HasFailure()) return;
    ++(pull.is_whole() ? pulled : kept);
  }
  EXPECT_GT(pulled, 2000);
  EXPECT_GT(kept, 200);
}

TEST(PulledQuantizesTest, CopiesThatCastKeepTheOperation) {
  CopyBatch quantizes, copies;
  quantizes.kind = CopyKind::kQuantize;
  quantizes.quantizes = {{.input = {0, 0, DType::kBf16},
                          .output = {1, 0, DType::kFp8E4m3},
                          .scales = {2, 0, DType::kFp32},
                          .columns = 8,
                          .input_row_bytes = 16,
                          .output_row_bytes = 8,
                          .scale_row_bytes = 4,
                          .block_columns = 8}};
  const TensorBox to = {{0, 0, DType::kBf16}, {{8, {.bytes = 2}}}};
  const TensorBox from = {{3, 0, DType::kFp32}, {{8, {.bytes = 4}}}};
  ASSERT_TRUE(AppendCopy(from, to, /*link=*/1, copies));
  EXPECT_EQ(PullQuantizes(quantizes, copies).is_pulled,
            std::vector<bool>({false}));
}

// Memory of a rank that no other can map, though it can map others'.
class LoneDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<ExportedMemory>> Export(
      absl::Span<const MemoryRange>) override {
    return absl::FailedPreconditionError("memory of a kind that is not shared");
  }
};

class PullingWorld : public LocalWorld {
 public:
  // `lone`: the source ranks whose memory cannot be shared.
  explicit PullingWorld(const PlanFile& plan,
                        const std::vector<int32_t>& lone = {})
      : LocalWorld(plan.world_size()) {
    AddLocalRanks(plan, [&](int32_t rank) -> ExecutorOptions {
      const bool is_lone =
          std::find(lone.begin(), lone.end(), rank) != lone.end();
      return {.device = is_lone ? &lone_device_ : nullptr};
    });
  }

  // After a refit of which every element must be right: how many elements each
  // side quantized without scratch.
  struct Fused {
    uint64_t by_sources = 0;
    uint64_t by_destinations = 0;
  };
  Fused ExpectRight(const PlanFile& plan) {
    ExpectEveryElementRight(plan);
    return Counted(plan);
  }
  Fused Counted(const PlanFile& plan) {
    Fused fused;
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      (plan.side(rank) == fb::Side::kSource ? fused.by_sources
                                            : fused.by_destinations) +=
          executor(rank).counters().fused_elements;
    }
    return fused;
  }

 private:
  LoneDevice lone_device_;
};

constexpr char kConfig[] = R"({"hidden_size": 256, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
 "vocab_size": 40, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "model_type": "qwen3", "intermediate_size": 512})";

// Sources hold rows of the MLP in turns of 256 / `turns` / 2, and all of the
// rest.
std::string TurnsJob(int turns, const std::string& destination,
                     const std::string& more) {
  const auto turned = [](const std::string& match, int factor) {
    return absl::StrCat("{\"match\": \"*.mlp.", match,
                        "_proj.weight\", \"mesh\": \"m\", \"placements\": "
                        "[\"StridedShard(0, split_factor=",
                        factor, ")\"]}, ");
  };
  return absl::StrCat(
      R"({"model": "config.json", "source": {"layout": "generic",
 "meshes": {"m": {"axes": {"x": 2}}}, "tensors": [)",
      turned("down", turns), turned("*", 2 * turns),
      R"({"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
 "destination": {"layout": "vllm", "dtype": "fp8_e4m3_block128", )",
      destination, "}", more, "}");
}

TEST(PulledQuantizesTest, DestinationsReadWhatSourcesWouldStore) {
  for (const int turns : {2, 4, 32}) {
    if (kSanitized && turns == 4) continue;
    for (const char* const destination :
         {R"("tensor_parallel": 1)", R"("tensor_parallel": 2)",
          R"("replicas": 2)"}) {
      for (const char* const more :
           {"", R"(, "options": {"scratch_bytes": 400000})"}) {
        if (kSanitized && (turns == 2) == (*more == '\0')) continue;
        SCOPED_TRACE(absl::StrCat(turns, " ", destination, more));
        const PlanFile plan =
            CompiledPlan(TurnsJob(turns, destination, more), kConfig);
        PullingWorld world(plan);
        world.Bind();
        const PullingWorld::Fused fused = world.ExpectRight(plan);
        EXPECT_GT(fused.by_sources, 0);
        // Both layers of three matrices, once for each engine.
        EXPECT_EQ(fused.by_destinations,
                  2 * 3 * 256 * 512 *
                      (destination == std::string(R"("replicas": 2)") ? 2 : 1));
        const auto bytes = world.Destinations(plan);
        // A checked refit goes through scratch.
        ValueCheck(plan).PoisonDestinations(world.tensors);
        ASSERT_TRUE(AllOk(world.CheckedRefit()));
        EXPECT_EQ(world.Counted(plan).by_destinations, 0);
        EXPECT_TRUE(world.Destinations(plan) == bytes);
        world.ExpectRight(plan);
      }
    }
  }
}

TEST(PulledQuantizesTest, ColocatedRanksRefitAgainAndAgain) {
  const PlanFile plan = CompiledPlan(
      TurnsJob(2, R"("tensor_parallel": 2)", R"(, "colocated": true)"),
      kConfig);
  PullingWorld world(plan);
  world.Bind();
  for (int i = 0; i < 4; ++i) {
    EXPECT_GT(world.ExpectRight(plan).by_destinations, 0);
  }
}

// All or nothing: the sources' blocks are cut by both.
TEST(PulledQuantizesTest, SourcesThatShowNothingStore) {
  const PlanFile plan =
      CompiledPlan(TurnsJob(2, R"("tensor_parallel": 2)", ""), kConfig);
  PullingWorld world(plan, {1});
  world.Bind();
  EXPECT_EQ(world.ExpectRight(plan).by_destinations, 0);
}

// Where destinations read everything, no pair moves anything in a round that
// has such bytes alone.
TEST(PulledQuantizesTest, RoundsOfScratchAloneHaveNoFences) {
  const PlanFile plan =
      CompiledPlan(TurnsJob(2, R"("tensor_parallel": 2)",
                            R"(, "options": {"scratch_bytes": 400000})"),
                   kConfig);
  const int32_t destination = plan.source_ranks();
  const RankSchedule schedule(plan, destination);
  DirectPairs peers;
  std::set<uint32_t>& slots = peers.pulled_slots[destination];
  for (const fb::Quantize* op :
       *plan.body().programs()->Get(destination)->quantizes()) {
    slots.insert(op->input_slot());
  }
  const auto fences = [&](int32_t rank, bool pulls) {
    size_t count = 0;
    for (const DirectEnds& ends :
         ListDirectEnds(plan, rank, RankSchedule(plan, rank), peers, pulls)) {
      count += ends.grant.size() + ends.await_grants.size() +
               ends.finish.size() + ends.await_finishes.size();
    }
    return count;
  };
  EXPECT_GT(fences(destination, false), fences(destination, true));
  EXPECT_GT(fences(0, false), fences(0, true));
  EXPECT_GT(fences(destination, true), 0);
}

}  // namespace
}  // namespace refit
