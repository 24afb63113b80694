// Block quantization of a side: what it adds to the params, and to the buffers
// that a framework's layout lists.
//
// A layout frontend lists the buffers of a side as if nothing were quantized.
// Values keep that place in fp8; their scales stand in one more buffer for
// each, in the same geometry, one element for each block. So no frontend knows
// of blocks.
#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/layout/layout.h"
#include "compiler/model/stacks.h"
#include "plan/glob.h"
#include "plan/quantize_check.h"

namespace refit {
namespace {

std::string SchemeText(const SideSpec& side) {
  if (!side.quantized.given) return "unquantized";
  const BlockScheme& scheme = side.quantized.value;
  return scheme.scale_format == ScaleFormat::kUe8m0
             ? absl::StrCat(std::string(scheme.name), " with scale_fmt ue8m0")
             : std::string(scheme.name);
}

// Why no engine holds such params in block-scaled fp8, though they are large
// matrices; "": not so.
std::string_view WhyNoBlocks(const Param& param, bool of_file) {
  if (of_file && IsPlainModule(param.role) && param.shape.size() > 1) {
    return "which plain modules of a rules file an engine quantizes is not "
           "known";
  }
  if (param.split == Split::kRowsInHeadPairs) {
    return "engines permute the rows of queries and keys, across blocks";
  }
  switch (param.role) {
    case ParamRole::kMambaIn:
      return "checkpoints with Mamba mixers have one scale a tensor, not "
             "blocks";
    case ParamRole::kStackedExpertGateUp:
    case ParamRole::kFusedExpertGateThenUp:
      return "experts that the checkpoint has in one tensor are not quantized "
             "by a refit yet";
    case ParamRole::kFusedExpertGateUp:
      return "experts in one tensor are quantized to MXFP4 alone, which a "
             "refit "
             "does not write";
    default:
      return "";
  }
}

// What a buffer of scales has after the name of that of the values.
std::string_view SuffixOf(const SideSpec& side) {
  // SGLang calls the scales of all blocks so.
  if (side.layout.value == LayoutKind::kSglang) return kFp8Block128.suffix;
  return side.quantized.value.suffix;
}

// The buffers of one side, with scales.
class ScaledSide {
 public:
  ScaledSide(const SideSpec& side, fb::Side which, Module& module,
             Diagnostics& diagnostics)
      : side_(side),
        which_(which),
        scheme_(side.quantized.value),
        module_(module),
        diagnostics_(diagnostics),
        of_param_(module.params.size(), nullptr) {
    for (const Quantization& quantization : module.quantizations) {
      of_param_[IndexOf(quantization.of)] = &quantization;
    }
  }

  // The buffers that stand for `id`: itself, or values and scales.
  const std::vector<BufferId>& Replacement(BufferId id) {
    const auto [it, is_new] = replacements_.try_emplace(id);
    if (is_new) it->second = Replace(id, Buffer(module_.buffers[id]));
    return it->second;
  }

 private:
  std::vector<BufferId> Replace(BufferId id, Buffer values) {
    size_t quantized = 0;
    for (const Fragment& fragment : values.fragments) {
      quantized += of_param_[IndexOf(fragment.param)] != nullptr ? 1 : 0;
    }
    if (quantized == 0) return {id};
    if (quantized != values.fragments.size() || !values.regions.empty()) {
      Report(values, "holds more than quantized matrices");
      return {};
    }
    std::optional<Buffer> scales = Scales(values);
    if (!scales.has_value()) return {};
    values.dtype = DType::kFp8E4m3;
    for (Fragment& fragment : values.fragments) {
      fragment.param = of_param_[IndexOf(fragment.param)]->data;
    }
    return {module_.buffers.Intern(std::move(values)),
            module_.buffers.Intern(*std::move(scales))};
  }

  std::optional<Buffer> Scales(const Buffer& values) {
    const size_t dims = values.shape.size();
    if (dims < 2) {
      Report(values, "is no matrix");
      return std::nullopt;
    }
    const Dims matrix(values.shape.end() - 2, values.shape.end());
    const Dims grid = ScaleShape(matrix, scheme_);
    Buffer scales;
    scales.name = absl::StrCat(values.name, std::string(SuffixOf(side_)));
    scales.index = values.index;
    scales.shape = values.shape;
    scales.shape[dims - 2] = grid[0];
    scales.shape[dims - 1] = grid[1];
    scales.dtype = ScaleDType(scheme_.scale_format);
    AddScaleHook(scales);
    for (const Fragment& fragment : values.fragments) {
      std::optional<Fragment> part = Scales(values, fragment, matrix, grid);
      if (!part.has_value()) return std::nullopt;
      scales.fragments.push_back(*std::move(part));
    }
    return scales;
  }

