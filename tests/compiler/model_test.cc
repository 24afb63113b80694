#include "compiler/model/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/model/stacks.h"
#include "tests/compiler/model_oracle.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

ReadModelResult ReadConfigText(const std::string& text) {
  const TemporaryDirectory directory;
  ReadModelResult result = ReadConfig(directory.Write("config.json", text));
  result.errors = directory.Relative(result.errors);
  return result;
}

ReadModelResult ReadParameters(std::vector<ParameterSpec> parameters) {
  ModelSpec spec;
  spec.parameters = std::move(parameters);
  return ReadModelOf(spec);
}

// One param a line, without its dtype: "name layers/experts shape role".
std::string Stacks(const Model& model) {
  std::ostringstream text;
  for (const Param& param : model.params) {
    text << param.name;
    for (const IndexDim& dim : param.index) {
      text << " [";
      for (const int32_t number : dim.numbers) {
        text << (number == dim.numbers[0] ? "" : " ") << number;
      }
      text << "]";
    }
    if (param.skip != SkipReason::kUnspecified) text << " excluded";
    text << "\n";
  }
  return text.str();
}

constexpr char kMixtral[] = R"({"model_type": "mixtral", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 100})";
constexpr char kMixedMoe[] = R"({"model_type": "qwen3_moe", "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 24,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 3, "mlp_only_layers": [3],
    "decoder_sparse_step": 2, "vocab_size": 100, "attention_bias": true})";
constexpr char kTiedQwen2[] = R"({"model_type": "qwen2", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "head_dim": null,
    "tie_word_embeddings": true})";
constexpr char kBiasedLlama[] = R"({"model_type": "llama", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "attention_bias": true,
    "rope_theta": Infinity})";
constexpr char kBiasedQwen3[] = R"({"model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
    "attention_bias": true})";

constexpr char kLatentOfOneStep[] = R"({"model_type": "deepseek_v3",
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "num_nextn_predict_layers": 2,
    "num_attention_heads": 3, "q_lora_rank": null, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5,
    "first_k_dense_replace": 0, "n_routed_experts": 3, "n_shared_experts": null,
    "topk_method": "noaux_tc", "vocab_size": 100})";
constexpr char kBiasedGlm[] = R"({"model_type": "glm4_moe", "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 24, "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "first_k_dense_replace": 2,
    "n_routed_experts": 3, "n_shared_experts": 2, "vocab_size": 100,
    "attention_bias": true, "use_qk_norm": true})";

constexpr char kListedNemotron[] = R"({"model_type": "nemotron_h",
    "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "vocab_size": 100, "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "mlp", "attention", "moe"],
    "intermediate_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 6,
    "n_groups": 2, "ssm_state_size": 3, "conv_kernel": 4,
    "use_conv_bias": false, "mamba_proj_bias": true, "attention_bias": false,
    "n_routed_experts": 4, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16, "tie_word_embeddings": true})";

// Layers 1 and 3 have experts.
constexpr char kLlama4[] = R"({"model_type": "llama4_text", "hidden_size": 3,
 "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
 "head_dim": 6, "num_hidden_layers": 5, "interleave_moe_layer_step": 2,
 "moe_layers": [3, 1], "num_local_experts": 3, "intermediate_size": 4,
 "intermediate_size_mlp": 8})";

constexpr char kKimiVl[] =
    R"({"model_type": "kimi_vl", "tie_word_embeddings": false, "text_config": {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 3, "q_lora_rank": null,
    "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 5, "first_k_dense_replace": 1, "n_routed_experts": 3,
    "topk_method": "noaux_tc", "n_shared_experts": 2, "vocab_size": 100},
    "vision_config": {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "patch_size": 2, "init_pos_emb_height": 3,
    "init_pos_emb_width": 4, "merge_kernel_size": [2, 2]}})";

class UnpublishedConfigTest : public ::testing::TestWithParam<const char*> {};

