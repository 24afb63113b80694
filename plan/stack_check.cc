#include "plan/stack_check.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/check.h"
#include "plan/file_limits.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

using Uint128 = unsigned __int128;
using IndexDims = flatbuffers::Vector<flatbuffers::Offset<fb::IndexDim>>;

constexpr size_t kPostHooksMax = 16;  // of one stack

template <typename Enum>
uint32_t Number(Enum value) {
  return static_cast<uint32_t>(value);
}

absl::Status CheckIndex(const IndexDims* index, uint64_t& tensors) {
  tensors = 1;
  if (Length(index) > kDimsMax) {
    return Bad("%u index dimensions are more than %u", Length(index), kDimsMax);
  }
  for (uint32_t d = 0; d < Length(index); ++d) {
    const fb::IndexDim& dim = *index->Get(d);
    if (dim.count() == 0 || !Multiply(dim.count(), tensors) ||
        tensors > kStackTensorsMax) {
      return Bad("index %u: count %u is not possible", d, dim.count());
    }
    if (dim.numbers() != nullptr && dim.numbers()->size() != dim.count()) {
      return Bad("index %u: %u numbers for a count of %u", d,
                 dim.numbers()->size(), dim.count());
    }
    if (dim.numbers() == nullptr && int64_t{dim.first()} + dim.count() - 1 >
                                        std::numeric_limits<int32_t>::max()) {
      return Bad("index %u: %u numbers from %d overflow", d, dim.count(),
                 dim.first());
    }
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const flatbuffers::Vector<uint64_t>* shape,
                        uint64_t& elements) {
  elements = 1;
  if (Length(shape) > kDimsMax) {
    return Bad("%u dimensions are more than %u", Length(shape), kDimsMax);
  }
  if (!IsAligned(shape)) {
    return Bad("shape is not aligned to 8 bytes");
  }
  for (uint32_t d = 0; d < Length(shape); ++d) {
    if (shape->Get(d) > kLargestSize || !Multiply(shape->Get(d), elements)) {
      return Bad("dimension %u of %u overflows the size", d, shape->Get(d));
    }
  }
  return absl::OkStatus();
}

// The sizes of the dimensions [index…, shape…] of `param`.
absl::Status CheckParam(const fb::Param& param, std::vector<uint64_t>& dims) {
  uint64_t tensors = 0;
  uint64_t elements = 0;
  if (absl::Status status = CheckUtf8("name", param.name()); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckIndex(param.index(), tensors); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckShape(param.shape(), elements); !status.ok()) {
    return status;
  }
  if (!IsKnown(param.dtype())) {
    return Bad("unknown dtype %u", Number(param.dtype()));
  }
  if (!IsKnown(param.skip())) {
    return Bad("unknown skip reason %u", Number(param.skip()));
  }
  if (!Multiply(tensors, elements) ||
      !Multiply(DTypeBytes(param.dtype()), elements)) {
    return Bad("more than 2^63 bytes");
  }
  for (uint32_t d = 0; d < Length(param.index()); ++d) {
    dims.push_back(param.index()->Get(d)->count());
  }
  for (uint32_t d = 0; d < Length(param.shape()); ++d) {
    dims.push_back(param.shape()->Get(d));
  }
  return absl::OkStatus();
}

// A strided box stays inside a buffer.
absl::Status CheckStrides(const BufferSize& buffer, uint64_t offset,
                          const flatbuffers::Vector<uint64_t>* extent,
                          const flatbuffers::Vector<uint64_t>* stride) {
  if (Length(extent) != Length(stride)) {
    return Bad("%u extents and %u strides", Length(extent), Length(stride));
  }
  if (!IsAligned(extent) || !IsAligned(stride)) {
    return Bad("extent or stride is not aligned to 8 bytes");
  }
  Uint128 last = offset;  // a sum of few terms below 2^64
  for (uint32_t d = 0; d < Length(extent); ++d) {
    if (extent->Get(d) == 0) {
      return Bad("extent %u is 0", d);
    }
    const Uint128 span = Uint128{extent->Get(d) - 1} * stride->Get(d);
    if (span > kLargestSize) {
      return Bad("dimension %u overflows", d);
    }
    last += span;
  }
  if (last >= buffer.elements()) {
    return Bad("leaves the buffer's %u elements", buffer.elements());
  }
  return absl::OkStatus();
}

absl::Status CheckFragment(
    const std::vector<std::vector<uint64_t>>& params_dims,
    const BufferSize& buffer, const fb::Fragment& fragment) {
  if (fragment.param() >= params_dims.size()) {
    return Bad("param %u is not below %u", fragment.param(),
               params_dims.size());
  }
  const std::vector<uint64_t>& dims = params_dims[fragment.param()];
  if (Length(fragment.lo()) != dims.size() ||
      Length(fragment.extent()) != dims.size()) {
    return Bad(
        "lo has %u and extent %u entries when param %u has %u dimensions",
        Length(fragment.lo()), Length(fragment.extent()), fragment.param(),
        dims.size());
  }
  if (!IsAligned(fragment.lo())) return Bad("lo is not aligned to 8 bytes");
  if (absl::Status status = CheckStrides(buffer, fragment.offset(),
                                         fragment.extent(), fragment.stride());
      !status.ok()) {
    return status;
  }
  for (uint32_t d = 0; d < dims.size(); ++d) {
    const uint64_t lo = fragment.lo()->Get(d);
    const uint64_t extent = fragment.extent()->Get(d);
    if (lo > dims[d] || extent > dims[d] - lo) {
      return Bad("dimension %u: %u elements from %u leave the param's %u", d,
                 extent, lo, dims[d]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRegion(const BufferSize& buffer, const fb::Region& region) {
  if (region.kind() != fb::RegionKind::kFill &&
      region.kind() != fb::RegionKind::kSkip) {
    return Bad("unknown kind %u", Number(region.kind()));
  }
  if (!IsKnown(region.reason()) ||
      (region.kind() == fb::RegionKind::kSkip &&
       region.reason() == fb::SkipReason::kUnspecified)) {
    return Bad("unknown skip reason %u", Number(region.reason()));
  }
  if (Length(region.extent()) > kDimsMax) {
    return Bad("%u dimensions are more than %u", Length(region.extent()),
               kDimsMax);
  }
  if (absl::Status status = CheckUtf8("detail", region.detail());
      !status.ok()) {
    return status;
  }
  return CheckStrides(buffer, region.offset(), region.extent(),
                      region.stride());
}

// A word for programs and a line for people: no quoting is needed anywhere.
absl::Status CheckPostHook(const fb::PostHook& hook) {
  const std::string name = hook.name()->str();
  const bool is_word =
      !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
      });
  if (!is_word) {
    return Bad("its name is not made of lower-case letters, digits and '-'");
  }
  if (hook.detail()->size() == 0) return Bad("it has no detail");
  return CheckUtf8("detail", hook.detail());
}

absl::Status CheckBuffer(const std::vector<std::vector<uint64_t>>& params_dims,
                         const fb::Buffer& buffer, BufferSize& size) {
  size.dtype = buffer.dtype();
  if (absl::Status status = CheckUtf8("name", buffer.name()); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckIndex(buffer.index(), size.tensors);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckShape(buffer.shape(), size.tensor_elements);
      !status.ok()) {
    return status;
  }
  if (!IsKnown(size.dtype)) {
    return Bad("unknown dtype %u", Number(size.dtype));
  }
  uint64_t bytes = size.tensor_elements;
  if (!Multiply(size.tensors, bytes) ||
      !Multiply(DTypeBytes(size.dtype), bytes)) {
    return Bad("more than 2^63 bytes");
  }
  for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
    if (absl::Status status =
            CheckFragment(params_dims, size, *buffer.fragments()->Get(i));
        !status.ok()) {
      return At(absl::StrCat("fragment ", i), status);
    }
  }
  for (uint32_t i = 0; i < Length(buffer.regions()); ++i) {
    if (absl::Status status = CheckRegion(size, *buffer.regions()->Get(i));
        !status.ok()) {
      return At(absl::StrCat("region ", i), status);
    }
  }
  if (Length(buffer.post_hooks()) > kPostHooksMax) {
    return Bad("%u post-hooks are more than %u", Length(buffer.post_hooks()),
               kPostHooksMax);
  }
  for (uint32_t i = 0; i < Length(buffer.post_hooks()); ++i) {
    if (absl::Status status = CheckPostHook(*buffer.post_hooks()->Get(i));
        !status.ok()) {
      return At(absl::StrCat("post-hook ", i), status);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStacks(const fb::Body& body, std::vector<BufferSize>& sizes) {
  std::vector<std::vector<uint64_t>> params_dims(body.params()->size());
  for (uint32_t i = 0; i < params_dims.size(); ++i) {
    if (absl::Status status =
            CheckParam(*body.params()->Get(i), params_dims[i]);
        !status.ok()) {
      return At(absl::StrCat("param ", i), status);
    }
  }
  sizes.resize(body.buffers()->size());
  for (uint32_t i = 0; i < sizes.size(); ++i) {
    if (absl::Status status =
            CheckBuffer(params_dims, *body.buffers()->Get(i), sizes[i]);
        !status.ok()) {
      return At(absl::StrCat("buffer ", i), status);
    }
  }
  return absl::OkStatus();
}

}  // namespace refit
