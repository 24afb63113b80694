// What a param is to the network. A model family assigns roles; layout
// frontends place params by them; nothing downstream looks at one.
#ifndef REFIT_COMPILER_IR_PARAM_ROLE_H_
#define REFIT_COMPILER_IR_PARAM_ROLE_H_

#include <cstddef>
#include <cstdint>

namespace refit {

enum class ParamRole : uint8_t {
  kOther,  // only role-free layouts can place it
  kEmbedding,
  kFinalNorm,
  kOutputHead,

  // Attention. Of gated attention (qwen3_next) the query's rows are, per head,
  // [query; output gate].
  kAttentionNorm,
  kQuery,
  kKey,
  kValue,
  kQueryBias,
  kKeyBias,
  kValueBias,
  kQueryNorm,
  kKeyNorm,
  kQueryHeadsNorm,  // over all heads at once (minimax_m2)
  kKeyHeadsNorm,
  kAttentionOutput,
  kAttentionOutputBias,
  kAttentionSinks,  // one per query head (gpt_oss)

  // Multi-head latent attention (deepseek_v3). kAttentionNorm and
  // kAttentionOutput are as above.
  kLatentQuery,       // q_proj, of models without q_lora_rank
  kQueryDown,         // q_a_proj
  kQueryDownNorm,     // q_a_layernorm
  kQueryUp,           // q_b_proj
  kKeyValueDown,      // kv_a_proj_with_mqa
  kKeyValueDownNorm,  // kv_a_layernorm
  kKeyValueUp,        // kv_b_proj

  // The indexer of sparse attention (deepseek_v32): which keys a query reads.
  kIndexQuery,    // wq_b
  kIndexKey,      // wk
  kIndexWeights,  // weights_proj
  kIndexKeyNorm,  // fp32 in engines
  kIndexKeyNormBias,

  // Dense MLP; without kMlpGate it is not gated.
  kMlpNorm,
  kMlpInputNorm,   // pre_feedforward_layernorm (gemma3): kMlpNorm is before
  kMlpOutputNorm,  // post_feedforward_layernorm
  kMlpGate,
  kMlpUp,
  kMlpDown,

  // Mixture of experts; without gates it is not gated.
  kMoeNorm,
  kRouter,
  kRouterBias,        // of the linear layer (gpt_oss)
  kRouterCorrection,  // e_score_correction_bias, fp32
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kSharedExpertGate,
  kSharedExpertUp,
  kSharedExpertDown,
  kSharedExpertRouter,  // shared_expert_gate of qwen3_next: one row
  kLatentDown,          // fc1_latent_proj: into the experts' width (nemotron_h)
  kLatentUp,            // fc2_latent_proj

  // Experts as gpt_oss stores them: all of a layer in one tensor, in x out;
  // gate and up columns alternate.
  kFusedExpertGateUp,
  kFusedExpertGateUpBias,
  kFusedExpertDown,
  kFusedExpertDownBias,

  // Experts as qwen3_5 stores them: all of a layer in one tensor, out x in; the
  // gates' rows come before the ups'.
  kStackedExpertGateUp,
  kStackedExpertDown,

  // Mamba-2 mixer (nemotron_h): rows [z; x; B; C; dt], conv [x; B; C].
  kMambaNorm,  // before the mixer
  kMambaIn,
  kMambaInBias,
  kMambaConv,
  kMambaConvBias,
  kMambaALog,
  kMambaD,
  kMambaDtBias,
  kMambaGatedNorm,
  kMambaOut,
  kMambaOutBias,

  // Gated delta net (qwen3_next). kAttentionNorm is before it.
  kDeltaQkvz,
  kDeltaBa,
  // The same in tensors of their own (qwen3_5), rows by head: [queries; keys;
  // values], z, b and a.
  kDeltaQkv,
  kDeltaZ,
  kDeltaB,
  kDeltaA,
  kDeltaConv,
  kDeltaALog,
  kDeltaDtBias,
  kDeltaGatedNorm,
  kDeltaOut,

  // What only a multi-token-prediction layer has beside a usual layer's.
  kMtpEmbeddingNorm,  // enorm
  kMtpHiddenNorm,     // hnorm
  kMtpProjection,     // eh_proj: [embedding, hidden] columns
  kMtpFinalNorm,

  // Modules of which nothing is known but how they are cut, as a file of rules
  // says; a layer may have many of each. FormOf's dims are the fewest.
  kColumn,      // rows over tensor parallelism (ColumnParallelLinear)
  kRow,         // columns (RowParallelLinear)
  kReplicated,  // whole
  kFirstStage,  // whole, outside the layers
  kLastStage,

  // Roles younger than the digest of a job's inputs: their numbers are in it.

  // Experts as llama4 stores them: as kFusedExpertGateUp, but the gates'
  // columns come before the ups'. The down is a kFusedExpertDown.
  kFusedExpertGateThenUp,

  // A vision tower, by how engines cut its modules; one of its layers may have
  // many of each. FormOf's dims are the fewest.
  kTowerColumn,  // rows over tensor parallelism
  kTowerRow,     // columns
  kTowerHeads,   // rows [queries; keys; values], a part of each
  kTowerWhole,
  // Rows, also where each rank has the tower whole.
  kTowerConnector,
  kTowerPositions,  // learned: whole, or cut as a vocabulary

  // DeepSeek-V4. Its queries, keys and values are kQueryDown, kQueryUp and
  // kKeyValueDown; keys are values.
  kAttentionOutputDown,  // wo_a: rows by group of heads
  kAttentionOutputUp,    // wo_b
  kAttentionSinksFp32,   // as kAttentionSinks; engines pad the heads
  kHyperAttentionMix,    // hc_attn_fn, fp32 everywhere
  kReplicatedFp32,       // a plain module, whole, fp32 everywhere
  kHyperHead,            // hc_head_*: the same, outside the layers

  kCount,
};

inline constexpr size_t kRoleCount = static_cast<size_t>(ParamRole::kCount);

// What the numbers in the name of a role's params count. kTower: layers, or
// other parts, of the vision tower, which the model's layers do not count; or
// there is no number.
enum class RoleScope : uint8_t { kModel, kLayer, kExpert, kTower };

struct RoleForm {
  RoleScope scope = RoleScope::kModel;
  int dims = 1;  // of one tensor
  // Whether checkpoints with block scales hold it in fp8.
  bool block_quantized = false;
};

RoleForm FormOf(ParamRole role);

inline bool IsPlainModule(ParamRole role) {
  return (role >= ParamRole::kColumn && role <= ParamRole::kLastStage) ||
         role == ParamRole::kReplicatedFp32 || role == ParamRole::kHyperHead;
}

// Whether frameworks keep params of this role in fp32 whatever a side's dtype.
inline bool IsAlwaysFp32(ParamRole role) {
  using enum ParamRole;
  // Routing compares scores that are close to each other.
  return role == kRouterCorrection || role == kAttentionSinksFp32 ||
         role == kHyperAttentionMix || role == kReplicatedFp32 ||
         role == kHyperHead;
}

inline bool IsTower(ParamRole role) {
  return FormOf(role).scope == RoleScope::kTower;
}

// The linear layers of attention, delta nets, MLPs and experts. Never
// embeddings, heads, norms, routers, biases, b and a of a delta net, Mamba
// mixers, eh_proj, vision towers.
inline bool IsBlockQuantized(ParamRole role) {
  return FormOf(role).block_quantized;
}

}  // namespace refit

#endif  // REFIT_COMPILER_IR_PARAM_ROLE_H_