TEST_P(UnpublishedConfigTest, ListsWhatTheOracleLists) {
  const TemporaryDirectory directory;
  ExpectEqualsOracle(directory.Write("config.json", GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Variants, UnpublishedConfigTest,
                         ::testing::Values(kMixtral, kMixedMoe, kTiedQwen2,
                                           kBiasedLlama, kBiasedQwen3,
                                           kLatentOfOneStep, kBiasedGlm,
                                           kListedNemotron, kLlama4, kKimiVl));

TEST(ModelTest, PredictionLayersAreListedIfTheJobMovesThem) {
  const TemporaryDirectory directory;
  for (const char* small : {kLatentOfOneStep, kBiasedGlm}) {
    ExpectEqualsOracle(directory.Write("config.json", small), {.mtp = true});
  }
}

TEST(ModelTest, AVisionTowerIsListedIfTheJobMovesIt) {
  const TemporaryDirectory directory;
  ExpectEqualsOracle(directory.Write("config.json", kKimiVl), {.vision = true});
}

TEST(ModelTest, StacksAreInTheOrderOfComputation) {
  const ReadModelResult result = ReadConfigText(kMixedMoe);
  ASSERT_EQ(result.errors, "");
  EXPECT_EQ(Stacks(*result.model),
            "model.embed_tokens.weight\n"
            "model.layers.{0}.input_layernorm.weight [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.q_proj.weight [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.k_proj.weight [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.v_proj.weight [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.q_proj.bias [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.k_proj.bias [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.v_proj.bias [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.o_proj.weight [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.o_proj.bias [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.q_norm.weight [0 1 2 3 4 5]\n"
            "model.layers.{0}.self_attn.k_norm.weight [0 1 2 3 4 5]\n"
            "model.layers.{0}.post_attention_layernorm.weight [0 2 3 4]\n"
            "model.layers.{0}.mlp.gate_proj.weight [0 2 3 4]\n"
            "model.layers.{0}.mlp.up_proj.weight [0 2 3 4]\n"
            "model.layers.{0}.mlp.down_proj.weight [0 2 3 4]\n"
            "model.layers.{0}.post_attention_layernorm.weight [1 5]\n"
            "model.layers.{0}.mlp.gate.weight [1 5]\n"
            "model.layers.{0}.mlp.experts.{1}.gate_proj.weight [1 5] [0 1 2]\n"
            "model.layers.{0}.mlp.experts.{1}.up_proj.weight [1 5] [0 1 2]\n"
            "model.layers.{0}.mlp.experts.{1}.down_proj.weight [1 5] [0 1 2]\n"
            "model.norm.weight\n"
            "lm_head.weight\n");
  EXPECT_EQ(result.model->architecture.experts, 3);
  EXPECT_EQ(result.model->params[12].role, ParamRole::kMlpNorm);
  EXPECT_EQ(result.model->params[16].role, ParamRole::kMoeNorm);
}

TEST(ModelTest, ATopkMethodThatEnginesWouldMissIsAskedFor) {
  for (const std::string config : {kLatentOfOneStep, kKimiVl}) {
    std::string without = config;
    const std::string key = R"("topk_method": "noaux_tc", )";
    without.erase(without.find(key), key.size());
    const std::string errors = ReadConfigText(without).errors;
    EXPECT_NE(errors.find("error: topk_method is missing, and engines then "
                          "hold no e_score_correction_bias, which the "
                          "checkpoint has; wanted \"noaux_tc\"\n"),
              std::string::npos)
        << errors;
  }
}

TEST(ModelTest, MixtralNamesItsExpertsByNumber) {
  const ReadModelResult result = ReadConfigText(kMixtral);
  ASSERT_EQ(result.errors, "");
  for (const Param& param : result.model->params) {
    if (param.name.find(".w1.") != std::string::npos) {
      EXPECT_EQ(param.role, ParamRole::kExpertGate);
    } else if (param.name.find(".w2.") != std::string::npos) {
      EXPECT_EQ(param.role, ParamRole::kExpertDown);
    } else if (param.name.find(".w3.") != std::string::npos) {
      EXPECT_EQ(param.role, ParamRole::kExpertUp);
    }
  }
}

TEST(ModelTest, ATiedHeadIsADeclaredSkip) {
  const ReadModelResult result = ReadConfigText(kTiedQwen2);
  ASSERT_EQ(result.errors, "");
  ASSERT_EQ(result.model->skips.size(), 1u);
  EXPECT_EQ(result.model->skips[0].name, "lm_head.weight");
  EXPECT_EQ(result.model->skips[0].reason, SkipReason::kTied);
  EXPECT_TRUE(result.model->architecture.tied);
  EXPECT_EQ(result.model->architecture.head_dim, 16);
}

// 2560 / 8 heads is not what a Gemma of 4B has.
TEST(ModelTest, AGemmaWithoutAHeadDimHasThatOfItsClass) {
  const ReadModelResult result = ReadConfigText(
      R"({"model_type": "gemma3_text", "hidden_size": 2560,
          "intermediate_size": 10240, "num_hidden_layers": 1})");
  ASSERT_EQ(result.errors, "");
  EXPECT_EQ(result.model->architecture.head_dim, 256);
}

TEST(ModelTest, DTypeComesFromTheConfig) {
  std::string text = kTiedQwen2;
  text.insert(1, "\"torch_dtype\": \"float32\", ");
  EXPECT_EQ(ReadConfigText(text).model->params[0].dtype, DType::kFp32);
  text.insert(1, "\"dtype\": \"float16\", ");
  EXPECT_EQ(ReadConfigText(text).model->params[0].dtype, DType::kFp16);
}

// A small llama4_text; `more`: keys, on line 5.
std::string Llama4(const std::string& more) {
  return R"({"model_type": "llama4_text", "hidden_size": 3, "vocab_size": 64,
 "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5,
 "interleave_moe_layer_step": 2, "num_local_experts": 3,
 "intermediate_size": 4, "intermediate_size_mlp": 8,
)" + more +
         "}";
}

TEST(ModelTest, ADTypeOfTheTextThatIsNotTheModelsIsRefused) {
  const auto errors = [](const std::string& beside, const std::string& text) {
    std::string config = Llama4("\"head_dim\": 6, " + text);
    config = R"({"model_type": "llama4", )" + beside + R"("text_config": )" +
             config + "}";
    return ReadConfigText(config).errors;
  };
  const std::string bf16 = R"("torch_dtype": "bfloat16")";
  const std::string fp32 = R"("dtype": "float32")";
  EXPECT_EQ(errors(bf16 + ", ", R"("dtype": "bfloat16")"), "");
  EXPECT_EQ(errors("", R"("dtype": "bfloat16")"), "");
  EXPECT_EQ(errors(fp32 + ", ", R"("torch_dtype": null)"), "");
  const std::string wanted =
      ": frameworks differ in which they take; wanted both alike\n";
  EXPECT_NE(errors(bf16 + ", ", fp32)
                .find("error: dtype of text_config is float32, and the one "
                      "beside it bfloat16" +
                      wanted),
            std::string::npos);
  EXPECT_NE(errors(fp32 + ", ", bf16)
                .find("error: torch_dtype of text_config is bfloat16, and the "
                      "one beside it float32" +
                      wanted),
            std::string::npos);
}

TEST(ModelTest, UnknownFamilyNamesTheKnownOnesAndTheWaysOut) {
  EXPECT_EQ(ReadConfigText("{\"model_type\": \"gpt5\"}").errors,
            "config.json:1:16: error: unknown model_type \"gpt5\"; wanted "
            "apertus, arcee, cohere, cohere2, deepseek_v2, deepseek_v3, "
            "deepseek_v32, deepseek_v4, dots1, ernie4_5, exaone4, falcon_h1, "
            "flex_olmo, gemma, gemma2, gemma3, gemma3_text, glm4_moe, "
            "glm4_moe_lite, glm4v_moe, glm_moe_dsa, gpt_oss, granite, helium, "
            "hunyuan_v1_dense, hunyuan_v1_moe, hyperclovax, internvl, "
            "iquestcoder, jais2, kimi_k2, kimi_k25, kimi_vl, llama, llama4, "
            "llama4_text, mamba2, minimax_m2, ministral, ministral3, mistral, "
            "mistral3, mixtral, nemotron, nemotron_h, olmo2, olmo3, olmoe, "
            "phimoe, qwen2, qwen2_5_vl, qwen2_moe, qwen2_vl, qwen3, qwen3_5, "
            "qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, "
            "qwen3_next, qwen3_vl, qwen3_vl_moe, seed_oss, smollm3, "
            "solar_open, stablelm, starcoder2 or youtu; "
            "a file can describe "
            "other families: \"model\": {\"config\": PATH, \"rules\": PATH}; "
            "or they move without roles: {\"safetensors\": DIRECTORY} with "
            "layout generic or fsdp, or the job that Python's refit.describe "
            "and refit.merge make of live models\n"
            "    1 | {\"model_type\": \"gpt5\"}\n"
            "      |                ^\n");
  EXPECT_NE(ReadConfigText("{\"model_type\": \"qwen3moe\"}")
                .errors.find("unknown model_type \"qwen3moe\"; did you mean "
                             "\"qwen3_moe\"? wanted apertus,"),
            std::string::npos);
}

