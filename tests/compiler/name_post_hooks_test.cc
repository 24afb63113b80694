// The pass that names what workers do after a refit, and other hooks of plans.
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/plan_file.h"
#include "plan/post_hooks.h"
#include "tests/compiler/compile_testing.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

// Layers: Mamba, MLP, attention, experts.
constexpr char kNemotron[] = R"({"model_type": "nemotron_h", "hidden_size": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "vocab_size": 64, "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-*E", "intermediate_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 2, "n_groups": 1,
    "ssm_state_size": 3, "conv_kernel": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 4, "moe_shared_expert_intermediate_size": 8,
    "moe_latent_size": 3})";
// Layer 0 is a delta net, layer 1 attention.
constexpr char kQwen3Next[] = R"({"model_type": "qwen3_next", "hidden_size": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1,
    "vocab_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 1, "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 2, "num_experts": 2, "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4})";

// "tensor name: hook" of all post-hooks of a plan.
std::set<std::string> PostHooksOf(const std::string& config,
                                  const std::string& source,
                                  const std::string& destination) {
  const TemporaryDirectory directory;
  const PlanFile plan = OpenJob(absl::StrFormat(
      R"({"model": "%s", "source": {"layout": "%s"},
          "destination": {"layout": "%s"}})",
      directory.Write("config.json", config), source, destination));
  std::set<std::string> hooks;
  for (const fb::Buffer* buffer : *plan.body().buffers()) {
    if (buffer->post_hooks() == nullptr) continue;
    for (const fb::PostHook* hook : *buffer->post_hooks()) {
      hooks.insert(
          absl::StrCat(TensorName(*buffer, 0), ": ", hook->name()->str()));
    }
  }
  return hooks;
}

TEST(NamePostHooksTest, TheyAreThoseByWhichTheTwoSidesDiffer) {
  EXPECT_EQ(PostHooksOf(kNemotron, "megatron", "vllm"),
            (std::set<std::string>{"model.layers.0.mixer.A: negative-exp"}));
  EXPECT_EQ(
      PostHooksOf(kNemotron, "vllm", "megatron"),
      (std::set<std::string>{"decoder.layers.0.mixer.A_log: log-of-negative"}));
  EXPECT_EQ(PostHooksOf(kNemotron, "megatron", "megatron"),
            std::set<std::string>());
  EXPECT_EQ(PostHooksOf(kQwen3Next, "megatron", "vllm"),
            (std::set<std::string>{
                "model.layers.0.linear_attn.norm.weight: add-one"}));
  EXPECT_EQ(
      PostHooksOf(kQwen3Next, "vllm", "megatron"),
      (std::set<std::string>{"decoder.layers.0.self_attention.out_norm.weight: "
                             "subtract-one"}));
}

TEST(NamePostHooksTest, EnginesNameMicroscalingScalesDifferently) {
  const TemporaryDirectory directory;
  const std::string config = directory.Write("config.json", R"({
      "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1,
      "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
      "intermediate_size": 64, "vocab_size": 64})");
  const auto scales_of = [&](const std::string& layout) {
    std::vector<uint8_t> bytes;
    EXPECT_EQ(ErrorsOf(R"({"model": ")" + config +
                           R"(", "source": {"layout": "megatron"},
                               "destination": {"dtype": "mxfp8_e4m3",
                                               "layout": ")" +
                           layout + R"("}})",
                       &bytes),
              "");
    const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
    EXPECT_TRUE(plan.ok());
    std::string found;
    const fb::RankProgram& rank = *plan->body().programs()->Get(1);
    for (uint32_t i = 0; i < rank.buffers()->size() - rank.scratch_buffers();
         ++i) {
      const fb::Buffer* buffer =
          plan->body().buffers()->Get(rank.buffers()->Get(i));
      const std::string name = buffer->name()->str();
      if (!name.starts_with("model.layers.{0}.mlp.down_proj.weight_")) continue;
      found = name.substr(name.rfind('.') + 1);
      if (buffer->post_hooks() == nullptr) continue;
      for (const fb::PostHook* hook : *buffer->post_hooks()) {
        found += " " + hook->name()->str();
      }
    }
    return found;
  };
  EXPECT_EQ(scales_of("vllm"), "weight_scale");
  EXPECT_EQ(scales_of("sglang"), "weight_scale_inv derive-scale-copies");
}

TEST(PostHookNameTest, EveryHookHasARowInTheDocs) {
  std::ifstream file(REFIT_SOURCE_DIR "/docs/plan-format.md");
  const std::string text((std::istreambuf_iterator<char>(file)),
                         std::istreambuf_iterator<char>());
  for (const std::string_view name : kPostHookNames) {
    EXPECT_NE(text.find("\n| `" + std::string(name) + "` |"), std::string::npos)
        << name;
  }
}

}  // namespace
}  // namespace refit
