// Families that a file of rules describes: plans of a user's copy equal to
// those of the family that is compiled in, and what is said of each mistake in
// a file.
#include "compiler/model/rules/rules.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "compiler/compile.h"
#include "compiler/model/model.h"
#include "compiler/model/rules/expression.h"
#include "compiler/model/stacks.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"
#include "tests/compiler/layout_testing.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

const std::string kRules =
    std::string(REFIT_SOURCE_DIR) + "/compiler/model/families/";

constexpr char kDenseKeys[] = R"("num_hidden_layers": 4, "hidden_size": 16,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
    "intermediate_size": 16, "vocab_size": 128)";

// The digest of the plan's body; what was reported where there is no plan.
std::string BodyOf(const std::string& model, const std::string& sides) {
  std::vector<uint8_t> bytes;
  const std::string errors =
      ErrorsOf(absl::StrFormat(R"({"model": %s, %s})", model, sides), &bytes);
  if (!errors.empty()) return errors;
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
  if (!plan.ok()) return std::string(plan.status().message());
  const fb::Digest& digest = *plan->plan().body_digest();
  return absl::StrFormat("%016x%016x", digest.high(), digest.low());
}

struct FamilyConfig {
  std::string name;
  std::string config;
};

constexpr char kLatent[] = R"("n_routed_experts": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 8, "first_k_dense_replace": 1,
    "topk_method": "noaux_tc", "q_lora_rank": 12, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6)";
constexpr char kLatentWithoutQueryRank[] = R"("n_routed_experts": 8,
    "n_shared_experts": 0, "first_k_dense_replace": 0, "q_lora_rank": null,
    "moe_intermediate_size": 8, "topk_method": "noaux_tc", "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6)";
constexpr char kMixers[] = R"("hybrid_override_pattern": "ME*-",
    "mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 4,
    "mamba_n_groups": 4, "ssm_state_size": 4, "conv_kernel": 4,
    "n_routed_experts": 8, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16)";
constexpr char kMixersAndLatentExperts[] = R"(
    "hybrid_override_pattern": "MEM*", "mamba_num_heads": 8,
    "mamba_head_dim": 4, "n_groups": 4, "mamba_n_groups": 4,
    "ssm_state_size": 4, "conv_kernel": 4, "use_bias": true,
    "use_conv_bias": false, "n_routed_experts": 8, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16, "moe_latent_size": 12)";

// The same plan by the family, and by its file as the user's.
void ExpectSamePlan(const FamilyConfig& family, const std::string& sides) {
  const TemporaryDirectory directory;
  const std::string config = directory.Write(
      "config.json", absl::StrFormat(R"({"model_type": "%s", %s, %s})",
                                     family.name, kDenseKeys, family.config));
  const std::string by_family =
      BodyOf(absl::StrFormat("\"%s\"", config), sides);
  const std::string by_rules =
      BodyOf(absl::StrFormat(R"({"config": "%s", "rules": "%s"})", config,
                             kRules + family.name + ".json"),
             sides);
  ASSERT_EQ(by_family.size(), 32u) << by_family;
  EXPECT_EQ(by_rules, by_family)
      << family.name << " " << family.config << sides;
}

class RulesParityTest : public testing::TestWithParam<std::string> {};

TEST_P(RulesParityTest, PlansAreThoseOfTheFamily) {
  for (const FamilyConfig& family :
       {FamilyConfig{"nemotron_h", kMixers},
        FamilyConfig{"nemotron_h", kMixersAndLatentExperts}}) {
    ExpectSamePlan(family, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, RulesParityTest,
    testing::Values(
        R"("source": {"layout": "fsdp"}, "destination": {"layout": "vllm"},
           "options": {"exclude": ["*.o_proj.bias"]})",
        R"("source": {"layout": "fsdp", "data_parallel": 3},
           "destination": {"layout": "vllm", "tensor_parallel": 4},
           "options": {"exclude": ["*.o_proj.bias"]})",
        R"("source": {"layout": "megatron", "tensor_parallel": 2,
                      "pipeline_parallel": 2},
           "destination": {"layout": "vllm", "tensor_parallel": 2,
                           "pipeline_parallel": 2, "replicas": 2},
           "options": {"exclude": ["*.o_proj.bias"]})",
        R"("source": {"layout": "megatron", "pipeline_parallel": 2,
                      "virtual_pipeline_parallel": 2},
           "destination": {"layout": "fsdp", "data_parallel": 2})",
        R"("source": {"layout": "fsdp", "data_parallel": 2},
           "destination": {"layout": "vllm", "tensor_parallel": 2,
                           "dtype": "fp32"},
           "options": {"exclude": ["*.o_proj.bias"]})"));

TEST(RulesTest, PlansForSglangAreThoseOfTheFamily) {
  for (const FamilyConfig& family :
       {FamilyConfig{"nemotron_h", kMixers},
        FamilyConfig{"nemotron_h", kMixersAndLatentExperts}}) {
    for (const char* mesh : {R"("tensor_parallel": 2, "pipeline_parallel": 2)",
                             R"("tensor_parallel": 4, "dp_attention": 2)"}) {
      ExpectSamePlan(family, absl::StrFormat(
                                 R"("source": {"layout": "megatron",
                                               "tensor_parallel": 2},
                                    "destination": {"layout": "sglang", %s})",
                                 mesh));
    }
  }
}

TEST(RulesTest, ExpertsThatAreSpreadArePlannedAsByTheFamily) {
  for (const FamilyConfig& family :
       {FamilyConfig{"nemotron_h", kMixers},
        FamilyConfig{"nemotron_h", kMixersAndLatentExperts}}) {
    for (const char* destination :
         {R"("vllm", "tensor_parallel": 2, "expert_parallel": true,
             "data_parallel": 2)",
          R"("sglang", "tensor_parallel": 4, "expert_parallel": 2)",
          R"("sglang", "tensor_parallel": 2)"}) {
      for (const char* source :
           {R"("megatron", "tensor_parallel": 2, "data_parallel": 2,
               "expert_parallel": 4)",
            R"("fsdp", "data_parallel": 4, "version": "5",
               "fused_experts": true)"}) {
        ExpectSamePlan(family, absl::StrFormat(R"("source": {"layout": %s},
                                          "destination": {"layout": %s})",
                                               source, destination));
      }
    }
  }
}

