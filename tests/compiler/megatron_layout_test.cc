// Megatron's layout against whole tensors cut and merged as its loaders do.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

struct Mesh {
  int64_t tp = 1, cp = 1, dp = 1, pp = 1, vpp = 1, ep = 1, etp = 1;
  int64_t replicas = 1;
  int64_t first = -1, last = -1;  // layers of the first and last stage
  std::vector<int64_t> layers_per_stage = {};
};

SideSpec SideOf(const Mesh& mesh) {
  SideSpec side = MakeSide(LayoutKind::kMegatron);
  side.tensor_parallel.value = mesh.tp;
  side.context_parallel.value = mesh.cp;
  side.data_parallel.value = mesh.dp;
  side.pipeline_parallel.value = mesh.pp;
  side.virtual_pipeline_parallel.value = mesh.vpp;
  side.expert_parallel.value = mesh.ep;
  side.expert_tensor_parallel.value = mesh.etp;
  side.replicas.value = mesh.replicas;
  side.make_vocab_size_divisible_by.value = 8;
  if (mesh.first >= 0) {
    side.num_layers_in_first_pipeline_stage = Given(mesh.first);
  }
  if (mesh.last >= 0) {
    side.num_layers_in_last_pipeline_stage = Given(mesh.last);
  }
  if (!mesh.layers_per_stage.empty()) {
    side.layers_per_stage = Given(mesh.layers_per_stage);
  }
  return side;
}

// The global number of the first layer of chunk v of stage p, and how many.
std::pair<int64_t, int64_t> OffsetAndCount(const Mesh& mesh, int64_t layers,
                                           int64_t p, int64_t v) {
  if (!mesh.layers_per_stage.empty()) {
    int64_t offset = 0;
    for (int64_t i = 0; i < v * mesh.pp + p; ++i) {
      offset += mesh.layers_per_stage[i];
    }
    return {offset, mesh.layers_per_stage[v * mesh.pp + p]};
  }
  if (mesh.first < 0 && mesh.last < 0) {
    return {v * (layers / mesh.vpp) + p * (layers / mesh.pp / mesh.vpp),
            layers / mesh.pp / mesh.vpp};
  }
  const int64_t f = mesh.first < 0 ? 0 : mesh.first;
  const int64_t z = mesh.last < 0 ? 0 : mesh.last;
  const int64_t mids = mesh.pp - (mesh.first >= 0) - (mesh.last >= 0);
  const int64_t middle = (layers - f - z) / mesh.vpp;
  const int64_t total = f / mesh.vpp + middle + z / mesh.vpp;
  const bool is_first = mesh.first >= 0 && p == 0;
  const bool is_last = mesh.last >= 0 && p == mesh.pp - 1;
  const int64_t mid_rank = mesh.first >= 0 ? p - 1 : p;
  if (is_first) return {v * total, f / mesh.vpp};
  return {v * total + f / mesh.vpp + mid_rank * (mids ? middle / mids : 0),
          is_last ? z / mesh.vpp : middle / mids};
}

// Row P of the fused QKV tensor, for each P.
Tensor MergeQkv(const Architecture& a, const Tensor& q, const Tensor& k,
                const Tensor& v) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t block = (group + 2) * a.head_dim;
  std::vector<Tensor> rows(a.kv_heads * block);
  for (int64_t h = 0; h < a.heads; ++h) {
    for (int64_t i = 0; i < a.head_dim; ++i) {
      const int64_t g = h / group;
      const int64_t row = h * a.head_dim + i;
      rows[g * block + (h % group) * a.head_dim + i] = Rows(q, row, row + 1);
    }
  }
  for (int64_t g = 0; g < a.kv_heads; ++g) {
    for (int64_t i = 0; i < a.head_dim; ++i) {
      const int64_t row = g * a.head_dim + i;
      rows[g * block + group * a.head_dim + i] = Rows(k, row, row + 1);
      rows[g * block + (group + 1) * a.head_dim + i] = Rows(v, row, row + 1);
    }
  }
  return Concat(rows);
}

