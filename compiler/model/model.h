// Model: every logical parameter of a checkpoint, as stacks with roles.
#ifndef REFIT_COMPILER_MODEL_MODEL_H_
#define REFIT_COMPILER_MODEL_MODEL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "compiler/model/family.h"

namespace refit {

// Mamba-2 mixers: the rows of the input projection are [z; x; B; C; dt], those
// of the convolution [x; B; C].
struct MambaSizes {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t groups = 0;         // that share B and C
  int64_t sglang_groups = 0;  // what SGLang takes for them
  int64_t state = 0;

  int64_t inner() const { return heads * head_dim; }  // rows of z and of x
  int64_t shared() const { return groups * state; }   // rows of B and of C
};

// Gated delta nets: the rows of in_proj_qkvz are, per key head, [query; key;
// its value heads; their gates z], those of in_proj_ba, per key head, [b; a] of
// its value heads, those of the convolution [queries; keys; values].
struct DeltaNetSizes {
  int64_t key_heads = 0;
  int64_t value_heads = 0;  // a multiple of key_heads
  int64_t key_dim = 0;
  int64_t value_dim = 0;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
};

// Multi-head latent attention: queries, keys and values are made of narrow
// projections. Per head, a query is [nope; rope] and the key-value projection
// is [nope of the key; value].
struct LatentAttention {
  int64_t query_rank = 0;  // 0: queries are projected at once
  int64_t key_value_rank = 0;
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t value_dim = 0;
};

// What layouts need to know of a network beyond its parameters' shapes.
struct Architecture {
  const Family* family = &kNoFamily;  // never nullptr
  int64_t layers = 0;
  // Multi-token-prediction layers that the model has beside `layers`, which
  // they follow in number. Each prediction is made by `mtp_block` of them.
  int64_t mtp_layers = 0;
  int64_t mtp_block = 1;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab = 0;
  int64_t experts = 0;  // 0: dense
  // Groups that routers choose among before experts, as vLLM's class hears of
  // them; 0: config.json does not say.
  int64_t expert_groups = 1;
  bool tied = false;                      // lm_head is the embedding
  std::optional<LatentAttention> latent;  // then kv_heads, head_dim: unused
  // Attention has an output gate: a query head's rows are [query; gate].
  bool output_gate = false;
  // Indexers of sparse attention interleave the halves of a rotary pair.
  bool index_rope_interleaved = false;
  std::optional<MambaSizes> mamba;
  std::optional<DeltaNetSizes> delta;
  int64_t tower_heads = 0;  // of the vision tower's attention; 0: no tower
  // Groups of heads that kAttentionOutputDown projects each by itself.
  int64_t output_groups = 0;
  // The first layers, whose routers choose by a table of tokens.
  int64_t hash_layers = 0;
  int64_t experts_per_token = 0;  // where there are hash layers

  int64_t all_layers() const { return layers + mtp_layers; }
  int64_t query_head_rows() const { return (output_gate ? 2 : 1) * head_dim; }
};

// Stacks are disjoint, and a stack's index[0] is the layer for every param of
// a layer. Tied: `params` has no output head, `skips` says so.
struct Model {
  Place place;          // config.json, the safetensors index, or the job
  bool mtp = false;     // the job wants multi-token-prediction layers
  bool vision = false;  // the job wants the vision tower
  // Of a file of rules: what architecture.family points to.
  std::shared_ptr<const Family> own_family;
  Architecture architecture;
  std::vector<Param> params;
  std::vector<Skip> skips;
  // Globs over names of a checkpoint that are no params: scales, stale buffers,
  // copies of other tensors, layers that the job leaves out.
  std::vector<std::string> stored_beside;
  // How the checkpoint is quantized ("fp8", "awq" …), by config.json's
  // quantization_config. The params are those behind it.
  Located<std::string> quant_method;
};

// Whether only multi-head latent attention has the role, or attention like it.
bool IsLatent(ParamRole role);

// What of the param contradicts its role in a model of this architecture, as in
// "has 3 rows; wanted 4"; "" for nothing.
std::string ShapeMistake(const Param& param, const Architecture& architecture);

// Reads the model a job names. Errors: multi-token-prediction layers or a
// vision tower asked of a model that has none, missing or malformed file,
// unknown model_type (with the known ones), missing or wrong config keys, a
// safetensors header that disagrees with the config.json beside it, a name
// twice. Returns nullopt after an error.
std::optional<Model> ReadModel(const Job& job, Diagnostics& diagnostics);

// Of a family from a file of rules: warns of roles that belong together and of
// which a layer has only some.
void WarnOfMissingRoles(const Model& model, Diagnostics& diagnostics);

// Reports the first role that a layer lacks beside others that frameworks join
// with it. True when there is none.
bool CheckMissingRoles(const Model& model, Diagnostics& diagnostics);

// Marks what `options.exclude` matches as skipped, splitting stacks where a
// glob matches only some members. A glob may match nothing: one list of globs
// serves models with and without, say, multi-token-prediction layers. Globs
// that leave nothing to move are an error.
void ApplyExcludes(const OptionsSpec& options, Model& model,
                   Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_MODEL_H_
