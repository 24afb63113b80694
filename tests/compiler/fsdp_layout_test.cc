// The fsdp layout against torch.chunk and DTensor applied to whole tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

SideSpec MakeFsdp(int64_t data, int64_t tensor = 1, int64_t replicas = 1) {
  SideSpec side = MakeSide(LayoutKind::kFsdp);
  side.data_parallel = Given(data);
  side.tensor_parallel = Given(tensor);
  side.replicas = Given(replicas);
  return side;
}

// Chunk `index` of torch.chunk(tensor, count); 0 rows beyond the last chunk.
Tensor Chunk(const Tensor& tensor, int64_t count, int64_t index) {
  const int64_t rows = tensor.shape[0];
  const int64_t each = (rows + count - 1) / count;
  return Rows(tensor, std::min(index * each, rows),
              std::min((index + 1) * each, rows));
}

TEST(FsdpLayoutTest, RowsAreTorchChunks) {
  const Model model = MakeModel({.layers = 3, .hidden = 5, .experts = 3});
  const Tensors checkpoint = Checkpoint(model);
  for (const fb::Side which : {fb::Side::kSource, fb::Side::kDestination}) {
    for (const int64_t ranks : {1, 2, 3, 7, 64}) {
      const std::vector<Tensors> found =
          LayOutAndExpand(model, MakeFsdp(ranks), which);
      ASSERT_EQ(found.size(), ranks);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(rank);
        Tensors wanted;
        for (const auto& [name, tensor] : checkpoint) {
          wanted[name] = Chunk(tensor, ranks, rank);
        }
        ExpectSameTensors(found[rank], wanted);
      }
    }
  }
}

TEST(FsdpLayoutTest, RandomShapesAreTorchChunks) {
  std::mt19937 random(20260301);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE(trial);
    Model model;
    for (const std::string name : {"a", "b", "c.{0}", "d.{0}.e.{1}"}) {
      Param param = {
          .name = name, .index = {}, .shape = {}, .dtype = DType::kBf16};
      for (const char* index : {"{0}", "{1}"}) {
        if (name.find(index) == std::string::npos) continue;
        param.index.push_back(
            Consecutive(static_cast<int32_t>(draw(0, 2)), draw(1, 3)));
      }
      for (int64_t dim = draw(1, 4); dim > 0; --dim) {
        param.shape.push_back(draw(0, 9));
      }
      model.params.push_back(param);
    }
    const Tensors checkpoint = Checkpoint(model);
    const int64_t data = draw(1, 12);
    const int64_t replicas = draw(1, 2);
    const std::vector<Tensors> found = LayOutAndExpand(
        model, MakeFsdp(data, 1, replicas), fb::Side::kDestination);
    ASSERT_EQ(found.size(), data * replicas);
    for (int64_t rank = 0; rank < data * replicas; ++rank) {
      Tensors wanted;
      for (const auto& [name, tensor] : checkpoint) {
        wanted[name] = Chunk(tensor, data, rank % data);
      }
      ExpectSameTensors(found[rank], wanted);
    }
  }
}

TEST(FsdpLayoutTest, EmptyShardsArePresent) {
  const std::vector<Tensors> ranks =
      LayOutAndExpand(MakeModel({.hidden = 5}), MakeFsdp(4), fb::Side::kSource);
  ASSERT_EQ(ranks.size(), 4);
  EXPECT_EQ(ranks[2].at("model.norm.weight").shape, std::vector<int64_t>{1});
  EXPECT_EQ(ranks[3].at("model.norm.weight").shape, std::vector<int64_t>{0});
}

TEST(FsdpLayoutTest, ReplicasAreTheSlowestAxis) {
  const Model model = MakeModel({});
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, MakeFsdp(3, 1, 2), fb::Side::kSource);
  ASSERT_EQ(ranks.size(), 6);
  for (int64_t rank = 0; rank < 3; ++rank) {
    ExpectSameTensors(ranks[3 + rank], ranks[rank]);
  }
  EXPECT_NE(ranks[0].at("lm_head.weight"), ranks[1].at("lm_head.weight"));
}

TEST(FsdpLayoutTest, TiedHeadIsListedOnce) {
  const std::vector<Tensors> ranks = LayOutAndExpand(
      MakeModel({.tied = true}), MakeFsdp(2), fb::Side::kSource);
  ASSERT_EQ(ranks.size(), 2);
  EXPECT_TRUE(ranks[1].contains("model.embed_tokens.weight"));
  EXPECT_FALSE(ranks[1].contains("lm_head.weight"));
}

