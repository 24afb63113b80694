#include "bench/m2n_tensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "refit/host_device.h"
#include "runner/checked_run.h"
#include "runner/value_check.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

constexpr char kMixtureOfExperts[] = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
  "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
  "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
  "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
  "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 64,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16"})";

std::string TensorsJob(const std::string& source,
                       const std::string& destination) {
  return R"({"model": "config.json", "source": {"layout": "megatron")" +
         source + R"(}, "destination": {"layout": "vllm")" + destination + "}}";
}

uint64_t Product(const std::vector<uint64_t>& extents) {
  uint64_t product = 1;
  for (const uint64_t extent : extents) product *= extent;
  return product;
}

// Where a side's mesh says that the part of its `i`-th rank begins in the whole
// tensor.
std::vector<uint64_t> CornerOf(const M2nSide& side, int i) {
  std::vector<uint64_t> corner(side.local_shape.size(), 0);
  const std::array<int, 2> at = {i / side.mesh[1], i % side.mesh[1]};
  for (size_t axis = 0; axis < 2; ++axis) {
    if (side.placements[axis] == kM2nReplicate) continue;
    const auto dim = static_cast<size_t>(side.placements[axis]);
    corner[dim] = static_cast<uint64_t>(at[axis]) * side.local_shape[dim];
  }
  return corner;
}

std::vector<uint64_t> WholeShape(const M2nSide& side) {
  std::vector<uint64_t> shape = side.local_shape;
  for (size_t axis = 0; axis < 2; ++axis) {
    if (side.placements[axis] == kM2nReplicate) continue;
    shape[static_cast<size_t>(side.placements[axis])] *=
        static_cast<uint64_t>(side.mesh[axis]);
  }
  return shape;
}

// Copies between a contiguous part and the whole tensor, element by element.
void CopyPart(const M2nSide& side, int i, uint64_t element_bytes,
              std::byte* part, std::vector<std::byte>& whole, bool to_whole) {
  const std::vector<uint64_t> shape = WholeShape(side);
  const std::vector<uint64_t> corner = CornerOf(side, i);
  for (uint64_t element = 0; element < Product(side.local_shape); ++element) {
    uint64_t rest = element;
    uint64_t there = 0;
    uint64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0;) {
      there += (corner[d] + rest % side.local_shape[d]) * stride;
      rest /= side.local_shape[d];
      stride *= shape[d];
    }
    std::byte* const a = part + element * element_bytes;
    std::byte* const b = whole.data() + there * element_bytes;
    std::memcpy(to_whole ? b : a, to_whole ? a : b, element_bytes);
  }
}

// Does what NCCL M2N would do with the tensors of `plan`, and counts the
// elements that are wrong after it.
uint64_t WrongAfterM2n(const PlanFile& plan) {
  HostDevice device;
  TensorsByRank tensors;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    tensors.push_back(TensorsOfRank(plan, rank));
    memory.push_back(*AllocateTensors(device, tensors.back()));
  }
  const ValueCheck check(plan);
  check.FillSources(tensors);
  check.PoisonDestinations(tensors);
  const auto moved = M2nTensors(plan);
  EXPECT_TRUE(moved.ok()) << moved.status();
  if (!moved.ok()) return 1;
  for (const M2nTensor& tensor : *moved) {
    const auto element_bytes = static_cast<uint64_t>(DTypeBytes(tensor.dtype));
    EXPECT_EQ(WholeShape(tensor.source), WholeShape(tensor.destination));
    EXPECT_EQ(tensor.tiles.size(),
              static_cast<size_t>(
                  tensor.source.mesh[0] * tensor.source.mesh[1] +
                  tensor.destination.mesh[0] * tensor.destination.mesh[1]));
    std::vector<std::byte> whole(Product(WholeShape(tensor.source)) *
                                 element_bytes);
    for (const bool sources : {true, false}) {
      const M2nSide& side = sources ? tensor.source : tensor.destination;
      for (const M2nTile& tile : tensor.tiles) {
        if ((tile.rank < plan.source_ranks()) != sources) continue;
        const BoundTensor& held =
            tensors[static_cast<size_t>(tile.rank)][tile.tensor];
        CopyPart(side, tile.rank - side.start_rank, element_bytes,
                 static_cast<std::byte*>(held.data) + tile.offset_bytes, whole,
                 sources);
      }
    }
  }
  return check.Check(tensors).wrong_elements;
}

