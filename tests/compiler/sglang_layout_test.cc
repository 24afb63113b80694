// SGLang's layout against whole tensors cut and joined as its weight loaders
// do.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

struct Mesh {
  int64_t tp = 1, pp = 1, ep = 1, dp_attention = 1, replicas = 1;
  bool dp_lm_head = false;
  EmbeddingCut embedding = EmbeddingCut::kTensor;
  std::vector<int64_t> layers_per_stage = {};
  int64_t redundant = 0;
  std::string moe_backend = {};
};

SideSpec SideOf(const Mesh& mesh) {
  SideSpec side = MakeSide(LayoutKind::kSglang);
  side.tensor_parallel.value = mesh.tp;
  side.pipeline_parallel.value = mesh.pp;
  side.expert_parallel.value = mesh.ep;
  side.dp_attention.value = mesh.dp_attention;
  side.replicas.value = mesh.replicas;
  side.dp_lm_head.value = mesh.dp_lm_head;
  side.embedding.value = mesh.embedding;
  if (!mesh.layers_per_stage.empty()) {
    side.layers_per_stage = Given(mesh.layers_per_stage);
  }
  if (mesh.redundant > 0) {
    side.experts = Given(ExpertPlacement{.redundant_experts = mesh.redundant,
                                         .physical_to_logical = {}});
  }
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
    const bool own_head = a.family->model_type == "qwen3_moe" ||
                          a.family->model_type == "mixtral";
    const bool head_everywhere = own_head || a.family->model_type == "llama";
    Tensors out;
    tp_ = rank % mesh_.tp;
    const int64_t pp = rank / mesh_.tp % mesh_.pp;
    const bool last = pp == mesh_.pp - 1;

    const Tensor& embedding = hf_.at("model.embed_tokens.weight");
    if (pp == 0) {
      out["model.embed_tokens.weight"] =
          mesh_.embedding == EmbeddingCut::kReplicated ? Padded(embedding, 1)
          : mesh_.embedding == EmbeddingCut::kAttention
              ? OfAttention(Padded(embedding, attention_ranks()))
              : Shard(Padded(embedding, mesh_.tp), mesh_.tp, tp_);
    }
    if (last) out["model.norm.weight"] = hf_.at("model.norm.weight");
    const Tensor& matrix = a.tied ? embedding : hf_.at("lm_head.weight");
    const Tensor head = mesh_.dp_lm_head
                            ? OfAttention(Padded(matrix, attention_ranks()))
                            : Shard(Padded(matrix, mesh_.tp), mesh_.tp, tp_);
    const bool is_alias = a.tied && mesh_.pp == 1 && !own_head;
    if (last && !is_alias) out["lm_head.weight"] = head;
    if (!last && head_everywhere) {
      out["lm_head.weight"] = Filled(head.shape, Tensor::kSkip);
    }

    std::vector<int64_t> counts = mesh_.layers_per_stage;
    if (counts.empty()) {
      // All but the last stages hold the smaller number of layers.
      const int64_t small = mesh_.pp - a.layers % mesh_.pp;
      for (int64_t stage = 0; stage < mesh_.pp; ++stage) {
        counts.push_back(a.layers / mesh_.pp + (stage >= small ? 1 : 0));
      }
    }
    int64_t start = 0;
    for (int64_t i = 0; i < pp; ++i) start += counts[i];
    for (int64_t layer = start; layer < start + counts[pp]; ++layer) {
      AddLayer("model.layers." + std::to_string(layer) + ".", out);
    }
    return out;
  }

 private:
  // Ranks 0 … n-1 compute attention for one part of the requests, n … 2n-1 for
  // the next, each over the same n shards.
  int64_t attention_ranks() const { return mesh_.tp / mesh_.dp_attention; }
  Tensor OfAttention(const Tensor& t) const {
    return Shard(t, attention_ranks(), tp_ % attention_ranks());
  }

  // To a multiple of 64; of 64 for each rank if they do not divide that.
  static Tensor Padded(const Tensor& t, int64_t ranks) {
    int64_t rows = t.shape[0];
    while (rows % 64 != 0) ++rows;
    if (rows % ranks != 0) {
      while (rows % (64 * ranks) != 0) rows += 64;
    }
    const int64_t missing = rows - t.shape[0];
    if (missing == 0) return t;
    return Concat({t, Filled({missing, t.shape[1]}, Tensor::kFill)});
  }

  Tensor KvHeads(const Tensor& t) const {
    const int64_t heads = model_.architecture.kv_heads;
    const int64_t rank = tp_ % attention_ranks();
    if (attention_ranks() <= heads) return OfAttention(t);
    return Shard(t, heads, rank * heads / attention_ranks());
  }

  void AddLayer(const std::string& p, Tensors& out) {
    for (const std::string same :
         {"input_layernorm.weight", "post_attention_layernorm.weight",
          "self_attn.q_norm.weight", "self_attn.k_norm.weight",
          "self_attn.o_proj.bias", "mlp.gate.weight",
          "block_sparse_moe.gate.weight"}) {
      if (hf_.contains(p + same)) out[p + same] = hf_.at(p + same);
    }
    const std::string attention = p + "self_attn.";
    for (const std::string leaf : {"weight", "bias"}) {
      if (!hf_.contains(attention + "q_proj." + leaf)) continue;
      out[attention + "qkv_proj." + leaf] =
          Concat({OfAttention(hf_.at(attention + "q_proj." + leaf)),
                  KvHeads(hf_.at(attention + "k_proj." + leaf)),
                  KvHeads(hf_.at(attention + "v_proj." + leaf))});
    }
    out[attention + "o_proj.weight"] =
        ShardColumns(hf_.at(attention + "o_proj.weight"), attention_ranks(),
                     tp_ % attention_ranks());
    if (!hf_.contains(p + "mlp.gate_proj.weight")) return AddExperts(p, out);
    out[p + "mlp.gate_up_proj.weight"] =
        Concat({Shard(hf_.at(p + "mlp.gate_proj.weight"), mesh_.tp, tp_),
                Shard(hf_.at(p + "mlp.up_proj.weight"), mesh_.tp, tp_)});
    out[p + "mlp.down_proj.weight"] =
        ShardColumns(hf_.at(p + "mlp.down_proj.weight"), mesh_.tp, tp_);
  }

  void AddExperts(const std::string& p, Tensors& out) {
    const bool mixtral = model_.architecture.family->model_type == "mixtral";
    const std::string to =
        p + (mixtral ? "block_sparse_moe.experts." : "mlp.experts.");
    const int64_t experts = model_.architecture.experts;
    const int64_t parts = mesh_.tp / mesh_.ep;
    const int64_t local = (experts + mesh_.redundant) / mesh_.ep;
    std::vector<Tensor> w13, w2;
    for (int64_t i = 0; i < local; ++i) {
      const int64_t expert = (tp_ / parts * local + i) % experts;
      const std::string name = to + std::to_string(expert) + ".";
      const Tensor gate =
          Shard(hf_.at(name + (mixtral ? "w1.weight" : "gate_proj.weight")),
                parts, tp_ % parts);
      const Tensor up =
          Shard(hf_.at(name + (mixtral ? "w3.weight" : "up_proj.weight")),
                parts, tp_ % parts);
      w13.push_back(mesh_.moe_backend == "flashinfer_cutlass"
                        ? Concat({up, gate})
                        : Concat({gate, up}));
      w2.push_back(ShardColumns(
          hf_.at(name + (mixtral ? "w2.weight" : "down_proj.weight")), parts,
          tp_ % parts));
    }
    out[to + "w13_weight"] = Stack(w13);
    out[to + "w2_weight"] = Stack(w2);
  }

  const Mesh mesh_;
  const Model model_;
  const Tensors hf_;
  int64_t tp_ = 0;
};