class Oracle {
 public:
  Oracle(const ModelSizes& sizes, const Mesh& mesh, fb::Side which)
      : mesh_(mesh),
        which_(which),
        model_(MakeModel(sizes)),
        hf_(Checkpoint(model_)) {}

  const Model& model() const { return model_; }

  Tensors Rank(int64_t rank) {
    Tensors out;
    const int64_t stage_ranks = mesh_.tp * mesh_.cp * mesh_.dp;
    const int64_t in_stage = rank % stage_ranks;
    tp_ = in_stage % mesh_.tp;
    etp_ = in_stage % mesh_.etp;
    ep_ = in_stage / mesh_.etp % mesh_.ep;
    const int64_t p = rank / stage_ranks % mesh_.pp;
    for (int64_t v = 0; v < mesh_.vpp; ++v) AddChunk(p, v, out);
    return out;
  }

 private:
  void AddChunk(int64_t p, int64_t v, Tensors& out) {
    const Architecture& a = model_.architecture;
    const std::string prefix =
        mesh_.vpp > 1 ? "vp_stage." + std::to_string(v) + "." : "";
    const bool first = p == 0 && v == 0;
    const bool last = p == mesh_.pp - 1 && v == mesh_.vpp - 1;
    if (first) {
      out[prefix + "embedding.word_embeddings.weight"] =
          Vocabulary(hf_.at("model.embed_tokens.weight"));
    }
    if (last) {
      out[prefix + "decoder.final_layernorm.weight"] =
          hf_.at("model.norm.weight");
      const std::string head = prefix + "output_layer.weight";
      if (!a.tied) out[head] = Vocabulary(hf_.at("lm_head.weight"));
      if (a.tied && !first) {
        Tensor copy = Vocabulary(hf_.at("model.embed_tokens.weight"));
        if (which_ == fb::Side::kSource) {
          copy = Filled(copy.shape, Tensor::kSkip);
        }
        out[head] = copy;
      }
    }
    const auto [offset, count] = OffsetAndCount(mesh_, a.layers, p, v);
    for (int64_t i = 0; i < count; ++i) {
      AddLayer(prefix + "decoder.layers." + std::to_string(i) + ".",
               "model.layers." + std::to_string(offset + i) + ".", out);
    }
  }

  void AddLayer(const std::string& to, const std::string& from, Tensors& out) {
    const Architecture& a = model_.architecture;
    const auto hf = [&](const std::string& name) {
      return hf_.at(from + name);
    };
    const std::string attention = to + "self_attention.";
    for (const std::string leaf : {"weight", "bias"}) {
      if (!hf_.contains(from + "self_attn.q_proj." + leaf)) continue;
      out[attention + "linear_qkv." + leaf] = Split(MergeQkv(
          a, hf("self_attn.q_proj." + leaf), hf("self_attn.k_proj." + leaf),
          hf("self_attn.v_proj." + leaf)));
    }
    if (hf_.contains(from + "self_attn.o_proj.bias")) {
      out[attention + "linear_proj.bias"] = hf("self_attn.o_proj.bias");
    }
    if (hf_.contains(from + "self_attn.q_norm.weight")) {
      out[attention + "q_layernorm.weight"] = hf("self_attn.q_norm.weight");
      out[attention + "k_layernorm.weight"] = hf("self_attn.k_norm.weight");
    }
    out[attention + "linear_qkv.layer_norm_weight"] =
        hf("input_layernorm.weight");
    out[attention + "linear_proj.weight"] =
        SplitColumns(hf("self_attn.o_proj.weight"), mesh_.tp, tp_);
    if (hf_.contains(from + "mlp.gate_proj.weight")) {
      out[to + "mlp.linear_fc1.layer_norm_weight"] =
          hf("post_attention_layernorm.weight");
      out[to + "mlp.linear_fc1.weight"] = Fc1(
          hf("mlp.gate_proj.weight"), hf("mlp.up_proj.weight"), mesh_.tp, tp_);
      out[to + "mlp.linear_fc2.weight"] =
          SplitColumns(hf("mlp.down_proj.weight"), mesh_.tp, tp_);
      return;
    }
    out[to + "pre_mlp_layernorm.weight"] =
        hf("post_attention_layernorm.weight");
    out[to + "mlp.router.weight"] = hf("mlp.gate.weight");
    const int64_t local = a.experts / mesh_.ep;
    for (int64_t k = 0; k < local; ++k) {
      const std::string expert =
          "mlp.experts." + std::to_string(ep_ * local + k) + ".";
      const std::string number = std::to_string(k);
      out[to + "mlp.experts.linear_fc1.weight" + number] =
          Fc1(hf(expert + "gate_proj.weight"), hf(expert + "up_proj.weight"),
              mesh_.etp, etp_);
      out[to + "mlp.experts.linear_fc2.weight" + number] =
          SplitColumns(hf(expert + "down_proj.weight"), mesh_.etp, etp_);
    }
  }