// What `fused_experts` makes of a checkpoint: the stacks of a layer's experts,
// rows of the gate before rows of the up projection.
Tensors Fuse(const Tensors& checkpoint, int64_t experts, bool mixtral) {
  Tensors fused;
  std::vector<std::string> prefixes;
  const std::string block = mixtral ? "block_sparse_moe." : "mlp.";
  for (const auto& [name, tensor] : checkpoint) {
    const size_t at = name.find(block + "experts.");
    if (at != std::string::npos) {
      prefixes.push_back(name.substr(0, at));
    } else if (name.find(block) != std::string::npos) {
      fused[name.substr(0, name.find(block)) + "mlp." +
            name.substr(name.find(block) + block.size())] = tensor;
    } else {
      fused[name] = tensor;
    }
  }
  for (const std::string& prefix : prefixes) {
    std::vector<Tensor> gate_up, down;
    for (int64_t expert = 0; expert < experts; ++expert) {
      const std::string name =
          prefix + block + "experts." + std::to_string(expert) + ".";
      const auto at = [&](const char* plain, const char* numbered) {
        return checkpoint.at(name + (mixtral ? numbered : plain) + ".weight");
      };
      gate_up.push_back(Concat({at("gate_proj", "w1"), at("up_proj", "w3")}));
      down.push_back(at("down_proj", "w2"));
    }
    fused[prefix + "mlp.experts.gate_up_proj"] = Stack(gate_up);
    fused[prefix + "mlp.experts.down_proj"] = Stack(down);
  }
  return fused;
}

TEST(FsdpLayoutTest, FusedExpertsAreStacksCutByExperts) {
  for (const bool mixtral : {false, true}) {
    ModelSizes sizes = {.layers = 4, .experts = 5};
    if (mixtral) sizes.family = "mixtral";
    if (!mixtral) sizes.dense_layers = {1};
    const Model model = MakeModel(sizes);
    const Tensors fused = Fuse(Checkpoint(model), 5, mixtral);
    for (const int64_t data : {1, 2, 3, 4, 7}) {
      SideSpec side = MakeFsdp(data);
      side.fused_experts = Given(true);
      const std::vector<Tensors> found =
          LayOutAndExpand(model, side, fb::Side::kDestination);
      ASSERT_EQ(found.size(), data);
      for (int64_t rank = 0; rank < data; ++rank) {
        SCOPED_TRACE(rank);
        Tensors wanted;
        for (const auto& [name, tensor] : fused) {
          wanted[name] = Chunk(tensor, data, rank);
        }
        ExpectSameTensors(found[rank], wanted);
      }
    }
  }
}

bool IsExpert(const std::string& name) {
  return name.find(".experts.") != std::string::npos;
}

// Rank f * EP + e holds chunk f of what EP rank e has of a stack's experts; of
// what is no expert, its chunk of all ranks.
TEST(FsdpLayoutTest, ExpertMeshCutsStacksByExpertsThenByShards) {
  const Model model = MakeModel({.layers = 3, .experts = 12});
  const Tensors fused = Fuse(Checkpoint(model), 12, false);
  for (const int64_t expert_ranks : {2, 3, 4}) {
    for (const int64_t shards : {1, 2, 3}) {
      SideSpec side = MakeFsdp(expert_ranks * shards, 1, 2);
      side.fused_experts = Given(true);
      side.expert_parallel = Given(expert_ranks);
      const std::vector<Tensors> found =
          LayOutAndExpand(model, side, fb::Side::kDestination);
      ASSERT_EQ(found.size(), expert_ranks * shards * 2);
      for (size_t rank = 0; rank < found.size(); ++rank) {
        SCOPED_TRACE(rank);
        const int64_t d = static_cast<int64_t>(rank) % (expert_ranks * shards);
        Tensors wanted;
        for (const auto& [name, tensor] : fused) {
          wanted[name] =
              IsExpert(name)
                  ? Chunk(Chunk(tensor, expert_ranks, d % expert_ranks), shards,
                          d / expert_ranks)
                  : Chunk(tensor, expert_ranks * shards, d);
        }
        ExpectSameTensors(found[rank], wanted);
      }
    }
  }
}

// Part `index` of `count` of each expert's rows: Shard(1) of a stack.
Tensor ShareOfEachExpert(const Tensor& stack, int64_t count, int64_t index) {
  const int64_t experts = stack.shape[0];
  const int64_t rows = stack.shape[1];
  std::vector<Tensor> parts;
  for (int64_t expert = 0; expert < experts; ++expert) {
    Tensor one = Rows(stack, expert, expert + 1);
    one.shape.erase(one.shape.begin());
    parts.push_back(
        Rows(one, index * rows / count, (index + 1) * rows / count));
  }
  return Stack(parts);
}