  // A fragment's scales: the same part of the buffer, in blocks.
  std::optional<Fragment> Scales(const Buffer& values, const Fragment& fragment,
                                 const Dims& matrix, const Dims& grid) {
    const int64_t matrix_elements = Product(matrix);
    const size_t row = fragment.box.lo.size() - 2;
    const int64_t at_row = fragment.offset % matrix_elements / matrix[1];
    const int64_t at_column = fragment.offset % matrix[1];
    const Dims strides(fragment.stride.begin() + static_cast<int64_t>(row),
                       fragment.stride.end());
    bool is_matrix =
        (strides[0] == matrix[1] || fragment.box.extent(row) == 1) &&
        (strides[1] == 1 || fragment.box.extent(row + 1) == 1);
    for (size_t dim = 0; dim < row; ++dim) {
      is_matrix = is_matrix && (fragment.stride[dim] % matrix_elements == 0 ||
                                fragment.box.extent(dim) == 1);
    }
    const Param& param = module_.param(fragment.param);
    if (!is_matrix) {
      Report(values, absl::StrFormat("does not hold \"%s\" as rows of a matrix",
                                     param.name));
      return std::nullopt;
    }
    if (!HoldsWholeBlocks(fragment.box, param.shape, scheme_)) {
      const Box part = {.lo = {fragment.box.lo[row], fragment.box.lo[row + 1]},
                        .hi = {fragment.box.hi[row], fragment.box.hi[row + 1]}};
      Report(values,
             absl::StrFormat(
                 "holds %s of \"%s\" [%d, %d]; wanted whole blocks of %d x %d",
                 BoxText(part), param.name, param.shape[0], param.shape[1],
                 scheme_.block_rows, scheme_.block_columns));
      return std::nullopt;
    }
    if (at_row % scheme_.block_rows != 0 ||
        at_column % scheme_.block_columns != 0) {
      Report(values,
             absl::StrFormat("holds \"%s\" from row %d and column %d on; "
                             "wanted multiples of %d and %d",
                             param.name, at_row, at_column, scheme_.block_rows,
                             scheme_.block_columns));
      return std::nullopt;
    }
    const int64_t grid_elements = Product(grid);
    Fragment scales;
    scales.param = of_param_[IndexOf(fragment.param)]->scales;
    scales.box = ScaleBox(fragment.box, scheme_);
    scales.offset = fragment.offset / matrix_elements * grid_elements +
                    at_row / scheme_.block_rows * grid[1] +
                    at_column / scheme_.block_columns;
    for (size_t dim = 0; dim < row; ++dim) {
      scales.stride.push_back(fragment.stride[dim] / matrix_elements *
                              grid_elements);
    }
    scales.stride.push_back(grid[1]);
    scales.stride.push_back(1);
    return scales;
  }

  // SGLang's backends compute with copies of E8M0 scales in orders of their
  // own, which it makes when it loads weights.
  void AddScaleHook(Buffer& scales) const {
    if (which_ != fb::Side::kDestination ||
        side_.layout.value != LayoutKind::kSglang ||
        scheme_.scale_format != ScaleFormat::kE8m0) {
      return;
    }
    scales.post_hooks.push_back(
        {.name = "derive-scale-copies",
         .detail = "make the copies of it that the layer's backend computes "
                   "with (_swizzled, _shuffled, _deepgemm) again, if it has "
                   "any"});
  }

  // Ranks that cut a matrix alike are told of once.
  void Report(const Buffer& buffer, const std::string& what) {
    if (!reported_.insert(buffer.name).second) return;
    diagnostics_.Error(side_.quantized.place, "%s.dtype %s: buffer \"%s\" %s",
                       side_.key, scheme_.name, buffer.name, what);
  }