TEST(RulesTest, ExpressionsAreOverTheConfigsKeys) {
  Diagnostics diagnostics;
  const auto file = std::make_shared<SourceFile>();
  file->text = R"({"hidden": 12, "flag": true, "off": false, "gone": null,
                   "word": "x", "kinds": ["dense", "dense", "sparse"],
                   "sizes": [14, 7]})";
  const std::optional<JsonDocument> document =
      ParseJson(file, file->text, diagnostics);
  ASSERT_TRUE(document.has_value());
  const ExpressionScope scope = {.config = *document->root.AsObject(),
                                 .sizes = {{"heads", 4}}};
  for (const auto& [text, value] :
       {std::pair("hidden / heads", "3"),
        std::pair("2 + 3 * hidden - 1", "37"),
        std::pair("(2 + 3) * heads", "20"),
        std::pair("flag", "1"),
        std::pair("not flag", "0"),
        std::pair("gone or 7", "7"),
        std::pair("absent or gone or heads", "4"),
        std::pair("hidden / absent or 5", "5"),
        std::pair("not off", "1"),
        std::pair("absent or true", "1"),
        std::pair("12", "12"),
        std::pair("hiden",
                  "config.json has no key \"hiden\"; did you mean "
                  "\"hidden\"?"),
        std::pair("gone",
                  "config.json has no key \"gone\"; wanted one of its keys, or "
                  "a size of the rules"),
        std::pair("word",
                  "config.json has \"word\" as \"x\", which is no "
                  "integer"),
        std::pair("kinds.dense", "2"),
        std::pair("kinds.none", "0"),
        std::pair("kinds.count", "3"),
        std::pair("sizes.0 - sizes.1", "7"),
        std::pair("absent.count or 3", "3"),
        std::pair("absent.0 or 3", "3"),
        std::pair("sizes.2",
                  "config.json has \"sizes\" as an array, which is no list "
                  "with an integer at 2"),
        std::pair("kinds.0",
                  "config.json has \"kinds\" as an array, which is no list "
                  "with an integer at 0"),
        std::pair("hidden.count",
                  "config.json has \"hidden\" as 12, which is no list"),
        std::pair("word.x + word.y", "1"),
        std::pair("hidden * flag.x", "0"),
        std::pair("absent.dense or 3", "3"),
        std::pair("kinds.", "a word is missing behind \"kinds.\""),
        std::pair("hidden // 5", "2"),
        std::pair("(0 - hidden) // 5", "-3"),
        std::pair("hidden // heads", "3"),
        std::pair("hidden / 5", "12 / 5 is no whole number"),
        std::pair("hidden / (heads - 4)", "12 / 0 is no number"),
        std::pair("(hidden", "it ends; wanted \")\""),
        std::pair("hidden )", "\")\" stands after its end"),
        std::pair("hidden *", "a number or a name is missing at its end"),
        std::pair("* hidden",
                  "\"*\" stands where a number or a name is "
                  "wanted"),
        std::pair("absent or 3 +", "a number or a name is missing at its end"),
        std::pair("3x", "\"3x\" is no number"),
        std::pair("9223372036854775807 + 1",
                  "9223372036854775807 + 1 is too large"),
        std::pair("", "a number or a name is missing at its end")}) {
    const absl::StatusOr<int64_t> found = Evaluate(text, scope);
    EXPECT_EQ(found.ok() ? std::to_string(*found)
                         : std::string(found.status().message()),
              value)
        << text;
  }
  EXPECT_EQ(Evaluate(std::string(10'000, '('), scope).status().message(),
            "it is nested too deep");
}

// What is said of rules, one line for each report, without the line shown.
std::string Mistakes(const std::string& rules,
                     const std::string& config = R"({"model_type": "mine",
    "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 16, "num_experts": 2, "kinds": ["a", "b"]})") {
  const TemporaryDirectory directory;
  directory.Write("config.json", config);
  directory.Write("rules.json", rules);
  Diagnostics diagnostics;
  Job job;
  job.model.config_path = directory.Path("config.json");
  job.model.rules_path = {
      .value = directory.Path("rules.json"), .place = {}, .given = true};
  const std::optional<Model> model = ReadModel(job, diagnostics);
  EXPECT_EQ(model.has_value(), diagnostics.ok());
  std::istringstream lines(directory.Relative(diagnostics.Render()));
  std::string text;
  for (std::string line; std::getline(lines, line);) {
    if (line.find(": error: ") != std::string::npos) text += line + "\n";
  }
  return text;
}

// Rules of one param, and what else they have.
std::string Param(std::string_view param, std::string_view more = "") {
  return absl::StrFormat(R"({"model_type": "mine"%s, "params": [%s]})", more,
                         param);
}

constexpr char kEmbedding[] = R"({"name": "embed.weight",
    "shape": ["vocab", "hidden"], "role": "embedding"})";

TEST(RulesTest, RightRulesHaveNoMistake) {
  EXPECT_EQ(Mistakes(Param(kEmbedding)), "");
}

TEST(RulesTest, EachMistakeHasAPlaceWhatWasFoundAndWhatIsWanted) {
  struct Case {
    std::string rules;
    std::string wanted;
  };
  for (const auto& [rules, wanted] : {
           Case{Param(R"({"name": "a", "shap": [1], "role": "embedding"})"),
                "rules.json:1:35: error: missing key \"shape\" in params[0]; "
                "wanted an array\n"
                "rules.json:1:49: error: unknown key \"shap\" in params[0]; "
                "did you mean \"shape\"?\n"},
           Case{Param(R"({"name": "a", "shape": [1], "role": "embeding"})"),
                "rules.json:1:71: error: params[0].role is \"embeding\"; did "
                "you mean \"embedding\"?\n"},
           Case{Param(R"({"name": "a", "shape": ["vocab_sise"],
                          "role": "first_stage"})"),
                "rules.json:1:59: error: params[0].shape[0] is \"vocab_sise\": "
                "config.json has no key \"vocab_sise\"; did you mean "
                "\"vocab_size\"?\n"},
           Case{Param(R"({"name": "a", "shape": ["vocab", "hidden - 8"],
                          "role": "embedding"})"),
                "rules.json:1:68: error: params[0].shape[1] is \"hidden - 8\", "
                "0 for this config.json; wanted 1 to 2147483647\n"},
           Case{Param(R"({"name": "a", "shape": [8, "hidden"],
                          "role": "embedding"})"),
                "rules.json:1:58: error: params[0].shape: parameter \"a\" has "
                "8 rows; wanted 16\n"},
           Case{Param(R"({"name": "a.{layer}", "shape": ["vocab", "hidden"],
                          "role": "embedding"})"),
                "rules.json:1:44: error: params[0].name is \"a.{layer}\"; the "
                "role embedding wants a name with neither {layer} nor "
                "{expert}\n"},
           Case{Param(R"({"name": "a.{rank}", "shape": ["hidden"],
                          "role": "attention_norm"})"),
                "rules.json:1:44: error: params[0].name is \"a.{rank}\"; "
                "wanted no braces but one {layer} or {mtp} and one {expert}\n"},
           Case{Param(R"({"name": "{layer}.{expert}.up", "shape": [2, "hidden"],
                          "role": "expert_up"})"),
                "rules.json:1:44: error: params[0].name has {expert}, and the "
                "model has no experts; wanted \"experts\" in sizes\n"},
           Case{Param(R"({"name": "{layer}.n", "shape": ["hidden"],
                          "role": "attention_norm", "layers": "sparce"})",
                      R"(, "layers": {"sparse": {"from": 1}})"),
                "rules.json:2:63: error: params[0].layers is \"sparce\", which "
                "is no set of \"layers\"; did you mean \"sparse\"?\n"},
           Case{Param(kEmbedding, R"(, "layers": {"b": {"besides": "a"}})"),
                "rules.json:1:52: error: layers.b.besides is \"a\", which is "
                "no set of layers before it\n"},
           Case{Param(kEmbedding, R"(, "layers": {"b": {"besides": ["a"]}})"),
                "rules.json:1:52: error: layers.b.besides is \"a\", which is "
                "no set of layers before it\n"},
           Case{Param(kEmbedding, R"(, "layers": {"b": {"except": "mlp"}})"),
                "rules.json:1:51: error: layers.b.except is \"mlp\": "
                "config.json has no such key; wanted one, or \"mlp or []\"\n"},
           Case{Param(kEmbedding,
                      R"(, "layers": {"b": {"where": {"kind": "a"}}})"),
                "rules.json:1:50: error: layers.b.where: config.json has no "
                "key \"kind\"; did you mean \"kinds\"?\n"},
           Case{Param(kEmbedding, R"(, "layers": {"b": {"form": 1}})"),
                "rules.json:1:41: error: unknown key \"form\" in layers.b; did "
                "you mean \"from\"?\n"},
           Case{Param(kEmbedding, R"(, "sizes": {"heads": "num_heads"})"),
                "rules.json:1:43: error: sizes.heads is \"num_heads\": "
                "config.json has no key \"num_heads\"; wanted one of its "
                "keys, or a size of the rules\n"},
           Case{Param(kEmbedding, R"(, "sizes": {"layers": 3.5})"),
                "rules.json:1:44: error: sizes.layers is 3.5; wanted an "
                "integer or an expression in quotes\n"},
           Case{Param(kEmbedding, R"(, "sizes": {"kv_heads": 3})"),
                "rules.json:1:46: error: sizes.kv_heads 3 does not divide "
                "sizes.heads 4\n"},
           Case{R"({"model_type": "yours", "params": []})",
                "rules.json:1:16: error: model_type \"yours\", but config.json "
                "is of model_type \"mine\"; wanted the same\n"},
           Case{R"({"model_type": "mine", "params": []})",
                "rules.json:1:34: error: params give this config.json no "
                "parameter; wanted at least one\n"},
           Case{R"({"model_type": "mine", "parms": []})",
                "rules.json:1:1: error: missing key \"params\"; wanted an "
                "array of parameters\n"
                "rules.json:1:24: error: unknown key \"parms\"; did you mean "
                "\"params\"?\n"},
           Case{Param(std::string(kEmbedding) + ", " + kEmbedding),
                "rules.json:2:57: error: parameter \"embed.weight\" stands "
                "twice\n"},
           Case{Param(R"({"name": "a.{layer}.b", "shape": [1],
                          "role": "replicated"}, {"name": "a.1.b",
                          "shape": [1], "role": "last_stage"})"),
                "rules.json:2:50: error: parameter \"a.1.b\" stands twice\n"},
           Case{Param(R"({"name": "a{layer}{expert}", "shape": [1, "hidden"],
                          "role": "expert_up"})",
                      R"(, "sizes": {"layers": 12, "experts": 11})"),
                "rules.json:1:75: error: parameter \"a110\" stands twice\n"},
           Case{Param(kEmbedding, R"(, "vllm": {"every_stage": "end"})"),
                "rules.json:1:48: error: vllm.every_stage is \"end\"; wanted "
                "nothing, embedding, vocabulary or ends\n"},
           Case{Param(kEmbedding, R"(, "vllm": {"name": {}})"),
                "rules.json:1:33: error: unknown key \"name\" in vllm; did you "
                "mean \"names\"?\n"},
           Case{Param(kEmbedding, R"(, "vllm": {"names": {"lm.": ""}})"),
                "rules.json:1:43: error: vllm.names renames \"lm.\", which is "
                "in no name of params; wanted a part of one\n"},
           Case{Param(kEmbedding, R"(, "sglang": {"head": "own"})"),
                "rules.json:1:43: error: sglang.head is \"own\"; wanted "
                "last_stage, every_stage or own_tensor\n"},
           Case{Param(kEmbedding, R"(, "sizes": {"mamba_heads": 4,
                          "mamba_state": 8})"),
                "rules.json:1:49: error: sizes.mamba_heads is 4 and "
                "sizes.mamba_head_dim is 0; wanted both above 0, or neither\n"},
           Case{Param(kEmbedding, R"(, "sizes": {"mamba_heads": "num_heads"})"),
                "rules.json:1:49: error: sizes.mamba_heads is \"num_heads\": "
                "config.json has no key \"num_heads\"; did you mean "
                "\"kv_heads\"?\n"},
           Case{Param(kEmbedding, R"(, "sizes": {"mamba_heads": 4,
                          "mamba_head_dim": 8, "mamba_groups": 3,
                          "mamba_state": 8})"),
                "rules.json:2:64: error: sizes.mamba_groups 3 does not divide "
                "sizes.mamba_heads 4\n"},
           Case{Param(kEmbedding, R"(, "layers": {"b": {"where":
                                        {"model_type": "m"}}})"),
                "rules.json:2:41: error: layers.b.where: config.json's "
                "\"model_type\" has 4 words; wanted 2, one per layer\n"},
           Case{Param(kEmbedding, R"(, "layers": {"b": {"where":
                                        {"model_type": "mine"}}})"),
                "rules.json:2:41: error: layers.b.where: config.json's "
                "\"model_type\" is a string, and \"mine\" is no letter; "
                "wanted one\n"},
           Case{Param(kEmbedding, R"(, "transformers": {"name": {}})"),
                "rules.json:1:41: error: unknown key \"name\" in transformers; "
                "did you mean \"names\"?\n"},
           Case{Param(kEmbedding,
                      R"(, "sglang": {"shared_fusion_experts": -1})"),
                "rules.json:1:60: error: sglang.shared_fusion_experts is -1; "
                "wanted 0 to 100000\n"},
           Case{Param(kEmbedding, R"(, "megatron": {"tp": 1})"),
                "rules.json:1:36: error: megatron has keys; wanted {}\n"},
       }) {
    EXPECT_EQ(Mistakes(rules), wanted) << rules;
  }
}

