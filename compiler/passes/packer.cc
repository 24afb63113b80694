#include "compiler/passes/packer.h"

#include <algorithm>

#include "plan/plan_file.h"

namespace refit {

int64_t Packer::Free() const {
  return buckets_.empty() ? 0
                          : SizeOf(buckets_.size() - 1) -
                                AlignStaging(buckets_.back().size_bytes);
}

void Packer::Place(PieceId piece, const Box& box, int64_t bytes) {
  if (buckets_.empty() || bytes > Free()) buckets_.emplace_back();
  Bucket& bucket = buckets_.back();
  if (bucket.contents.empty()) {
    constexpr size_t kMostReserved = 4;
    bucket.contents.reserve(std::min(pieces_, kMostReserved));
  }
  const int64_t offset = AlignStaging(bucket.size_bytes);
  bucket.contents.push_back(
      {.piece = piece, .box = box, .staging_offset = offset});
  bucket.size_bytes = offset + bytes;
}

void Packer::Add(PieceId piece, const Box& box, int64_t element_bytes) {
  // Most boxes are not cut.
  if (const int64_t bytes = box.Volume() * element_bytes;
      bytes > 0 && bytes <= Free()) {
    Place(piece, box, bytes);
    return;
  }
  Box rest = box;
  while (!rest.Empty()) {
    const int64_t bytes = rest.Volume() * element_bytes;
    if (bytes <= Free() ||
        (bytes <= SizeOf(buckets_.size()) && Free() <= waste_bytes_)) {
      Place(piece, rest, bytes);
      return;
    }
    // Cut along the outermost dimension that can be cut: as many whole slabs
    // as fit now, then the rest.
    size_t dim = 0;
    while (rest.extent(dim) == 1) ++dim;
    const int64_t slab_bytes = bytes / rest.extent(dim);
    const int64_t room =
        Free() <= waste_bytes_ ? SizeOf(buckets_.size()) : Free();
    const int64_t slabs = room / slab_bytes;
    if (slabs == 0 && slab_bytes <= waste_bytes_) {
      // The slab is small and yet does not fit: a new bucket serves it better.
      buckets_.emplace_back();
      continue;
    }
    Box first = rest;
    rest.lo[dim] += std::max<int64_t>(slabs, 1);
    first.hi[dim] = rest.lo[dim];
    if (slabs == 0) {
      Add(piece, first, element_bytes);  // cuts inside one slab
    } else {
      Place(piece, first, slabs * slab_bytes);
    }
  }
}

}  // namespace refit
