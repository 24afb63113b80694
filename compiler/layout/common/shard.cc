#include "compiler/layout/common/shard.h"

#include <algorithm>
#include <cassert>

namespace refit {
namespace {

// Appends what stands at the local positions [begin, end) of `runs`.
void AppendSlice(const Runs& runs, Range positions, Runs& out) {
  int64_t run_begin = 0;
  for (const Range& run : runs) {
    const int64_t begin = std::max(positions.begin, run_begin);
    const int64_t end = std::min(positions.end, run_begin + run.size());
    if (begin < end) {
      const Range part = {run.begin + begin - run_begin,
                          run.begin + end - run_begin};
      if (!out.empty() && out.back().end == part.begin) {
        out.back().end = part.end;
      } else {
        out.push_back(part);
      }
    }
    run_begin += run.size();
  }
}

}  // namespace

Range EvenShard(int64_t size, int64_t count, int64_t index) {
  assert(count > 0 && size % count == 0);
  const int64_t shard = size / count;
  return {index * shard, (index + 1) * shard};
}

Range ChunkShard(int64_t size, int64_t count, int64_t index) {
  assert(count > 0);
  const int64_t shard = size / count + (size % count != 0);
  // A shard beyond the end is empty; comparing first keeps the product small.
  if (shard == 0 || index >= size / shard + (size % shard != 0)) {
    return {size, size};
  }
  return {index * shard, std::min((index + 1) * shard, size)};
}

Range LinearShard(int64_t size, int64_t count, int64_t index) {
  assert(count > 0);
  const int64_t base = size / count;
  const int64_t rest = size % count;
  const int64_t begin = index * base + std::min(index, rest);
  return {begin, begin + base + (index < rest ? 1 : 0)};
}

int64_t RunsSize(const Runs& runs) {
  int64_t size = 0;
  for (const Range& run : runs) size += run.size();
  return size;
}

Runs StridedShardRuns(const Runs& runs, int64_t split_factor, int64_t count,
                      int64_t index) {
  Runs out;
  const int64_t size = RunsSize(runs);
  for (int64_t split = 0; split < split_factor; ++split) {
    const Range chunk = ChunkShard(size, split_factor, split);
    if (chunk.size() == 0) break;  // so are all that follow
    const Range part = ChunkShard(chunk.size(), count, index);
    AppendSlice(runs, {chunk.begin + part.begin, chunk.begin + part.end}, out);
  }
  return out;
}

}  // namespace refit
