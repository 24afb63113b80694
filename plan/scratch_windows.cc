#include "plan/scratch_windows.h"

#include "plan/dtype.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

uint32_t FirstScratch(const fb::RankProgram& program) {
  return program.buffers()->size() - program.scratch_buffers();
}

bool HasWindows(const fb::RankProgram& program) {
  return program.scratch_windows() != nullptr &&
         program.scratch_windows()->size() > 0;
}

}  // namespace

bool IsScratch(const fb::RankProgram& program, uint32_t slot) {
  return slot >= FirstScratch(program);
}

const fb::ScratchWindow* WindowOf(const fb::RankProgram& program,
                                  uint32_t slot) {
  if (!HasWindows(program) || !IsScratch(program, slot)) return nullptr;
  return program.scratch_windows()->Get(slot - FirstScratch(program));
}

std::vector<ScratchRange> ScratchRanges(const fb::Body& body,
                                        const fb::RankProgram& program) {
  std::vector<ScratchRange> ranges;
  uint64_t next_byte = 0;
  for (uint32_t slot = FirstScratch(program); slot < program.buffers()->size();
       ++slot) {
    const fb::Buffer& buffer =
        *body.buffers()->Get(program.buffers()->Get(slot));
    const uint64_t bytes = TensorElements(buffer) * StackTensors(buffer) *
                           static_cast<uint64_t>(DTypeBytes(buffer.dtype()));
    ScratchRange range = {
        .begin_byte = next_byte, .begin = 0, .end = body.rounds()->size()};
    if (const fb::ScratchWindow* window = WindowOf(program, slot)) {
      range.begin_byte = window->offset();
      range.begin = window->begin();
      range.end = window->end();
    }
    range.end_byte = range.begin_byte + bytes;
    next_byte = (range.end_byte + kScratchAlignmentBytes - 1) /
                kScratchAlignmentBytes * kScratchAlignmentBytes;
    ranges.push_back(range);
  }
  return ranges;
}

uint64_t ScratchBytes(const fb::Body& body, const fb::RankProgram& program) {
  if (HasWindows(program)) return program.scratch_arena_bytes();
  const std::vector<ScratchRange> ranges = ScratchRanges(body, program);
  return ranges.empty() ? 0 : ranges.back().end_byte;
}

}  // namespace refit