// What roles of latent attention and of mixers need, and what they refuse.
// A size whose mistake was reported is no mistake where others name it.
// The names of a model of such rules, or the mistakes.
// `member`: what is listed of each param.
template <typename Member>
std::string ListOf(const std::string& rules, const std::string& more, bool mtp,
                   const Member& member) {
  const TemporaryDirectory directory;
  Job job;
  job.model.config_path =
      directory.Write("config.json", R"({"model_type": "mine", "hidden_size": 8,
      "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 16,
      "intermediate_size": 4)" + more + "}");
  job.model.rules_path = {.value = directory.Write("rules.json", rules),
                          .place = {},
                          .given = true};
  job.source.mtp.value = mtp;
  Diagnostics diagnostics;
  const std::optional<Model> model = ReadModel(job, diagnostics);
  if (!model.has_value()) return directory.Relative(diagnostics.Render());
  std::string names;
  for (const struct Param& param : model->params) names += member(param) + " ";
  return names;
}

std::string Names(const std::string& rules, const std::string& more = "") {
  const bool mtp = more.find("mtp") != std::string::npos;
  return ListOf(rules, more, mtp, [](const struct Param& param) {
    return param.name.substr(param.name.rfind("0}") + 1);
  });
}

// With all numbers.
std::string FullNames(const std::string& rules, const std::string& more,
                      bool mtp = false) {
  return ListOf(rules, more, mtp, [](const struct Param& param) {
    return absl::StrJoin(MemberNames(param), " ");
  });
}

TEST(RulesTest, AFamilyMayBeLikeAnother) {
  EXPECT_EQ(Names(R"({"model_type": "mine", "like": "llama", "params": [
          {"name": "model.layers.{layer}.self_attn.v_proj.bias", "if": true},
          {"name": "model.layers.{layer}.extra.weight", "role": "replicated",
           "shape": [3]},
          {"name": "model.layers.{layer}.other.weight", "role": "replicated",
           "shape": [3]},
          {"name": "model.layers.{layer}.mlp.gate_proj.weight", "if": false}],
          "vllm": {}})"),
            "model.embed_tokens.weight }.input_layernorm.weight "
            "}.self_attn.q_proj.weight }.self_attn.k_proj.weight "
            "}.self_attn.v_proj.weight }.self_attn.v_proj.bias }.extra.weight "
            "}.other.weight }.self_attn.o_proj.weight "
            "}.post_attention_layernorm.weight }.mlp.up_proj.weight "
            "}.mlp.down_proj.weight model.norm.weight lm_head.weight ");
  EXPECT_EQ(Mistakes(R"({"model_type": "mine", "like": "lama"})"),
            "rules.json:1:32: error: like is \"lama\", which is no family of "
            "rules; did you mean \"llama\"?\n");
  EXPECT_NE(Names(R"({"model_type": "mine", "like": "llama", "params": [{},
                      {"name": "model.norm.weight"}]})")
                .find("error: missing key \"name\" in params[0]"),
            std::string::npos);
  // null takes a key away: with the other family's it would be refused.
  const std::string biased = R"(, "mlp_bias": true)";
  EXPECT_NE(Names(R"({"model_type": "mine", "like": "llama"})", biased)
                .find("mlp_bias true is not supported; wanted false"),
            std::string::npos);
  EXPECT_EQ(Names(R"({"model_type": "mine", "like": "llama",
                      "only": {"mlp_bias": null}})",
                  biased),
            Names(R"({"model_type": "mine", "like": "llama"})"));
  // A mistake stands at the entry that makes it.
  const std::string config = R"({"model_type": "mine", "hidden_size": 8,
      "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 16,
      "intermediate_size": 8})";
  EXPECT_EQ(Mistakes(R"({"model_type": "mine", "like": "llama", "params": [
      {"name": "model.nrm.weight", "if": false}]})",
                     config),
            "rules.json:2:16: error: params[0].name is \"model.nrm.weight\", "
            "which no parameter of \"llama\" has that is left to change; did "
            "you mean \"model.norm.weight\"?\n");
  EXPECT_EQ(Mistakes(R"({"model_type": "mine", "like": "llama", "params": [
      {"name": "model.norm.weight", "if": false},
      {"name": "model.norm.weight", "if": true}]})",
                     config),
            "rules.json:3:16: error: params[1].name is \"model.norm.weight\", "
            "which no parameter of \"llama\" has that is left to change; "
            "wanted \"role\" and \"shape\" of a new one\n");
  EXPECT_EQ(Mistakes(R"({"model_type": "mine", "like": "llama", "params": [
      {"name": "model.norm.weight", "shape": null}]})",
                     config),
            "rules.json:2:37: error: missing key \"shape\" in params[14]; "
            "wanted an array\n");
  EXPECT_EQ(Mistakes(R"({"model_type": "mine", "like": "llama",
      "names": {"model.norm": "model.{norm}"}})",
                     config),
            "rules.json:2:31: error: params[14].name is "
            "\"model.{norm}.weight\"; wanted no braces but one {layer} or "
            "{mtp} and one {expert}\n");
  // What the other file says stands where it is named.
  EXPECT_EQ(Mistakes(R"({"model_type": "mine", "like": "llama",
                         "sizes": {"query": 3}})")
                .substr(0, 54),
            "rules.json:1:32: error: params[2].shape: parameter \"mo");
}

