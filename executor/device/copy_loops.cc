#include "executor/device/copy_loops.h"

namespace refit {
namespace {

bool Continues(const CopyStep& outer, const CopyStep& inner, uint64_t extent) {
  return outer.entries == inner.entries * extent &&
         outer.bytes == inner.bytes * extent;
}

}  // namespace

CopyLoops MergedLoops(absl::Span<const CopyLoop> loops) {
  CopyLoops merged;
  for (const CopyLoop& loop : loops) {
    if (loop.extent == 1) continue;
    if (!merged.empty() &&
        Continues(merged.back().from, loop.from, loop.extent) &&
        Continues(merged.back().to, loop.to, loop.extent)) {
      merged.back() = {.extent = merged.back().extent * loop.extent,
                       .from = loop.from,
                       .to = loop.to};
    } else {
      merged.push_back(loop);
    }
  }
  return merged;
}

}  // namespace refit
