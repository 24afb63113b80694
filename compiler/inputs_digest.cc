#include "compiler/inputs_digest.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/job/keys.h"
#include "plan/plan_file.h"

// Appends all members of `value`. A member more or less in the struct does not
// compile, so that none is forgotten here.
#define REFIT_APPEND_MEMBERS(...)    \
  const auto& [__VA_ARGS__] = value; \
  AppendAll(text, __VA_ARGS__)

namespace refit {
namespace {

// Becomes anything.
struct Anything {
  template <typename T>
  operator T() const;
};

// The number of a struct's members.
template <typename T, typename... Members>
constexpr size_t CountMembers() {
  if constexpr (requires { T{Members()..., Anything()}; }) {
    return CountMembers<T, Members..., Anything>();
  } else {
    return sizeof...(Members);
  }
}

template <typename Keys>
constexpr size_t CountKeyMembers(const Keys& keys) {
  size_t count = 0;
  ForEachMember(keys, [&](auto) { ++count; });
  return count;
}

// Every value is written so that no other value of its type is written alike,
// and ends with a space.

template <typename... Values>
void AppendAll(std::string& text, const Values&... values);

template <typename T>
requires std::is_integral_v<T> || std::is_enum_v<T>
void Append(std::string& text, T value) {
  absl::StrAppend(&text, static_cast<int64_t>(value), " ");
}

// With all its digits.
void Append(std::string& text, double value) {
  absl::StrAppendFormat(&text, "%.17g ", value);
}

// With its length, since it may hold anything.
void Append(std::string& text, std::string_view value) {
  absl::StrAppend(&text, value.size(), ":");
  text.append(value);
  text += ' ';
}
void Append(std::string& text, const std::string& value) {
  Append(text, std::string_view(value));
}

// Where the user wrote something changes nothing.
void Append(std::string&, const Place&) {}

template <typename T>
void Append(std::string& text, const std::vector<T>& values) {
  absl::StrAppend(&text, values.size(), "[");
  for (const T& value : values) AppendAll(text, value);
  text += "] ";
}

void Append(std::string& text, const Dims& values) {
  absl::StrAppend(&text, values.size(), "[");
  for (const int64_t value : values) Append(text, value);
  text += "] ";
}

template <typename T>
void Append(std::string& text, const std::optional<T>& value) {
  text += value.has_value() ? "some " : "none ";
  if (value.has_value()) AppendAll(text, *value);
}

// A default may be another thing than the same word, written.
template <typename T>
void Append(std::string& text, const Located<T>& value) {
  text += value.given ? "given " : "default ";
  AppendAll(text, value.value);
}

// The job.

void Append(std::string& text, const Placement& value) {
  REFIT_APPEND_MEMBERS(kind, dim, split_factor, place);
}

void Append(std::string& text, const MeshSpec& value) {
  REFIT_APPEND_MEMBERS(name, axes, shape, ranks, place);
}

void Append(std::string& text, const TensorRule& value) {
  REFIT_APPEND_MEMBERS(match, mesh, placements, rename, dtype, place);
}

void Append(std::string& text, const RangeSpec& value) {
  REFIT_APPEND_MEMBERS(begin, end, place);
}

void Append(std::string& text, const FlatEntry& value) {
  REFIT_APPEND_MEMBERS(param, offset, rows, place);
}

void Append(std::string& text, const FlatBufferSpec& value) {
  REFIT_APPEND_MEMBERS(name, mesh, placements, ranges, length, dtype, layers,
                       entries, place);
}

void Append(std::string& text, const GenericSpec& value) {
  REFIT_APPEND_MEMBERS(meshes, tensors, flat_buffers);
}

void Append(std::string& text, const ExpertPlacement& value) {
  REFIT_APPEND_MEMBERS(kind, redundant_experts, physical_to_logical);
}

void Append(std::string& text, const BlockScheme& value) {
  REFIT_APPEND_MEMBERS(name, block_rows, block_columns, scale_format, suffix);
}

// The members that the keys of a table fill, in the order of the struct: the
// order of the table is free.
template <typename Spec, typename Keys>
void AppendKeys(std::string& text, const Spec& spec, const Keys& keys);

// Nothing where the job does not have it: as before there was such a key.
void Append(std::string& text, const Located<DeltaSpec>& value) {
  if (!value.given) return;
  const auto& [enabled, changes, dense_every, check] = value.value;
  text += "delta ";
  AppendAll(text, enabled, changes, dense_every, check);
}

void Append(std::string& text, const SideSpec& value) {
  Append(text, value.key);
  AppendKeys(text, value, kSideKeys);
}

void Append(std::string& text, const TopologySpec& value) {
  AppendKeys(text, value, kTopologyKeys);
}

void Append(std::string& text, const OptionsSpec& value) {
  AppendKeys(text, value, kOptionsKeys);
}

// The model that a job names is read by now, and stands before it.
void Append(std::string&, const ModelSpec&) {}

void Append(std::string& text, const Job& value) {
  AppendKeys(text, value, kRootKeys);
}

// A member that no key fills would be in no digest.
static_assert(CountMembers<SideSpec>() == CountKeyMembers(kSideKeys) + 2);
static_assert(CountMembers<TopologySpec>() ==
              CountKeyMembers(kTopologyKeys) + 1);
static_assert(CountMembers<OptionsSpec>() == CountKeyMembers(kOptionsKeys));
static_assert(CountMembers<Job>() == CountKeyMembers(kRootKeys) + 2);

// The model.

void Append(std::string& text, const LatentAttention& value) {
  REFIT_APPEND_MEMBERS(query_rank, key_value_rank, nope_dim, rope_dim,
                       value_dim);
}

void Append(std::string& text, const MambaSizes& value) {
  REFIT_APPEND_MEMBERS(heads, head_dim, groups, sglang_groups, state);
}

void Append(std::string& text, const DeltaNetSizes& value) {
  REFIT_APPEND_MEMBERS(key_heads, value_heads, key_dim, value_dim);
}

void Append(std::string& text, const Rename& value) {
  AppendAll(text, value.first, value.second);
}

void Append(std::string& text, const Fusion& value) {
  REFIT_APPEND_MEMBERS(into, modules);
}

template <typename T>
void Append(std::string& text, absl::Span<const T> values) {
  absl::StrAppend(&text, values.size(), "[");
  for (const T& value : values) AppendAll(text, value);
  text += "] ";
}

void Append(std::string& text, const VllmTraits& value) {
  const auto& [known, renames, fused, fp32_router, output_bias, every_stage,
               cuts_shared_experts_of_token_parts, draft_has_prefix,
               query_key_value_down, token_parts_on_one_stage, block_scales,
               pipeline_parallel] = value;
  AppendAll(text, known, renames, fused, fp32_router, output_bias, every_stage,
            cuts_shared_experts_of_token_parts, draft_has_prefix);
  // Younger than the digest.
  if (!pipeline_parallel) text += "one_stage ";
  if (token_parts_on_one_stage) text += "token_parts_on_one_stage ";
  if (!block_scales) text += "no_block_scales ";
  if (query_key_value_down != VllmTraits().query_key_value_down) {
    AppendAll(text, std::string_view("joined_down"), query_key_value_down);
  }
}

void Append(std::string& text, const SglangTraits& value) {
  const auto& [known, renames, fused, fp32_router_since, head, shared_fusion,
               shared_fusion_experts, shared_fusion_expert_parallel, embedding,
               pipeline_parallel, dp_attention, redundant_experts, dense_layers,
               plain_tower, whole_in_tower, loads_expert_parallel] = value;
  AppendAll(text, known, renames, fused, fp32_router_since, head, shared_fusion,
            shared_fusion_experts, shared_fusion_expert_parallel, embedding,
            pipeline_parallel, dp_attention, redundant_experts, dense_layers,
            loads_expert_parallel);
  // Younger than the digest.
  if (plain_tower) text += "plain_tower ";
  if (!whole_in_tower.empty()) {
    AppendAll(text, std::string_view("whole_in_tower"), whole_in_tower);
  }
}

void Append(std::string& text, const MegatronTraits& value) {
  REFIT_APPEND_MEMBERS(known);
}

// A family that is compiled in has the same traits in every job.
void Append(std::string& text, const Family* value) {
  Append(text, value->model_type);
  if (!value->of_file) return;
  text += "rules ";
  AppendAll(text, value->vllm, value->sglang, value->megatron);
  // Younger than the digest.
  const Renames renames = value->transformers.renames_since_5;
  if (renames.data() != std::data(kTransformers5Names)) {
    AppendAll(text, std::string_view("transformers"), renames);
  }
  if (value->transformers.transposes_experts_since_5) text += "transposes ";
  if (value->transformers.fp32_norms_since_5) text += "fp32_norms ";
  if (!value->transformers.knows_tower_since_5) text += "unknown_tower ";
  if (!value->whole_tower) text += "always_cut ";
}

void Append(std::string& text, const Architecture& value) {
  const auto& [family, layers, mtp_layers, mtp_block, hidden, heads, kv_heads,
               head_dim, vocab, experts, expert_groups, tied, latent,
               output_gate, index_rope_interleaved, mamba, delta, tower_heads,
               output_groups, hash_layers, experts_per_token] = value;
  // Groups decide whether a job compiles, and no plan depends on them.
  static_cast<void>(expert_groups);
  AppendAll(text, family, layers, mtp_layers, mtp_block, hidden, heads,
            kv_heads, head_dim, vocab, experts, tied, latent, output_gate,
            mamba, delta);
  // Younger than the digest.
  if (index_rope_interleaved) text += "index_rope_interleaved ";
  if (tower_heads > 0)
    AppendAll(text, std::string_view("tower_heads"), tower_heads);
  if (output_groups > 0) {
    AppendAll(text, std::string_view("output_groups"), output_groups,
              hash_layers, experts_per_token);
  }
}

void Append(std::string& text, const IndexDim& value) {
  REFIT_APPEND_MEMBERS(numbers);
}

void Append(std::string& text, const Param& value) {
  REFIT_APPEND_MEMBERS(name, index, shape, dtype, role, first_layer, skip,
                       split);
}

void Append(std::string& text, const Skip& value) {
  REFIT_APPEND_MEMBERS(name, reason, detail);
}

void Append(std::string& text, const Model& value) {
  // What a checkpoint holds beside the params, and how, moves nothing.
  // Whether the tower is moved, its params say.
  const auto& [place, mtp, vision, own_family, architecture, params, skips,
               stored_beside, quant_method] = value;
  AppendAll(text, mtp, architecture, params, skips);
}

template <typename... Values>
void AppendAll(std::string& text, const Values&... values) {
  (Append(text, values), ...);
}

template <typename Spec, typename Keys>
void AppendKeys(std::string& text, const Spec& spec, const Keys& keys) {
  std::map<const void*, std::string> texts;
  ForEachKey(keys, [&](const auto& key) {
    const auto append = [&](auto member) {
      std::string& of_member = texts[&(spec.*member)];
      if constexpr (requires { (spec.*member).given; }) {
        if (key.info.in_digest_if_given) {
          if (!(spec.*member).given) return;
          of_member += key.info.name;
          of_member += ' ';
        }
      }
      AppendAll(of_member, spec.*member);
    };
    std::apply([&](auto... member) { (append(member), ...); }, key.members);
  });
  for (const auto& [address, member] : texts) text += member;
}

}  // namespace

std::string CanonicalInputs(const Job& job, const Model& model) {
  std::string text;
  AppendAll(text, model, job);
  return text;
}

fb::Digest InputsDigest(const Job& job, const Model& model) {
  const std::string text = CanonicalInputs(job, model);
  return DigestOf(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

}  // namespace refit
