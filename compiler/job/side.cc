#include "compiler/job/side.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/key_homes.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr IntegerRange kSizeRange = {.min = 1, .max = 1'000'000};

using LayoutSet = unsigned;
constexpr LayoutSet SetOf(LayoutKind kind) {
  return 1u << static_cast<unsigned>(kind);
}
constexpr LayoutSet kMegatron = SetOf(LayoutKind::kMegatron);
constexpr LayoutSet kFsdp = SetOf(LayoutKind::kFsdp);
constexpr LayoutSet kVllm = SetOf(LayoutKind::kVllm);
constexpr LayoutSet kSglang = SetOf(LayoutKind::kSglang);
constexpr LayoutSet kGeneric = SetOf(LayoutKind::kGeneric);
constexpr LayoutSet kFrameworks = kMegatron | kFsdp | kVllm | kSglang;
constexpr LayoutSet kEvery = kFrameworks | kGeneric;

struct LayoutInfo {
  LayoutKind kind;
  std::string_view name;
};
constexpr std::array kLayouts = {
    LayoutInfo{LayoutKind::kMegatron, "megatron"},
    LayoutInfo{LayoutKind::kFsdp, "fsdp"},
    LayoutInfo{LayoutKind::kVllm, "vllm"},
    LayoutInfo{LayoutKind::kSglang, "sglang"},
    LayoutInfo{LayoutKind::kGeneric, "generic"},
};

struct IntegerKey {
  std::string_view name;
  Located<int64_t> SideSpec::*target;
  LayoutSet layouts;
  // Counts ranks along an axis, so that 1 is right for a layout without it.
  bool is_axis;
};
constexpr std::array kIntegerKeys = {
    IntegerKey{"tensor_parallel", &SideSpec::tensor_parallel, kFrameworks,
               true},
    IntegerKey{"pipeline_parallel", &SideSpec::pipeline_parallel,
               kMegatron | kVllm | kSglang, true},
    IntegerKey{"virtual_pipeline_parallel",
               &SideSpec::virtual_pipeline_parallel, kMegatron, true},
    IntegerKey{"expert_tensor_parallel", &SideSpec::expert_tensor_parallel,
               kMegatron, true},
    IntegerKey{"data_parallel", &SideSpec::data_parallel, kFrameworks, true},
    IntegerKey{"context_parallel", &SideSpec::context_parallel, kMegatron,
               true},
    IntegerKey{"replicas", &SideSpec::replicas, kFrameworks, true},
    IntegerKey{"num_layers_in_first_pipeline_stage",
               &SideSpec::num_layers_in_first_pipeline_stage, kMegatron, false},
    IntegerKey{"num_layers_in_last_pipeline_stage",
               &SideSpec::num_layers_in_last_pipeline_stage, kMegatron, false},
    IntegerKey{"make_vocab_size_divisible_by",
               &SideSpec::make_vocab_size_divisible_by, kMegatron, false},
    IntegerKey{"moe_mlp_glu_interleave_size",
               &SideSpec::moe_mlp_glu_interleave_size, kMegatron, false},
    IntegerKey{"dp_attention", &SideSpec::dp_attention, kSglang, true},
};

template <typename T>
struct Choice {
  std::string_view name;
  T value;
};
constexpr std::array kEmbeddingCuts = {
    Choice<EmbeddingCut>{"tensor", EmbeddingCut::kTensor},
    Choice<EmbeddingCut>{"attention", EmbeddingCut::kAttention},
    Choice<EmbeddingCut>{"replicated", EmbeddingCut::kReplicated},
};
constexpr std::array kRouterDTypes = {
    Choice<DType>{"bf16", DType::kBf16},
    Choice<DType>{"fp16", DType::kFp16},
    Choice<DType>{"fp32", DType::kFp32},
};
constexpr std::array kSharedExperts = {
    Choice<SharedExperts>{"tensor", SharedExperts::kTensor},
    Choice<SharedExperts>{"replicated", SharedExperts::kReplicated},
    Choice<SharedExperts>{"fused", SharedExperts::kFused},
};

std::vector<std::string_view> LayoutNames(LayoutSet layouts = kEvery) {
  std::vector<std::string_view> names;
  for (const LayoutInfo& info : kLayouts) {
    if ((SetOf(info.kind) & layouts) != 0) names.push_back(info.name);
  }
  return names;
}

// Reads a side's keys; each key is asked whether the layout has it.
class SideReader {
 public:
  SideReader(const ValueReader& values, const JsonValue& value, std::string key)
      : reader_(values, value, key) {
    side_.key = std::move(key);
    side_.place = reader_.place();
  }

