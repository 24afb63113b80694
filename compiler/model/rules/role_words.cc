#include "compiler/model/rules/role_words.h"

#include <utility>

namespace refit {
namespace {

using enum ParamRole;

constexpr std::pair<std::string_view, ParamRole> kRoles[] = {
    {"embedding", kEmbedding},
    {"final_norm", kFinalNorm},
    {"output_head", kOutputHead},
    {"attention_norm", kAttentionNorm},
    {"query", kQuery},
    {"key", kKey},
    {"value", kValue},
    {"query_bias", kQueryBias},
    {"key_bias", kKeyBias},
    {"value_bias", kValueBias},
    {"query_norm", kQueryNorm},
    {"key_norm", kKeyNorm},
    {"query_heads_norm", kQueryHeadsNorm},
    {"key_heads_norm", kKeyHeadsNorm},
    {"attention_output", kAttentionOutput},
    {"attention_output_bias", kAttentionOutputBias},
    {"attention_sinks", kAttentionSinks},
    {"latent_query", kLatentQuery},
    {"query_down", kQueryDown},
    {"query_down_norm", kQueryDownNorm},
    {"query_up", kQueryUp},
    {"key_value_down", kKeyValueDown},
    {"key_value_down_norm", kKeyValueDownNorm},
    {"key_value_up", kKeyValueUp},
    {"index_query", kIndexQuery},
    {"index_key", kIndexKey},
    {"index_key_norm", kIndexKeyNorm},
    {"index_key_norm_bias", kIndexKeyNormBias},
    {"index_weights", kIndexWeights},
    {"mamba_norm", kMambaNorm},
    {"mamba_in", kMambaIn},
    {"mamba_in_bias", kMambaInBias},
    {"mamba_conv", kMambaConv},
    {"mamba_conv_bias", kMambaConvBias},
    {"mamba_a_log", kMambaALog},
    {"mamba_d", kMambaD},
    {"mamba_dt_bias", kMambaDtBias},
    {"mamba_gated_norm", kMambaGatedNorm},
    {"mamba_out", kMambaOut},
    {"mamba_out_bias", kMambaOutBias},
    {"delta_qkv", kDeltaQkv},
    {"delta_z", kDeltaZ},
    {"delta_b", kDeltaB},
    {"delta_a", kDeltaA},
    {"delta_conv", kDeltaConv},
    {"delta_a_log", kDeltaALog},
    {"delta_dt_bias", kDeltaDtBias},
    {"delta_gated_norm", kDeltaGatedNorm},
    {"delta_out", kDeltaOut},
    {"mlp_norm", kMlpNorm},
    {"mlp_input_norm", kMlpInputNorm},
    {"mlp_output_norm", kMlpOutputNorm},
    {"mlp_gate", kMlpGate},
    {"mlp_up", kMlpUp},
    {"mlp_down", kMlpDown},
    {"moe_norm", kMoeNorm},
    {"router", kRouter},
    {"router_bias", kRouterBias},
    {"router_correction", kRouterCorrection},
    {"expert_gate", kExpertGate},
    {"expert_up", kExpertUp},
    {"expert_down", kExpertDown},
    {"stacked_expert_gate_up", kStackedExpertGateUp},
    {"stacked_expert_down", kStackedExpertDown},
    {"fused_expert_gate_up", kFusedExpertGateUp},
    {"fused_expert_gate_up_bias", kFusedExpertGateUpBias},
    {"fused_expert_gate_then_up", kFusedExpertGateThenUp},
    {"fused_expert_down", kFusedExpertDown},
    {"fused_expert_down_bias", kFusedExpertDownBias},
    {"experts_latent_down", kLatentDown},
    {"experts_latent_up", kLatentUp},
    {"shared_expert_gate", kSharedExpertGate},
    {"shared_expert_up", kSharedExpertUp},
    {"shared_expert_down", kSharedExpertDown},
    {"shared_expert_router", kSharedExpertRouter},
    {"mtp_embedding_norm", kMtpEmbeddingNorm},
    {"mtp_hidden_norm", kMtpHiddenNorm},
    {"mtp_projection", kMtpProjection},
    {"mtp_final_norm", kMtpFinalNorm},
    {"column", kColumn},
    {"row", kRow},
    {"replicated", kReplicated},
    {"first_stage", kFirstStage},
    {"last_stage", kLastStage},
    {"tower_column", kTowerColumn},
    {"tower_row", kTowerRow},
    {"tower_heads", kTowerHeads},
    {"tower_whole", kTowerWhole},
    {"tower_connector", kTowerConnector},
    {"tower_positions", kTowerPositions},
};

}  // namespace

std::vector<std::string_view> RoleWords() {
  std::vector<std::string_view> words;
  for (const auto& [word, role] : kRoles) words.push_back(word);
  return words;
}

std::string_view RoleWord(ParamRole role) {
  for (const auto& [word, known] : kRoles) {
    if (known == role) return word;
  }
  return "";
}

std::optional<ParamRole> RoleOf(std::string_view word) {
  for (const auto& [known, role] : kRoles) {
    if (known == word) return role;
  }
  return std::nullopt;
}

}  // namespace refit
