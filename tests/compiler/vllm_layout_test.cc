// vLLM's layout against whole tensors cut and joined as its weight loaders do.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

struct Mesh {
  int64_t tp = 1, pp = 1, dp = 1, replicas = 1;
  bool ep = false;
  std::vector<int64_t> layers_per_stage = {};
  std::string version = {};
  ExpertPlacement experts = {};
  std::string moe_backend = {};
};

SideSpec SideOf(const Mesh& mesh) {
  SideSpec side = MakeSide(LayoutKind::kVllm);
  side.tensor_parallel.value = mesh.tp;
  side.pipeline_parallel.value = mesh.pp;
  side.data_parallel.value = mesh.dp;
  side.replicas.value = mesh.replicas;
  side.expert_parallel_enabled.value = mesh.ep;
  if (!mesh.layers_per_stage.empty()) {
    side.layers_per_stage = Given(mesh.layers_per_stage);
  }
  if (!mesh.version.empty()) side.version = Given(mesh.version);
  if (mesh.ep) side.experts = Given(mesh.experts);
  if (!mesh.moe_backend.empty()) side.moe_backend = Given(mesh.moe_backend);
  return side;
}

class Oracle {
 public:
  Oracle(const ModelSizes& sizes, const Mesh& mesh)
      : mesh_(mesh), model_(MakeModel(sizes)), hf_(Checkpoint(model_)) {}

  const Model& model() const { return model_; }

  Tensors Rank(int64_t rank) {
    const Architecture& a = model_.architecture;
    Tensors out;
    tp_ = rank % mesh_.tp;
    const int64_t pp = rank / mesh_.tp % mesh_.pp;
    const int64_t dp = rank / mesh_.tp / mesh_.pp % mesh_.dp;
    expert_rank_ = dp * mesh_.tp + tp_;

    const bool first = pp == 0;
    const bool last = pp == mesh_.pp - 1;
    const bool everywhere = a.family->model_type == "qwen3_moe" ||
                            a.family->model_type == "mixtral";
    const auto end = [&](const std::string& name, const Tensor& tensor,
                         bool read) {
      if (read) out[name] = tensor;
      if (!read && everywhere) out[name] = Filled(tensor.shape, Tensor::kSkip);
    };
    end("model.embed_tokens.weight",
        Vocabulary(hf_.at("model.embed_tokens.weight")),
        first || (last && a.tied));
    end("model.norm.weight", hf_.at("model.norm.weight"), last);
    if (!a.tied) {
      end("lm_head.weight", Vocabulary(hf_.at("lm_head.weight")), last);
    }

    std::vector<int64_t> partitions = mesh_.layers_per_stage;
    if (partitions.empty()) {
      partitions.assign(mesh_.pp, a.layers / mesh_.pp);
      for (int64_t i = 2; i < a.layers % mesh_.pp + 2; ++i) {
        ++partitions[partitions.size() - i];
      }
    }
    int64_t start = 0;
    for (int64_t i = 0; i < pp; ++i) start += partitions[i];
    for (int64_t layer = start; layer < start + partitions[pp]; ++layer) {
      AddLayer("model.layers." + std::to_string(layer) + ".", out);
    }
    return out;
  }

 private:
  void AddLayer(const std::string& p, Tensors& out) {
    const auto hf = [&](const std::string& name) { return hf_.at(p + name); };
    for (const std::string same :
         {"input_layernorm.weight", "post_attention_layernorm.weight",
          "self_attn.q_norm.weight", "self_attn.k_norm.weight",
          "self_attn.o_proj.bias", "mlp.gate.weight",
          "block_sparse_moe.gate.weight"}) {
      if (hf_.contains(p + same)) out[p + same] = hf(same);
    }
    for (const std::string leaf : {"weight", "bias"}) {
      if (!hf_.contains(p + "self_attn.q_proj." + leaf)) continue;
      out[p + "self_attn.qkv_proj." + leaf] =
          Concat({Shard(hf("self_attn.q_proj." + leaf), mesh_.tp, tp_),
                  KvHeads(hf("self_attn.k_proj." + leaf)),
                  KvHeads(hf("self_attn.v_proj." + leaf))});
    }
    out[p + "self_attn.o_proj.weight"] =
        ShardColumns(hf("self_attn.o_proj.weight"), mesh_.tp, tp_);
    if (hf_.contains(p + "mlp.gate_proj.weight")) {
      out[p + "mlp.gate_up_proj.weight"] =
          Concat({Shard(hf("mlp.gate_proj.weight"), mesh_.tp, tp_),
                  Shard(hf("mlp.up_proj.weight"), mesh_.tp, tp_)});
      out[p + "mlp.down_proj.weight"] =
          ShardColumns(hf("mlp.down_proj.weight"), mesh_.tp, tp_);
      return;
    }
    AddExperts(p, out);
  }

