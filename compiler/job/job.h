// Job: what the user asks for, as docs/jobs.md describes the JSON, with the
// place of every value.
#ifndef REFIT_COMPILER_JOB_JOB_H_
#define REFIT_COMPILER_JOB_JOB_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compiler/diagnostics.h"
#include "compiler/ir/block_scheme.h"
#include "plan/dtype.h"

namespace refit {

enum class LayoutKind : uint8_t { kMegatron, kFsdp, kVllm, kSglang, kGeneric };
std::string_view LayoutName(LayoutKind kind);

// A parameter written out in the job.
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype = DType::kUnspecified;
  Place place;
};

// Exactly one of config_path, safetensors_path and parameters is set.
struct ModelSpec {
  Place place;
  std::optional<std::string>
      config_path;  // resolved against the job's directory
  std::optional<std::string>
      safetensors_path;  // directory or *.index.json, resolved
  std::optional<std::vector<ParameterSpec>> parameters;
  // The file that describes the family, resolved; beside a config or a
  // checkpoint with one.
  Located<std::string> rules_path;
};

// How a `generic` tensor is laid over one mesh axis. Applied left to right over
// the mesh axes, as DTensor does: a dimension sharded by two axes is cut by the
// first, and each part is cut again by the second.
struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard, kStridedShard };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;           // of kShard and kStridedShard
  int64_t split_factor = 1;  // of kStridedShard: DTensor's _StridedShard
  Place place;
};

// A named mesh of `generic`: axis sizes and the side's ranks at their
// coordinates, row-major (the last axis fastest).
struct MeshSpec {
  std::string name;
  std::vector<std::string> axes;
  std::vector<int64_t> shape;
  std::vector<int64_t> ranks;  // Product(shape) of them, within the side
  Place place;
};

// One rule of `generic`: params whose name matches `match` (glob) are held by
// the mesh's ranks under these placements. The first matching rule counts.
struct TensorRule {
  std::string match;
  std::string mesh;
  std::vector<Placement> placements;  // one per mesh axis
  std::optional<std::string>
      rename;  // the buffer's name; "{name}" is the param's
  std::optional<DType> dtype;
  Place place;
};

// Half-open range of elements, rows or layers.
struct RangeSpec {
  int64_t begin = 0;
  int64_t end = 0;
  Place place;
};

// Stands in a flat buffer's names for the number of a layer.
inline constexpr std::string_view kLayerMark = "{layer}";

// A param, or some of its rows, row-major from element `offset` on of a flat
// buffer.
struct FlatEntry {
  std::string param;  // "{layer}" stands for the buffer's layer
  int64_t offset = 0;
  std::optional<RangeSpec> rows;
  Place place;
};

// One-dimensional tensors of `generic` that hold params one after the other, as
// systems that shard flat buffers do: each rank of the mesh holds a range of
// it. With `layers` a stack of them, one per layer.
struct FlatBufferSpec {
  std::string name;
  std::string mesh;
  // One of the two is set.
  std::vector<Placement> placements;  // one per mesh axis
  std::vector<RangeSpec> ranges;      // one per rank of the mesh
  int64_t length = 0;
  std::optional<DType> dtype;
  std::optional<RangeSpec> layers;
  std::vector<FlatEntry> entries;
  Place place;
};

struct GenericSpec {
  std::vector<MeshSpec> meshes;
  std::vector<TensorRule> tensors;
  std::vector<FlatBufferSpec> flat_buffers;
};

// Which logical expert each physical expert of a serving engine is. Physical
// experts are numbered over the ranks that share a layer's experts, those of
// rank 0 first. Several may be the same logical expert.
struct ExpertPlacement {
  enum class Kind : uint8_t { kLinear, kRoundRobin, kTable };
  Kind kind = Kind::kLinear;
  int64_t redundant_experts = 0;  // of kLinear: beyond one each
  // Of kTable: one list for all layers, or one per layer.
  std::vector<std::vector<int64_t>> physical_to_logical;
};

// How SGLang cuts the embedding.
enum class EmbeddingCut : uint8_t { kTensor, kAttention, kReplicated };

// How SGLang holds shared experts: as a module of their own, cut or whole, or
// fused into the others as the last physical expert of each rank.
enum class SharedExperts : uint8_t { kTensor, kReplicated, kFused };

// Whether tensor parallelism cuts the vision tower's weights, or each rank has
// all of them and a part of the images.
enum class EncoderCut : uint8_t { kWeights, kData };

// What computes vLLM's attention, where the tensors depend on it.
enum class AttentionBackend : uint8_t { kFlashMla, kFlashInfer };