// Two of qwen3_moe have one name, in other layers.
TEST(RulesTest, AFamilyThatIsLikeAnotherChangesAllOfAName) {
  const std::string rules = R"({"model_type": "mine", "like": "qwen3_moe",
      "params": [{"name":
          "model.layers.{layer}.post_attention_layernorm.weight", %s}]})";
  const std::string sizes = R"(, "num_experts": 2, "num_experts_per_tok": 1,
      "moe_intermediate_size": 4, "num_key_value_heads": 2,
      "decoder_sparse_step": 2)";
  const std::string norm = "}.post_attention_layernorm.weight ";
  const auto norms = [&](const std::string& change) {
    const std::string names =
        Names(absl::StrReplaceAll(rules, {{"%s", change}}), sizes);
    EXPECT_EQ(names.find("error"), std::string::npos) << names;
    size_t count = 0;
    for (size_t at = names.find(norm); at != std::string::npos;
         at = names.find(norm, at + 1)) {
      ++count;
    }
    return count;
  };
  EXPECT_EQ(norms(R"("if": true)"), 2);
  EXPECT_EQ(norms(R"("if": false)"), 0);
  EXPECT_EQ(norms(R"("layers": "sparse", "if": false)"), 1);
}

TEST(RulesTest, AnEntryOfOtherLayersChangesNoneThatIsThere) {
  const std::string names = Names(R"({"model_type": "mine", "like": "qwen3_moe",
          "layers": {"odd": {"every": 2}}, "params": [
          {"name": "model.layers.{layer}.post_attention_layernorm.weight",
           "layers": "sparse", "if": false},
          {"name": "model.layers.{layer}.post_attention_layernorm.weight",
           "role": "replicated", "shape": ["hidden"], "layers": "odd"}]})",
                                  R"(, "num_experts": 2,
      "num_experts_per_tok": 1, "moe_intermediate_size": 4,
      "num_key_value_heads": 2, "decoder_sparse_step": 2)");
  const std::string norm = "}.post_attention_layernorm.weight ";
  const size_t first = names.find(norm);
  ASSERT_NE(first, std::string::npos) << names;
  EXPECT_NE(names.find(norm, first + 1), std::string::npos) << names;
}

TEST(RulesTest, ASecondEntryOfANameIsANewParameter) {
  const std::string names = Names(R"({"model_type": "mine", "like": "llama",
          "layers": {"first": {"to": 1}, "others": {"besides": "first"}},
          "params": [
          {"name": "model.layers.{layer}.input_layernorm.weight",
           "layers": "first"},
          {"name": "model.layers.{layer}.input_layernorm.weight",
           "role": "replicated", "shape": ["hidden"], "layers": "others"}]})");
  EXPECT_NE(names.find("}.input_layernorm.weight }.input_layernorm.weight "
                       "}.self_attn.q_proj.weight "),
            std::string::npos)
      << names;
}

TEST(RulesTest, AFamilyCallsAnothersParametersAnew) {
  const std::string names = Names(R"({"model_type": "mine", "like": "llama",
          "names": {"model.": "body.", ".mlp.": ".ff."},
          "params": [{"name": "body.layers.{layer}.ff.up_proj.weight",
                      "if": false}]})");
  EXPECT_TRUE(names.starts_with("body.embed_tokens.weight ")) << names;
  EXPECT_NE(names.find("}.ff.gate_proj.weight }.ff.down_proj.weight "),
            std::string::npos)
      << names;
  EXPECT_NE(Names(R"({"model_type": "mine", "names": {"a": "b"},
                      "params": []})")
                .find("rules.json:1:24: error: unknown key \"names\"; wanted "),
            std::string::npos);
}

// Of a model of one layer beside a tower of two, or the mistakes.
std::string TowerNames(const std::string& tower, const std::string& vision) {
  const TemporaryDirectory directory;
  Job job;
  job.model.config_path = directory.Write(
      "config.json", absl::StrFormat(R"({"model_type": "mine", "text_config": {
      "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 1,
      "vocab_size": 16, "intermediate_size": 4}, "vision_config": {%s}})",
                                     vision));
  job.model.rules_path = {
      .value = directory.Write(
          "rules.json",
          absl::StrFormat(R"({"model_type": "mine", "like": "llama",
"defaults": {"tie_word_embeddings": false},
"tower": {"sizes": {"layers": "depth", "mixed": "hidden * text_hidden"}, %s},
"vllm": {"names": {"tower.": "visual."}}})",
                          tower)),
      .place = {},
      .given = true};
  job.source.vision = {.value = true, .place = {}, .given = true};
  Diagnostics diagnostics;
  const std::optional<Model> model = ReadModel(job, diagnostics);
  std::string text = directory.Relative(diagnostics.Render());
  text = text.substr(0, text.find('\n'));
  if (!model.has_value()) return text;
  for (const auto& param : model->params) {
    if (!IsTower(param.role)) break;
    absl::StrAppend(
        &text, param.name, " ", absl::StrJoin(param.shape, "x"), " of ",
        param.index.empty() ? 0 : param.index[0].numbers.size(), "; ");
  }
  return text;
}

TEST(RulesTest, ATowerHasRulesOfItsOwn) {
  const std::string vision = R"("depth": 2, "hidden_size": 6,
      "num_attention_heads": 3, "at": [1, 2, 4])";
  EXPECT_EQ(TowerNames(R"("layers": {"joints": {"to": "at.count"}},
      "params": [
      {"name": "tower.b.{layer}.norm", "role": "tower_whole",
       "shape": ["hidden"]},
      {"name": "tower.j.{layer}.fc", "role": "tower_row",
       "shape": ["mixed", "hidden"], "layers": "joints"},
      {"name": "tower.last", "role": "tower_connector",
       "shape": ["text_hidden"]}])",
                       vision),
            "tower.b.{0}.norm 6 of 2; tower.j.{0}.fc 48x6 of 3; "
            "tower.last 8 of 0; ");
  for (const auto& [param, mistake] :
       {std::pair(
            R"({"name": "tower.{layer}.n", "role": "replicated",
                     "shape": [1]})",
            "rules.json:3:121: error: tower.params[0].role is replicated, "
            "and a tower has roles of its own; wanted a role that begins "
            "with \"tower_\""),
        std::pair(R"({"name": "tower.{layer}.qkv", "role": "tower_heads",
                     "shape": [7, 6]})",
                  "rules.json:4:31: error: tower.params[0].shape: parameter "
                  "\"tower.{layer}.qkv\" has 7 rows; wanted as many of "
                  "queries, keys and values"),
        std::pair(R"({"name": "tower.{layer}.q_proj.weight",
                     "role": "tower_column", "shape": [6, 6]})",
                  "rules.json:3:85: error: engines join parameter "
                  "\"tower.{0}.q_proj.weight\" with "
                  "\"tower.{0}.k_proj.weight\"; wanted both of role "
                  "tower_column, with equal columns and layers"),
        std::pair(R"({"name": "tower.n", "role": "tower_whole",
                     "shape": ["text_hiden"]})",
                  "rules.json:4:32: error: tower.params[0].shape[0] is "
                  "\"text_hiden\": config.json has no key \"text_hiden\"; "
                  "did you mean \"text_hidden\"?")}) {
    EXPECT_EQ(TowerNames(absl::StrFormat(R"("params": [%s])", param), vision),
              mistake);
  }
  EXPECT_EQ(TowerNames(R"("params": [])", R"("depth": 2, "hidden_size": 6,
                       "num_attention_heads": 4)"),
            "config.json:4:47: error: num_attention_heads 4 does not divide "
            "hidden_size 6");
  EXPECT_EQ(Mistakes(Param(R"({"name": "n", "role": "tower_whole",
                              "shape": [1]})")),
            "rules.json:1:57: error: params[0].role is tower_whole, and only "
            "the params of \"tower\" have such roles; wanted another role\n");
}

