#include "compiler/job/side.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/keys.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

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

// Reads a side's keys; each key is asked whether the layout has it.
class SideReader {
 public:
  SideReader(const ValueReader& values, const JsonValue& value, std::string key)
      : reader_(values, value, key) {
    side_.key = std::move(key);
    side_.place = reader_.place();
  }

  SideSpec Read() {
    ForEachKey(kSideKeys, [&](const auto& key) {
      std::apply([&](auto... members) { ReadKey(key.info, side_.*members...); },
                 key.members);
    });
    // Without a known layout only a side that looks generic is read as such.
    if (layouts_ == kGeneric) side_.generic = ReadGeneric(reader_);
    RefuseKeysOfOthers(reader_, JobObject::kSide);
    reader_.RejectOtherKeys();
    return std::move(side_);
  }

 private:
  void ReadKey(const KeyInfo&, Located<LayoutKind>&) {
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
      reader_.values().Error(
          *value,
          nearest.empty()
              ? absl::StrFormat("unknown layout %s; wanted %s", Quoted(*name),
                                wanted)
              : absl::StrFormat("unknown layout %s; did you mean \"%s\"?",
                                Quoted(*name), nearest));
      return;
    }
    side_.layout = {.value = info->kind, .place = place, .given = true};
    layouts_ = SetOf(info->kind);
  }

  // Whether a key is to be read; reports it in a side whose layout does not
  // have it.
  bool Has(const KeyInfo& key) {
    if ((key.layouts & layouts_) != 0) {
      reader_.Find(key.name);
      return true;
    }
    reader_.Refuse(key.name,
                   absl::StrFormat("%s is a key of layout %s; %s is %s",
                                   reader_.PathOf(key.name),
                                   Alternatives(LayoutNames(key.layouts)),
                                   reader_.PathOf("layout"),
                                   LayoutName(side_.layout.value)));
    return false;
  }

  // Of the keys that others read.
  void ReadKey(const KeyInfo& key) { Has(key); }
  void ReadKey(const KeyInfo& key, GenericSpec&) { Has(key); }

  template <typename T>
  void ReadKey(const KeyInfo& key, Located<T>& target) {
    const JsonValue* value = reader_.Peek(key.name);
    const bool is_one = value != nullptr && value->AsInteger() != nullptr &&
                        *value->AsInteger() == 1;
    if ((key.is_axis && is_one) || Has(key)) ReadMember(reader_, key, target);
  }

  // With attention data parallelism each part of the ranks embeds the tokens of
  // its own requests.
  void ReadKey(const KeyInfo& key, Located<EmbeddingCut>& target) {
    if (!Has(key)) return;
    if (side_.dp_attention.value > 1) target.value = EmbeddingCut::kAttention;
    ReadMember(reader_, key, target);
  }

  void ReadKey(const KeyInfo& key, Located<ExpertPlacement>& target) {
    if (Has(key)) ReadExpertPlacement(reader_, side_.layout.value, target);
  }

  // vLLM has a flag where others have a size.
  void ReadKey(const KeyInfo& key, Located<int64_t>& size,
               Located<bool>& flag) {
    size.place = side_.place;
    flag.place = side_.place;
    if (layouts_ == kEvery) {
      reader_.Find(key.name);  // of which type the layout would say
    } else if (layouts_ == kVllm) {
      ReadMember(reader_, key, flag);
    } else {
      KeyInfo others = key;
      others.layouts &= ~kVllm;
      ReadKey(others, size);
    }
  }

  // A dtype of its own for linear layers leaves the others as the model has
  // them.
  void ReadKey(const KeyInfo&, Located<DType>&, Located<BlockScheme>&) {
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
      reader_.values().Error(*value, "%s %s is not supported yet; wanted %s",
                             reader_.PathOf("dtype"), *name, kWanted);
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
      reader_.values().Error(*value, "%s goes with dtype %s alone; %s is %s",
                             path, kFp8Block128.name, reader_.PathOf("dtype"),
                             dtype == nullptr ? "not given" : dtype->Text());
    } else {
      side_.quantized.value.scale_format = ScaleFormat::kUe8m0;
    }
  }

  ObjectReader reader_;
  SideSpec side_;
  LayoutSet layouts_ = kEvery;  // one, once the layout is known
};

}  // namespace

std::vector<std::string_view> LayoutNames(LayoutSet layouts) {
  std::vector<std::string_view> names;
  for (const LayoutInfo& info : kLayouts) {
    if ((SetOf(info.kind) & layouts) != 0) names.push_back(info.name);
  }
  return names;
}

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
