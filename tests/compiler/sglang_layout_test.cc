// SGLang's layout: skips, and what its classes of newer families hold that
// those of others do not. Which bytes stand where else is the second opinion's
// (tests/second_opinion/sglang.py).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

std::vector<std::string> SkippedOf(const ModelSizes& sizes, fb::Side which,
                                   size_t stage) {
  const std::vector<Tensors> stages = LayOutAndExpand(
      MakeModel(sizes), MakeSide(LayoutKind::kSglang, 1, 2), which);
  return SkippedTensors(stages.at(stage));
}

const std::vector<std::string> kNone;
const std::vector<std::string> kHead = {"lm_head.weight"};

TEST(SglangLayoutTest, CopyOfATiedHeadIsNotReadFromASource) {
  const ModelSizes sizes = {.tied = true, .family = "qwen3"};
  EXPECT_EQ(SkippedOf(sizes, fb::Side::kSource, 1), kHead);
  EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 1), kNone);
}

TEST(SglangLayoutTest, UnreadHeadsOfMoeModelsAreDeclaredSkips) {
  for (const ModelSizes& sizes :
       {ModelSizes{.experts = 4}, ModelSizes{.experts = 4, .tied = true},
        ModelSizes{.experts = 4, .family = "mixtral"}}) {
    EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 0), kHead);
    EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 1), kNone);
  }
}

TEST(SglangLayoutTest, EveryStageOfALlamaHasAHead) {
  EXPECT_EQ(SkippedOf({.family = "llama"}, fb::Side::kDestination, 0), kHead);
  EXPECT_EQ(SkippedOf({.family = "qwen3"}, fb::Side::kDestination, 0), kNone);
}

constexpr char kSizes[] = R"("hidden_size": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 60,
    "num_hidden_layers": 2, "intermediate_size": 8)";

TEST(SglangLayoutTest, ANormOverAllHeadsIsCutByAttentionRanks) {
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "minimax_m2", %s, "num_local_experts": 4})", kSizes));
  const Tensors hf = Under(Checkpoint(model), "model.layers.1.self_attn.");
  SideSpec side = MakeSide(LayoutKind::kSglang, 4);
  side.dp_attention.value = 2;
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, side, fb::Side::kDestination);
  const Tensors found = Under(ranks[3], "model.layers.1.self_attn.");
  EXPECT_EQ(found.at("q_norm.weight"), Rows(hf.at("q_norm.weight"), 4, 8));
  EXPECT_EQ(found.at("k_norm.weight"), Rows(hf.at("k_norm.weight"), 2, 4));
  EXPECT_EQ(
      BufferOf(model, side, "model.layers.{0}.block_sparse_moe.gate.weight")
          .dtype,
      DType::kFp32);
}

TEST(SglangLayoutTest, EveryStageOfAMinimaxHasAnEmbedding) {
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "minimax_m2", %s, "num_local_experts": 2})", kSizes));
  const std::vector<Tensors> stages = LayOutAndExpand(
      model, MakeSide(LayoutKind::kSglang, 1, 2), fb::Side::kDestination);
  EXPECT_EQ(SkippedTensors(stages[0]), kNone);
  EXPECT_EQ(SkippedTensors(stages[1]),
            std::vector<std::string>{"model.embed_tokens.weight"});
}

TEST(SglangLayoutTest, TheEmbeddingOfAGemmaIsWholeAndNotPadded) {
  const Model model = ReadTinyModel(
      absl::StrFormat(R"({"model_type": "gemma3_text", %s})", kSizes));
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  const Tensors found =
      LayOutAndExpand(model, side, fb::Side::kDestination).at(1);
  for (const std::string name :
       {"model.embed_tokens.weight",
        "model.layers.1.pre_feedforward_layernorm.weight",
        "model.layers.1.post_feedforward_layernorm.weight"}) {
    EXPECT_EQ(found.at(name), hf.at(name)) << name;
  }
  side.embedding.given = true;
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.embedding: SGLang's gemma3_text has the embedding "
            "whole on every rank; wanted no such key\n");
  side.embedding.given = false;
  side.dp_attention.value = 2;
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.dp_attention 2: SGLang's gemma3_text cuts its "
            "attention by all of tensor_parallel; wanted 1, with \"replicas\" "
            "for more engines\n");
}

}  // namespace
}  // namespace refit
