#include "plan/schedule/operation_box.h"

#include <algorithm>

namespace refit {

CopyStride Times(const CopyStride& stride, uint64_t times) {
  return {.entries = stride.entries * times, .bytes = stride.bytes * times};
}

void MoveBy(CopyAddress& at, const CopyStride& stride, uint64_t times) {
  at.entry += stride.entries * times;
  at.byte_offset += stride.bytes * times;
}

uint64_t OperationBox::LastOf(size_t dim) const {
  uint64_t last = start[dim];
  for (const DimensionLoop& loop : loops[dim]) {
    last += (loop.extent - 1) * loop.step;
  }
  return last;
}

uint64_t OperationBox::Elements() const {
  uint64_t elements = 1;
  for (const auto& of_dim : loops) {
    for (const DimensionLoop& loop : of_dim) elements *= loop.extent;
  }
  return elements;
}

uint64_t SpanBytes(const Dimensions& dims, uint64_t element_bytes) {
  uint64_t span = element_bytes;
  for (const Dimension& dim : dims) span += (dim.extent - 1) * dim.stride_bytes;
  return span;
}

bool IsNested(const Dimensions& dims, uint64_t element_bytes) {
  uint64_t inner = element_bytes;
  for (size_t d = dims.size(); d-- > 0;) {
    if (dims[d].extent == 1) continue;
    if (dims[d].stride_bytes < inner) return false;
    inner = dims[d].stride_bytes * dims[d].extent;
  }
  return true;
}

namespace {

// Adds a loop of a copy to the box, cut where it runs on from one dimension
// into the next. False: it cannot be cut.
bool AddLoop(const Dimensions& dims, uint64_t extent, uint64_t stride_bytes,
             CopyStride to, OperationBox& box) {
  while (extent > 1) {
    size_t d = 0;
    while (d < dims.size() &&
           (dims[d].extent == 1 || dims[d].stride_bytes > stride_bytes)) {
      ++d;
    }
    if (d == dims.size() || stride_bytes % dims[d].stride_bytes != 0) {
      return false;
    }
    const uint64_t step = stride_bytes / dims[d].stride_bytes;
    uint64_t part = extent;
    if (box.start[d] + (extent - 1) * step >= dims[d].extent) {
      if (box.start[d] >= step || dims[d].extent % step != 0) return false;
      part = dims[d].extent / step;
      if (part == 1 || extent % part != 0) return false;
    }
    box.loops[d].push_back({.step = step, .extent = part, .to = to});
    extent /= part;
    stride_bytes *= part;
    to = Times(to, part);
  }
  return true;
}

}  // namespace

std::optional<OperationBox> BoxIn(const Dimensions& dims,
                                  const CopyAddress& first,
                                  const StridedCopy& copy,
                                  absl::Span<const CopyLoop> loops) {
  if (copy.from.entry != first.entry || copy.from.dtype != copy.to.dtype ||
      copy.from.dtype != first.dtype ||
      copy.from.byte_offset < first.byte_offset) {
    return std::nullopt;
  }
  OperationBox box;
  box.to = copy.to;
  box.link = copy.link;
  box.loops.resize(dims.size());
  uint64_t rest = copy.from.byte_offset - first.byte_offset;
  for (const Dimension& dim : dims) {
    box.start.push_back(dim.extent == 1 ? 0 : rest / dim.stride_bytes);
    rest -= box.start.back() * dim.stride_bytes;
  }
  if (rest != 0) return std::nullopt;
  for (size_t l = loops.size(); l-- > 0;) {
    if (loops[l].extent > 1 && loops[l].from.entries != 0) return std::nullopt;
    if (!AddLoop(dims, loops[l].extent, loops[l].from.bytes, loops[l].to,
                 box)) {
      return std::nullopt;
    }
  }
  for (size_t d = 0; d < dims.size(); ++d) {
    std::stable_sort(box.loops[d].begin(), box.loops[d].end(),
                     [](const DimensionLoop& a, const DimensionLoop& b) {
                       return a.step > b.step;
                     });
    // What continues the loop inside is one with it.
    std::vector<DimensionLoop> joined;
    for (const DimensionLoop& loop : box.loops[d]) {
      if (!joined.empty() && joined.back().step == loop.step * loop.extent &&
          joined.back().to.entries == loop.to.entries * loop.extent &&
          joined.back().to.bytes == loop.to.bytes * loop.extent) {
        joined.back() = {.step = loop.step,
                         .extent = joined.back().extent * loop.extent,
                         .to = loop.to};
      } else {
        joined.push_back(loop);
      }
    }
    // A coordinate that is read twice would stand for another that is not.
    for (size_t l = 0; l + 1 < joined.size(); ++l) {
      if (joined[l].step < joined[l + 1].step * joined[l + 1].extent) {
        return std::nullopt;
      }
    }
    box.loops[d] = std::move(joined);
    if (box.LastOf(d) >= dims[d].extent) return std::nullopt;
  }
  return box;
}

bool AreDisjoint(const OperationBox& a, const OperationBox& b) {
  for (size_t d = 0; d < a.start.size(); ++d) {
    if (a.LastOf(d) < b.start[d] || b.LastOf(d) < a.start[d]) return true;
  }
  return false;
}

CopyStride SpanOf(const CopyAddress& first, absl::Span<const CopyLoop> loops,
                  CopyStride CopyLoop::*side) {
  CopyStride span = {.entries = 1,
                     .bytes = static_cast<uint64_t>(DTypeBytes(first.dtype))};
  for (const CopyLoop& loop : loops) {
    span.entries += (loop.extent - 1) * (loop.*side).entries;
    span.bytes += (loop.extent - 1) * (loop.*side).bytes;
  }
  return span;
}

bool Meets(const CopyAddress& at, const CopyStride& span,
           const CopyAddress& first, uint64_t span_bytes) {
  return at.entry <= first.entry && first.entry < at.entry + span.entries &&
         at.byte_offset < first.byte_offset + span_bytes &&
         first.byte_offset < at.byte_offset + span.bytes;
}

}  // namespace refit