TEST(ModelTest, UnknownFamilyNamesTheOneWhoseClassItsArchitecturesResemble) {
  for (const auto& [architectures, hint] :
       {std::pair(R"(["LlamaForCausalLM"])",
                  "its architectures are like LlamaForCausalLM of llama, whose "
                  "rules may be copied and changed: "
                  "share/refit/families/llama.json; wanted "),
        std::pair(R"(["LlammaForCausalLM"])", "LlamaForCausalLM of llama,"),
        std::pair(R"(["NemotronHForCausalLM"])",
                  "\"gpt5\"; its architectures are like NemotronHForCausalLM "
                  "of nemotron_h, whose rules"),
        std::pair(R"([1, "LlamaForCausalLM"])", "LlamaForCausalLM of llama,"),
        std::pair(R"([1, null])", "\"gpt5\"; wanted "),
        std::pair(R"("LlamaForCausalLM")", "\"gpt5\"; wanted "),
        std::pair("{}", "\"gpt5\"; wanted "),
        std::pair("null", "\"gpt5\"; wanted ")}) {
    const std::string errors =
        ReadConfigText(
            absl::StrFormat(R"({"model_type": "gpt5", "architectures": %s})",
                            architectures))
            .errors;
    EXPECT_NE(errors.find(hint), std::string::npos) << errors;
    EXPECT_EQ(errors.find("error: "), errors.rfind("error: ")) << errors;
  }
}

// Engines place experts in turn only where routers choose groups.
TEST(ModelTest, ADeepseekV2HasTheGroupsOfItsRouter) {
  constexpr char kConfig[] =
      R"({"model_type": "deepseek_v2", "hidden_size": 64, "vocab_size": 512,
          "num_attention_heads": 4, "intermediate_size": 96,
          "moe_intermediate_size": 32, "num_hidden_layers": 1,
          "n_routed_experts": 8, "q_lora_rank": null, "kv_lora_rank": 16,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8%s})";
  for (const auto& [more, groups] :
       {std::pair("", 1), std::pair(", \"n_group\": 4", 4)}) {
    const ReadModelResult result =
        ReadConfigText(absl::StrFormat(kConfig, more));
    ASSERT_EQ(result.errors, "");
    EXPECT_EQ(result.model->architecture.expert_groups, groups);
  }
}

TEST(ModelTest, NullIsNotTheOnlyValueThatAFamilyOfRulesKnows) {
  const std::string errors =
      ReadConfigText(R"({"model_type": "cohere", "tie_word_embeddings": null})")
          .errors;
  EXPECT_NE(errors.find("config.json:1:49: error: tie_word_embeddings null is "
                        "not supported; wanted true"),
            std::string::npos)
      << errors;
}

TEST(ModelTest, WhatEnginesReadOtherwiseOfALlama4IsRefused) {
  EXPECT_NE(ReadConfigText(Llama4("\"head_dim\": 6, \"moe_layers\": [0, 1]"))
                .errors.find("config.json:5:30: error: moe_layers names other "
                             "layers than interleave_moe_layer_step does: "
                             "frameworks differ in which they read; wanted "
                             "both alike"),
            std::string::npos);
  EXPECT_NE(ReadConfigText(Llama4("\"head_dim\": 5"))
                .errors.find("config.json:5:13: error: head_dim 5 is odd; "
                             "wanted an even one, of rotary pairs"),
            std::string::npos);
  EXPECT_NE(ReadConfigText(Llama4("\"head_dim\": 6, \"attention_bias\": true"))
                .errors.find("attention_bias"),
            std::string::npos);
}

TEST(ModelTest, ATiedHeadBesideAVisionTowerHasItsName) {
  const ReadModelResult result = ReadConfigText(
      R"({"model_type": "llama4", "tie_word_embeddings": true,
          "text_config": )" +
      Llama4("\"head_dim\": 6, \"tie_word_embeddings\": true") + "}");
  ASSERT_EQ(result.errors, "");
  ASSERT_EQ(result.model->skips.size(), 1u);
  EXPECT_EQ(result.model->skips[0].name, "language_model.lm_head.weight");
}

// vLLM takes that beside the text's config, whose class has a default.
TEST(ModelTest, ATextThatIsTiedInAModelThatIsNotIsRefused) {
  EXPECT_EQ(
      ReadConfigText("{\"model_type\": \"llama4\", \"text_config\":\n" +
                     Llama4("\"head_dim\": 6, \"tie_word_embeddings\": true") +
                     "}")
          .errors,
      "config.json:6:39: error: tie_word_embeddings of text_config is true, "
      "and the one beside it false by default: frameworks differ in which they "
      "take; wanted both alike\n"
      "    6 | \"head_dim\": 6, \"tie_word_embeddings\": true}}\n"
      "      |                                       ^\n");
  const std::string missing = ReadConfigText(kKimiVl).errors;
  EXPECT_EQ(missing, "");
  std::string kimi = kKimiVl;
  const std::string key = R"("tie_word_embeddings": false, )";
  kimi.erase(kimi.find(key), key.size());
  EXPECT_NE(ReadConfigText(kimi).errors.find(
                "error: missing key \"tie_word_embeddings\": classes of this "
                "model differ in what that means; wanted true or false\n"),
            std::string::npos);
}

// A small model of experts; `more`: keys, on line 6.
std::string SharedExperts(const std::string& family, const std::string& more) {
  return R"({"model_type": ")" + family + R"(", "hidden_size": 64,
 "intermediate_size": 96, "moe_intermediate_size": 24, "num_hidden_layers": 3,
 "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
 "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5,
 "n_routed_experts": 3, "vocab_size": 100, "topk_method": "noaux_tc"
)" + more +
         "}";
}

constexpr char kOneDense[] =
    R"("mlp_layer_types": ["dense", "sparse", "sparse"])";
constexpr char kTwoDense[] =
    R"("mlp_layer_types": ["dense", "dense", "sparse"])";