  SideSpec Read() {
    ReadLayout();
    for (const IntegerKey& key : kIntegerKeys) ReadInteger(key);
    ReadExpertParallel();
    if (Has("layers_per_stage", kMegatron | kVllm | kSglang)) {
      reader_.Integers("layers_per_stage", {.min = 0, .max = kSizeRange.max},
                       side_.layers_per_stage);
    }
    ReadSideDType();
    if (Has("version", kFrameworks)) {
      reader_.String("version", side_.version);
    }
    if (Has("mamba_fp32", kMegatron)) {
      reader_.Bool("mamba_fp32", side_.mamba_fp32);
    }
    if (Has("fused_experts", kFsdp)) {
      reader_.Bool("fused_experts", side_.fused_experts);
    }
    if (Has("expert_shard_dim", kFsdp)) {
      reader_.Integer("expert_shard_dim", {.min = 0, .max = 1},
                      side_.expert_shard_dim);
    }
    if (Has("moe_single_grouped_weight", kMegatron)) {
      reader_.Bool("moe_single_grouped_weight",
                   side_.moe_single_grouped_weight);
    }
    if (Has("mtp", kEvery)) reader_.Bool("mtp", side_.mtp);
    if (Has("experts", kVllm | kSglang)) {
      ReadExpertPlacement(reader_, side_.layout.value, side_.experts);
    }
    if (Has("moe_backend", kVllm | kSglang)) {
      reader_.String("moe_backend", side_.moe_backend);
    }
    if (Has("router_dtype", kVllm | kSglang)) {
      ReadChoice("router_dtype", kRouterDTypes, side_.router_dtype);
    }
    if (Has("dp_lm_head", kSglang)) {
      reader_.Bool("dp_lm_head", side_.dp_lm_head);
    }
    if (Has("embedding", kSglang)) {
      // With attention data parallelism each part of the ranks embeds the
      // tokens of its own requests.
      if (side_.dp_attention.value > 1) {
        side_.embedding.value = EmbeddingCut::kAttention;
      }
      ReadChoice("embedding", kEmbeddingCuts, side_.embedding);
    }
    if (Has("shared_experts", kSglang)) {
      ReadChoice("shared_experts", kSharedExperts, side_.shared_experts);
    }
    // Without a known layout only a side that looks generic is read as such.
    const bool is_generic = layouts_ == kGeneric;
    const bool has_meshes = Has("meshes", kGeneric);
    const bool has_tensors = Has("tensors", kGeneric);
    const bool has_flat_buffers = Has("flat_buffers", kGeneric);
    if (is_generic && has_meshes && has_tensors && has_flat_buffers) {
      side_.generic = ReadGeneric(reader_);
    }
    RefuseKeysOfOthers(reader_, JobObject::kSide);
    reader_.RejectOtherKeys();
    return std::move(side_);
  }

 private:
  void Report(const Place& place, std::string message) {
    reader_.values().diagnostics().Error(place, std::move(message));
  }

  void ReadLayout() {
    const std::string wanted = Alternatives(LayoutNames());
    const JsonValue* value = reader_.Require("layout", wanted);
    if (value == nullptr) return;
    const std::string* name =
        reader_.values().String(*value, reader_.PathOf("layout"), wanted);
    if (name == nullptr) return;
    const auto info =
        std::find_if(kLayouts.begin(), kLayouts.end(),
                     [&](const LayoutInfo& i) { return i.name == *name; });
    const Place place = reader_.values().PlaceOf(*value);
    if (info == kLayouts.end()) {
      const std::string nearest = NearestWord(*name, LayoutNames());
      Report(place,
             nearest.empty()
                 ? absl::StrFormat("unknown layout %s; wanted %s",
                                   Quoted(*name), wanted)
                 : absl::StrFormat("unknown layout %s; did you mean \"%s\"?",
                                   Quoted(*name), nearest));
      return;
    }
    side_.layout = {.value = info->kind, .place = place, .given = true};
    layouts_ = SetOf(info->kind);
  }

  // Whether a key that `layouts` have is to be read; reports it in a side that
  // does not have it.
  bool Has(std::string_view key, LayoutSet layouts) {
    if ((layouts & layouts_) != 0) {
      reader_.Find(key);
      return true;
    }
    reader_.Refuse(key, absl::StrFormat("%s is a key of layout %s; %s is %s",
                                        reader_.PathOf(key),
                                        Alternatives(LayoutNames(layouts)),
                                        reader_.PathOf("layout"),
                                        LayoutName(side_.layout.value)));
    return false;
  }

  void ReadInteger(const IntegerKey& key) {
    const JsonValue* value = reader_.Peek(key.name);
    Located<int64_t>& target = side_.*key.target;
    const bool is_one = value != nullptr && value->AsInteger() != nullptr &&
                        *value->AsInteger() == 1;
    if ((key.is_axis && is_one) || Has(key.name, key.layouts)) {
      reader_.Integer(key.name, kSizeRange, target);
    }
  }

  void ReadExpertParallel() {
    side_.expert_parallel.place = side_.place;
    side_.expert_parallel_enabled.place = side_.place;
    if (layouts_ == kEvery) {
      reader_.Find("expert_parallel");  // of which type the layout would say
    } else if (layouts_ == kVllm) {
      reader_.Bool("expert_parallel", side_.expert_parallel_enabled);
    } else {
      ReadInteger({"expert_parallel", &SideSpec::expert_parallel,
                   kMegatron | kFsdp | kSglang, true});
    }
  }