struct SideSpec {
  std::string key;  // "source" or "destination", for messages
  Place place;
  Located<LayoutKind> layout;
  Located<int64_t> tensor_parallel{.value = 1};
  Located<int64_t> pipeline_parallel{.value = 1};
  Located<int64_t> virtual_pipeline_parallel{.value = 1};
  Located<int64_t> expert_parallel{.value = 1};           // not vLLM
  Located<bool> expert_parallel_enabled{.value = false};  // vLLM's flag
  Located<int64_t> expert_tensor_parallel{.value = 1};
  Located<int64_t> data_parallel{.value = 1};
  Located<int64_t> context_parallel{.value = 1};
  Located<int64_t> replicas{.value = 1};
  Located<std::vector<int64_t>> layers_per_stage;
  Located<int64_t> num_layers_in_first_pipeline_stage;
  Located<int64_t> num_layers_in_last_pipeline_stage;
  Located<int64_t> make_vocab_size_divisible_by{.value = 128};
  Located<DType> dtype;            // not given: the model's own
  Located<BlockScheme> quantized;  // not given: nothing is
  Located<std::string> version;
  Located<bool> fused_experts{.value = false};
  // The dim of stacked experts that FSDP cuts; not given: see FsdpLayout.
  Located<int64_t> expert_shard_dim;
  Located<ExpertPlacement> experts;           // vLLM, SGLang
  Located<std::string> moe_backend;           // vLLM, SGLang
  Located<DType> router_dtype;                // vLLM, SGLang
  Located<int64_t> dp_attention{.value = 1};  // SGLang: within tensor_parallel
  Located<bool> dp_lm_head{.value = false};   // SGLang
  Located<EmbeddingCut> embedding{.value = EmbeddingCut::kTensor};  // SGLang
  Located<SharedExperts> shared_experts{.value =
                                            SharedExperts::kTensor};  // SGLang
  // Rows of a gate and of an up block that alternate in an expert's fused
  // tensor; not given: all gate rows, then all up rows.
  Located<int64_t> moe_mlp_glu_interleave_size;
  // Megatron: A_log and D of Mamba mixers are fp32 whatever the dtype.
  Located<bool> mamba_fp32{.value = false};
  // The experts of a rank are one tensor, not one each.
  Located<bool> moe_single_grouped_weight{.value = false};
  Located<bool> mtp{.value = false};     // see MovesMtpLayers
  Located<bool> vision{.value = false};  // see MovesVisionTower
  Located<EncoderCut> mm_encoder_tp_mode{.value = EncoderCut::kWeights};
  Located<AttentionBackend> attention_backend{
      .value = AttentionBackend::kFlashMla};  // vLLM
  // vLLM, of a tied model: false if the engine has a head of its own.
  Located<bool> tie_word_embeddings{.value = true};
  GenericSpec generic;
};

// By what ranks of different hosts exchange messages. Only NCCL broadcasts.
enum class TransportKind : uint8_t { kNccl, kUcx };

struct TopologySpec {
  Place place;
  Located<TransportKind> transport{.value = TransportKind::kNccl};
  Located<int64_t> gpus_per_host;       // not given: one host
  Located<std::vector<int64_t>> hosts;  // per global rank
  Located<double> peer_gigabytes_per_second{.value = 370};
  Located<double> network_gigabytes_per_second{.value = 50};
  Located<std::string> machine;  // what is not given is as its file says
  Located<int64_t> hosts_per_nvlink_domain{.value = 1};
  Located<int64_t> gpus_per_nic{.value = 1};
  Located<int64_t> hosts_per_leaf;  // not given: all
  Located<bool> rails{.value = false};
  Located<double> spine_oversubscription{.value = 1};
};

// Which end of a pair of ranks moves the bytes of direct rounds.
enum class DirectKind : uint8_t { kPush, kPull };

// What refits send of what has not changed: nothing.
struct DeltaSpec {
  bool enabled = false;
  fb::DeltaChanges changes = fb::DeltaChanges::kSnapshot;
  int64_t dense_every = 20;  // 0: never for this reason
  bool check = true;
};

struct OptionsSpec {
  // How bytes travel between ranks that can map each other's memory.
  Located<fb::Mechanism> peer{.value = fb::Mechanism::kDirect};
  Located<DirectKind> direct{.value = DirectKind::kPush};
  Located<int64_t> bucket_bytes{.value = int64_t{256} << 20};
  Located<int64_t> staging_bytes{.value = int64_t{1} << 30};
  Located<int64_t> scratch_bytes{.value = int64_t{1} << 30};  // of a rank
  Located<int64_t> network_peers;             // not given: no limit
  Located<int64_t> direct_multiprocessors;    // not given: all
  Located<std::vector<std::string>> exclude;  // globs over param names
  Located<DeltaSpec> delta;
};

// What a job says, as "destination.tensor_parallel" and "4": for readers of its
// plan.
using JobFacts = std::map<std::string, std::string>;

struct Job {
  Place place;
  JobFacts facts;  // of all but the model
  ModelSpec model;
  SideSpec source;
  SideSpec destination;
  TopologySpec topology;
  OptionsSpec options;
  Located<bool> colocated{.value = false};
};

inline constexpr int64_t kRanksMax = 65536;  // of both sides together

// Whether multi-token-prediction layers are part of the job: a side says true
// and none says false.
bool MovesMtpLayers(const Job& job);

// The same of the vision tower.
bool MovesVisionTower(const Job& job);

// A job file larger than this is refused unread: no real job comes near it.
inline constexpr int64_t kJobBytesMax = int64_t{64} << 20;

// Reads and checks the form of a job: syntax, unknown keys (with the nearest
// known key), types, signs, unknown layout, dtype and placement names, keys
// that the side's layout does not have. Sizes are checked against the model by
// the layouts. `path` may be "-" for standard input (model paths are then
// relative to the working directory). Messages say that `reader` takes a job.
// Returns nullopt after an error.
std::optional<Job> ReadJob(const std::string& path, Diagnostics& diagnostics,
                           std::string_view reader);

// The same for a job that is no file: `file` has its text and the name to show
// in diagnostics, and paths in it are relative to `directory` ("": the working
// directory).
std::optional<Job> ReadJobText(std::shared_ptr<const SourceFile> file,
                               const std::string& directory,
                               Diagnostics& diagnostics,
                               std::string_view reader);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_JOB_H_