TEST(M2nTensorsTest, MovesWhatThePlanMoves) {
  const std::map<std::string, std::string> jobs = {
      {"", ""},
      {R"(, "expert_parallel": 2, "data_parallel": 2)",
       R"(, "tensor_parallel": 2)"},
      {R"(, "tensor_parallel": 2, "pipeline_parallel": 2)",
       R"(, "tensor_parallel": 2, "replicas": 2)"},
      {R"(, "tensor_parallel": 4)", R"(, "tensor_parallel": 2)"},
      {R"(, "tensor_parallel": 2, "data_parallel": 2)", R"(, "replicas": 3)"}};
  for (const auto& [source, destination] : jobs) {
    EXPECT_EQ(WrongAfterM2n(CompiledPlan(TensorsJob(source, destination),
                                         kMixtureOfExperts)),
              0u)
        << source << " to " << destination;
  }
  EXPECT_EQ(WrongAfterM2n(CompiledPlan(ReshardJob(2, 4, ""))), 0u);
}

// Megatron keeps each group of heads together, vLLM all queries: a tensor of
// M2N is one group.
TEST(M2nTensorsTest, CutsWhatOneSideHoldsInPieces) {
  const PlanFile plan = CompiledPlan(TensorsJob("", ""), kMixtureOfExperts);
  const auto tensors = M2nTensors(plan);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  // Of a layer 4 groups of queries, keys and values; the projection back, four
  // norms, the router and 4 experts of 3 matrices. Beside layers 3.
  EXPECT_EQ(tensors->size(), 2 * (3 * 4 + 1 + 4 + 1 + 4 * 3) + 3u);
}

TEST(M2nTensorsTest, SaysWhatItCannotMove) {
  const auto error = [](const std::string& job) {
    return std::string(
        M2nTensors(CompiledPlan(job, kMixtureOfExperts)).status().message());
  };
  EXPECT_EQ(error(R"({"model": "config.json",
                  "source": {"layout": "megatron"},
                  "destination": {"layout": "vllm"}, "colocated": true})"),
            "nccl_m2n needs a GPU for each rank, and this plan's ranks share "
            "GPUs");
  EXPECT_EQ(std::string(M2nTensors(WindowsPlan(R"("scratch_bytes": 150000)"))
                            .status()
                            .message()),
            "nccl_m2n does not quantize, and this plan does");
  const auto generic = [&](const char* shape, const char* placement) {
    const auto side = [](int ranks, const std::string& placed) {
      return R"({"layout": "generic", "meshes": {"m": {"axes": {"x": )" +
             std::to_string(ranks) +
             R"(}}}, "tensors": [{"match": "*", "mesh": "m", "placements": [")" +
             placed + R"("]}]})";
    };
    return error(R"({"model": {"parameters": [{"name": "w", "shape": )" +
                 std::string(shape) + R"(, "dtype": "bf16"}]}, "source": )" +
                 side(2, placement) + R"(, "destination": )" +
                 side(1, "Replicate") + "}");
  };
  EXPECT_EQ(generic("[8, 8]", "Shard(1)"), "");
  EXPECT_EQ(generic("[8, 8]", "StridedShard(1, split_factor=2)"),
            "nccl_m2n cannot move \"w\": its parts are no even meshes of "
            "contiguous tensors of one dtype");
  EXPECT_EQ(generic("[8, 2, 2, 2]", "Shard(0)"),
            "nccl_m2n cannot move \"w\": it has 4 dimensions, more than 3");
}

}  // namespace
}  // namespace refit