  void AddExperts(const std::string& p, Tensors& out) {
    const bool mixtral = model_.architecture.family->model_type == "mixtral";
    const std::string block = mixtral ? "block_sparse_moe." : "mlp.";
    const int64_t ranks = mesh_.dp * mesh_.tp;
    std::vector<Tensor> w13, w2;
    for (const int64_t e : LocalExperts()) {
      const std::string name = p + block + "experts." + std::to_string(e) + ".";
      const int64_t count = mesh_.ep ? 1 : ranks;
      const int64_t index = mesh_.ep ? 0 : expert_rank_;
      const Tensor gate =
          Shard(hf_.at(name + (mixtral ? "w1.weight" : "gate_proj.weight")),
                count, index);
      const Tensor up =
          Shard(hf_.at(name + (mixtral ? "w3.weight" : "up_proj.weight")),
                count, index);
      w13.push_back(mesh_.moe_backend == "flashinfer_cutlass"
                        ? Concat({up, gate})
                        : Concat({gate, up}));
      w2.push_back(ShardColumns(
          hf_.at(name + (mixtral ? "w2.weight" : "down_proj.weight")), count,
          index));
    }
    const std::string to = p + block + "experts." +
                           (mesh_.version == "0.23.1" ? "" : "routed_experts.");
    out[to + "w13_weight"] = Stack(w13);
    out[to + "w2_weight"] = Stack(w2);
  }

  // By physical expert.
  std::vector<int64_t> LocalExperts() const {
    const int64_t experts = model_.architecture.experts;
    const int64_t ranks = mesh_.ep ? mesh_.dp * mesh_.tp : 1;
    const int64_t rank = mesh_.ep ? expert_rank_ : 0;
    const int64_t physical = experts + mesh_.experts.redundant_experts;
    std::vector<int64_t> local;
    for (int64_t p = 0; p < physical; ++p) {
      const bool in_turn =
          mesh_.experts.kind == ExpertPlacement::Kind::kRoundRobin;
      const int64_t owner = in_turn ? p % ranks : OwnerOf(p, physical, ranks);
      if (owner == rank) local.push_back(p % experts);
    }
    return local;
  }

  // The rank that holds physical expert e when the first ranks take one more
  // each.
  static int64_t OwnerOf(int64_t e, int64_t physical, int64_t ranks) {
    int64_t next = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      next += physical / ranks + (rank < physical % ranks ? 1 : 0);
      if (e < next) return rank;
    }
    return -1;
  }

  Tensor KvHeads(const Tensor& t) const {
    const Architecture& a = model_.architecture;
    if (mesh_.tp < a.kv_heads) return Shard(t, mesh_.tp, tp_);
    return Shard(t, a.kv_heads, tp_ / (mesh_.tp / a.kv_heads));
  }

  Tensor Vocabulary(const Tensor& t) const {
    const int64_t padded = (t.shape[0] + 63) / 64 * 64;
    return Shard(
        Concat({t, Filled({padded - t.shape[0], t.shape[1]}, Tensor::kFill)}),
        mesh_.tp, tp_);
  }

  const Mesh mesh_;
  const Model model_;
  const Tensors hf_;
  int64_t tp_ = 0, expert_rank_ = 0;
};

void ExpectMatchesOracle(const ModelSizes& sizes, const Mesh& mesh) {
  Oracle oracle(sizes, mesh);
  ExpectSameRanks(
      LayOutAndExpand(oracle.model(), SideOf(mesh), fb::Side::kDestination),
      mesh.tp * mesh.pp * mesh.dp * mesh.replicas,
      [&](int64_t rank) { return oracle.Rank(rank); });
}

TEST(VllmLayoutTest, DenseModelIsCutByTensorParallelism) {
  for (const int64_t tp : {1, 2, 4}) {
    ExpectMatchesOracle({.qkv_bias = true, .qk_norm = true, .family = "qwen2"},
                        {.tp = tp});
  }
}

TEST(VllmLayoutTest, OddTensorParallelSizesCutEvenly) {
  ExpectMatchesOracle({.kv_heads = 3, .vocab = 180, .family = "llama"},
                      {.tp = 3});
  ExpectMatchesOracle({.kv_heads = 6, .vocab = 190, .family = "llama"},
                      {.tp = 6, .dp = 2});
}