// transformers 5 saves the list, and engines count.
TEST(ModelTest, DenseLayersAreListedOrCounted) {
  const auto stacks = [](const std::string& family, const std::string& more) {
    const ReadModelResult result = ReadConfigText(SharedExperts(family, more));
    EXPECT_EQ(result.errors, "") << family << more;
    return result.model.has_value() ? Stacks(*result.model) : result.errors;
  };
  const std::string counted = R"(, "first_k_dense_replace": )";
  const std::string one = stacks("glm4_moe_lite", counted + "1");
  EXPECT_NE(one.find("mlp.gate_proj.weight [0]\n"), std::string::npos) << one;
  EXPECT_NE(one.find("mlp.gate.weight [1 2]\n"), std::string::npos) << one;
  EXPECT_EQ(stacks("glm4_moe_lite", ""), one);
  EXPECT_EQ(stacks("glm4_moe_lite", std::string(", ") + kOneDense), one);
  EXPECT_EQ(stacks("glm4_moe_lite", counted + "1, " + kOneDense), one);
  const std::string two = stacks("deepseek_v3", counted + "2");
  EXPECT_NE(two.find("mlp.gate.weight [2]\n"), std::string::npos) << two;
  EXPECT_EQ(stacks("deepseek_v3", counted + "2, " + kTwoDense), two);
  EXPECT_EQ(stacks("glm4_moe_lite", std::string(", ") + kTwoDense), two);
}

TEST(ModelTest, DenseLayersThatTwoKeysSayDifferentlyAreRefused) {
  const auto error = [](const std::string& family, const std::string& more) {
    const std::string errors =
        ReadConfigText(SharedExperts(family, more)).errors;
    return errors.substr(0, errors.find('\n'));
  };
  const std::string differ =
      ": frameworks differ in which they read; wanted both alike";
  const std::string counted = R"(, "first_k_dense_replace": )";
  EXPECT_EQ(error("glm4_moe_lite", counted + "1, " + kTwoDense),
            "config.json:6:50: error: mlp_layer_types of layer 1 is "
            "\"dense\", and by first_k_dense_replace it is not \"dense\"" +
                differ);
  // The class counts, and without the key it counts 3.
  EXPECT_EQ(error("deepseek_v3", std::string(", ") + kTwoDense),
            "config.json:6:22: error: mlp_layer_types of layer 2 is "
            "\"sparse\", and by first_k_dense_replace it is \"dense\"" +
                differ);
  EXPECT_EQ(error("glm4_moe_lite", counted + "2"),
            "config.json:6:28: error: first_k_dense_replace is 2, and there is "
            "no mlp_layer_types: transformers reads that alone, and makes one "
            "layer dense; wanted both, alike");
  const std::string by = "and by the count of its words it is ";
  for (const auto& [types, mistake] :
       {std::pair(R"(["sparse", "dense", "sparse"])",
                  "of layer 0 is \"sparse\", " + by + "\"dense\"" + differ),
        std::pair(R"(["dense", "sparse"])",
                  std::string("has 2 words; wanted 3, one per layer")),
        std::pair(
            R"(["dense", "moe", "sparse"])",
            std::string("has a layer \"moe\"; wanted dense or sparse"))}) {
    EXPECT_EQ(
        error("glm4_moe_lite", absl::StrCat(R"(, "mlp_layer_types": )", types)),
        "config.json:6:22: error: mlp_layer_types " + mistake);
  }
}

// transformers has no class of it.
TEST(ModelTest, WhatAKimiLeavesOutIsRefused) {
  const std::string errors =
      ReadConfigText(SharedExperts("kimi_k2", "")).errors;
  for (const char* key : {"first_k_dense_replace", "n_shared_experts"}) {
    EXPECT_NE(
        errors.find(absl::StrCat("config.json:1:1: error: missing key \"", key,
                                 "\"; wanted an integer, or null for "
                                 "none\n")),
        std::string::npos)
        << errors;
  }
}

// A small nemotron_h; `more`: keys, on line 6.
std::string Nemotron(const std::string& more) {
  return R"({"model_type": "nemotron_h", "hidden_size": 24, "head_dim": 6,
 "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
 "intermediate_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 6,
 "n_groups": 2, "ssm_state_size": 3, "conv_kernel": 4, "n_routed_experts": 4,
 "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 16,
)" + more +
         "}";
}

TEST(ModelTest, EachLayerOfAQwen35HasANormBeforeItsMlp) {
  const ReadModelResult result =
      ReadConfigText(R"({"model_type": "qwen3_5_moe_text", "hidden_size": 8,
          "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
          "vocab_size": 16, "num_hidden_layers": 4, "intermediate_size": 8,
          "linear_num_key_heads": 2, "linear_num_value_heads": 2,
          "linear_key_head_dim": 2, "linear_value_head_dim": 2,
          "linear_conv_kernel_dim": 2, "num_experts": 2,
          "moe_intermediate_size": 4, "shared_expert_intermediate_size": 4,
          "mlp_only_layers": [1]})");
  ASSERT_EQ(result.errors, "");
  const std::string listing = ModelListing(*result.model);
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_NE(listing.find(absl::StrFormat(
                  "model.layers.%d.post_attention_layernorm.weight", layer)),
              std::string::npos)
        << layer;
  }
}

TEST(ModelTest, OtherKeysThatSayOneThingDifferentlyAreRefused) {
  const auto error = [](const std::string& config) {
    const std::string errors = ReadConfigText(config).errors;
    return errors.substr(0, errors.find('\n'));
  };
  const std::string differ =
      ": frameworks differ in which they read; wanted both alike";
  EXPECT_EQ(error(R"({"model_type": "qwen3_moe", "num_experts": 8,
 "num_local_experts": 4, "hidden_size": 64, "moe_intermediate_size": 24,
 "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
 "vocab_size": 100})"),
            "config.json:2:23: error: num_local_experts is 4, and num_experts "
            "is 8" +
                differ);
  EXPECT_EQ(error(Nemotron(R"("num_hidden_layers": 2,
 "hybrid_override_pattern": "**", "layers_block_type": ["attention", "mlp"])")),
            "config.json:7:56: error: layers_block_type of layer 1 is \"mlp\", "
            "and by hybrid_override_pattern it is \"attention\"" +
                differ);
}

