#include "plan/diff/element_sum.h"

#include <algorithm>
#include <array>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "plan/dtype.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

// The powers of one base, a table look-up and a product per set bit.
class Powers {
 public:
  explicit Powers(Residue base) {
    for (Residue& square : squares_) {
      square = base;
      base *= base;
    }
  }

  Residue Of(uint64_t exponent) const {
    Residue power(1);
    for (size_t bit = 0; exponent != 0; ++bit, exponent >>= 1) {
      if (exponent & 1) power *= squares_[bit];
    }
    return power;
  }

 private:
  std::array<Residue, 64> squares_;
};

// The bases of the coordinates. Any large residues of large order would do;
// names keep them apart.
const Powers& BufferPowers() {
  static const Powers powers(WeightOf("element of a buffer"));
  return powers;
}
const Powers& StagingPowers() {
  static const Powers powers(WeightOf("byte of a message"));
  return powers;
}
const Powers& ParamPowers(size_t dim) {
  // As many as an open plan's shapes can have.
  static const auto powers = [] {
    std::vector<Powers> all;
    for (int i = 0; i < 32; ++i)
      all.emplace_back(WeightOf(absl::StrCat("param dimension ", i)));
    return all;
  }();
  return powers[dim % powers.size()];
}

// A dimension that runs over whole tensors of the stack.
struct TensorLoop {
  uint64_t extent = 0;
  uint64_t tensors = 0;         // ordinals per iteration
  Residue factor = Residue(1);  // of the other coordinate, per iteration
  uint64_t param_tensors = 0;   // ordinals of the param per iteration
};

using TensorLoops = absl::InlinedVector<TensorLoop, 4>;

// Calls `visit(tensor, factor, param_tensor)` for every combination of
// iterations.
template <typename Visit>
void WalkTensors(absl::Span<const TensorLoop> loops, uint64_t tensor,
                 Residue factor, uint64_t param_tensor, const Visit& visit) {
  if (loops.empty()) {
    visit(tensor, factor, param_tensor);
    return;
  }
  const TensorLoop& loop = loops[0];
  for (uint64_t i = 0; i < loop.extent; ++i) {
    WalkTensors(loops.subspan(1), tensor, factor, param_tensor, visit);
    tensor += loop.tensors;
    factor *= loop.factor;
    param_tensor += loop.param_tensors;
  }
}

void AddFragment(const fb::Body& body, const fb::Fragment& fragment,
                 uint64_t tensor_elements,
                 const std::vector<Residue>& param_weights,
                 std::vector<Residue>& sums) {
  const IndexDims* index = body.params()->Get(fragment.param())->index();
  const uint32_t index_dims = Length(index);
  TensorLoops loops;
  Residue within = BufferPowers().Of(fragment.offset() % tensor_elements);
  Residue factor(1);
  uint64_t param_tensor = 0;
  // Ordinals of the param per index of each index dimension.
  std::vector<uint64_t> param_strides(Length(fragment.extent()), 0);
  uint64_t product = 1;
  for (uint32_t dim = index_dims; dim > 0; --dim) {
    param_strides[dim - 1] = product;
    param_tensor += product * fragment.lo()->Get(dim - 1);
    product *= index->Get(dim - 1)->count();
  }
  for (uint32_t dim = 0; dim < Length(fragment.extent()); ++dim) {
    const uint64_t extent = fragment.extent()->Get(dim);
    const uint64_t stride = fragment.stride()->Get(dim);
    Residue coordinate(1);
    if (dim >= index_dims) {
      const Powers& powers = ParamPowers(dim - index_dims);
      factor *= powers.Of(fragment.lo()->Get(dim));
      coordinate = powers.Of(1);
    }
    if (extent == 1) continue;
    if (stride >= tensor_elements) {
      loops.push_back(
          {extent, stride / tensor_elements, coordinate, param_strides[dim]});
    } else if (dim < index_dims) {
      loops.push_back(
          {extent, 0, BufferPowers().Of(stride), param_strides[dim]});
    } else {
      within *= GeometricSum(BufferPowers().Of(stride) * coordinate, extent);
    }
  }
  WalkTensors(loops, fragment.offset() / tensor_elements, factor, param_tensor,
              [&](uint64_t tensor, Residue weight, uint64_t param) {
                if (tensor >= sums.size()) return;
                sums[tensor] += within * weight * param_weights[param];
              });
}