TEST(RulesTest, ATowerMayBeAnotherFamilys) {
  const std::string names = TowerNames(
      R"("like": "qwen3_vl", "names": {"model.visual.": "tower."})",
      R"("depth": 2, "hidden_size": 6, "num_heads": 3, "patch_size": 1,
         "deepstack_visual_indexes": [])");
  EXPECT_TRUE(names.starts_with("tower.patch_embed.proj.weight 6x3x2x1x1 of"))
      << names;
  EXPECT_EQ(TowerNames(R"("like": "llama")", ""),
            "rules.json:3:82: error: tower.like is \"llama\", which has no "
            "tower; wanted a family with one");
}

TEST(RulesTest, DeltaNetsHaveTheirSizes) {
  EXPECT_EQ(Mistakes(Param(R"({"name": "l.{layer}.b", "role": "delta_b",
                              "shape": [1, 8]})")),
            "rules.json:1:67: error: params[0].role is delta_b, and the model "
            "has no delta nets; wanted \"delta_key_heads\" in sizes\n");
  const std::string sizes = R"(, "sizes": {"delta_key_heads": 2,
      "delta_value_heads": %d, "delta_key_dim": 3, "delta_value_dim": 5})";
  const std::string param = R"({"name": "l.{layer}.qkv", "role": "delta_qkv",
                                "shape": [31, 8]})";
  const auto found = [&](const std::string& heads, const std::string& wanted) {
    const std::string text =
        Mistakes(Param(param, absl::StrReplaceAll(sizes, {{"%d", heads}})));
    EXPECT_NE(text.find(wanted), std::string::npos) << text;
  };
  found("4", "has 31 rows; wanted 32\n");
  found("3",
        "sizes.delta_key_heads 2 does not divide sizes.delta_value_heads "
        "3\n");
}

TEST(RulesTest, AListOfLayersComesBeforeEveryWhichMayReplaceIt) {
  const auto layers = [](const std::string& more) {
    const std::string names = Names(
        R"({"model_type": "mine", "layers": {"some": {
            "where": {"kinds": "a"}, "every": 2}}, "params": [
            {"name": "first.{layer}.x", "role": "replicated", "shape": [1],
             "layers": "some"}, {"name": "e", "role": "embedding",
             "shape": ["vocab", "hidden"]}]})",
        more);
    return names;
  };
  EXPECT_EQ(layers(""), layers(R"(, "kinds": ["b", "a"])"));
  EXPECT_NE(layers(""), layers(R"(, "kinds": ["b", "b"])"));
}

// Two predictions of three layers each: the first of each has a norm more.
TEST(RulesTest, PredictionsMayHaveNumbersOfTheirOwn) {
  const std::string rules =
      R"({"model_type": "mine", "sizes": {"mtp_block": "kinds.count",
          "mtp_layers": "2 * mtp_block"}, "layers": {
          "first": {"from": "layers", "every": "mtp_block", "at": 0},
          "last": {"from": "layers", "every": "mtp_block"},
          "a": {"from": "layers", "where": {"kinds": ["a", "c"]}},
          "rest": {"from": "layers", "besides": ["a"],
                   "alike": {"kinds": "b"}}}, "params": [
          {"name": "e", "role": "embedding", "shape": ["vocab", "hidden"]},
          {"name": "p.{mtp}.in", "role": "mtp_projection",
           "shape": ["hidden", "2 * hidden"], "layers": "first"},
          {"name": "p.{mtp}.out", "role": "mtp_final_norm",
           "shape": ["hidden"], "layers": "last"},
          {"name": "p.{mtp}.a", "role": "replicated", "shape": [1],
           "layers": "a"},
          {"name": "p.{mtp}.b", "role": "replicated", "shape": [1],
           "layers": "rest"}]})";
  EXPECT_EQ(FullNames(rules, R"(, "kinds": ["a", "b", "c"])", /*mtp=*/true),
            "e p.0.in p.3.in p.2.out p.5.out p.0.a p.2.a p.3.a p.5.a p.1.b "
            "p.4.b ");
  EXPECT_EQ(FullNames(rules, R"(, "kinds": "abc")", /*mtp=*/true),
            FullNames(rules, R"(, "kinds": ["a", "b", "c"])", /*mtp=*/true));
  EXPECT_EQ(FullNames(rules, R"(, "kinds": "abc")"), "e ");
  EXPECT_NE(FullNames(rules, R"(, "kinds": "abd")", /*mtp=*/true)
                .find("kinds has a layer \"d\"; wanted a, c or b"),
            std::string::npos);
  const auto mistake = [](const std::string& param) {
    return FullNames(absl::StrFormat(
                         R"({"model_type": "mine", "sizes": {"mtp_layers": 2},
        "layers": {"first": {"to": 1}}, "params": [%s]})",
                         param),
                     "", /*mtp=*/true);
  };
  for (const int block : {0, 3}) {
    EXPECT_NE(FullNames(absl::StrFormat(R"({"model_type": "mine",
        "sizes": {"mtp_layers": 2, "mtp_block": %d}, "params": [
        {"name": "p.{mtp}", "role": "replicated", "shape": [1]}]})",
                                        block),
                        "", /*mtp=*/true)
                  .find(absl::StrFormat(
                      "sizes.mtp_layers is 2 and sizes.mtp_block is %d; wanted "
                      "a multiple of it, above 0",
                      block)),
              std::string::npos);
  }
  EXPECT_NE(mistake(R"({"name": "p.{mtp}", "role": "replicated", "shape": [1],
                        "layers": "first"})")
                .find("params[0].layers is \"first\", which has layers before "
                      "those of multi-token prediction"),
            std::string::npos);
  EXPECT_NE(mistake(R"({"name": "p", "role": "mtp_final_norm",
                        "shape": ["hidden"]})")
                .find("params[0].name is \"p\", and the model has 2 layers of "
                      "multi-token prediction; wanted {mtp} or {layer} in it"),
            std::string::npos);
}

TEST(RulesTest, ListsOfOneThingMustNotDiffer) {
  const auto found = [](const std::string& lists) {
    return FullNames(R"({"model_type": "mine", "layers": {"some": {
        "where": {"kinds": ["a", "x"], "rates": 4}}}, "params": [
        {"name": "{layer}.x", "role": "replicated", "shape": [1],
         "layers": "some"}]})",
                     lists);
  };
  const std::string wanted = found(R"(, "kinds": ["b", "a"])");
  EXPECT_EQ(wanted, "1.x ");
  EXPECT_EQ(found(R"(, "rates": [0, 4])"), wanted);
  EXPECT_EQ(found(R"(, "kinds": ["b", "x"], "rates": [0, 4])"), wanted);
  EXPECT_NE(found(R"(, "kinds": ["a", "b"], "rates": [0, 4])")
                .find("rates has a layer \"0\"; wanted 4"),
            std::string::npos);
  EXPECT_NE(
      found(R"(, "kinds": ["a", "b"], "rates": [4, 4])")
          .find("rates of layer 1 is \"4\", and by kinds it is not \"4\""),
      std::string::npos);
  EXPECT_NE(found("").find("layers.some.where: config.json has no key "
                           "\"kinds\""),
            std::string::npos);
}

TEST(RulesTest, RotaryPairsAreOfQueriesAndKeys) {
  const auto found = [](const std::string& module, const std::string& more,
                        const std::string& wanted) {
    const std::string text =
        Names(absl::StrFormat(
                  R"({"model_type": "mine", "like": "llama", "params": [
{"name": "model.layers.{layer}.%s.weight", "rotary_pairs": true}]})",
                  module),
              more);
    EXPECT_NE(text.find(wanted), std::string::npos) << text;
  };
  found("mlp.up_proj", "",
        ".role is mlp_up, which has no rotary pairs; wanted query or key\n");
  found("self_attn.k_proj", R"(, "head_dim": 3)",
        "config.json:3:43: error: head_dim 3 is odd; wanted an even one, of "
        "rotary pairs\n");
}

TEST(RulesTest, ANewNameOfAFamilyThatIsLikeAnotherStandsOnce) {
  EXPECT_NE(Names(R"({"model_type": "mine", "like": "llama", "params": [
      {"name": "model.layers.{layer}.self_attn.q_norm.weight",
       "role": "query_norm", "shape": ["head_dim"]},
      {"name": "model.layers.{layer}.self_attn.q_norm.weight",
       "role": "key_norm", "shape": ["head_dim"]}]})")
                .find("stands twice"),
            std::string::npos);
}