TEST(ModelTest, ReadsTheLayersOfNemotronAsTransformers5SavesThem) {
  const ReadModelResult old = ReadConfigText(Nemotron(R"("num_hidden_layers": 4,
                                 "hybrid_override_pattern": "M*E-")"));
  const ReadModelResult saved = ReadConfigText(Nemotron(R"("layers_block_type":
          ["linear_attention", "full_attention", "moe", "mlp"])"));
  ASSERT_EQ(old.errors + saved.errors, "");
  EXPECT_EQ(Stacks(*saved.model), Stacks(*old.model));
}

TEST(ModelTest, ReportsKeysThatGiveNemotronOtherParameters) {
  const std::string pattern =
      R"("num_hidden_layers": 4, "hybrid_override_pattern": "M*E-", )";
  for (const auto& [key, error] :
       {std::pair(R"("mlp_bias": true)",
                  "mlp_bias true is not supported; wanted false"),
        std::pair(R"("attention_bias": true)",
                  "attention_bias true is not supported; wanted false"),
        std::pair(R"("n_shared_experts": 2)",
                  "n_shared_experts is 2, which frameworks read differently; "
                  "wanted 1")}) {
    const std::string errors = ReadConfigText(Nemotron(pattern + key)).errors;
    EXPECT_TRUE(errors.starts_with("config.json:6:")) << errors;
    EXPECT_TRUE(errors.find(error) != std::string::npos) << errors;
  }
  const ReadModelResult biased =
      ReadConfigText(Nemotron(pattern + R"("use_bias": true)"));
  ASSERT_EQ(biased.errors, "");
  EXPECT_TRUE(Stacks(*biased.model).find("mixer.in_proj.bias") !=
              std::string::npos);
}

TEST(ModelTest, ReportsAPatternThatNamesNoLayers) {
  EXPECT_EQ(ReadConfigText(Nemotron(R"("num_hidden_layers": 2,
 "hybrid_override_pattern": "xx")"))
                .errors,
            "config.json:7:29: error: hybrid_override_pattern has a layer "
            "\"x\"; wanted M, *, - or E\n"
            "    7 |  \"hybrid_override_pattern\": \"xx\"}\n"
            "      |                             ^\n");
}

TEST(ModelTest, ReportsAllMissingAndWrongConfigKeys) {
  EXPECT_EQ(ReadConfigText(R"({"model_type": "llama", "hidden_size": "big",
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 3,
 "head_dim": 16, "intermediate_size": 0})")
                .errors,
            "config.json:1:40: error: hidden_size is \"big\"; wanted an "
            "integer from 1 to 2147483647\n"
            "    1 | {\"model_type\": \"llama\", \"hidden_size\": \"big\",\n"
            "      |                                        ^\n"
            "config.json:1:1: error: missing key \"vocab_size\"; wanted an "
            "integer\n"
            "    1 | {\"model_type\": \"llama\", \"hidden_size\": \"big\",\n"
            "      | ^\n"
            "config.json:2:75: error: num_key_value_heads 3 does not divide "
            "num_attention_heads 4\n"
            "    2 |  \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
            "\"num_key_value_heads\": 3,\n"
            "      | " +
                std::string(74, ' ') +
                "^\n"
                "config.json:3:39: error: intermediate_size is 0; wanted an "
                "integer from 1 to 2147483647\n"
                "    3 |  \"head_dim\": 16, \"intermediate_size\": 0}\n"
                "      |                                       ^\n");
}

TEST(ModelTest, HugeSizesDoNotOverflow) {
  const ReadModelResult result = ReadConfigText(R"({"model_type": "qwen3_moe",
    "hidden_size": 2147483647, "num_hidden_layers": 100000,
    "num_attention_heads": 2147483647, "num_key_value_heads": 2147483647,
    "head_dim": 2147483647, "vocab_size": 2147483647,
    "moe_intermediate_size": 2147483647, "num_experts": 100000})");
  EXPECT_FALSE(result.model.has_value());
  EXPECT_TRUE(result.errors.starts_with(
      "config.json:1:1: error: sizes.query is \"heads * head_dim\", "))
      << result.errors;
}

TEST(ModelTest, MissingConfigIsReportedWhereTheJobNamesIt) {
  ModelSpec spec;
  spec.config_path = "no/config.json";
  spec.place = {.file = std::make_shared<const SourceFile>(SourceFile{
                    .path = "job.json", .text = "{\"model\": \"no\"}"}),
                .offset = 10};
  EXPECT_EQ(ReadModelOf(spec).errors,
            "job.json:1:11: error: \"no/config.json\": cannot be opened: No "
            "such file or directory\n"
            "    1 | {\"model\": \"no\"}\n"
            "      |           ^\n");
}

// Lists of parameters.

ParameterSpec Parameter(std::string name, std::vector<int64_t> shape = {2}) {
  return {.name = std::move(name),
          .shape = std::move(shape),
          .dtype = DType::kBf16,
          .place = {}};
}

TEST(ListedModelTest, FoldsNumbersIntoStacks) {
  const ReadModelResult result = ReadParameters(
      {Parameter("head"), Parameter("l.1.e.0.w"), Parameter("l.1.e.1.w"),
       Parameter("l.0.e.0.w"), Parameter("l.0.e.1.w"), Parameter("l.0.n"),
       Parameter("l.1.n"), Parameter("l.01.n"), Parameter("l.7.m")});
  ASSERT_EQ(result.errors, "");
  EXPECT_EQ(Stacks(*result.model),
            "head\n"
            "l.{0}.e.{1}.w [0 1] [0 1]\n"
            "l.{0}.n [0 1]\n"
            "l.01.n\n"
            "l.7.m\n");
}

TEST(ListedModelTest, OtherShapesAreOtherStacks) {
  const ReadModelResult result =
      ReadParameters({Parameter("l.0.w"), Parameter("l.1.w", {3}),
                      Parameter("l.2.w"), Parameter("l.3.w", {3})});
  EXPECT_EQ(Stacks(*result.model), "l.{0}.w [0 2]\nl.{0}.w [1 3]\n");
}

TEST(ListedModelTest, RaggedExpertsMakeOneStackPerSet) {
  const ReadModelResult result = ReadParameters(
      {Parameter("l.0.e.0"), Parameter("l.0.e.1"), Parameter("l.1.e.0"),
       Parameter("l.2.e.0"), Parameter("l.2.e.1"), Parameter("l.3.e.9")});
  EXPECT_EQ(Stacks(*result.model),
            "l.{0}.e.{1} [0 2] [0 1]\n"
            "l.1.e.0\n"
            "l.3.e.9\n");
}

TEST(ListedModelTest, AThirdNumberStaysInTheName) {
  const ReadModelResult result =
      ReadParameters({Parameter("a.0.b.0.c.0"), Parameter("a.0.b.0.c.1"),
                      Parameter("a.1.b.0.c.0"), Parameter("a.1.b.0.c.1")});
  EXPECT_EQ(Stacks(*result.model),
            "a.{0}.b.{1}.c.0 [0 1] [0]\n"
            "a.{0}.b.{1}.c.1 [0 1] [0]\n");
}

TEST(ListedModelTest, ListsWhatWasGiven) {
  const ReadModelResult result =
      ReadParameters({Parameter("l.1.w", {2, 3}), Parameter("l.0.w", {2, 3}),
                      Parameter("scalar", {})});
  EXPECT_EQ(ModelListing(*result.model),
            "l.0.w\tBF16\t2x3\nl.1.w\tBF16\t2x3\nscalar\tBF16\t\n");
}

TEST(ListedModelTest, ANameStandsOnce) {
  EXPECT_EQ(ReadParameters({Parameter("a"), Parameter("a")}).errors,
            "error: parameter \"a\" stands twice\n");
}

// A plan's file has room for no more.
TEST(ListedModelTest, AParameterHasSixteenDimensionsAtMost) {
  EXPECT_EQ(
      ReadParameters({Parameter("a", std::vector<int64_t>(16, 1))}).errors, "");
  EXPECT_EQ(
      ReadParameters({Parameter("a", std::vector<int64_t>(17, 1))}).errors,
      "error: parameter \"a\" has 17 dimensions; wanted at most 16\n");
}

TEST(ModelTest, AStackHasAsManyMembersAsAPlansFileHasRoomFor) {
  const std::string errors = ReadConfigText(R"({"model_type": "qwen3_moe",
    "hidden_size": 2, "num_hidden_layers": 1025, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 2,
    "moe_intermediate_size": 2, "num_experts": 1024})")
                                 .errors;
  EXPECT_TRUE(errors.starts_with(
      "config.json:1:1: error: "
      "\"model.layers.{0}.mlp.experts.{1}.gate_proj.weight\" stands for "
      "1049600 parameters; wanted at most 1048576 (families/qwen3_moe.json:"))
      << errors;
}