void AddRegion(const fb::Region& region, uint64_t tensor_elements,
               std::vector<Residue>& sums) {
  Residue within =
      WeightOf(absl::StrCat(
          EnumText(region.kind()), " ", EnumText(region.reason()), " ",
          region.detail() == nullptr ? "" : region.detail()->str())) *
      BufferPowers().Of(region.offset() % tensor_elements);
  TensorLoops loops;
  for (uint32_t dim = 0; dim < Length(region.extent()); ++dim) {
    const uint64_t extent = region.extent()->Get(dim);
    const uint64_t stride = region.stride()->Get(dim);
    if (extent == 1) continue;
    if (stride >= tensor_elements) {
      loops.push_back({extent, stride / tensor_elements, Residue(1), 0});
    } else {
      within *= GeometricSum(BufferPowers().Of(stride), extent);
    }
  }
  WalkTensors(loops, region.offset() / tensor_elements, Residue(1), 0,
              [&](uint64_t tensor, Residue, uint64_t) {
                if (tensor < sums.size()) sums[tensor] += within;
              });
}

}  // namespace

Residue GeometricSum(Residue ratio, uint64_t count) {
  Residue sum;
  Residue power(1);  // ratio^(terms in sum)
  for (int bit = 63; bit >= 0; --bit) {
    sum *= Residue(1) + power;
    power *= power;
    if ((count >> bit) & 1) {
      sum = sum * ratio + Residue(1);
      power *= ratio;
    }
  }
  return sum;
}

Residue WeightOf(std::string_view text) {
  const fb::Digest digest = DigestOf(absl::MakeSpan(
      reinterpret_cast<const uint8_t*>(text.data()), text.size()));
  return Residue(digest.low());
}

void AppendCopyParts(const fb::Body& body, const fb::Copy& copy,
                     uint64_t tensor_elements, std::vector<CopyPart>& parts) {
  const auto dtype_bytes = static_cast<uint64_t>(DTypeBytes(copy.wire_dtype()));
  // A dtype is a small number; any factor that tells them apart will do.
  const Residue start = BufferPowers().Of(copy.offset() % tensor_elements) *
                        Residue(static_cast<uint64_t>(copy.wire_dtype()) + 1);
  Residue content = start;
  Residue packing = start * StagingPowers().Of(copy.staging_offset());
  uint64_t part_elements = 1;
  uint64_t dense = dtype_bytes;  // bytes of staging per stride of the loop
  TensorLoops loops;
  const absl::Span<const fb::Loop> all = LoopsOf(body, copy);
  for (size_t i = all.size(); i > 0; --i) {
    const fb::Loop& loop = all[i - 1];
    const Residue staged = StagingPowers().Of(dense);
    if (loop.stride() >= tensor_elements) {
      loops.push_back(
          {loop.extent(), loop.stride() / tensor_elements, staged, 0});
    } else {
      const Residue moved = BufferPowers().Of(loop.stride());
      content *= GeometricSum(moved, loop.extent());
      packing *= GeometricSum(moved * staged, loop.extent());
      part_elements *= loop.extent();
    }
    dense *= loop.extent();
  }
  WalkTensors(loops, copy.offset() / tensor_elements, Residue(1), 0,
              [&](uint64_t tensor, Residue staged, uint64_t) {
                parts.push_back({.slot = copy.buffer_slot(),
                                 .tensor = static_cast<uint32_t>(tensor),
                                 .content = content,
                                 .packing = packing * staged,
                                 .bytes = part_elements * dtype_bytes});
              });
}

std::vector<Residue> LayoutSums(
    const fb::Body& body, const fb::Buffer& buffer,
    const std::vector<std::vector<Residue>>& param_weights) {
  std::vector<Residue> sums(StackTensors(buffer));
  const uint64_t tensor_elements = TensorElements(buffer);
  if (tensor_elements == 0) return sums;
  for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
    const fb::Fragment& fragment = *buffer.fragments()->Get(i);
    AddFragment(body, fragment, tensor_elements,
                param_weights[fragment.param()], sums);
  }
  for (uint32_t i = 0; i < Length(buffer.regions()); ++i) {
    AddRegion(*buffer.regions()->Get(i), tensor_elements, sums);
  }
  return sums;
}

}  // namespace refit