TEST(VllmLayoutTest, ConsecutiveRanksShareAKvHeadWhenThereAreMoreRanks) {
  ExpectMatchesOracle({.kv_heads = 2, .qkv_bias = true, .family = "llama"},
                      {.tp = 4});
  ExpectMatchesOracle({.kv_heads = 1, .vocab = 180}, {.tp = 3});
  ExpectMatchesOracle({.kv_heads = 3, .vocab = 180}, {.tp = 6});
  ExpectMatchesOracle({.kv_heads = 2, .vocab = 180}, {.tp = 12});
}

TEST(VllmLayoutTest, VocabularyPaddingIsFilledAlsoOnRanksWithoutRows) {
  ExpectMatchesOracle({.vocab = 5}, {.tp = 4});
  ExpectMatchesOracle({.vocab = 64}, {.tp = 4});
}

TEST(VllmLayoutTest, RemainingLayersGoToTheStagesBeforeTheLast) {
  ExpectMatchesOracle({.layers = 11, .family = "qwen3"}, {.tp = 2, .pp = 4});
  ExpectMatchesOracle({.layers = 7, .family = "llama"}, {.pp = 4, .dp = 2});
}

TEST(VllmLayoutTest, LayersPerStageIsTheLayerPartition) {
  ExpectMatchesOracle({.layers = 7, .family = "llama"},
                      {.pp = 3, .layers_per_stage = {4, 1, 2}});
}

TEST(VllmLayoutTest, TiedModelHasNoHeadAndTheEmbeddingOnFirstAndLastStage) {
  ExpectMatchesOracle({.tied = true, .family = "qwen3"}, {.tp = 2});
  ExpectMatchesOracle({.tied = true, .family = "qwen3"}, {.tp = 2, .pp = 3});
}

TEST(VllmLayoutTest, UnreadCopiesOfMoeModelsAreDeclaredSkips) {
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .pp = 3});
  ExpectMatchesOracle({.experts = 4, .family = "mixtral"}, {.pp = 2});
}

TEST(VllmLayoutTest, ExpertsAreCutByDataTimesTensorWithoutExpertParallel) {
  ExpectMatchesOracle({.experts = 4}, {.tp = 2});
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .pp = 2, .dp = 3});
}

TEST(VllmLayoutTest, ExpertsAreSpreadLinearlyWithExpertParallel) {
  ExpectMatchesOracle({.experts = 8}, {.tp = 2, .dp = 2, .ep = true});
  ExpectMatchesOracle({.experts = 8}, {.tp = 1, .dp = 3, .ep = true});
  ExpectMatchesOracle({.experts = 7}, {.tp = 2, .pp = 2, .dp = 2, .ep = true});
}

TEST(VllmLayoutTest, ExpertsAreDealtInTurnRoundRobin) {
  const ExpertPlacement in_turn = {.kind = ExpertPlacement::Kind::kRoundRobin,
                                   .physical_to_logical = {}};
  ExpectMatchesOracle({.experts = 8},
                      {.tp = 2, .dp = 2, .ep = true, .experts = in_turn});
  ExpectMatchesOracle({.experts = 7},
                      {.dp = 3, .ep = true, .experts = in_turn});
}

TEST(VllmLayoutTest, RedundantExpertsStandBehindAllOthers) {
  ExpectMatchesOracle({.experts = 6}, {.tp = 2,
                                       .dp = 2,
                                       .ep = true,
                                       .experts = {.redundant_experts = 2,
                                                   .physical_to_logical = {}}});
  // More than one extra physical expert of an expert, and two of one expert on
  // a rank.
  ExpectMatchesOracle({.experts = 3}, {.tp = 2,
                                       .ep = true,
                                       .experts = {.redundant_experts = 5,
                                                   .physical_to_logical = {}}});
}