  Tensor Split(const Tensor& t) const {
    const int64_t n = t.shape[0] / mesh_.tp;
    return Rows(t, tp_ * n, (tp_ + 1) * n);
  }
  static Tensor SplitColumns(const Tensor& t, int64_t count, int64_t index) {
    const int64_t n = t.shape[1] / count;
    return Columns(t, index * n, (index + 1) * n);
  }
  static Tensor Fc1(const Tensor& gate, const Tensor& up, int64_t count,
                    int64_t index) {
    const int64_t n = gate.shape[0] / count;
    return Concat({Rows(gate, index * n, (index + 1) * n),
                   Rows(up, index * n, (index + 1) * n)});
  }
  Tensor Vocabulary(const Tensor& t) const {
    const int64_t unit = 8 * mesh_.tp;
    const int64_t padded = (t.shape[0] + unit - 1) / unit * unit;
    return Split(Concat(
        {t, Filled({padded - t.shape[0], t.shape[1]},
                   which_ == fb::Side::kDestination ? Tensor::kFill
                                                    : Tensor::kNothing)}));
  }

  const Mesh mesh_;
  const fb::Side which_;
  const Model model_;
  const Tensors hf_;
  int64_t tp_ = 0, ep_ = 0, etp_ = 0;
};

void ExpectMatchesOracle(const ModelSizes& sizes, const Mesh& mesh) {
  for (const fb::Side which : {fb::Side::kSource, fb::Side::kDestination}) {
    Oracle oracle(sizes, mesh, which);
    const std::vector<Tensors> ranks =
        LayOutAndExpand(oracle.model(), SideOf(mesh), which);
    ASSERT_EQ(ranks.size(),
              mesh.tp * mesh.cp * mesh.dp * mesh.pp * mesh.replicas);
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      SCOPED_TRACE(rank);
      ExpectSameTensors(ranks[rank], oracle.Rank(static_cast<int64_t>(rank)));
      if (which == fb::Side::kSource) continue;
      for (const auto& [name, tensor] : ranks[rank]) {
        for (const int64_t cell : tensor.cells) {
          ASSERT_NE(cell, Tensor::kNothing) << name;
          ASSERT_NE(cell, Tensor::kSkip) << name;
        }
      }
    }
  }
}

TEST(MegatronLayoutTest, DenseModelIsCutByTensorParallelism) {
  for (const int64_t tp : {1, 2, 4}) {
    ExpectMatchesOracle({.qkv_bias = true, .qk_norm = true}, {.tp = tp});
  }
}

TEST(MegatronLayoutTest, OddTensorParallelSizesCutEvenly) {
  ExpectMatchesOracle({.kv_heads = 3}, {.tp = 3});
  ExpectMatchesOracle({.kv_heads = 6}, {.tp = 6, .dp = 2});
}

// Each query group's rows lie on several ranks and no key or value is copied.
TEST(MegatronLayoutTest, GroupsStraddleRanksWhenThereAreMoreRanksThanKvHeads) {
  ExpectMatchesOracle({.kv_heads = 2, .qkv_bias = true}, {.tp = 4});
  ExpectMatchesOracle({.kv_heads = 3, .qkv_bias = true}, {.tp = 6});
  ExpectMatchesOracle({.kv_heads = 1, .head_dim = 6}, {.tp = 12});
  ExpectMatchesOracle({.heads = 4, .kv_heads = 2, .head_dim = 3}, {.tp = 4});
}

