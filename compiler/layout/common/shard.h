// How one dimension is cut: the index arithmetic that the layouts share.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_SHARD_H_
#define REFIT_COMPILER_LAYOUT_COMMON_SHARD_H_

#include <cstdint>
#include <vector>

namespace refit {

// Half-open.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

// Shard `index` of `count` equal shards. Requires that `count` divides `size`.
Range EvenShard(int64_t size, int64_t count, int64_t index);

// Part `index` of `count` equal parts.
struct EvenPart {
  int64_t count = 1;
  int64_t index = 0;
};

// As torch.chunk cuts: shards of ceil(size / count), the last ones shorter or
// empty (10 over 4: 3, 3, 3, 1; 5 over 4: 2, 2, 1, 0).
Range ChunkShard(int64_t size, int64_t count, int64_t index);

// As vLLM's linear expert placement: the first size % count shards hold one
// more than the others.
Range LinearShard(int64_t size, int64_t count, int64_t index);

// The indices of a global dimension that stand in a local one, in order.
// Adjacent ranges are merged, none is empty.
using Runs = std::vector<Range>;

int64_t RunsSize(const Runs& runs);

// DTensor's _StridedShard(dim, split_factor): cut into `split_factor` chunks,
// each of them into `count`, and keep chunk `index` of every one, in order;
// Shard(dim) has the factor 1.
Runs StridedShardRuns(const Runs& runs, int64_t split_factor, int64_t count,
                      int64_t index);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_SHARD_H_
