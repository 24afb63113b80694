#include "plan/text/strided_box.h"

#include <algorithm>

#include "absl/types/span.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

using Dims = absl::Span<const StridedBox::Dim>;

// The distance from the first element to the last.
int64_t SpanOf(Dims dims) {
  int64_t span = 0;
  for (const StridedBox::Dim& dim : dims) {
    span += static_cast<int64_t>((dim.extent - 1) * dim.stride);
  }
  return span;
}

int64_t FloorDivide(int64_t numerator, int64_t denominator) {
  const int64_t quotient = numerator / denominator;
  return quotient * denominator > numerator ? quotient - 1 : quotient;
}

// Whether an element of `a`, which starts at 0, is one of `b`, which starts at
// `delta`.
bool MeetAt(int64_t delta, Dims a, Dims b) {
  const int64_t a_span = SpanOf(a);
  const int64_t b_span = SpanOf(b);
  if (delta > a_span || delta + b_span < 0) return false;
  if (a.empty() && b.empty()) return true;

  // Take off the widest stride, of both when they are equal: then only the
  // difference of the two positions matters.
  const uint64_t stride =
      std::max(a.empty() ? 0 : a[0].stride, b.empty() ? 0 : b[0].stride);
  const Dims a_rest = !a.empty() && a[0].stride == stride ? a.subspan(1) : a;
  const Dims b_rest = !b.empty() && b[0].stride == stride ? b.subspan(1) : b;
  const int64_t a_last =
      a_rest.size() == a.size() ? 0 : static_cast<int64_t>(a[0].extent) - 1;
  const int64_t b_last =
      b_rest.size() == b.size() ? 0 : static_cast<int64_t>(b[0].extent) - 1;
  // Positions that leave the rests within reach of each other.
  const int64_t unit = static_cast<int64_t>(stride);
  const int64_t first =
      std::max(-a_last, -FloorDivide(delta + SpanOf(b_rest), unit));
  const int64_t last =
      std::min(b_last, FloorDivide(SpanOf(a_rest) - delta, unit));
  for (int64_t position = first; position <= last; ++position) {
    if (MeetAt(delta + position * unit, a_rest, b_rest)) return true;
  }
  return false;
}

}  // namespace

void StridedBox::Add(uint64_t extent, uint64_t stride) {
  if (extent > 1) dims.push_back({.extent = extent, .stride = stride});
}

void StridedBox::Normalize() {
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
    return a.stride > b.stride;
  });
  size_t kept = 0;
  for (const Dim& dim : dims) {
    if (kept > 0 && dims[kept - 1].stride == dim.extent * dim.stride) {
      dims[kept - 1] = {.extent = dims[kept - 1].extent * dim.extent,
                        .stride = dim.stride};
    } else {
      dims[kept++] = dim;
    }
  }
  dims.resize(kept);
}

StridedBox BoxOf(const fb::Body& body, const fb::Copy& copy) {
  StridedBox box = {.offset = copy.offset(), .dims = {}};
  for (const fb::Loop& loop : LoopsOf(body, copy)) {
    box.Add(loop.extent(), loop.stride());
  }
  box.Normalize();
  return box;
}

bool Meet(const StridedBox& a, const StridedBox& b) {
  return MeetAt(static_cast<int64_t>(b.offset) - static_cast<int64_t>(a.offset),
                a.dims, b.dims);
}

}  // namespace refit