TEST(MegatronLayoutTest, PipelineStagesNumberTheirLayersFromZero) {
  ExpectMatchesOracle({.layers = 6}, {.tp = 2, .pp = 3});
  ExpectMatchesOracle({.layers = 5}, {.pp = 5});
}

TEST(MegatronLayoutTest, FirstAndLastStagesMayBeUneven) {
  ExpectMatchesOracle({.layers = 7}, {.pp = 3, .first = 1});
  ExpectMatchesOracle({.layers = 7}, {.pp = 3, .last = 1});
  ExpectMatchesOracle({.layers = 9}, {.pp = 4, .first = 1, .last = 2});
  ExpectMatchesOracle({.layers = 3}, {.pp = 2, .first = 1, .last = 2});
}

TEST(MegatronLayoutTest, VirtualStagesInterleaveLayers) {
  ExpectMatchesOracle({.layers = 12}, {.pp = 2, .vpp = 3});
  ExpectMatchesOracle({.layers = 12},
                      {.pp = 3, .vpp = 2, .first = 2, .last = 6});
  ExpectMatchesOracle({.layers = 10}, {.pp = 3, .vpp = 2, .last = 2});
  ExpectMatchesOracle({.layers = 4, .tied = true}, {.vpp = 2});
}

TEST(MegatronLayoutTest, LayersPerStageListsChunkZeroOfEveryStageFirst) {
  ExpectMatchesOracle({.layers = 8}, {.pp = 3, .layers_per_stage = {1, 4, 3}});
  ExpectMatchesOracle({.layers = 8},
                      {.pp = 2, .vpp = 2, .layers_per_stage = {1, 4, 0, 3}});
}

TEST(MegatronLayoutTest, ExpertsAreSpreadOverTheSameRanks) {
  ExpectMatchesOracle({.experts = 6}, {.tp = 2, .dp = 3, .ep = 6});
  ExpectMatchesOracle({.experts = 6}, {.tp = 2, .cp = 3, .ep = 3, .etp = 2});
  ExpectMatchesOracle({.experts = 6},
                      {.tp = 2, .dp = 6, .pp = 2, .ep = 2, .etp = 3});
  ExpectMatchesOracle({.experts = 6}, {.tp = 4, .ep = 1, .etp = 4});
}

TEST(MegatronLayoutTest, DenseLayersBetweenExpertLayersKeepTheirNumbers) {
  ExpectMatchesOracle({.layers = 6, .experts = 4, .dense_layers = {0, 3}},
                      {.tp = 2, .pp = 2, .ep = 2});
  ExpectMatchesOracle({.layers = 8, .experts = 4, .dense_layers = {1, 3, 5, 7}},
                      {.pp = 2, .vpp = 2});
}

TEST(MegatronLayoutTest, TiedModelHasNoOutputLayerOnOneStage) {
  ExpectMatchesOracle({.tied = true}, {.tp = 2});
}

TEST(MegatronLayoutTest, TiedOutputLayerOfTheLastStageIsACopyOfTheEmbedding) {
  ExpectMatchesOracle({.kv_heads = 3, .tied = true}, {.tp = 3, .pp = 2});
}

TEST(MegatronLayoutTest, ReplicasAreTheSlowestAxis) {
  ExpectMatchesOracle({.experts = 4},
                      {.tp = 2, .pp = 2, .ep = 2, .replicas = 3});
}

TEST(MegatronLayoutTest, VocabularyPaddingIsFilledAlsoOnRanksWithoutRows) {
  ExpectMatchesOracle({.vocab = 4}, {.tp = 4});
}