  // Without the key `target` keeps its value.
  template <typename T, size_t kCount>
  void ReadChoice(std::string_view key,
                  const std::array<Choice<T>, kCount>& choices,
                  Located<T>& target) {
    const JsonValue* value = reader_.Find(key);
    target.place = reader_.place();
    if (value == nullptr) return;
    std::vector<std::string_view> names;
    for (const Choice<T>& choice : choices) names.push_back(choice.name);
    const std::string path = reader_.PathOf(key);
    const std::string wanted = Alternatives(names);
    const std::string* name = reader_.values().String(*value, path, wanted);
    if (name == nullptr) return;
    const Place place = reader_.values().PlaceOf(*value);
    for (const Choice<T>& choice : choices) {
      if (choice.name != *name) continue;
      target = {.value = choice.value, .place = place, .given = true};
      return;
    }
    Report(place,
           absl::StrFormat("%s is %s; wanted %s", path, Quoted(*name), wanted));
  }

  // A dtype of its own for linear layers leaves the others as the model has
  // them.
  void ReadSideDType() {
    constexpr std::string_view kWanted =
        "bf16, fp16, fp32, fp8_e4m3_block128 or mxfp8_e4m3";
    side_.dtype.place = side_.place;
    side_.quantized.place = side_.place;
    const JsonValue* value = reader_.Find("dtype");
    if (value == nullptr) return ReadScaleFormat();
    const std::string* name =
        reader_.values().String(*value, reader_.PathOf("dtype"), kWanted);
    if (name == nullptr) return;
    const Place place = reader_.values().PlaceOf(*value);
    const std::optional<DType> dtype = ParseDType(*name);
    if (dtype == DType::kBf16 || dtype == DType::kFp16 ||
        dtype == DType::kFp32) {
      side_.dtype = {.value = *dtype, .place = place, .given = true};
    } else if (*name == kFp8Block128.name || *name == kMxFp8.name) {
      side_.quantized = {.value = *name == kMxFp8.name ? kMxFp8 : kFp8Block128,
                         .place = place,
                         .given = true};
    } else if (dtype.has_value()) {
      Report(place, absl::StrFormat("%s %s is not supported yet; wanted %s",
                                    reader_.PathOf("dtype"), *name, kWanted));
    } else {
      reader_.values().Wrong(*value, reader_.PathOf("dtype"), kWanted);
    }
    ReadScaleFormat();
  }

  // As a Hugging Face quantization_config names it.
  void ReadScaleFormat() {
    constexpr std::string_view kWanted = "\"ue8m0\"";
    const JsonValue* value = reader_.Find("scale_fmt");
    if (value == nullptr) return;
    const std::string path = reader_.PathOf("scale_fmt");
    const std::string* name = reader_.values().String(*value, path, kWanted);
    if (name == nullptr) return;
    const JsonValue* dtype = reader_.Find("dtype");
    if (*name != "ue8m0") {
      reader_.values().Wrong(*value, path, kWanted);
    } else if (side_.quantized.value.name != kFp8Block128.name) {
      reader_.values().Error(
          *value,
          absl::StrFormat("%s goes with dtype %s alone; %s is %s", path,
                          kFp8Block128.name, reader_.PathOf("dtype"),
                          dtype == nullptr ? "not given" : dtype->Text()));
    } else {
      side_.quantized.value.scale_format = ScaleFormat::kUe8m0;
    }
  }

  ObjectReader reader_;
  SideSpec side_;
  LayoutSet layouts_ = kEvery;  // one, once the layout is known
};

}  // namespace

std::string_view LayoutName(LayoutKind kind) {
  for (const LayoutInfo& info : kLayouts) {
    if (info.kind == kind) return info.name;
  }
  return "unknown";
}

SideSpec ReadSide(const ValueReader& values, const JsonValue& value,
                  std::string key) {
  if (!values.IsObject(value, key)) return {};
  return SideReader(values, value, std::move(key)).Read();
}

std::optional<DType> ReadDType(const ValueReader& values,
                               const JsonValue& value, std::string_view what) {
  constexpr std::string_view kWanted = "a dtype like bf16, fp32 or int8";
  const std::string* name = values.String(value, what, kWanted);
  if (name == nullptr) return std::nullopt;
  const std::optional<DType> dtype = ParseDType(*name);
  if (!dtype.has_value()) {
    values.Wrong(value, what, kWanted);
  }
  return dtype;
}

int64_t CountRanks(const SideSpec& side) {
  if (side.layout.value == LayoutKind::kGeneric) {
    int64_t last = -1;
    for (const MeshSpec& mesh : side.generic.meshes) {
      for (const int64_t rank : mesh.ranks) last = std::max(last, rank);
    }
    return last + 1;
  }
  int64_t ranks = 1;
  for (const int64_t size :
       {side.tensor_parallel.value, side.pipeline_parallel.value,
        side.context_parallel.value, side.data_parallel.value,
        side.replicas.value}) {
    // No factor exceeds kSizeRange.max, so that the product fits.
    ranks = std::min(ranks, kSizeRange.max) * size;
  }
  return ranks;
}

}  // namespace refit
