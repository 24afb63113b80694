// The traits of a model family. One file of rules holds all that the compiler
// knows of a family, and layouts ask for traits and never for a family's name.
#ifndef REFIT_COMPILER_MODEL_FAMILY_H_
#define REFIT_COMPILER_MODEL_FAMILY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/types/span.h"

namespace refit {

// A part of the checkpoint's names, and what a framework's modules call it. One
// that begins with '^' stands at the start of names.
using Rename = std::pair<std::string_view, std::string_view>;
using Renames = absl::Span<const Rename>;

// The name with each part renamed where it first stands.
std::string Renamed(std::string_view name, Renames renames);

// "q_proj" of "a.b.q_proj.weight", and that name with another module.
std::string_view ModuleOf(std::string_view name);
std::string WithModule(std::string_view name, std::string_view module);

// Plain modules (IsPlainModule) whose rows one tensor of an engine holds, in
// this order: what engines call packed modules.
struct Fusion {
  std::string_view into;
  absl::Span<const std::string> modules;  // two or more
};

// The traits of a family say where a framework's class of it differs from most
// of its classes. docs/layouts.md says where each was read.

struct VllmTraits {
  bool known = true;  // what its class holds
  Renames renames = {};
  absl::Span<const Fusion> fused = {};
  bool fp32_router = false;
  // False: "attention_bias" gives the output projection no bias.
  bool output_bias = true;
  // What every pipeline stage has, whether the stage reads it or not.
  enum class EveryStage : uint8_t {
    kNothing,
    kEmbedding,
    kVocabulary,  // embedding and head
    kEnds,        // embedding, final norm and head
  };
  EveryStage every_stage = EveryStage::kNothing;
  // Tensor parallelism cuts the shared experts also where each rank runs only a
  // part of the tokens through them.
  bool cuts_shared_experts_of_token_parts = false;
  // The draft model's modules are named "mtp.", as in the checkpoint, where
  // others have the model's layer numbers. What joins the draft's inputs is cut
  // by rows then.
  bool draft_has_prefix = false;
  // The tensor of kQueryDown and kKeyValueDown.
  std::string_view query_key_value_down = "fused_qkv_a_proj";
  // Ranks run parts of the tokens through the experts only without pipeline
  // parallelism.
  bool token_parts_on_one_stage = false;
  // Whether it can compute with block-scaled weights as a refit writes them.
  bool block_scales = true;
  bool pipeline_parallel = true;  // false: it has one stage
};

struct SglangTraits {
  bool known = true;  // what its class holds
  Renames renames = {};
  absl::Span<const Fusion> fused = {};
  // The first release whose routers are fp32. Before it they keep the side's
  // dtype, and compute with an fp32 copy that they make once. "": they never
  // are.
  std::string_view fp32_router_since = "";
  enum class Head : uint8_t {
    kLastStage,   // tied: the embedding's tensor, copied to a last stage
    kEveryStage,  // whether read or not; tied: the embedding's tensor, which
                  // only the first stage has
    kOwnTensor,   // on every stage, also when tied
  };
  Head head = Head::kLastStage;
  // Whether the engine puts shared experts into the experts' tensors.
  enum class SharedFusion : uint8_t {
    kNever,
    kOneExpert,  // if they are as large as one expert
    kAlways,     // and it refuses those that are not so large
  };
  SharedFusion shared_fusion = SharedFusion::kNever;
  int64_t shared_fusion_experts = 0;  // with so many experts alone; 0: any
  bool shared_fusion_expert_parallel = false;  // also with expert parallelism
  enum class Embedding : uint8_t {
    kFirstStage,
    kEveryStage,              // whether read or not
    kWhole,                   // on each rank of one stage, its rows not padded
    kWholeBesideDpAttention,  // on each rank of the first stage; without DP
                              // attention cut
  };
  Embedding embedding = Embedding::kFirstStage;
  // Features that other classes have and this one may lack.
  bool pipeline_parallel = true;
  bool dp_attention = true;
  bool redundant_experts = true;
  bool dense_layers = true;  // beside layers with experts
  // Tensor parallelism cuts the vision tower's modules whatever the mode, and
  // DP attention cuts them differently.
  bool plain_tower = false;
  // What stands in the names of modules of the tower that each rank holds
  // whole, where tensor parallelism cuts those of other classes. "": nothing.
  std::string_view whole_in_tower = "";
  // False: its loader up to 0.5.23 cannot load experts of other ranks.
  bool loads_expert_parallel = true;
};

struct MegatronTraits {
  bool known = true;  // what its modules hold
};

// Live models of transformers, which FSDP holds. Release 5 renamed the block of
// experts in all classes.
inline constexpr Rename kTransformers5Names[] = {
    {".block_sparse_moe.", ".mlp."}};
struct TransformersTraits {
  Renames renames_since_5 = kTransformers5Names;
  // Since release 5 a layer's stacked experts are [expert, out, in], where the
  // checkpoint has [expert, in, out].
  bool transposes_experts_since_5 = false;
  // Since release 5 its norms are fp32 unless the side says its dtype.
  bool fp32_norms_since_5 = false;
  // False: since release 5 the tower's rows are in an order of their own.
  bool knows_tower_since_5 = true;
};

struct Family {
  std::string_view model_type = "";  // of config.json
  VllmTraits vllm = {};
  SglangTraits sglang = {};
  MegatronTraits megatron = {};
  TransformersTraits transformers = {};
  bool tower = false;  // the model has a part that reads images
  // False: of its multi-token-prediction layers, if it has any, no parameter is
  // known.
  bool knows_mtp = true;
  // "mm_encoder_tp_mode": "data" makes engines hold the tower whole.
  bool whole_tower = true;
  bool of_file = false;  // of rules that the user wrote
};

// Of models whose params have no roles.
inline constexpr Family kNoFamily;

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_FAMILY_H_
