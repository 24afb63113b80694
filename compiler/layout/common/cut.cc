#include "compiler/layout/common/cut.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

namespace refit {
namespace {

using enum ParamRole;

// What each dimension of all experts' tensor counts: e experts, i inputs,
// o outputs, g gate or up, G the outputs of gates and then those of ups.
struct ExpertStack {
  ParamRole role;
  std::string_view dims;
};
constexpr std::array kExpertStacks = {
    ExpertStack{kFusedExpertGateUp, "eiog"},
    ExpertStack{kFusedExpertGateUpBias, "eog"},
    ExpertStack{kFusedExpertGateThenUp, "eiG"},
    ExpertStack{kFusedExpertDown, "eio"},
    ExpertStack{kFusedExpertDownBias, "eo"},
    ExpertStack{kStackedExpertGateUp, "eGi"},
    ExpertStack{kStackedExpertDown, "eoi"},
};

std::string_view DimsOf(ParamRole role) {
  for (const ExpertStack& stack : kExpertStacks) {
    if (stack.role == role) return stack.dims;
  }
  return "";
}

// Of `heads` heads that `part` shares: with more ranks than heads, consecutive
// ranks hold the same.
EvenPart PartOfHeads(int64_t heads, EvenPart part) {
  const int64_t count = std::min(part.count, heads);
  return {.count = count, .index = part.index / (part.count / count)};
}

}  // namespace

std::vector<Section> SectionsOf(const Param& param,
                                const Architecture& architecture,
                                EvenPart part) {
  const int64_t rows = param.StoredShape()[0];
  switch (param.role) {
    case kKey:
    case kValue:
    case kKeyBias:
    case kValueBias:
    case kKeyHeadsNorm:
      return {{rows, PartOfHeads(architecture.kv_heads, part)}};
    case kMambaIn:
    case kMambaInBias:
    case kMambaConv:
    case kMambaConvBias: {
      const MambaSizes& mamba = *architecture.mamba;
      const EvenPart group = mamba.groups % part.count == 0 ? part : EvenPart{};
      std::vector<Section> sections = {{mamba.inner(), part},
                                       {mamba.shared(), group},
                                       {mamba.shared(), group}};
      if (param.role == kMambaIn || param.role == kMambaInBias) {
        sections.insert(sections.begin(), {mamba.inner(), part});
        sections.push_back({mamba.heads, part});
      }
      return sections;
    }
    case kDeltaConv:
    case kDeltaQkv: {
      const DeltaNetSizes& delta = *architecture.delta;
      return {
          {delta.keys(), part}, {delta.keys(), part}, {delta.values(), part}};
    }
    case kTowerHeads:
      return {{rows / 3, part}, {rows / 3, part}, {rows / 3, part}};
    default:
      return {{rows, part}};
  }
}

void AppendRows(const Param& param, Range rows, TensorSpec& spec) {
  const int64_t at = spec.shape[0];
  spec.shape[0] += rows.size();
  if (param.split != Split::kRowsInHeadPairs) {
    spec.parts.push_back(RowsPart(param, rows, at));
    return;
  }
  const int64_t head_rows = param.StoredShape()[0] / param.shape[0];
  const int64_t columns = param.shape.back();
  Part part =
      RowsPart(param, {rows.begin / head_rows, rows.end / head_rows}, 0);
  part.offset = at * columns;
  part.stride = {head_rows * columns, columns, head_rows / 2 * columns, 1};
  spec.parts.push_back(std::move(part));
}

TensorSpec CutOf(absl::Span<const Param* const> params, Cut cut,
                 const Architecture& architecture, EvenPart part) {
  const Param& first = *params[0];
  if (cut == Cut::kColumns) {
    const Range columns = EvenShard(first.shape[1], part.count, part.index);
    return {.name = {},
            .shape = {first.shape[0], columns.size()},
            .parts = {ColumnsPart(first, columns)}};
  }
  TensorSpec spec = {.name = {}, .shape = first.StoredShape(), .parts = {}};
  spec.shape[0] = 0;
  for (const Param* param : params) {
    if (cut == Cut::kWhole) {
      AppendRows(*param, {0, param->StoredShape()[0]}, spec);
      continue;
    }
    int64_t begin = 0;
    for (const Section& section : SectionsOf(*param, architecture, part)) {
      const Range own =
          EvenShard(section.rows, section.part.count, section.part.index);
      AppendRows(*param, {begin + own.begin, begin + own.end}, spec);
      begin += section.rows;
    }
  }
  return spec;
}

TensorSpec StackedExperts(const Param& param, Range experts, EvenPart part,
                          GateUpOrder order) {
  const std::string_view dims = DimsOf(param.role);
  const auto extent = [&](char letter) {
    const size_t dim = dims.find(letter);
    return dim == std::string_view::npos ? int64_t{0} : param.shape[dim];
  };
  const bool is_gate_up = dims.find_first_of("gG") != std::string_view::npos;
  const bool alternates = is_gate_up && order == GateUpOrder::kAlternating;
  const bool has_inputs = extent('i') > 0;
  const int64_t half = extent('G') / 2;
  Range in = {0, has_inputs ? extent('i') : 1};
  Range out = {0, half > 0 ? half : extent('o')};
  Range& cut = is_gate_up ? out : in;
  if (is_gate_up || has_inputs) {
    cut = EvenShard(cut.end, part.count, part.index);
  }
  TensorSpec spec = {
      .name = {},
      .shape = {experts.size(), (is_gate_up ? 2 : 1) * out.size()},
      .parts = {}};
  const int64_t matrix = spec.shape[1] * in.size();
  if (has_inputs) spec.shape.push_back(in.size());
  // Gate, up, or both at once.
  const auto add = [&](Range gate_or_up, int64_t offset) {
    Part added = {
        .role = param.role, .box = {}, .offset = offset, .stride = {}};
    const auto add_dim = [&](Range range, int64_t stride) {
      added.box.lo.push_back(range.begin);
      added.box.hi.push_back(range.end);
      added.stride.push_back(stride);
    };
    for (const char dim : dims) {
      switch (dim) {
        case 'e':
          add_dim(experts, matrix);
          break;
        case 'i':
          add_dim(in, 1);
          break;
        case 'o':
          add_dim(out, (alternates ? 2 : 1) * in.size());
          break;
        case 'g':
          add_dim(gate_or_up, alternates ? in.size() : 0);
          break;
        default:
          add_dim({out.begin + gate_or_up.begin * half,
                   out.end + gate_or_up.begin * half},
                  in.size());
      }
    }
    spec.parts.push_back(std::move(added));
  };
  if (!is_gate_up || alternates) {
    add({0, 2}, 0);
  } else {
    const int64_t behind = out.size() * in.size();
    const bool up_first = order == GateUpOrder::kUpFirst;
    add({0, 1}, up_first ? behind : 0);
    add({1, 2}, up_first ? 0 : behind);
  }
  return spec;
}

bool IsStacked(ParamRole role) { return !DimsOf(role).empty(); }

bool IsStackedBias(ParamRole role) {
  return IsStacked(role) && DimsOf(role).find('i') == std::string_view::npos;
}

std::vector<Box> BoxesOfElements(absl::Span<const int64_t> shape, Range range) {
  if (range.size() == 0) return {};
  if (shape.empty()) return {Box{}};
  const int64_t row = Product(shape.subspan(1));
  // Boxes within one row, that row put before them.
  std::vector<Box> boxes;
  const auto within_row = [&](int64_t number, Range elements) {
    for (Box& box : BoxesOfElements(shape.subspan(1), elements)) {
      box.lo.insert(box.lo.begin(), number);
      box.hi.insert(box.hi.begin(), number + 1);
      boxes.push_back(std::move(box));
    }
  };
  const int64_t first = range.begin / row;
  if (range.end <= (first + 1) * row && range.size() < row) {
    within_row(first, {range.begin - first * row, range.end - first * row});
    return boxes;
  }
  const int64_t whole_begin = (range.begin + row - 1) / row;
  const int64_t whole_end = range.end / row;
  if (first < whole_begin) within_row(first, {range.begin - first * row, row});
  if (whole_begin < whole_end) {
    Box box = WholeBox(shape);
    box.lo[0] = whole_begin;
    box.hi[0] = whole_end;
    boxes.push_back(std::move(box));
  }
  within_row(whole_end, {0, range.end - whole_end * row});
  return boxes;
}

std::vector<Fragment> OfSplitParam(const Param& param,
                                   const Fragment& fragment) {
  if (param.split == Split::kNone) return {fragment};
  const std::vector<Dims> factors = param.Factors();
  const size_t index = param.index.size();
  std::vector<Fragment> fragments = {fragment};
  // From the last dimension on, so that those before keep their places.
  for (size_t dim = factors.size(); dim-- > 0;) {
    if (factors[dim].size() == 1) continue;
    const size_t at = index + dim;
    const Range range = {fragment.box.lo[at], fragment.box.hi[at]};
    const int64_t stride = fragment.stride[at];
    Dims strides = RowMajorStrides(factors[dim]);
    for (int64_t& of_factor : strides) of_factor *= stride;
    const auto put = [at](Dims& dims, const Dims& in_place) {
      dims.erase(dims.begin() + static_cast<ptrdiff_t>(at));
      dims.insert(dims.begin() + static_cast<ptrdiff_t>(at), in_place.begin(),
                  in_place.end());
    };
    std::vector<Fragment> split;
    for (const Fragment& whole : fragments) {
      int64_t offset = whole.offset;
      for (const Box& box : BoxesOfElements(factors[dim], range)) {
        Fragment& part = split.emplace_back(whole);
        part.offset = offset;
        put(part.box.lo, box.lo);
        put(part.box.hi, box.hi);
        put(part.stride, strides);
        offset += box.Volume() * stride;
      }
    }
    fragments = std::move(split);
  }
  return fragments;
}

}  // namespace refit