TEST(ListedModelTest, ANameHoldsNoBrace) {
  EXPECT_EQ(ReadParameters({Parameter("a.{0}")}).errors,
            "error: parameter name \"a.{0}\" is empty or holds a brace or a "
            "control character\n");
}

// Excludes.

std::string Excluded(std::vector<std::string> globs,
                     std::vector<ParameterSpec> parameters) {
  ReadModelResult result = ReadParameters(std::move(parameters));
  OptionsSpec options;
  options.exclude.value = std::move(globs);
  Diagnostics diagnostics;
  ApplyExcludes(options, *result.model, diagnostics);
  EXPECT_EQ(diagnostics.Render(), "");
  return Stacks(*result.model);
}

TEST(ExcludeTest, SplitsLayersIntoTwo) {
  EXPECT_EQ(
      Excluded({"l.2.*", "*.3.w"},
               {Parameter("l.0.w"), Parameter("l.1.w"), Parameter("l.2.w"),
                Parameter("l.3.w"), Parameter("l.4.w"), Parameter("o")}),
      "l.{0}.w [0 1 4]\n"
      "l.{0}.w [2 3] excluded\n"
      "o\n");
}

TEST(ExcludeTest, SplitsExpertsWithinLayers) {
  EXPECT_EQ(Excluded({"l.*.e.0"}, {Parameter("l.0.e.0"), Parameter("l.0.e.1"),
                                   Parameter("l.1.e.0"), Parameter("l.1.e.1")}),
            "l.{0}.e.{1} [0 1] [0] excluded\n"
            "l.{0}.e.{1} [0 1] [1]\n");
  EXPECT_EQ(Excluded({"l.1.e.0"}, {Parameter("l.0.e.0"), Parameter("l.0.e.1"),
                                   Parameter("l.1.e.0"), Parameter("l.1.e.1")}),
            "l.{0}.e.{1} [0] [0 1]\n"
            "l.{0}.e.{1} [1] [0] excluded\n"
            "l.{0}.e.{1} [1] [1]\n");
}

TEST(ExcludeTest, AGlobMayMatchNothing) {
  EXPECT_EQ(Excluded({"mtp.*"}, {Parameter("a")}), "a\n");
}

// Checkpoints.

std::string Safetensors(const std::string& header, size_t data_bytes) {
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) {
    file[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  }
  return file + header + std::string(data_bytes, '\0');
}

// Whose tensors stand one behind the other; names and shapes are given.
struct Stored {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype = "BF16";
};
std::string SafetensorsOf(const std::vector<Stored>& tensors) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  int64_t offset = 0;
  for (const Stored& tensor : tensors) {
    int64_t bytes = tensor.dtype == "F32"       ? 4
                    : tensor.dtype == "F8_E4M3" ? 1
                                                : 2;
    std::string shape;
    for (const int64_t extent : tensor.shape) {
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
      bytes *= extent;
    }
    header += ",\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype +
              "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
              std::to_string(offset) + "," + std::to_string(offset + bytes) +
              "]}";
    offset += bytes;
  }
  return Safetensors(header + "}", static_cast<size_t>(offset));
}

ReadModelResult ReadCheckpointAt(const TemporaryDirectory& directory,
                                 const std::string& path) {
  ModelSpec spec;
  spec.safetensors_path = path;
  ReadModelResult result = ReadModelOf(spec);
  result.errors = directory.Relative(result.errors);
  return result;
}

std::string ErrorsOfFile(const std::string& content) {
  const TemporaryDirectory directory;
  return ReadCheckpointAt(directory, directory.Write("a.safetensors", content))
      .errors;
}