void ExpectMatchesOracle(const ModelSizes& sizes, const Mesh& mesh) {
  Oracle oracle(sizes, mesh);
  ExpectSameRanks(
      LayOutAndExpand(oracle.model(), SideOf(mesh), fb::Side::kDestination),
      mesh.tp * mesh.pp * mesh.replicas,
      [&](int64_t rank) { return oracle.Rank(rank); });
}

TEST(SglangLayoutTest, DenseModelIsCutByTensorParallelism) {
  for (const int64_t tp : {1, 2, 4}) {
    ExpectMatchesOracle({.qkv_bias = true, .qk_norm = true, .family = "qwen2"},
                        {.tp = tp, .replicas = 2});
  }
  ExpectMatchesOracle({.kv_heads = 2, .vocab = 180, .family = "llama"},
                      {.tp = 12});
}

TEST(SglangLayoutTest, AttentionIsCutByTensorOverDataParallelism) {
  ExpectMatchesOracle({.qkv_bias = true, .qk_norm = true, .family = "qwen3"},
                      {.tp = 4, .dp_attention = 2});
  ExpectMatchesOracle({.qk_norm = true, .family = "qwen3"},
                      {.tp = 4, .dp_attention = 4});
  // More ranks than key-value heads within each part.
  ExpectMatchesOracle({.kv_heads = 2, .vocab = 180, .family = "qwen3"},
                      {.tp = 12, .dp_attention = 3});
}

