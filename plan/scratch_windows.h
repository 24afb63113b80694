// Where a rank's scratch lies, and in which rounds.
#ifndef REFIT_PLAN_SCRATCH_WINDOWS_H_
#define REFIT_PLAN_SCRATCH_WINDOWS_H_

#include <cstdint>
#include <vector>

#include "plan_generated.h"

namespace refit {

// Of each scratch buffer in the arena, so that what a GPU accesses at once
// never straddles two.
inline constexpr uint64_t kScratchAlignmentBytes = 128;

// Bytes [begin_byte, end_byte) of the rank's arena in rounds [begin, end).
struct ScratchRange {
  uint64_t begin_byte = 0;
  uint64_t end_byte = 0;
  uint32_t begin = 0;
  uint32_t end = 0;

  bool SharesBytes(const ScratchRange& other) const {
    return begin_byte < other.end_byte && other.begin_byte < end_byte;
  }
};

// By scratch buffer. Without windows each has bytes of its own in all rounds.
std::vector<ScratchRange> ScratchRanges(const fb::Body& body,
                                        const fb::RankProgram& program);

// The size of the arena.
uint64_t ScratchBytes(const fb::Body& body, const fb::RankProgram& program);

// Whether slot `slot` of the rank's buffers is scratch.
bool IsScratch(const fb::RankProgram& program, uint32_t slot);

// Null for what is not scratch, and in programs without windows.
const fb::ScratchWindow* WindowOf(const fb::RankProgram& program,
                                  uint32_t slot);

}  // namespace refit

#endif  // REFIT_PLAN_SCRATCH_WINDOWS_H_