TEST(VllmLayoutTest, ATableSaysEachPhysicalExpert) {
  const Model model =
      MakeModel({.layers = 3, .experts = 3, .dense_layers = {1}});
  const Tensors hf = Checkpoint(model);
  // One list for all layers; one per layer with experts; one per layer.
  const std::vector<int64_t> a = {2, 0, 1, 0}, b = {1, 1, 2, 0},
                             unused = {0, 1, 2, 2};
  struct Case {
    std::vector<std::vector<int64_t>> table;
    std::vector<int64_t> layer_0, layer_2;
  };
  for (const Case& c :
       {Case{{a}, a, a}, Case{{a, b}, a, b}, Case{{b, unused, a}, b, a}}) {
    const std::vector<Tensors> ranks = LayOutAndExpand(
        model,
        SideOf({.tp = 2,
                .ep = true,
                .experts = {.kind = ExpertPlacement::Kind::kTable,
                            .physical_to_logical = c.table}}),
        fb::Side::kDestination);
    ASSERT_EQ(ranks.size(), 2);
    for (int64_t rank = 0; rank < 2; ++rank) {
      for (const auto& [layer, physical] :
           {std::pair("0", &c.layer_0), std::pair("2", &c.layer_2)}) {
        const std::string mlp = std::string("model.layers.") + layer + ".mlp.";
        std::vector<Tensor> w2;
        for (int64_t p = 2 * rank; p < 2 * rank + 2; ++p) {
          w2.push_back(hf.at(mlp + "experts." + std::to_string((*physical)[p]) +
                             ".down_proj.weight"));
        }
        EXPECT_EQ(ranks[rank].at(mlp + "experts.routed_experts.w2_weight"),
                  Stack(w2))
            << "rank " << rank << " layer " << layer;
      }
    }
  }
}

TEST(VllmLayoutTest, FlashInferCutlassHasUpBeforeGate) {
  ExpectMatchesOracle({.experts = 4},
                      {.tp = 2, .dp = 2, .moe_backend = "flashinfer_cutlass"});
  ExpectMatchesOracle(
      {.experts = 4},
      {.tp = 2, .ep = true, .moe_backend = "flashinfer_cutlass"});
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .moe_backend = "triton"});
}

TEST(VllmLayoutTest, DenseLayersBetweenExpertLayersKeepTheirNumbers) {
  ExpectMatchesOracle({.layers = 6, .experts = 4, .dense_layers = {0, 3}},
                      {.tp = 2, .pp = 2, .dp = 2, .ep = true});
}

TEST(VllmLayoutTest, ReplicasAreEnginesAndTheSlowestAxis) {
  ExpectMatchesOracle({.experts = 4},
                      {.tp = 2, .pp = 2, .dp = 2, .replicas = 3});
}

TEST(VllmLayoutTest, VersionChoosesTheNameOfTheExperts) {
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .version = "0.23.1"});
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .version = "0.24"});
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .version = "1.0.0rc1"});
}

TEST(VllmLayoutTest, MixtralKeepsItsBlockNameAroundTheExperts) {
  const std::vector<Tensors> ranks =
      LayOutAndExpand(MakeModel({.experts = 4, .family = "mixtral"}),
                      SideOf({.tp = 2}), fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 2);
  const std::string block = "model.layers.3.block_sparse_moe.";
  EXPECT_TRUE(ranks[1].contains(block + "experts.routed_experts.w13_weight"));
  EXPECT_TRUE(ranks[1].contains(block + "gate.weight"));
}

// All experts of all layers of a stage in two fragments: gate and up.
TEST(VllmLayoutTest, FragmentsFollowDistinctShapesNotLayersTimesExperts) {
  const Model model = MakeModel({.layers = 24, .experts = 64});
  BufferTable buffers;
  Diagnostics diagnostics;
  const SideSpec side = SideOf({.tp = 4, .pp = 2, .ep = true});
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kDestination,
          .buffers = buffers,
          .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok());
  for (const Buffer& buffer : buffers.all()) {
    if (buffer.name.ends_with("w13_weight")) {
      EXPECT_EQ(buffer.fragments.size(), 2);
    }
  }
}

// Physical experts an even stride apart are one fragment: here the first copies
// of all experts of a rank, and the second.
TEST(VllmLayoutTest, ExpertsAtEvenStridesAreOneFragment) {
  const Model model = MakeModel({.experts = 8});
  BufferTable buffers;
  Diagnostics diagnostics;
  std::vector<int64_t> table;
  for (int64_t p = 0; p < 16; ++p) table.push_back(p / 2);
  const SideSpec side =
      SideOf({.tp = 2,
              .ep = true,
              .experts = {.kind = ExpertPlacement::Kind::kTable,
                          .physical_to_logical = {table}}});
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kDestination,
          .buffers = buffers,
          .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok());
  for (const Buffer& buffer : buffers.all()) {
    if (buffer.name.ends_with("w2_weight")) {
      EXPECT_EQ(buffer.fragments.size(), 2);
    }
  }
}

}  // namespace
}  // namespace refit
