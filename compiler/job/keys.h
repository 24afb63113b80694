// The table of a job's keys. It drives how a job is read, the hints for keys
// that are misspelled or in the wrong object, the inputs digest, and
// docs/jobs.md.
#ifndef REFIT_COMPILER_JOB_KEYS_H_
#define REFIT_COMPILER_JOB_KEYS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/job.h"
#include "compiler/job/object_reader.h"

namespace refit {

// Objects of a job that users mix up. Each has keys that no other has.
enum class JobObject : uint8_t { kRoot, kModel, kSide, kTopology, kOptions };

// The layouts whose sides have a key.
using LayoutSet = unsigned;
constexpr LayoutSet SetOf(LayoutKind kind) {
  return 1u << static_cast<unsigned>(kind);
}
inline constexpr LayoutSet kMegatron = SetOf(LayoutKind::kMegatron);
inline constexpr LayoutSet kFsdp = SetOf(LayoutKind::kFsdp);
inline constexpr LayoutSet kVllm = SetOf(LayoutKind::kVllm);
inline constexpr LayoutSet kSglang = SetOf(LayoutKind::kSglang);
inline constexpr LayoutSet kGeneric = SetOf(LayoutKind::kGeneric);
inline constexpr LayoutSet kEngines = kVllm | kSglang;
inline constexpr LayoutSet kFrameworks = kMegatron | kFsdp | kEngines;
inline constexpr LayoutSet kEvery = kFrameworks | kGeneric;

// "megatron", "fsdp" …
std::vector<std::string_view> LayoutNames(LayoutSet layouts = kEvery);

inline constexpr IntegerRange kSizeRange = {.min = 1, .max = 1'000'000};
inline constexpr IntegerRange kBytesRange = {.min = 4096,
                                             .max = int64_t{1} << 40};

// What is said of every key.
struct KeyInfo {
  std::string_view name;
  LayoutSet layouts = kEvery;  // of a side's key
  // Counts ranks along an axis, so that 1 is right for a layout without it.
  bool is_axis = false;
  IntegerRange range = {};  // of integers
  // As the docs say it; "": the member's own value.
  std::string_view default_text = "";
  std::string_view help = "";  // one line of Markdown
  // A key that is younger than the digest of inputs: a job without it has the
  // digest that it had.
  bool in_digest_if_given = false;
};

// A key, and the members of the object's struct that it fills. A key without
// members is read together with another one.
template <typename... Members>
struct JobKey {
  KeyInfo info;
  std::tuple<Members...> members;
};
template <typename... Members>
constexpr JobKey<Members...> Key(KeyInfo info, Members... members) {
  return {info, {members...}};
}

// Keys are read in this order, and hints list them in this order.

inline constexpr auto kRootKeys = std::tuple(
    Key({.name = "model",
         .default_text = "required",
         .help = "see [`model`](#model)"},
        &Job::model),
    Key({.name = "source",
         .default_text = "required",
         .help = "the side that has the new weights"},
        &Job::source),
    Key({.name = "destination",
         .default_text = "required",
         .help = "the side that gets them"},
        &Job::destination),
    Key({.name = "topology",
         .default_text = "one host",
         .help = "see [`topology`](#topology)"},
        &Job::topology),
    Key({.name = "options",
         .default_text = "`{}`",
         .help = "see [`options`](#options)"},
        &Job::options),
    Key({.name = "colocated", .help = "see [`colocated`](#colocated)"},
        &Job::colocated));

// Of a model that is an object; job.cc reads them together.
inline constexpr auto kModelKeys = std::tuple(
    Key({.name = "config",
         .help = "the path of a config.json; alone the same as the path "
                 "itself"}),
    Key({.name = "safetensors",
         .help = "the directory of a checkpoint, or its index.json"}),
    Key({.name = "parameters", .help = "an array of parameters"}),
    Key({.name = "rules",
         .default_text = "a known family",
         .help = "the path of a file that describes the model's family, "
                 "beside `config` or `safetensors`; see "
                 "[Rules of a family](#rules-of-a-family)"}));

inline constexpr auto kSideKeys = std::tuple(
    Key({.name = "layout",
         .default_text = "required",
         .help = "`megatron`, `fsdp`, `vllm`, `sglang`, `generic`"},
        &SideSpec::layout),
    Key({.name = "tensor_parallel",
         .layouts = kFrameworks,
         .is_axis = true,
         .range = kSizeRange,
         .help = "the framework's size. FSDP: FSDP2 inside tensor parallelism, "
                 "dense models only"},
        &SideSpec::tensor_parallel),
    Key({.name = "pipeline_parallel",
         .layouts = kMegatron | kEngines,
         .is_axis = true,
         .range = kSizeRange,
         .help = "the framework's size"},
        &SideSpec::pipeline_parallel),
    Key({.name = "virtual_pipeline_parallel",
         .layouts = kMegatron,
         .is_axis = true,
         .range = kSizeRange,
         .help = "the framework's size"},
        &SideSpec::virtual_pipeline_parallel),
    Key({.name = "expert_tensor_parallel",
         .layouts = kMegatron,
         .is_axis = true,
         .range = kSizeRange,
         .help = "the framework's size. Megatron Core's own default is its "
                 "tensor parallelism"},
        &SideSpec::expert_tensor_parallel),
    Key({.name = "data_parallel",
         .layouts = kFrameworks,
         .is_axis = true,
         .range = kSizeRange,
         .help = "copies of the dense weights inside one trainer or engine. "
                 "Megatron: its ranks / (tensor × pipeline × context "
                 "parallelism), as Megatron counts it; experts are spread "
                 "inside. So 16 GPUs with TP2 and EP4 have 8. "
                 "FSDP: the ranks that share the weights. SGLang: whole "
                 "engines (its `dp_size` without `dp_attention`)"},
        &SideSpec::data_parallel),
    Key({.name = "context_parallel",
         .layouts = kMegatron,
         .is_axis = true,
         .range = kSizeRange,
         .help = "the framework's size"},
        &SideSpec::context_parallel),
    Key({.name = "replicas",
         .layouts = kFrameworks,
         .is_axis = true,
         .range = kSizeRange,
         .help = "independent copies of the whole side: several engines, "
                 "HSDP's replicate axis. Slowest in the rank order"},
        &SideSpec::replicas),
    Key({.name = "num_layers_in_first_pipeline_stage",
         .layouts = kMegatron,
         .range = kSizeRange,
         .default_text = "even",
         .help = "layers of the first stage"},
        &SideSpec::num_layers_in_first_pipeline_stage),
    Key({.name = "num_layers_in_last_pipeline_stage",
         .layouts = kMegatron,
         .range = kSizeRange,
         .default_text = "even",
         .help = "layers of the last stage"},
        &SideSpec::num_layers_in_last_pipeline_stage),
    Key({.name = "make_vocab_size_divisible_by",
         .layouts = kMegatron,
         .range = kSizeRange,
         .help = "unit of vocabulary padding, times TP"},
        &SideSpec::make_vocab_size_divisible_by),
    Key({.name = "moe_mlp_glu_interleave_size",
         .layouts = kMegatron,
         .range = kSizeRange,
         .default_text = "off",
         .help = "gate and up rows of an expert alternate in blocks of this "
                 "many rows"},
        &SideSpec::moe_mlp_glu_interleave_size),
    Key({.name = "dp_attention",
         .layouts = kSglang,
         .is_axis = true,
         .range = kSizeRange,
         .help = "copies of the attention within `tensor_parallel` "
                 "(`--attn-dp-size`; before: `--dp-size` with "
                 "`--enable-dp-attention`)"},
        &SideSpec::dp_attention),
    Key({.name = "expert_parallel",
         .layouts = kFrameworks,
         .is_axis = true,
         .range = kSizeRange,
         .default_text = "1; vllm: `false`",
         .help = "see [Expert parallelism](#expert-parallelism)"},
        &SideSpec::expert_parallel, &SideSpec::expert_parallel_enabled),
    Key({.name = "layers_per_stage",
         .layouts = kMegatron | kEngines,
         .range = {.min = 0, .max = kSizeRange.max},
         .default_text = "even",
         .help = "layers of each stage. With virtual stages: chunk 0 of every "
                 "stage, then chunk 1 …"},
        &SideSpec::layers_per_stage),
    Key({.name = "dtype",
         .default_text = "the model's",
         .help = "see [`dtype`](#dtype)"},
        &SideSpec::dtype, &SideSpec::quantized),
    Key({.name = "scale_fmt",
         .default_text = "fp32 scales",
         .help = "`\"ue8m0\"` beside `fp8_e4m3_block128`: scales are powers of "
                 "two, as a `quantization_config` names it"}),
    Key({.name = "version",
         .layouts = kFrameworks,
         .default_text = "newest release",
         .help = "names and dtypes of that release, see "
                 "[`version`](#version)"},
        &SideSpec::version),
    Key({.name = "mamba_fp32",
         .layouts = kMegatron,
         .help = "`A_log` and `D` of Mamba mixers stay fp32, because the "
                 "trainer leaves them out of `Float16Module`'s cast"},
        &SideSpec::mamba_fp32),
    Key({.name = "fused_experts",
         .layouts = kFsdp,
         .help = "a layer's experts stacked as in transformers 5: "
                 "`mlp.experts.gate_up_proj`, `mlp.experts.down_proj`"},
        &SideSpec::fused_experts),
    Key({.name = "expert_shard_dim",
         .layouts = kFsdp,
         .range = {.min = 0, .max = 1},
         .default_text = "0 or 1",
         .help = "the dimension of stacked experts that FSDP cuts. 0: between "
                 "experts. 1: each expert's rows (NeMo Automodel, VeOmni). "
                 "Default as torchtitan: 1 with `expert_parallel` and more "
                 "ranks than experts, else 0"},
        &SideSpec::expert_shard_dim),
    Key({.name = "moe_single_grouped_weight",
         .layouts = kMegatron,
         .help = "one tensor for all experts of a rank"},
        &SideSpec::moe_single_grouped_weight),
    Key({.name = "mtp",
         .help = "`true` moves the multi-token-prediction layers too. One side "
                 "may say it for both; `false` on either side leaves them out. "
                 "An error for models without such layers, and on an SGLang "
                 "side, whose draft model is a separate worker"},
        &SideSpec::mtp),
    Key({.name = "vision",
         .help = "`true` moves the vision tower too, and what joins it to the "
                 "language model. Said as `mtp`. An error for models without a "
                 "tower, and for layouts that do not know it. "
                 "[`options.exclude`](#options) skips parts of it by name. See "
                 "[Vision towers](layouts.md#vision-towers)",
         .in_digest_if_given = true},
        &SideSpec::vision),
    Key({.name = "mm_encoder_tp_mode",
         .layouts = kEngines,
         .default_text = "`\"weights\"`",
         .help = "vLLM's own flag, beside `vision`. `weights`: TP cuts the "
                 "vision tower. `data`: each rank holds it whole "
                 "(SGLang: `--mm-enable-dp-encoder`)",
         .in_digest_if_given = true},
        &SideSpec::mm_encoder_tp_mode),
    Key({.name = "experts",
         .layouts = kEngines,
         .default_text = "linear",
         .help = "which experts each rank holds, see "
                 "[`experts`](#experts); needs expert parallelism"},
        &SideSpec::experts),
    Key({.name = "moe_backend",
         .layouts = kEngines,
         .default_text = "`\"triton\"`",
         .help = "what the engine's MoE backend does to its weights after "
                 "loading. `flashinfer_cutlass` has up before gate; SGLang's "
                 "`triton_kernel` transposes experts. Others are refused with "
                 "what to do instead ([layouts.md](layouts.md))"},
        &SideSpec::moe_backend),
    Key({.name = "router_dtype",
         .layouts = kEngines,
         .default_text = "the engine's",
         .help = "`bf16`, `fp16` or `fp32`: the dtype of the engine's routers. "
                 "vLLM's nemotron_h needs `\"fp32\"` on GPUs other than Hopper "
                 "and Blackwell, and with `VLLM_BATCH_INVARIANT=1`"},
        &SideSpec::router_dtype),
    Key({.name = "attention_backend",
         .layouts = kVllm,
         .default_text = "`\"flashmla\"`",
         .help =
             "what computes vLLM's attention: `flashmla` or `flashinfer`. It "
             "says to how many heads vLLM pads deepseek_v4's `attn_sink`",
         .in_digest_if_given = true},
        &SideSpec::attention_backend),
    Key({.name = "tie_word_embeddings",
         .layouts = kVllm,
         .default_text = "the model's",
         .help =
             "`false` for a tied model whose engine has a head of its own, "
             "because the checkpoint that it loaded stores one. See "
             "[layouts.md](layouts.md#tied-models-with-a-head-of-their-own)",
         .in_digest_if_given = true},
        &SideSpec::tie_word_embeddings),
    Key({.name = "dp_lm_head",
         .layouts = kSglang,
         .help = "cut the head as the attention (`--enable-dp-lm-head`)"},
        &SideSpec::dp_lm_head),
    Key({.name = "embedding",
         .layouts = kSglang,
         .default_text = "by `dp_attention`",
         .help = "`tensor`: cut by TP. `attention`: by TP / `dp_attention`; "
                 "the default with `dp_attention`. `replicated`: whole"},
        &SideSpec::embedding),
    Key({.name = "shared_experts",
         .layouts = kSglang,
         .default_text = "as the engine does",
         .help = "`tensor`: separate modules, cut by TP "
                 "(`--disable-shared-experts-fusion`). `replicated`: whole "
                 "(all-to-all backends). `fused`: one more physical expert on "
                 "each rank. The engine fuses qwen3_next, and with "
                 "`expert_parallel` 1 GLM and deepseek_v3 with 256 experts "
                 "([layouts.md](layouts.md))"},
        &SideSpec::shared_experts),
    Key({.name = "meshes",
         .layouts = kGeneric,
         .default_text = "required",
         .help = "see [`generic`](#generic)"},
        &SideSpec::generic),
    Key({.name = "tensors",
         .layouts = kGeneric,
         .default_text = "required without `flat_buffers`",
         .help = "rules that place parameters, see [`generic`](#generic)"}),
    Key({.name = "flat_buffers",
         .layouts = kGeneric,
         .default_text = "`[]`",
         .help = "see [Flat buffers](#flat-buffers)"}));

inline constexpr auto kTopologyKeys = std::tuple(
    Key({.name = "gpus_per_host",
         .range = {.min = 1, .max = kRanksMax},
         .default_text = "all on one host",
         .help = "ranks fill hosts in order, destination after source. If the "
                 "source does not fill its last host, the first destination "
                 "ranks stand there too. Give `hosts` if that is wrong"},
        &TopologySpec::gpus_per_host),
    Key({.name = "hosts",
         .range = {.min = 0, .max = kRanksMax - 1},
         .default_text = "by `gpus_per_host`",
         .help = "one number per global rank; ranks with equal numbers share a "
                 "host"},
        &TopologySpec::hosts),
    Key({.name = "peer_gigabytes_per_second",
         .help = "per rank and direction inside a host (measured on 8 × H200, "
                 "NVLink, NCCL 2.28.9)"},
        &TopologySpec::peer_gigabytes_per_second),
    Key({.name = "network_gigabytes_per_second",
         .help = "per NIC and direction between hosts (400 Gb/s)"},
        &TopologySpec::network_gigabytes_per_second),
    Key({.name = "transport",
         .default_text = "`\"nccl\"`",
         .help = "what workers of different hosts exchange messages by: "
                 "`\"nccl\"`, or `\"ucx\"`, which does not broadcast, so "
                 "that hosts pass on to each other what several of them want",
         .in_digest_if_given = true},
        &TopologySpec::transport),
    Key({.name = "machine",
         .default_text = "none",
         .help = "`hgx-h100`, `hgx-h200`, `hgx-b200` or `gb200-nvl72`: the "
                 "keys that the job does not give are this machine's, see "
                 "[topology.md](topology.md)",
         .in_digest_if_given = true},
        &TopologySpec::machine),
    Key({.name = "hosts_per_nvlink_domain",
         .range = {.min = 1, .max = kRanksMax},
         .help = "hosts whose GPUs NVLink joins, counted from host 0. "
                 "Ranks of such hosts send at the speed inside a host",
         .in_digest_if_given = true},
        &TopologySpec::hosts_per_nvlink_domain),
    Key({.name = "gpus_per_nic",
         .range = {.min = 1, .max = kRanksMax},
         .help = "neighboring GPUs of a host that share a NIC",
         .in_digest_if_given = true},
        &TopologySpec::gpus_per_nic),
    Key({.name = "hosts_per_leaf",
         .range = {.min = 1, .max = kRanksMax},
         .default_text = "all",
         .help = "hosts, counted from host 0, whose NICs are on one leaf "
                 "switch; with `rails` on one leaf for each NIC of a host",
         .in_digest_if_given = true},
        &TopologySpec::hosts_per_leaf),
    Key({.name = "rails",
         .help = "the first NICs of hosts are on one leaf, the second on "
                 "another, and so on",
         .in_digest_if_given = true},
        &TopologySpec::rails),
    Key({.name = "spine_oversubscription",
         .help = "how many times faster the NICs of a leaf are together than "
                 "its way to the other leaves. At least 1. Each of its hosts "
                 "counts with as many NICs as the host of the plan that has "
                 "most",
         .in_digest_if_given = true},
        &TopologySpec::spine_oversubscription));

inline constexpr auto kOptionsKeys = std::tuple(
    Key({.name = "bucket_bytes",
         .range = kBytesRange,
         .help = "largest staged message, see "
                 "[`bucket_bytes`](#bucket_bytes)"},
        &OptionsSpec::bucket_bytes),
    Key({.name = "staging_bytes",
         .range = kBytesRange,
         .help = "largest staging arena of a rank, at least twice "
                 "`bucket_bytes`. What it sends and what it receives share it"},
        &OptionsSpec::staging_bytes),
    Key({.name = "scratch_bytes",
         .range = kBytesRange,
         .help = "most memory of a rank for quantization, see "
                 "[`scratch_bytes`](#scratch_bytes)"},
        &OptionsSpec::scratch_bytes),
    Key({.name = "network_peers",
         .range = {.min = 1, .max = kRanksMax},
         .default_text = "no limit",
         .help = "most ranks of other hosts that a rank exchanges with. "
                 "`refitc` refuses a job whose plan has more, see "
                 "[`network_peers`](#network_peers)",
         .in_digest_if_given = true},
        &OptionsSpec::network_peers),
    Key({.name = "direct_multiprocessors",
         .range = {.min = 1, .max = 1024},
         .default_text = "all",
         .help =
             "most multiprocessors of a GPU that move bytes in direct "
             "rounds, see [`direct_multiprocessors`](#direct_multiprocessors)",
         .in_digest_if_given = true},
        &OptionsSpec::direct_multiprocessors),
    Key({.name = "peer",
         .default_text = "`\"direct\"`",
         .help = "how bytes travel inside a host, see [`peer`](#peer)"},
        &OptionsSpec::peer),
    Key({.name = "direct",
         .default_text = "`\"push\"`",
         .help = "which rank of a pair copies in direct rounds, sender or "
                 "receiver, see [`direct`](#direct)",
         .in_digest_if_given = true},
        &OptionsSpec::direct),
    Key({.name = "exclude",
         .default_text = "`[]`",
         .help = "globs of parameters that do not move. The plan declares them "
                 "as skips. A glob may match nothing, so that one list serves "
                 "many models; `--stats` counts the skips. Excluding "
                 "everything is an error"},
        &OptionsSpec::exclude),
    Key({.name = "delta",
         .default_text = "`false`",
         .help = "refits send only what changed, see [`delta`](#delta)"},
        &OptionsSpec::delta));

// Calls `visit(key)` for each key of a table.
template <typename Keys, typename Visit>
constexpr void ForEachKey(const Keys& keys, Visit visit) {
  std::apply([&](const auto&... key) { (visit(key), ...); }, keys);
}

// Calls `visit(member)` for each pointer to a member that the table fills.
template <typename Keys, typename Visit>
constexpr void ForEachMember(const Keys& keys, Visit visit) {
  ForEachKey(keys, [&](const auto& key) {
    std::apply([&](auto... member) { (visit(member), ...); }, key.members);
  });
}

// The words of a key that takes one of several.
template <typename T>
struct Word {
  std::string_view name;
  T value;
};
// `kMark` stands on both sides of each word in messages.
template <typename T>
struct Words;
template <>
struct Words<EmbeddingCut> {
  static constexpr std::string_view kMark = "";
  static constexpr Word<EmbeddingCut> kAll[] = {
      {"tensor", EmbeddingCut::kTensor},
      {"attention", EmbeddingCut::kAttention},
      {"replicated", EmbeddingCut::kReplicated}};
};
template <>
struct Words<SharedExperts> {
  static constexpr std::string_view kMark = "";
  static constexpr Word<SharedExperts> kAll[] = {
      {"tensor", SharedExperts::kTensor},
      {"replicated", SharedExperts::kReplicated},
      {"fused", SharedExperts::kFused}};
};
template <>
struct Words<EncoderCut> {
  static constexpr std::string_view kMark = "\"";
  static constexpr Word<EncoderCut> kAll[] = {{"weights", EncoderCut::kWeights},
                                              {"data", EncoderCut::kData}};
};
template <>
struct Words<AttentionBackend> {
  static constexpr std::string_view kMark = "\"";
  static constexpr Word<AttentionBackend> kAll[] = {
      {"flashmla", AttentionBackend::kFlashMla},
      {"flashinfer", AttentionBackend::kFlashInfer}};
};
template <>
struct Words<DType> {
  static constexpr std::string_view kMark = "";
  static constexpr Word<DType> kAll[] = {
      {"bf16", DType::kBf16}, {"fp16", DType::kFp16}, {"fp32", DType::kFp32}};
};
template <>
struct Words<fb::Mechanism> {
  static constexpr std::string_view kMark = "\"";
  static constexpr Word<fb::Mechanism> kAll[] = {
      {"direct", fb::Mechanism::kDirect}, {"staged", fb::Mechanism::kStaged}};
};
template <>
struct Words<TransportKind> {
  static constexpr std::string_view kMark = "\"";
  static constexpr Word<TransportKind> kAll[] = {{"nccl", TransportKind::kNccl},
                                                 {"ucx", TransportKind::kUcx}};
};
template <>
struct Words<DirectKind> {
  static constexpr std::string_view kMark = "\"";
  static constexpr Word<DirectKind> kAll[] = {{"push", DirectKind::kPush},
                                              {"pull", DirectKind::kPull}};
};

template <>
struct Words<fb::DeltaChanges> {
  static constexpr std::string_view kMark = "\"";
  static constexpr Word<fb::DeltaChanges> kAll[] = {
      {"snapshot", fb::DeltaChanges::kSnapshot},
      {"bitmap", fb::DeltaChanges::kBitmap}};
};

// Reads a key that takes one of several words.
template <typename T>
requires requires { Words<T>::kAll; }
void ReadMember(ObjectReader& reader, const KeyInfo& key, Located<T>& target) {
  std::vector<std::string_view> words;
  std::vector<std::string> marked;
  for (const Word<T>& word : Words<T>::kAll) {
    words.push_back(word.name);
    marked.push_back(
        absl::StrFormat("%s%s%s", Words<T>::kMark, word.name, Words<T>::kMark));
  }
  const size_t found =
      reader.Word(key.name, words, Alternatives({marked.begin(), marked.end()}),
                  target.place);
  if (found == words.size()) return;
  target.value = Words<T>::kAll[found].value;
  target.given = true;
}

// Reads options.delta: a bool, or an object of its own keys.
void ReadMember(ObjectReader& reader, const KeyInfo& key,
                Located<DeltaSpec>& target);

// Reads a key of one of the types of ObjectReader::Read.
template <typename T>
void ReadMember(ObjectReader& reader, const KeyInfo& key, Located<T>& target) {
  reader.Read(key.name, key.range, target);
}

// Reports the keys of `reader`, which reads an object of kind `here`, that are
// keys of another kind, and of which.
void RefuseKeysOfOthers(ObjectReader& reader, JobObject here);

// The row of each key of an object's table in docs/jobs.md.
std::vector<std::string> DocumentedKeys(JobObject object);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_KEYS_H_
