// vLLM's layout against whole tensors cut and joined as its weight loaders do.
#include <gtest/gtest.h>

#include <algorithm>
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
  return side;
}

Tensor Share(const Tensor& t, int64_t count, int64_t index) {
  const int64_t n = t.shape[0] / count;
  return Rows(t, index * n, (index + 1) * n);
}
Tensor ShareColumns(const Tensor& t, int64_t count, int64_t index) {
  const int64_t n = t.shape[1] / count;
  return Columns(t, index * n, (index + 1) * n);
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
    const bool everywhere = a.family == "qwen3_moe" || a.family == "mixtral";
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
          Concat({Share(hf("self_attn.q_proj." + leaf), mesh_.tp, tp_),
                  KvHeads(hf("self_attn.k_proj." + leaf)),
                  KvHeads(hf("self_attn.v_proj." + leaf))});
    }
    out[p + "self_attn.o_proj.weight"] =
        ShareColumns(hf("self_attn.o_proj.weight"), mesh_.tp, tp_);
    if (hf_.contains(p + "mlp.gate_proj.weight")) {
      out[p + "mlp.gate_up_proj.weight"] =
          Concat({Share(hf("mlp.gate_proj.weight"), mesh_.tp, tp_),
                  Share(hf("mlp.up_proj.weight"), mesh_.tp, tp_)});
      out[p + "mlp.down_proj.weight"] =
          ShareColumns(hf("mlp.down_proj.weight"), mesh_.tp, tp_);
      return;
    }
    AddExperts(p, out);
  }

  void AddExperts(const std::string& p, Tensors& out) {
    const bool mixtral = model_.architecture.family == "mixtral";
    const std::string block = mixtral ? "block_sparse_moe." : "mlp.";
    const int64_t ranks = mesh_.dp * mesh_.tp;
    std::vector<Tensor> w13, w2;
    const int64_t experts = model_.architecture.experts;
    for (int64_t e = 0; e < experts; ++e) {
      if (mesh_.ep && OwnerOf(e, experts, ranks) != expert_rank_) continue;
      const std::string name = p + block + "experts." + std::to_string(e) + ".";
      const Tensor& gate =
          hf_.at(name + (mixtral ? "w1.weight" : "gate_proj.weight"));
      const Tensor& up =
          hf_.at(name + (mixtral ? "w3.weight" : "up_proj.weight"));
      const Tensor& down =
          hf_.at(name + (mixtral ? "w2.weight" : "down_proj.weight"));
      const int64_t count = mesh_.ep ? 1 : ranks;
      const int64_t index = mesh_.ep ? 0 : expert_rank_;
      w13.push_back(
          Concat({Share(gate, count, index), Share(up, count, index)}));
      w2.push_back(ShareColumns(down, count, index));
    }
    const std::string to = p + block + "experts." +
                           (mesh_.version == "0.24.1" ? "" : "routed_experts.");
    out[to + "w13_weight"] = Stack(w13);
    out[to + "w2_weight"] = Stack(w2);
  }

  // The rank that holds expert e when the first ranks take one more each.
  static int64_t OwnerOf(int64_t e, int64_t experts, int64_t ranks) {
    int64_t next = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      next += experts / ranks + (rank < experts % ranks ? 1 : 0);
      if (e < next) return rank;
    }
    return -1;
  }

  Tensor KvHeads(const Tensor& t) const {
    const Architecture& a = model_.architecture;
    if (mesh_.tp < a.kv_heads) return Share(t, mesh_.tp, tp_);
    return Share(t, a.kv_heads, tp_ / (mesh_.tp / a.kv_heads));
  }

  Tensor Vocabulary(const Tensor& t) const {
    const int64_t padded = (t.shape[0] + 63) / 64 * 64;
    return Share(
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
  const std::vector<Tensors> ranks =
      LayOutAndExpand(oracle.model(), SideOf(mesh), fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), mesh.tp * mesh.pp * mesh.dp * mesh.replicas);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    SCOPED_TRACE(rank);
    ExpectSameTensors(ranks[rank], oracle.Rank(static_cast<int64_t>(rank)));
    for (const auto& [name, tensor] : ranks[rank]) {
      EXPECT_EQ(std::count(tensor.cells.begin(), tensor.cells.end(),
                           Tensor::kNothing),
                0)
          << name;
    }
  }
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
  ExpectMatchesOracle({.kv_heads = 2, .qkv_bias = true}, {.tp = 4});
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

TEST(VllmLayoutTest, DenseLayersBetweenExpertLayersKeepTheirNumbers) {
  ExpectMatchesOracle({.layers = 6, .experts = 4, .dense_layers = {0, 3}},
                      {.tp = 2, .pp = 2, .dp = 2, .ep = true});
}

TEST(VllmLayoutTest, ReplicasAreEnginesAndTheSlowestAxis) {
  ExpectMatchesOracle({.experts = 4},
                      {.tp = 2, .pp = 2, .dp = 2, .replicas = 3});
}

TEST(VllmLayoutTest, VersionChoosesTheNameOfTheExperts) {
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .version = "0.24.1"});
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .version = "0.25"});
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

}  // namespace
}  // namespace refit