// More ranks than experts, or the job says so: whole experts, cut by rows; a
// part of gate_up_proj may hold rows of both.
TEST(FsdpLayoutTest, ExpertMeshOfMoreRanksThanExpertsCutsRows) {
  struct Case {
    int64_t experts, expert_ranks, shards;
    bool asked;
  };
  for (const Case& c : {Case{4, 2, 4, false}, Case{4, 2, 2, true},
                        Case{6, 1, 2, true}, Case{3, 3, 4, false}}) {
    const Model model =
        MakeModel({.layers = 2, .hidden = 4, .experts = c.experts});
    const Tensors fused = Fuse(Checkpoint(model), c.experts, false);
    const int64_t data = c.expert_ranks * c.shards;
    SideSpec side = MakeFsdp(data);
    side.fused_experts = Given(true);
    side.expert_parallel = Given(c.expert_ranks);
    if (c.asked) side.expert_shard_dim = Given(int64_t{1});
    const std::vector<Tensors> found =
        LayOutAndExpand(model, side, fb::Side::kDestination);
    ASSERT_EQ(found.size(), data);
    for (int64_t rank = 0; rank < data; ++rank) {
      SCOPED_TRACE(rank);
      Tensors wanted;
      for (const auto& [name, tensor] : fused) {
        wanted[name] = IsExpert(name)
                           ? ShareOfEachExpert(Chunk(tensor, c.expert_ranks,
                                                     rank % c.expert_ranks),
                                               c.shards, rank / c.expert_ranks)
                           : Chunk(tensor, data, rank);
      }
      ExpectSameTensors(found[rank], wanted);
    }
  }
}

// Experts one by one keep the checkpoint's numbers; each is cut by rows over
// the ranks that hold it.
TEST(FsdpLayoutTest, ExpertMeshHoldsItsOwnExpertsOneByOne) {
  const Model model = MakeModel({.layers = 2, .experts = 6});
  SideSpec side = MakeFsdp(6);
  side.expert_parallel = Given(int64_t{2});
  const std::vector<Tensors> found =
      LayOutAndExpand(model, side, fb::Side::kSource);
  ASSERT_EQ(found.size(), 6);
  for (int64_t rank = 0; rank < 6; ++rank) {
    SCOPED_TRACE(rank);
    Tensors wanted;
    for (const auto& [name, tensor] : Checkpoint(model)) {
      if (!IsExpert(name)) {
        wanted[name] = Chunk(tensor, 6, rank);
        continue;
      }
      const int64_t expert =
          std::stoll(name.substr(name.find(".experts.") + 9));
      if (expert / 3 == rank % 2) wanted[name] = Chunk(tensor, 3, rank / 2);
    }
    ExpectSameTensors(found[rank], wanted);
  }
}

TEST(FsdpLayoutTest, ExpertMeshThatDoesNotFitIsRefused) {
  const Model model = MakeModel({.experts = 6});
  const auto errors = [&](int64_t data, int64_t expert, int64_t dim,
                          bool fused) {
    SideSpec side = MakeFsdp(data);
    side.expert_parallel = Given(expert);
    side.fused_experts = Given(fused);
    if (dim >= 0) side.expert_shard_dim = Given(dim);
    return LayOutErrors(model, side);
  };
  EXPECT_NE(
      errors(8, 4, -1, true)
          .find("destination.expert_parallel 4 does not divide 6 experts"),
      std::string::npos);
  EXPECT_NE(errors(8, 3, -1, true)
                .find("destination.expert_parallel 3 does not divide 8 "
                      "data-parallel ranks"),
            std::string::npos);
  EXPECT_NE(errors(14, 2, 1, true)
                .find("destination.data_parallel 14 over expert_parallel 2 "
                      "leaves 7 shards of dim 1 of gate_up_proj, which do not "
                      "divide its "),
            std::string::npos);
  EXPECT_NE(errors(4, 2, 1, false)
                .find("destination.expert_shard_dim 1 is of stacked experts; "
                      "wanted fused_experts beside it"),
            std::string::npos);
  SideSpec dense = MakeFsdp(2);
  dense.expert_parallel = Given(int64_t{2});
  EXPECT_NE(LayOutErrors(MakeModel({}), dense)
                .find("destination.expert_parallel needs a model with experts"),
            std::string::npos);
}