TEST(RulesTest, TheExampleOfAFamilyThatIsLikeAnotherIsRead) {
  std::ifstream file(REFIT_SOURCE_DIR "/examples/rules/README.md");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t begin =
      text.find("    {\n", text.find("## A family that is like another"));
  const std::string example =
      text.substr(begin, text.find("\n    }\n", begin) + 7 - begin);
  EXPECT_NE(Names(example).find("k_norm.weight"), std::string::npos)
      << Names(example);
}

// Frameworks join them, so that none may be alone.
TEST(RulesTest, RolesOfOneTensorStandTogether) {
  const std::string gpt_oss = R"({"model_type": "mine", "like": "gpt_oss",
      "params": [{"name": "model.layers.{layer}.mlp.experts.%s}]})";
  const std::string sizes = R"(, "num_local_experts": 2, "head_dim": 2,
      "num_experts_per_tok": 1, "num_key_value_heads": 2)";
  const auto mistake = [&](const std::string& change) {
    return Names(absl::StrReplaceAll(gpt_oss, {{"%s", change}}), sizes);
  };
  EXPECT_EQ(mistake(R"(down_proj_bias", "if": true)").find("error"),
            std::string::npos);
  EXPECT_NE(mistake(R"(gate_up_proj_bias", "shape": ["experts", 6])")
                .find("has the shape [2, 6]; wanted [2, 8]"),
            std::string::npos);
  EXPECT_NE(mistake(R"(down_proj_bias", "shape": ["experts", 6])")
                .find("has the shape [2, 6]; wanted [2, 8]"),
            std::string::npos);
  EXPECT_NE(mistake(R"(gate_up_proj", "if": false)")
                .find("has the role fused_expert_down and no "
                      "fused_expert_gate_up; wanted both"),
            std::string::npos);
}

TEST(RulesTest, AValueThatFrameworksReadDifferentlyIsRefused) {
  const std::string rules = Param(kEmbedding, R"(, "refuse": {
      "num_experts": {"if": "num_experts - 1",
                      "because": "which is odd; wanted 1"},
      "absent": {"if": "not absent or true", "because": "and none is"}})");
  EXPECT_EQ(Mistakes(rules, R"({"model_type": "mine", "hidden_size": 8,
    "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 16,
    "num_experts": 2})"),
            "config.json:3:20: error: num_experts is 2, which is odd; wanted "
            "1\nconfig.json:1:1: error: absent is missing, and none is\n");
}

TEST(RulesTest, OneMistakeIsOneMessage) {
  EXPECT_EQ(Mistakes(Param(R"({"name": "norm.weight", "shape": ["wide"],
                              "role": "final_norm"})",
                           R"(, "sizes": {"head_dim": "heads / 3",
                              "wide": "2 * head_dim"},
                              "layers": {"first": {"to": "wide"}})")),
            "rules.json:1:46: error: sizes.head_dim is \"heads / 3\": 4 / 3 is "
            "no whole number\n");
}

TEST(RulesTest, LatentAttentionAndMixersHaveTheirSizes) {
  constexpr std::string_view kSizesOf[] = {
      "",
      R"("key_value_rank": 4, "nope_dim": 2, "rope_dim": 1, "value_dim": 3)",
      R"("key_value_rank": 4, "nope_dim": 2, "rope_dim": 1, "value_dim": 3,
         "query_rank": 5)",
      R"("mamba_heads": 2, "mamba_head_dim": 4, "mamba_groups": 1,
         "mamba_state": 3)"};
  enum { kNone, kNoQueryRank, kQueryRank, kMamba };
  constexpr std::string_view kDown = R"({"name": "l.{layer}.kv_a",
      "shape": [5, 8], "role": "key_value_down"})";
  constexpr std::string_view kUp = R"({"name": "l.{layer}.kv_b",
      "shape": [20, 4], "role": "key_value_up"})";
  const auto mistakes = [&](std::string_view params, int sizes) {
    std::string rules = Param(params);
    rules.insert(rules.size() - 1,
                 absl::StrFormat(R"(, "sizes": {%s})", kSizesOf[sizes]));
    std::string found = Mistakes(rules);
    const size_t at = found.find("error: ");
    return at == std::string::npos ? found : found.substr(at + 7);
  };
  const auto both = [](std::string_view a, std::string_view b) {
    return absl::StrFormat("%s, %s", a, b);
  };
  EXPECT_EQ(mistakes(both(kDown, kUp), kNoQueryRank), "");
  EXPECT_EQ(mistakes(kDown, kNone),
            "params[0].role is key_value_down, and the model has no latent "
            "attention; wanted \"key_value_rank\" in sizes\n");
  EXPECT_EQ(mistakes(kDown, kMamba),
            "params[0].role is key_value_down, and the model has no latent "
            "attention; wanted \"key_value_rank\" in sizes\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.q", "shape": [8, 8],
                         "role": "query"})",
                     kNoQueryRank),
            "params[0].role is query, and sizes.key_value_rank makes attention "
            "latent; wanted latent_query, or no such size\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.q", "shape": [12, 8],
                         "role": "latent_query"})",
                     kQueryRank),
            "params[0].role is latent_query, and sizes.query_rank is 5; wanted "
            "query_down and query_up, or no such size\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.q_a", "shape": [5, 8],
                         "role": "query_down"})",
                     kNoQueryRank),
            "params[0].role is query_down, and sizes.query_rank is 0; wanted "
            "latent_query, or the rank of queries\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.q_a", "shape": [5, 8],
                         "role": "query_down"})",
                     kQueryRank),
            "layer 0 has the role query_down and no key_value_down; wanted "
            "both\n");
  EXPECT_EQ(
      mistakes(both(R"({"name": "l.{layer}.q_a", "shape": [5, 6],
                        "role": "query_down"})",
                    both(kDown, kUp)),
               kQueryRank),
      "parameter \"l.{0}.kv_a\" has 5 x 8 elements, and \"l.{0}.q_a\", which "
      "frameworks join with it, 5 x 6; wanted equal columns\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.k", "shape": [8, 8],
                         "role": "key"})",
                     kNoQueryRank),
            "params[0].role is key, and sizes.key_value_rank makes attention "
            "latent; wanted key_value_down and key_value_up, or no such "
            "size\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.k_norm", "shape": [8],
                         "role": "key_heads_norm"})",
                     kNoQueryRank),
            "params[0].role is key_heads_norm, and sizes.key_value_rank makes "
            "attention latent; wanted no such role, or no such size\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.kv_a", "shape": [4, 8],
                         "role": "key_value_down"})",
                     kNoQueryRank),
            "params[0].shape: parameter \"l.{layer}.kv_a\" has 4 rows; wanted "
            "5\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.kv_b", "shape": [20, 8],
                         "role": "key_value_up"})",
                     kNoQueryRank),
            "params[0].shape: parameter \"l.{layer}.kv_b\" has 8 columns; "
            "wanted 4\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.o", "shape": [8, 12],
                         "role": "attention_output"})",
                     kNoQueryRank),
            "layer 0 has the role attention_output and no key_value_up; wanted "
            "both\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.in", "shape": [24, 8],
                         "role": "mamba_in"})",
                     kNone),
            "params[0].role is mamba_in, and the model has no Mamba mixers; "
            "wanted \"mamba_heads\" in sizes\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.in", "shape": [22, 8],
                         "role": "mamba_in"})",
                     kMamba),
            "params[0].shape: parameter \"l.{layer}.in\" has 22 rows; wanted "
            "24\n");
  EXPECT_EQ(mistakes(R"({"name": "l.{layer}.out", "shape": [8, 6],
                         "role": "mamba_out"})",
                     kMamba),
            "params[0].shape: parameter \"l.{layer}.out\" has 6 columns; "
            "wanted 8\n");
}

// Two plain modules of each layer, and how vLLM joins them.
std::string Joined(std::string_view second, std::string_view fused) {
  return Param(
      absl::StrFormat(
          R"({"name": "l.{layer}.a_proj.weight", "shape": [4, "hidden"],
              "role": "column"}, {%s})",
          second),
      absl::StrFormat(R"(, "vllm": {"fused": %s})", fused));
}