TEST(SglangLayoutTest, EmbeddingAndHeadFollowTheirKeys) {
  for (const EmbeddingCut cut :
       {EmbeddingCut::kTensor, EmbeddingCut::kAttention,
        EmbeddingCut::kReplicated}) {
    for (const bool dp_lm_head : {false, true}) {
      ExpectMatchesOracle({.vocab = 70, .family = "qwen3"},
                          {.tp = 4,
                           .dp_attention = 2,
                           .dp_lm_head = dp_lm_head,
                           .embedding = cut});
    }
  }
}

TEST(SglangLayoutTest, RemainingLayersGoToTheLastStages) {
  ExpectMatchesOracle({.layers = 11, .family = "qwen3"}, {.tp = 2, .pp = 4});
  ExpectMatchesOracle({.layers = 7, .family = "qwen2"}, {.pp = 4});
}

TEST(SglangLayoutTest, LayersPerStageIsTheLayerPartition) {
  ExpectMatchesOracle({.layers = 7, .family = "qwen2"},
                      {.pp = 3, .layers_per_stage = {4, 1, 2}});
}

TEST(SglangLayoutTest, TiedHeadIsTheEmbeddingOnOneStageAndACopyOnMore) {
  ExpectMatchesOracle({.tied = true, .family = "qwen3"}, {.tp = 2});
  ExpectMatchesOracle({.tied = true, .family = "qwen3"}, {.tp = 2, .pp = 3});
}

TEST(SglangLayoutTest, CopyOfATiedHeadIsNotReadFromASource) {
  const Model model = MakeModel({.tied = true, .family = "qwen3"});
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, SideOf({.pp = 2}), fb::Side::kSource);
  ASSERT_EQ(ranks.size(), 2);
  const Tensor& head = ranks[1].at("lm_head.weight");
  EXPECT_EQ(head, Filled({128, 3}, Tensor::kSkip));
}

TEST(SglangLayoutTest, UnreadHeadsOfMoeModelsAreDeclaredSkips) {
  ExpectMatchesOracle({.experts = 4}, {.tp = 2, .pp = 3});
  ExpectMatchesOracle({.experts = 4, .family = "mixtral"}, {.pp = 2});
  ExpectMatchesOracle({.experts = 4, .tied = true}, {.tp = 2, .pp = 2});
}

TEST(SglangLayoutTest, EveryStageOfALlamaHasAHead) {
  ExpectMatchesOracle({.family = "llama"}, {.tp = 2, .pp = 3});
}

TEST(SglangLayoutTest, VocabularyIsPaddedForRanksThatDoNotDivideIt) {
  const ModelSizes sizes = {.kv_heads = 3, .vocab = 70, .family = "qwen3"};
  ExpectMatchesOracle(sizes, {.tp = 3});
  ExpectMatchesOracle(sizes, {.tp = 6, .pp = 2, .dp_attention = 2});
  ExpectMatchesOracle(sizes, {.tp = 6,
                              .dp_attention = 2,
                              .dp_lm_head = true,
                              .embedding = EmbeddingCut::kAttention});
}

TEST(SglangLayoutTest, ExpertsAreSpreadAndCut) {
  for (const int64_t ep : {1, 2, 4}) {
    ExpectMatchesOracle({.experts = 8}, {.tp = 4, .pp = 2, .ep = ep});
  }
  ExpectMatchesOracle({.experts = 6, .family = "mixtral"}, {.tp = 4, .ep = 2});
}

TEST(SglangLayoutTest, ExpertsSpanAllPartsOfAttention) {
  ExpectMatchesOracle({.layers = 6, .experts = 4},
                      {.tp = 4, .pp = 2, .ep = 2, .dp_attention = 2});
}

TEST(SglangLayoutTest, RedundantExpertsStandBehindAllOthers) {
  ExpectMatchesOracle({.experts = 6}, {.tp = 4, .ep = 4, .redundant = 2});
  ExpectMatchesOracle({.experts = 3}, {.tp = 4, .ep = 2, .redundant = 5});
}

TEST(SglangLayoutTest, FlashInferCutlassHasUpBeforeGate) {
  ExpectMatchesOracle({.experts = 4},
                      {.tp = 4, .ep = 2, .moe_backend = "flashinfer_cutlass"});
}

}  // namespace
}  // namespace refit