// Tensor parallelism first, FSDP cuts what it leaves: rank d * T + t.
TEST(FsdpLayoutTest, FsdpCutsWhatTensorParallelismLeaves) {
  const Model model =
      MakeModel({.hidden = 7, .qkv_bias = true, .qk_norm = true});
  const auto left = [](const std::string& name, const Tensor& tensor,
                       int64_t count, int64_t index) {
    const auto ends = [&](const char* suffix) {
      return name.ends_with(suffix);
    };
    if (ends("o_proj.weight") || ends("down_proj.weight")) {
      const int64_t each = tensor.shape[1] / count;
      return Columns(tensor, index * each, (index + 1) * each);
    }
    const bool whole = ends("norm.weight") || ends("o_proj.bias");
    return whole ? tensor : Chunk(tensor, count, index);
  };
  for (const int64_t tensor_ranks : {2, 4}) {
    for (const int64_t data : {1, 3, 5}) {
      const std::vector<Tensors> found = LayOutAndExpand(
          model, MakeFsdp(data, tensor_ranks, 2), fb::Side::kDestination);
      ASSERT_EQ(found.size(), data * tensor_ranks * 2);
      for (size_t rank = 0; rank < found.size(); ++rank) {
        SCOPED_TRACE(rank);
        const auto t = static_cast<int64_t>(rank) % tensor_ranks;
        const auto d = static_cast<int64_t>(rank) / tensor_ranks % data;
        Tensors wanted;
        for (const auto& [name, tensor] : Checkpoint(model)) {
          wanted[name] = Chunk(left(name, tensor, tensor_ranks, t), data, d);
        }
        ExpectSameTensors(found[rank], wanted);
      }
    }
  }
}

// torch keeps it in fp32, outside of what FSDP manages.
TEST(FsdpLayoutTest, RouterCorrectionIsWholeAndKeepsItsDtype) {
  Model model;
  model.params.push_back({.name = "model.layers.{0}.mlp.gate.weight",
                          .index = {Consecutive(0, 2)},
                          .shape = {4, 2},
                          .dtype = DType::kBf16,
                          .role = ParamRole::kRouter});
  model.params.push_back(
      {.name = "model.layers.{0}.mlp.gate.e_score_correction_bias",
       .index = {Consecutive(0, 2)},
       .shape = {4},
       .dtype = DType::kFp32,
       .role = ParamRole::kRouterCorrection});
  SideSpec side = MakeFsdp(3);
  side.dtype = Given(DType::kBf16);
  BufferTable buffers;
  Diagnostics diagnostics;
  const SideLayout layout = LayOut({.model = model,
                                    .side = side,
                                    .which = fb::Side::kSource,
                                    .buffers = buffers,
                                    .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok()) << diagnostics.Render();
  ASSERT_EQ(layout.ranks.size(), 3);
  for (const std::vector<BufferId>& rank : layout.ranks) {
    ASSERT_EQ(rank.size(), 2);
    EXPECT_EQ(buffers[rank[1]].shape, (Dims{4}));
    EXPECT_EQ(buffers[rank[1]].dtype, DType::kFp32);
  }
  EXPECT_EQ(buffers[layout.ranks[2][0]].shape, (Dims{0, 2}));
}

TEST(FsdpLayoutTest, OneFragmentPerStackAndRank) {
  const Model model = MakeModel({.layers = 40, .experts = 64});
  BufferTable buffers;
  Diagnostics diagnostics;
  const SideSpec side = MakeFsdp(2);
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kSource,
          .buffers = buffers,
          .diagnostics = diagnostics});
  EXPECT_LE(buffers.all().size(), 2 * model.params.size());
  for (const Buffer& buffer : buffers.all()) {
    EXPECT_LE(buffer.fragments.size(), 1);
  }
}

TEST(FsdpLayoutTest, ScalarIsRefused) {
  Model model;
  model.params.push_back(
      {.name = "scale", .index = {}, .shape = {}, .dtype = DType::kBf16});
  EXPECT_NE(LayOutErrors(model, MakeFsdp(2))
                .find("parameter \"scale\" has no dims; FSDP cuts dim 0, "
                      "wanted one or more"),
            std::string::npos);
}

TEST(FsdpLayoutTest, FusedExpertsNeedExpertsAndRoles) {
  SideSpec side = MakeFsdp(2);
  side.fused_experts = Given(true);
  EXPECT_NE(LayOutErrors(MakeModel({}), side)
                .find("destination.fused_experts needs a model with experts"),
            std::string::npos);
  Model model;
  model.params.push_back(
      {.name = "w", .index = {}, .shape = {4}, .dtype = DType::kBf16});
  EXPECT_NE(LayOutErrors(model, side)
                .find("fsdp cannot place parameter \"w\"; wanted a model "
                      "family with roles (config.json)"),
            std::string::npos);
  EXPECT_EQ(LayOutErrors(model, MakeFsdp(2)), "");
}

TEST(FsdpLayoutTest, TensorParallelismNeedsADenseModelWhoseHeadsItDivides) {
  EXPECT_NE(LayOutErrors(MakeModel({.experts = 2}), MakeFsdp(1, 2))
                .find("destination.tensor_parallel 2 cannot place parameter "
                      "\"model.layers.0.mlp.gate.weight\"; wanted a dense "
                      "model, or layout \"generic\" with its placements"),
            std::string::npos);
  EXPECT_NE(LayOutErrors(MakeModel({}), MakeFsdp(1, 8))
                .find("destination.tensor_parallel 8 does not divide 4 "
                      "key-value heads"),
            std::string::npos);
}

}  // namespace
}  // namespace refit