TEST(SafetensorsTest, WithoutConfigParametersHaveNoRoles) {
  const TemporaryDirectory directory;
  directory.Write("b.safetensors", SafetensorsOf({{"l.1.w", {2, 2}}}));
  directory.Write("a.safetensors",
                  SafetensorsOf({{"l.0.w", {2, 2}}, {"n", {3}, "F32"}}));
  const ReadModelResult result =
      ReadCheckpointAt(directory, directory.Path(""));
  ASSERT_EQ(result.errors, "");
  EXPECT_EQ(ModelListing(*result.model),
            "l.0.w\tBF16\t2x2\nl.1.w\tBF16\t2x2\nn\tF32\t3\n");
  EXPECT_EQ(result.model->params[0].role, ParamRole::kOther);
  EXPECT_EQ(result.model->architecture.family->model_type, "");
}

TEST(SafetensorsTest, AnIndexNamesTheFiles) {
  const TemporaryDirectory directory;
  directory.Write("b.safetensors", SafetensorsOf({{"w", {2}}}));
  directory.Write("old.safetensors", SafetensorsOf({{"w", {2}}}));
  const std::string index =
      directory.Write("model.safetensors.index.json",
                      R"({"weight_map": {"w": "b.safetensors"}})");
  for (const std::string& path : {directory.Path(""), index}) {
    const ReadModelResult result = ReadCheckpointAt(directory, path);
    ASSERT_EQ(result.errors, "");
    EXPECT_EQ(ModelListing(*result.model), "w\tBF16\t2\n");
  }
}

TEST(SafetensorsTest, TheIndexAgreesWithTheFiles) {
  const TemporaryDirectory directory;
  directory.Write("b.safetensors", SafetensorsOf({{"w", {2}}}));
  const std::string index = directory.Write(
      "x.json",
      R"({"weight_map": {"w": "b.safetensors", "v": "b.safetensors"}})");
  EXPECT_EQ(ReadCheckpointAt(directory, index).errors,
            "x.json:1:16: error: tensor \"v\" is not in \"b.safetensors\"\n"
            "    1 | {\"weight_map\": {\"w\": \"b.safetensors\", \"v\": "
            "\"b.safetensors\"}}\n"
            "      |                ^\n");
}

TEST(SafetensorsTest, MissingFilesAreNamed) {
  const TemporaryDirectory directory;
  EXPECT_EQ(ReadCheckpointAt(directory, directory.Path("none")).errors,
            "error: \"none\": cannot be opened: No such file or directory\n");
  EXPECT_EQ(ReadCheckpointAt(directory, directory.Path("x.safetensors")).errors,
            "error: \"x.safetensors\": no such file\n");
  directory.Write("d/readme", "");
  EXPECT_EQ(ReadCheckpointAt(directory, directory.Path("d")).errors,
            "error: \"d\": no *.safetensors there\n");
  directory.Write("e/a.safetensors", Safetensors("{}", 0));
  EXPECT_EQ(ReadCheckpointAt(directory, directory.Path("e")).errors,
            "e: error: there is no tensor in these safetensors; wanted at "
            "least one\n");
  directory.Write("d/model.safetensors.index.json",
                  R"({"weight_map": {"w": "gone.safetensors"}})");
  EXPECT_EQ(ReadCheckpointAt(directory, directory.Path("d")).errors,
            "d/gone.safetensors: error: cannot be opened: No such file or "
            "directory\n");
}

TEST(SafetensorsTest, BrokenHeadersAreRefused) {
  EXPECT_EQ(ErrorsOfFile("abc"),
            "a.safetensors: error: file has 3 bytes; wanted at least the 8 of "
            "a safetensors header length\n");
  EXPECT_EQ(ErrorsOfFile("{\"not\": \"safetensors\"}"),
            "a.safetensors: error: header length is 2322206441343951483 bytes; "
            "wanted at most 100000000, is this a safetensors file?\n");
  EXPECT_EQ(ErrorsOfFile(Safetensors("{}", 0).substr(0, 9)),
            "a.safetensors: error: file is truncated: it has 9 bytes, its "
            "header alone takes 10\n");
  EXPECT_EQ(ErrorsOfFile(Safetensors("{\"a\" 1}", 0)),
            "a.safetensors: error: header, byte 5: found '1'; wanted ':' after "
            "the key\n");
  EXPECT_EQ(ErrorsOfFile(Safetensors("{\"a\": 1}", 0)),
            "a.safetensors: error: tensor \"a\" is 1; wanted an object\n");
  EXPECT_EQ(ErrorsOfFile(Safetensors("{\"a\xff\": 1}", 0)),
            "a.safetensors: error: header: not UTF-8 text: byte 0xff at offset "
            "3\n");
}

std::string EntryError(const std::string& entry, size_t data_bytes) {
  return ErrorsOfFile(Safetensors("{\"a\":{" + entry + "}}", data_bytes));
}

TEST(SafetensorsTest, BrokenEntriesAreRefused) {
  EXPECT_EQ(EntryError(R"("dtype":"F99","shape":[2],"data_offsets":[0,4])", 4),
            "a.safetensors: error: tensor \"a\" has unknown dtype \"F99\"\n");
  EXPECT_EQ(
      EntryError(R"("dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2])", 2),
      "a.safetensors: error: tensor \"a\" is F8_E8M0, of a checkpoint in MXFP4 "
      "or MXFP8, which a refit does not read; wanted one in bf16, or "
      "\"model\": the path of its config.json\n");
  EXPECT_EQ(EntryError(R"("dtype":"F16","shape":[2],"data_offsets":[0,6])", 6),
            "a.safetensors: error: tensor \"a\" has 6 bytes of data; wanted 4 "
            "by its shape and dtype\n");
  EXPECT_EQ(EntryError(R"("dtype":"F16","shape":[2],"data_offsets":[0,4])", 3),
            "a.safetensors: error: tensor \"a\" ends at byte 4 of the data; "
            "the file has 3, is it truncated?\n");
  EXPECT_EQ(EntryError(R"("dtype":"F16","shape":[2],"data_offsets":[4,0])", 4),
            "a.safetensors: error: tensor \"a\" has data_offsets that are no "
            "range; wanted begin and end\n");
  EXPECT_EQ(EntryError(R"("dtype":"F16","shape":[0],"data_offsets":[0,0])", 0),
            "a.safetensors: error: tensor \"a\".shape[0] is 0; wanted an "
            "integer from 1 to 2147483647\n");
  EXPECT_EQ(EntryError(R"("dtype":"F16","data_offsets":[0,0])", 0),
            "a.safetensors: error: missing key \"shape\" in tensor \"a\"; "
            "wanted an array of integers\n");
  EXPECT_EQ(
      EntryError(R"("dtype":"F64","data_offsets":[0,8],)"
                 R"("shape":[2147483647,2147483647,2147483647,2147483647])",
                 8),
      "a.safetensors: error: tensor \"a\" has a shape of more than "
      "1152921504606846976 bytes\n");
}

