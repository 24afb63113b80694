// Fills buckets of bytes with boxes of pieces, in order.
#ifndef REFIT_COMPILER_PASSES_PACKER_H_
#define REFIT_COMPILER_PASSES_PACKER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "compiler/ir/module.h"
#include "plan/plan_file.h"

namespace refit {

// What one message holds, or one range of a flow.
struct Bucket {
  std::vector<Packed> contents;
  int64_t size_bytes = 0;
};

// Not thread-safe.
class Packer {
 public:
  // A slab that does not fit into what is left of a bucket is cut only when
  // closing the bucket early would waste more than this part of it.
  static constexpr int64_t kWasteDivisor = 32;

  // Where a part of a flow ends may differ by this part of it.
  static constexpr int64_t kUnevenPart = 256;

  // No bucket is larger than `bucket_bytes`, which has room for an element.
  // `pieces`: how many will come.
  Packer(int64_t bucket_bytes, int64_t waste_divisor, size_t pieces)
      : Packer(std::vector<int64_t>{bucket_bytes}, bucket_bytes / waste_divisor,
               pieces) {}
  // Buckets of these sizes at most, one after the other, and then more of the
  // last. At least one size; a bucket is closed early if that wastes no more
  // than `waste_bytes`.
  Packer(std::vector<int64_t> sizes, int64_t waste_bytes, size_t pieces)
      : sizes_(std::move(sizes)),
        // No element is cut.
        waste_bytes_(std::max(waste_bytes, kStagingAlignmentBytes)),
        pieces_(pieces) {}

  // Cuts `box` where a bucket ends, along its outermost dimension first.
  void Add(PieceId piece, const Box& box, int64_t element_bytes);
  std::vector<Bucket> Take() { return std::move(buckets_); }

 private:
  void Place(PieceId piece, const Box& box, int64_t bytes);
  int64_t Free() const;
  int64_t SizeOf(size_t bucket) const {
    return sizes_[std::min(bucket, sizes_.size() - 1)];
  }

  std::vector<int64_t> sizes_;
  int64_t waste_bytes_;
  size_t pieces_;
  std::vector<Bucket> buckets_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_PACKER_H_
