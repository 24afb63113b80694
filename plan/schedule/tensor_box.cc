#include "plan/schedule/tensor_box.h"

namespace refit {

uint64_t TensorBox::Elements() const {
  uint64_t elements = 1;
  for (const BoxLoop& loop : loops) elements *= loop.extent;
  return elements;
}

bool TensorBox::IsOneRun() const {
  uint64_t bytes = ElementBytes();
  for (size_t l = loops.size(); l-- > 0;) {
    if (loops[l].stride.entries != 0 || loops[l].stride.bytes != bytes)
      return false;
    bytes *= loops[l].extent;
  }
  return true;
}

TensorBox BoxOf(const fb::Body& body, const TensorTable& tensors,
                const fb::Copy& copy, uint64_t first_entry) {
  const uint32_t slot = copy.buffer_slot();
  TensorBox box;
  box.first = tensors.AddressOf(slot, copy.offset());
  box.first.entry += first_entry;
  for (const fb::Loop& loop : LoopsOf(body, copy)) {
    box.loops.push_back({.extent = loop.extent(),
                         .stride = tensors.StrideOf(slot, loop.stride())});
  }
  return box;
}

TensorBox RunOf(const CopyAddress& first, uint64_t elements) {
  TensorBox box;
  box.first = first;
  if (elements > 1) {
    box.loops.push_back(
        {.extent = elements, .stride = {.bytes = box.ElementBytes()}});
  }
  return box;
}

namespace {

// The part of `box` in the iterations of its loops from `depth` on that
// [begin, end) are; `part` stands at the first of them, with the loops before
// `depth` left out.
void VisitParts(const TensorBox& box, size_t depth, uint64_t begin,
                uint64_t end, const TensorBox& part,
                const std::function<void(const TensorBox&)>& visit) {
  if (begin == end) return;
  if (depth == box.loops.size()) return visit(part);
  uint64_t inner = 1;  // elements of one iteration
  for (size_t l = depth + 1; l < box.loops.size(); ++l) {
    inner *= box.loops[l].extent;
  }
  const BoxLoop& loop = box.loops[depth];
  const auto at = [&](uint64_t iteration) {
    TensorBox moved = part;
    moved.first.entry += iteration * loop.stride.entries;
    moved.first.byte_offset += iteration * loop.stride.bytes;
    return moved;
  };
  uint64_t first = begin / inner;
  const uint64_t last = end / inner;
  if (begin % inner != 0 || first == last) {
    const uint64_t limit = first == last ? end % inner : inner;
    VisitParts(box, depth + 1, begin % inner, limit, at(first), visit);
    if (first == last) return;
    ++first;
  }
  if (first < last) {
    TensorBox whole = at(first);
    whole.loops.push_back(loop);
    whole.loops.back().extent = last - first;
    whole.loops.insert(whole.loops.end(),
                       box.loops.begin() + static_cast<ptrdiff_t>(depth) + 1,
                       box.loops.end());
    visit(whole);
  }
  VisitParts(box, depth + 1, 0, end % inner, at(last), visit);
}

}  // namespace

void ForEachPart(const TensorBox& box, uint64_t begin, uint64_t end,
                 const std::function<void(const TensorBox&)>& visit) {
  VisitParts(box, 0, begin, end, {.first = box.first, .loops = {}}, visit);
}

}  // namespace refit