TEST(RulesTest, ModulesThatCannotBeJoinedAreReported) {
  const std::string second =
      R"("name": "l.{layer}.b_proj.weight", "shape": [8, "hidden"],
         "role": "column")";
  EXPECT_EQ(Mistakes(Joined(second, R"({"ab": ["a_proj", "b_proj"]})")), "");
  EXPECT_EQ(Mistakes(Joined(second, R"({"ab": ["a_proj", "c_proj"]})")),
            "rules.json:1:49: error: vllm.fused.ab: parameter "
            "\"l.{0}.c_proj.weight\" is not in params; wanted it beside "
            "\"l.{0}.a_proj.weight\"\n");
  EXPECT_EQ(Mistakes(Joined(second, R"({"ab": ["a_prj", "b_proj"]})")),
            "rules.json:1:49: error: vllm.fused.ab: \"a_prj\" is no module of "
            "a parameter of role column or replicated; did you mean "
            "\"a_proj\"? (other roles are joined as their framework does)\n");
  EXPECT_EQ(Mistakes(Joined(second, R"({"ab": ["a_proj"]})")),
            "rules.json:1:49: error: vllm.fused.ab has fewer than two modules; "
            "wanted two "
            "or more\n");
  for (const auto& [from, to, wanted] :
       {std::tuple("\"hidden\"", "2", "has other columns"),
        std::tuple("column", "replicated", "has another role")}) {
    std::string other = second;
    other.replace(other.find(from), std::string_view(from).size(), to);
    EXPECT_EQ(Mistakes(Joined(other, R"({"ab": ["a_proj", "b_proj"]})")),
              absl::StrFormat("rules.json:1:49: error: vllm.fused.ab: "
                              "parameter \"l.{0}.b_proj.weight\" %s; wanted it "
                              "beside \"l.{0}.a_proj.weight\"\n",
                              wanted));
  }
}

std::string JobErrors(const std::string& rules, const std::string& sides) {
  const TemporaryDirectory directory;
  directory.Write("config.json",
                  absl::StrFormat(R"({"model_type": "mine", %s})", kDenseKeys));
  directory.Write("rules.json", rules);
  const std::string job = directory.Write(
      "job.json", absl::StrFormat(R"({"model": {"config": "config.json",
          "rules": "rules.json"}, %s})",
                                  sides));
  Diagnostics diagnostics;
  const absl::StatusOr<std::vector<uint8_t>> plan =
      CompileFile(job, CompileOptions(), diagnostics);
  std::istringstream lines(directory.Relative(diagnostics.Render()));
  std::string line;
  std::getline(lines, line);
  return diagnostics.ok() ? std::string(plan.status().message()) : line;
}

constexpr char kToVllm[] =
    R"("source": {"layout": "fsdp"}, "destination": {"layout": "vllm",
       "tensor_parallel": 2})";

constexpr char kModules[] = R"(
    {"name": "l.{layer}.a_proj.weight", "shape": [4, "hidden"],
     "role": "column"},
    {"name": "l.{layer}.b_proj.weight", "shape": [8, "hidden"],
     "role": "column"},
    {"name": "l.{layer}.c_proj.weight", "shape": ["hidden", 6], "role": "row"},
    {"name": "l.{layer}.norm.bias", "shape": ["hidden"], "role": "replicated"},
    {"name": "position.weight", "shape": [8, "hidden"], "role": "first_stage"},
    {"name": "norm.bias", "shape": ["hidden"], "role": "last_stage"})";

TEST(RulesTest, ALayerHasWhatItsRolesGoWith) {
  for (const auto& [param, wanted] :
       {std::pair(R"({"name": "l.{layer}.o", "shape": ["hidden", 8],
                      "role": "attention_output"})",
                  "rules.json:1:35: error: layer 0 has the role "
                  "attention_output and no query; wanted both\n"),
        std::pair(R"({"name": "l.{layer}.k_norm", "shape": [8],
                      "role": "key_heads_norm"})",
                  "rules.json:1:35: error: layer 0 has the role "
                  "key_heads_norm and no key; wanted both\n"),
        std::pair(R"({"name": "l.{layer}.i", "shape": ["hidden"],
                      "role": "mlp_input_norm", "layers": "last"},
                     {"name": "l.{layer}.n", "shape": ["hidden"],
                      "role": "mlp_norm"})",
                  "rules.json:3:22: error: layer 0 has the role mlp_norm and "
                  "no mlp_input_norm; wanted both\n"),
        std::pair(R"({"name": "l.{layer}.e", "shape": [2, 8, "hidden"],
                      "role": "stacked_expert_gate_up"},
                     {"name": "l.{layer}.d", "shape": [2, "hidden", 4],
                      "role": "stacked_expert_down"})",
                  "rules.json:1:35: error: parameter \"l.{0}.e\" holds all "
                  "experts of a layer; wanted \".experts.\" in its name\n"),
        std::pair(R"({"name": "l.{layer}.experts.e",
                      "shape": [2, 6, "hidden"],
                      "role": "stacked_expert_gate_up"},
                     {"name": "l.{layer}.experts.d",
                      "shape": [2, "hidden", 4],
                      "role": "stacked_expert_down"})",
                  "rules.json:1:35: error: parameter \"l.{0}.experts.e\" has "
                  "the shape [2, 6, 8]; wanted [2, 8, 8], as "
                  "\"l.{0}.experts.d\" has [2, 8, 4]\n")}) {
    std::string rules = Param(param);
    rules.insert(rules.size() - 1,
                 R"(, "layers": {"last": {"from": 1}},
                    "sizes": {"experts": 2, "head_dim": 2})");
    EXPECT_EQ(Mistakes(rules), wanted);
  }
}

TEST(RulesTest, NamesAreKeptApart) {
  EXPECT_EQ(JobErrors(Param(kModules, R"(, "vllm": {
                "names": {"a_proj": "b_proj"}})"),
                      kToVllm),
            "job.json:2:91: error: destination: two tensors of a rank have the "
            "name \"l.{0}.b_proj.weight\"; wanted \"names\" and \"fused\" of "
            "the rules of mine that keep names apart");
  EXPECT_EQ(
      Mistakes(Param(kModules, R"(, "vllm": {"names": {"l.{0}.": "m."}})")),
      "rules.json:1:53: error: vllm.names.l.{0}. is \"m.\"; wanted no "
      "braces but those of {layer}\n");
}

TEST(RulesTest, MegatronsAttentionNeedsItsNorm) {
  EXPECT_EQ(JobErrors(Param(R"(
      {"name": "l.{layer}.q", "shape": ["heads * head_dim", 8], "role": "query"},
      {"name": "l.{layer}.k", "shape": ["kv_heads * head_dim", 8],
       "role": "key"},
      {"name": "l.{layer}.v", "shape": ["kv_heads * head_dim", 8],
       "role": "value"})",
                            R"(, "megatron": {})"),
                      R"("source": {"layout": "megatron"},
                         "destination": {"layout": "fsdp"})"),
            "job.json:2:56: error: source: Megatron's attention has a norm "
            "before it, and layer 0 of this mine has none; wanted a parameter "
            "of role attention_norm");
}

TEST(RulesTest, ARoleStandsOnceInALayer) {
  EXPECT_EQ(
      Mistakes(Param(R"({"name": "l.{layer}.n.weight", "shape": ["hidden"],
                         "role": "attention_norm"},
                        {"name": "l.{layer}.m.weight", "shape": ["hidden"],
                         "role": "attention_norm"})")),
      "rules.json:3:25: error: params[\"l.{0}.m.weight\"] is the role "
      "attention_norm of layer 0 a second time, after \"l.{0}.n.weight\"; "
      "wanted each once (column, row, replicated, first_stage and last_stage "
      "may stand often)\n");
}

TEST(RulesTest, WhatFrameworksJoinFitsTogether) {
  EXPECT_EQ(
      Mistakes(Param(R"({"name": "l.{layer}.gate", "shape": [4, "hidden"],
                         "role": "mlp_gate"},
                        {"name": "l.{layer}.up", "shape": [2, "hidden"],
                         "role": "mlp_up"})")),
      "rules.json:3:25: error: parameter \"l.{0}.up\" has 2 x 8 elements, and "
      "\"l.{0}.gate\", which frameworks join with it, 4 x 8; wanted equal "
      "shapes\n");
}

TEST(RulesTest, AFrameworkThatTheFileDoesNotNameIsRefused) {
  EXPECT_EQ(JobErrors(Param(kEmbedding, R"(, "sglang": {})"), kToVllm),
            "job.json:2:91: error: destination: the rules of mine say nothing "
            "of vllm; wanted \"vllm\": {…} in their file, once its class was "
            "read");
  EXPECT_EQ(JobErrors(Param(kEmbedding, R"(, "vllm": {})"), kToVllm), "");
}