  const SideSpec& side_;
  const fb::Side which_;
  const BlockScheme& scheme_;
  Module& module_;
  Diagnostics& diagnostics_;
  std::vector<const Quantization*> of_param_;
  absl::flat_hash_map<BufferId, std::vector<BufferId>> replacements_;
  absl::flat_hash_set<std::string> reported_;  // names of buffers
};

// Whether the rules of a generic side give the stack a dtype of its own;
// nullopt: some of its members.
std::optional<bool> RulesGiveDType(const GenericSpec& generic,
                                   const Param& param) {
  if (generic.tensors.empty()) return false;
  size_t own = 0;
  const std::vector<std::string> names = MemberNames(param);
  for (const std::string& name : names) {
    const auto rule =
        std::find_if(generic.tensors.begin(), generic.tensors.end(),
                     [&](const TensorRule& candidate) {
                       return GlobMatches(candidate.match, name);
                     });
    own += rule != generic.tensors.end() && rule->dtype.has_value() ? 1 : 0;
  }
  if (own != 0 && own != names.size()) return std::nullopt;
  return own != 0;
}

}  // namespace

void DeclareQuantizations(const Job& job, Module& module,
                          Diagnostics& diagnostics) {
  const SideSpec& source = job.source;
  const SideSpec& destination = job.destination;
  if (!source.quantized.given && !destination.quantized.given) return;
  if (source.quantized.given &&
      !(destination.quantized.given &&
        source.quantized.value == destination.quantized.value)) {
    diagnostics.Error(source.quantized.place,
                      "source.dtype is %s and the destination is %s; wanted "
                      "both alike, as nothing is dequantized",
                      SchemeText(source), SchemeText(destination));
    return;
  }
  for (const Param& param : module.params) {
    const std::string_view why = WhyNoBlocks(param, job.model.rules_path.given);
    if (why.empty() || param.skip != SkipReason::kUnspecified) continue;
    diagnostics.Error(
        destination.quantized.place,
        "destination.dtype %s: %s, as \"%s\"; wanted bf16, fp16 or fp32",
        SchemeText(destination), why, param.FirstName());
    return;
  }
  const BlockScheme& scheme = destination.quantized.value;
  const size_t model_params = module.params.size();
  for (size_t i = 0; i < model_params; ++i) {
    if (!IsBlockQuantized(module.params[i].role)) continue;
    const std::optional<bool> own_dtype =
        RulesGiveDType(destination.generic, module.params[i]);
    if (!own_dtype.has_value()) {
      diagnostics.Error(
          destination.quantized.place,
          "destination.dtype %s: rules of destination.tensors give some of the "
          "stack \"%s\" a dtype; wanted all of it or none",
          scheme.name, module.params[i].name);
      return;
    }
    if (*own_dtype) continue;
    const auto add = [&](std::string name, Dims shape, DType dtype) {
      Param param = module.params[i];
      param.name = std::move(name);
      param.shape = std::move(shape);
      param.dtype = dtype;
      module.params.push_back(std::move(param));
      return ParamId{static_cast<int32_t>(module.params.size() - 1)};
    };
    const std::string name = module.params[i].name;
    const Dims shape = module.params[i].shape;
    Quantization quantization;
    quantization.of = ParamId{static_cast<int32_t>(i)};
    quantization.data = quantization.of;
    quantization.scheme = scheme;
    if (source.quantized.given) {
      module.params[i].dtype = DType::kFp8E4m3;
    } else {
      quantization.data =
          add(absl::StrCat(name, ":fp8_e4m3"), shape, DType::kFp8E4m3);
    }
    quantization.scales =
        add(absl::StrCat(name, std::string(scheme.suffix)),
            ScaleShape(shape, scheme), ScaleDType(scheme.scale_format));
    module.quantizations.push_back(std::move(quantization));
  }
  if (module.quantizations.empty()) {
    diagnostics.Error(
        destination.quantized.place,
        "dtype %s quantizes the linear layers of a model, and no parameter is "
        "known as one; wanted a model family with roles (config.json)",
        scheme.name);
  }
}

void AddBlockScales(const SideSpec& side, fb::Side which, Module& module,
                    SideLayout& layout, Diagnostics& diagnostics) {
  if (!side.quantized.given) return;
  ScaledSide scaled(side, which, module, diagnostics);
  for (std::vector<BufferId>& rank : layout.ranks) {
    std::vector<BufferId> buffers;
    for (const BufferId id : rank) {
      const std::vector<BufferId>& replacement = scaled.Replacement(id);
      buffers.insert(buffers.end(), replacement.begin(), replacement.end());
    }
    rank = std::move(buffers);
  }
}

}  // namespace refit