TEST(SafetensorsTest, OverlappingTensorsAreRefused) {
  EXPECT_EQ(ErrorsOfFile(Safetensors(
                R"({"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},
                    "b":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}})",
                6)),
            "a.safetensors: error: tensors \"a\" and \"b\" overlap at byte 2 "
            "of the data\n");
}

// A tied qwen2 of one layer, as its checkpoint would be stored.
constexpr char kSmallConfig[] = R"({"model_type": "qwen2", "hidden_size": 4,
    "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10, "tie_word_embeddings": true})";
std::vector<Stored> SmallCheckpoint() {
  const std::string layer = "model.layers.0.";
  return {{"model.embed_tokens.weight", {10, 4}},
          {layer + "input_layernorm.weight", {4}, "F32"},
          {layer + "self_attn.q_proj.weight", {4, 4}},
          {layer + "self_attn.k_proj.weight", {2, 4}},
          {layer + "self_attn.v_proj.weight", {2, 4}},
          {layer + "self_attn.q_proj.bias", {4}},
          {layer + "self_attn.k_proj.bias", {2}},
          {layer + "self_attn.v_proj.bias", {2}},
          {layer + "self_attn.o_proj.weight", {4, 4}},
          {layer + "post_attention_layernorm.weight", {4}},
          {layer + "mlp.gate_proj.weight", {6, 4}},
          {layer + "mlp.up_proj.weight", {6, 4}},
          {layer + "mlp.down_proj.weight", {4, 6}},
          {"model.norm.weight", {4}}};
}

ReadModelResult ReadWithConfig(const std::vector<Stored>& tensors,
                               const std::string& config = kSmallConfig) {
  const TemporaryDirectory directory;
  directory.Write("m/config.json", config);
  directory.Write("m/model.safetensors", SafetensorsOf(tensors));
  return ReadCheckpointAt(directory, directory.Path("m"));
}

TEST(SafetensorsTest, ConfigGivesRolesAndHeadersGiveDTypes) {
  const ReadModelResult result = ReadWithConfig(SmallCheckpoint());
  ASSERT_EQ(result.errors, "");
  EXPECT_EQ(result.model->architecture.family->model_type, "qwen2");
  EXPECT_EQ(result.model->params[1].role, ParamRole::kAttentionNorm);
  EXPECT_EQ(result.model->params[1].dtype, DType::kFp32);
}

TEST(SafetensorsTest, AStoredCopyOfATiedHeadIsSkipped) {
  std::vector<Stored> tensors = SmallCheckpoint();
  tensors.push_back({"lm_head.weight", {10, 4}});
  const ReadModelResult result = ReadWithConfig(tensors);
  ASSERT_EQ(result.errors, "");
  EXPECT_EQ(result.model->skips.size(), 1u);
  EXPECT_EQ(ModelListing(*result.model).find("lm_head"), std::string::npos);
}

TEST(SafetensorsTest, DisagreementWithTheConfigIsReported) {
  std::vector<Stored> tensors = SmallCheckpoint();
  tensors[0].shape = {11, 4};
  tensors[13].name = "model.normal.weight";
  EXPECT_EQ(ReadWithConfig(tensors).errors,
            "m/model.safetensors: error: tensor \"model.embed_tokens.weight\" "
            "is 11x4; wanted 10x4 by config.json\n"
            "m: error: parameter \"model.norm.weight\" of config.json is "
            "missing\n"
            "m/model.safetensors: error: tensor \"model.normal.weight\" is not "
            "a parameter of a qwen2 model with this config.json\n");
}

// As Llama's, Qwen2's and Mixtral's older checkpoints store it.
TEST(SafetensorsTest, FrequenciesStoredInEachLayerAreLeftAlone) {
  std::vector<Stored> tensors = SmallCheckpoint();
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {1}});
  EXPECT_EQ(ReadWithConfig(tensors).errors, "");
}

// As DeepSeek's and Moonshot's checkpoints store them: weights in FP8 with
// scales, buffers that no code reads, the layers that predict.
TEST(SafetensorsTest, WhatIsStoredBesideTheParamsIsLeftAlone) {
  const ReadModelResult config = ReadConfigText(kLatentOfOneStep);
  ASSERT_EQ(config.errors, "");
  std::vector<Stored> tensors;
  for (const Param& param : config.model->params) {
    for (const std::string& name : MemberNames(param)) {
      tensors.push_back({name, {param.shape.begin(), param.shape.end()}});
      if (!name.ends_with("kv_b_proj.weight")) continue;
      tensors.back().dtype = "F8_E4M3";
      tensors.push_back({name + "_scale_inv", {1, 1}, "F32"});
    }
  }
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {1}});
  tensors.push_back({"model.layers.3.enorm.weight", {64}});
  tensors.push_back({"model.layers.4.embed_tokens.weight", {100, 64}});
  const ReadModelResult result = ReadWithConfig(tensors, kLatentOfOneStep);
  ASSERT_EQ(result.errors, "");
  for (const Param& param : result.model->params) {
    EXPECT_EQ(param.dtype, DType::kBf16) << param.name;
  }
}

// As Kimi-K2.5's checkpoint stores its experts.
TEST(SafetensorsTest, APackedCheckpointIsRefusedInOneLine) {
  std::vector<Stored> tensors = SmallCheckpoint();
  const std::string name = "model.layers.0.mlp.up_proj.weight_packed";
  tensors[11].name = name;
  EXPECT_EQ(ReadWithConfig(tensors).errors,
            "m/model.safetensors: error: tensor \"" + name +
                "\" holds packed values of a few bits, which no job moves; "
                "wanted a checkpoint of unquantized weights, or its "
                "config.json alone as the model\n");
}

TEST(SafetensorsTest, OfAnUnknownFamilyParametersHaveNoRoles) {
  const ReadModelResult result =
      ReadWithConfig({{"w", {2}}}, R"({"model_type": "gpt5"})");
  ASSERT_EQ(result.errors, "");
  EXPECT_EQ(ModelListing(*result.model), "w\tBF16\t2\n");
}

}  // namespace
}  // namespace refit