TEST(RulesTest, PipelineStagesThatAClassDoesNotHaveAreRefused) {
  EXPECT_EQ(
      JobErrors(Param(kEmbedding, R"(, "vllm": {"pipeline_parallel": false})"),
                R"("source": {"layout": "fsdp"}, "destination": {
                   "layout": "vllm", "pipeline_parallel": 2})"),
      "job.json:3:59: error: destination.pipeline_parallel 2: vLLM's "
      "mine has one stage; wanted 1");
}

// Two layers of plain modules.
Model PlainModel() {
  const TemporaryDirectory directory;
  Job job;
  job.model.config_path = directory.Write(
      "config.json",
      absl::StrFormat(R"({"model_type": "mine", %s})", kDenseKeys));
  job.model.rules_path = {
      .value = directory.Write("rules.json", Param(kModules, R"(,
          "sizes": {"layers": 2, "hidden": 6},
          "vllm": {"names": {"l.": "layers."}, "every_stage": "ends",
                   "fused": {"ab": ["a_proj", "b_proj"]}},
          "sglang": {})")),
      .place = {},
      .given = true};
  Diagnostics diagnostics;
  std::optional<Model> model = ReadModel(job, diagnostics);
  EXPECT_EQ(diagnostics.Render(), "");
  return *std::move(model);
}

TEST(RulesTest, PlainModulesAreCutAsTheirRolesSay) {
  using namespace layout_testing;
  const Model model = PlainModel();
  const Tensors hf = Checkpoint(model);
  const Tensor& a = hf.at("l.1.a_proj.weight");
  const Tensor& b = hf.at("l.1.b_proj.weight");
  const Tensor c = Columns(hf.at("l.1.c_proj.weight"), 3, 6);
  const Tensor& norm = hf.at("l.1.norm.bias");
  // Rank 3: stage 1, the second of two ranks that share its tensors.
  const Tensors vllm = LayOutAndExpand(model, MakeSide(LayoutKind::kVllm, 2, 2),
                                       fb::Side::kDestination)
                           .at(3);
  EXPECT_EQ(vllm.at("layers.1.ab.weight"),
            Concat({Rows(a, 2, 4), Rows(b, 4, 8)}));
  EXPECT_EQ(vllm.at("layers.1.c_proj.weight"), c);
  EXPECT_EQ(vllm.at("layers.1.norm.bias"), norm);
  EXPECT_EQ(vllm.at("norm.bias"), hf.at("norm.bias"));
  EXPECT_EQ(SkippedTensors(vllm), std::vector<std::string>{"position.weight"});
  ExpectSameTensors(LayOutAndExpand(model, MakeSide(LayoutKind::kSglang, 2, 2),
                                    fb::Side::kDestination)
                        .at(3),
                    {{"l.1.a_proj.weight", Rows(a, 2, 4)},
                     {"l.1.b_proj.weight", Rows(b, 4, 8)},
                     {"l.1.c_proj.weight", c},
                     {"l.1.norm.bias", norm},
                     {"norm.bias", hf.at("norm.bias")}});
  SideSpec fsdp = MakeSide(LayoutKind::kFsdp);
  fsdp.tensor_parallel.value = 2;
  const Tensors trainer = LayOutAndExpand(model, fsdp, fb::Side::kSource).at(1);
  EXPECT_EQ(trainer.at("l.1.a_proj.weight"), Rows(a, 2, 4));
  EXPECT_EQ(trainer.at("l.1.c_proj.weight"), c);
  EXPECT_EQ(trainer.at("l.1.norm.bias"), norm);
}

TEST(RulesTest, WhatIsNotKnownOfPlainModulesIsRefused) {
  using namespace layout_testing;
  const Model model = PlainModel();
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kVllm, 8)),
            "destination.tensor_parallel 8 does not divide 4 rows of a module "
            "of role column\n"
            "destination.tensor_parallel 8 does not divide 6 columns of a "
            "module of role row\n");
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  side.dp_attention.value = 2;
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.dp_attention 2: whether \"l.{0}.a_proj.weight\" of "
            "this mine is cut with the attention is not known of roles column "
            "and row; wanted 1\n");
  const std::string rules = Param(kModules, R"(, "vllm": {})");
  EXPECT_EQ(JobErrors(rules, R"("source": {"layout": "fsdp"}, "destination":
                {"layout": "vllm", "dtype": "fp8_e4m3_block128"})"),
            "job.json:3:45: error: destination.dtype fp8_e4m3_block128: which "
            "plain modules of a rules file an engine quantizes is not known, "
            "as \"l.0.a_proj.weight\"; wanted bf16, fp16 or fp32");
}

TEST(RulesTest, TheInputsDigestKnowsTheRules) {
  const auto digest = [](const std::string& rules) {
    const TemporaryDirectory directory;
    directory.Write(
        "config.json",
        absl::StrFormat(R"({"model_type": "mine", %s})", kDenseKeys));
    directory.Write("rules.json", rules);
    std::vector<uint8_t> bytes;
    EXPECT_EQ(ErrorsOf(absl::StrFormat(
                           R"({"model": {"config": "%s", "rules": "%s"}, %s})",
                           directory.Path("config.json"),
                           directory.Path("rules.json"), kToVllm),
                       &bytes),
              "");
    const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
    return plan->plan().inputs_digest()->low();
  };
  const uint64_t plain = digest(Param(kEmbedding, R"(, "vllm": {})"));
  EXPECT_EQ(digest(Param(kEmbedding, R"(, "vllm": { }, "layers": {})")), plain);
  EXPECT_NE(digest(Param(kEmbedding, R"(, "vllm": {"fp32_router": true})")),
            plain);
  EXPECT_NE(
      digest(Param(kEmbedding, R"(, "vllm": {"pipeline_parallel": false})")),
      plain);
  EXPECT_NE(digest(Param(kEmbedding,
                         R"(, "vllm": {"names": {"embed": "embedding"}})")),
            plain);
  EXPECT_NE(digest(Param(kEmbedding, R"(, "vllm": {}, "transformers": {
                "names": {"embed": "embedding"}})")),
            plain);
}

TEST(RulesTest, RulesAreBesideAConfig) {
  const auto errors = [](const std::string& model) {
    const TemporaryDirectory directory;
    const std::string job = directory.Write(
        "job.json", absl::StrFormat(R"({"model": %s, %s})", model, kToVllm));
    Diagnostics diagnostics;
    EXPECT_FALSE(CompileFile(job, CompileOptions(), diagnostics).ok());
    std::istringstream lines(directory.Relative(diagnostics.Render()));
    std::string line;
    std::getline(lines, line);
    return line;
  };
  EXPECT_EQ(errors(R"({"rules": "rules.json"})"),
            "job.json:1:11: error: model has none of \"config\", "
            "\"safetensors\" and \"parameters\"; wanted one of them");
  EXPECT_EQ(errors(R"({"config": "c.json", "safetensors": "s"})"),
            "job.json:1:11: error: model has more than one of \"config\", "
            "\"safetensors\" and \"parameters\"; wanted one of them");
  EXPECT_EQ(errors(R"({"parameters": [{"name": "a", "shape": [1],
                        "dtype": "bf16"}], "rules": "r.json"})"),
            "job.json:2:53: error: model.rules describe a config.json, and "
            "\"parameters\" have none; wanted \"config\" or \"safetensors\" "
            "beside them");
  EXPECT_EQ(errors(R"({"config": "config.json", "rule": "r.json"})"),
            "job.json:1:37: error: unknown key \"rule\" in model; did you mean "
            "\"rules\"?");
}

// The words of the page's table of roles are those that a file may use.
TEST(RulesTest, TheDocsListEveryRole) {
  std::ifstream file(std::string(REFIT_SOURCE_DIR) +
                     "/examples/rules/README.md");
  std::set<std::string> documented;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line == "## Roles") inside = true;
    if (line.starts_with("## ") && line != "## Roles") inside = false;
    if (!inside || !line.starts_with("| `")) continue;
    const std::string cell = line.substr(0, line.find(" | "));
    for (size_t at = 0; (at = cell.find('`', at)) != std::string::npos;) {
      const size_t end = cell.find('`', at + 1);
      documented.insert(cell.substr(at + 1, end - at - 1));
      at = end + 1;
    }
  }
  const std::vector<std::string_view> words = RoleWords();
  EXPECT_EQ(documented, std::set<std::string>(words.begin(), words.end()));
}

}  // namespace
}  // namespace refit
