// Scratch that shares bytes is never in use at the same time. With what
// DataProof shows of messages and operations, it follows that an executor finds
// a time for each operation: the rounds of the window before it in the same
// bytes are over, those that need it have not begun.
#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "absl/strings/str_format.h"
#include "plan/proof/schedule_proof.h"
#include "plan/scratch_windows.h"

namespace refit::proof {
namespace {

void CheckWindowsOf(const fb::Body& body, uint32_t rank,
                    Violations& violations) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const std::vector<ScratchRange> ranges = ScratchRanges(body, program);
  const uint32_t first_slot =
      program.buffers()->size() - program.scratch_buffers();
  // Walks the windows by their first rounds; `open` holds those that are not
  // over, by their first byte; disjoint.
  std::vector<size_t> by_begin(ranges.size());
  std::iota(by_begin.begin(), by_begin.end(), size_t{0});
  std::stable_sort(by_begin.begin(), by_begin.end(), [&](size_t a, size_t b) {
    return ranges[a].begin < ranges[b].begin;
  });
  std::map<uint64_t, size_t> open;
  for (const size_t i : by_begin) {
    const ScratchRange& range = ranges[i];
    auto at = open.lower_bound(range.begin_byte);
    if (at != open.begin() &&
        ranges[std::prev(at)->second].SharesBytes(range)) {
      --at;
    }
    bool is_free = true;
    while (at != open.end() && ranges[at->second].SharesBytes(range)) {
      const ScratchRange& other = ranges[at->second];
      if (other.end <= range.begin) {
        at = open.erase(at);
        continue;
      }
      is_free = false;
      violations.Report(
          {.rank = rank,
           .round = range.begin,
           .buffer_slot = first_slot + static_cast<uint32_t>(i)},
          Invariant::kInBounds,
          "its window of rounds %d to %d shares bytes with that of slot "
          "%d, of rounds %d to %d",
          range.begin, range.end - 1, first_slot + at->second, other.begin,
          other.end - 1);
      ++at;
    }
    if (is_free) open.emplace(range.begin_byte, i);
  }
}

}  // namespace

void CheckWindows(const fb::Body& body, Violations& violations) {
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    CheckWindowsOf(body, rank, violations);
  }
}

}  // namespace refit::proof