// 12 layers x 16 experts in two fragments: gate and up.
TEST(MegatronLayoutTest, FragmentsFollowDistinctShapesNotLayersTimesExperts) {
  const Model model = MakeModel({.layers = 24, .experts = 64});
  BufferTable buffers;
  Diagnostics diagnostics;
  SideSpec side = SideOf({.dp = 4, .pp = 2, .ep = 4});
  const SideLayout layout = LayOut({.model = model,
                                    .side = side,
                                    .which = fb::Side::kSource,
                                    .buffers = buffers,
                                    .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok());
  for (const BufferId id : layout.ranks[5]) {
    const Buffer& buffer = buffers[id];
    if (buffer.name != "decoder.layers.{0}.mlp.experts.linear_fc1.weight{1}") {
      continue;
    }
    EXPECT_EQ(buffer.index[0], Consecutive(0, 12));
    EXPECT_EQ(buffer.index[1], Consecutive(0, 16));
    ASSERT_EQ(buffer.fragments.size(), 2);
    const Fragment& up = buffer.fragments[1];
    EXPECT_EQ(BoxText(up.box), "[12:24, 16:32, 0:12, 0:3]");
    EXPECT_EQ(up.offset, 12 * 3);
    EXPECT_EQ(up.stride, (Dims{16 * 24 * 3, 24 * 3, 3, 1}));
    return;
  }
  ADD_FAILURE() << "no experts";
}

// What stands in each tensor of each rank, by names that do not depend on how
// the params are stacked.
using Places = std::map<std::string, std::vector<std::string>>;
std::vector<Places> PlacesByName(const Model& model, const SideSpec& side) {
  std::map<int64_t, std::string> names;
  for (const auto& [name, tensor] : Checkpoint(model)) {
    for (size_t i = 0; i < tensor.cells.size(); ++i) {
      names[tensor.cells[i]] = name + "#" + std::to_string(i);
    }
  }
  std::vector<Places> ranks;
  for (const Tensors& tensors :
       LayOutAndExpand(model, side, fb::Side::kDestination)) {
    Places& rank = ranks.emplace_back();
    for (const auto& [name, tensor] : tensors) {
      for (const int64_t cell : tensor.cells) {
        rank[name].push_back(cell < 0 ? "-" : names.at(cell));
      }
    }
  }
  return ranks;
}

// What an exclude of one expert in one layer leaves: three stacks per role.
TEST(MegatronLayoutTest, SplitStacksFillTheirPlaces) {
  Model whole = MakeModel({.layers = 5, .experts = 4});
  Model split = whole;
  split.params.clear();
  for (const Param& param : whole.params) {
    if (param.index.size() != 2) {
      split.params.push_back(param);
      continue;
    }
    Param others = param, layer = param, excluded = param;
    others.index[0].numbers = {0, 1, 3, 4};
    layer.index[0].numbers = {2};
    layer.index[1].numbers = {0, 2, 3};
    excluded.index[0].numbers = {2};
    excluded.index[1].numbers = {1};
    excluded.skip = SkipReason::kExcluded;
    split.params.insert(split.params.end(), {others, layer, excluded});
  }
  for (const int64_t ep : {1, 2, 4}) {
    const SideSpec side = SideOf({.tp = 4, .ep = ep});
    EXPECT_EQ(PlacesByName(split, side), PlacesByName(whole, side));
  }
}

// The stack of layer 1 lies between two runs of the others' params.
TEST(MegatronLayoutTest, LayersOfAnotherDtypeAreStackedApart) {
  const Model whole = MakeModel({});
  Model mixed = whole;
  mixed.params.clear();
  for (const Param& param : whole.params) {
    mixed.params.push_back(param);
    if (param.role != ParamRole::kQuery) continue;
    mixed.params.back().index[0].numbers = {0, 2, 3};
    mixed.params.push_back(param);
    mixed.params.back().index[0].numbers = {1};
    mixed.params.back().dtype = DType::kFp32;
  }
  const SideSpec side = SideOf({.tp = 2});
  EXPECT_EQ(PlacesByName(mixed, side), PlacesByName(whole, side));
}

TEST(MegatronLayoutTest, SideDtypeReplacesTheModels) {
  const Model model = MakeModel({});
  SideSpec side = SideOf({});
  side.dtype = Given(DType::kFp32);
  BufferTable buffers;
  Diagnostics diagnostics;
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kSource,
          .buffers = buffers,
          .diagnostics = diagnostics});
  for (const Buffer& buffer : buffers.all()) {
    EXPECT_EQ(buffer.dtype, DType::kFp32) << buffer.name;
  }
}

}  // namespace
}  // namespace refit
