#include "executor/direct_copies.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "executor/copy_boxes.h"
#include "executor/device/copy_loops.h"

namespace refit {
namespace {

// Walks the loops of one side from the innermost outwards, in portions.
class LoopWalk {
 public:
  LoopWalk(const TensorBox& box, uint64_t element_bytes)
      : box_(box), element_bytes_(element_bytes), next_(box.loops.size()) {
    Advance();
  }

  // What is left of the present loop; 1 after the last.
  uint64_t extent() const { return extent_; }
  const CopyStep& step() const { return step_; }
  // Moves on by `part` iterations, which divide extent().
  void Take(uint64_t part) {
    extent_ /= part;
    step_.entries *= part;
    step_.bytes *= part;
    if (extent_ == 1) Advance();
  }

 private:
  void Advance() {
    if (next_ == 0) return;
    const BoxLoop& loop = box_.loops[--next_];
    extent_ = loop.extent;
    step_ = StepOf(loop, element_bytes_);
  }

  const TensorBox& box_;
  const uint64_t element_bytes_;
  size_t next_;
  uint64_t extent_ = 1;
  CopyStep step_;
};

// The loops that visit both boxes in their common order; empty with `joined`
// false if a loop of one side straddles two of the other.
CopyLoops JoinLoops(LoopWalk from, LoopWalk to, bool& joined) {
  CopyLoops loops;
  joined = true;
  while (from.extent() > 1 || to.extent() > 1) {
    const uint64_t part = std::min(from.extent(), to.extent());
    if (part == 1 || from.extent() % part != 0 || to.extent() % part != 0) {
      joined = false;
      return {};
    }
    loops.push_back({.extent = part, .from = from.step(), .to = to.step()});
    from.Take(part);
    to.Take(part);
  }
  std::reverse(loops.begin(), loops.end());
  return loops;
}

}  // namespace

absl::Status AppendDirectCopies(const fb::Body& body, const MessageEnd& send,
                                const MessageEnd& recv, uint32_t lane,
                                CopyBatch& batch) {
  const auto place = [&](const MessageEnd& end, const fb::Copy& copy,
                         const TensorBox& box) {
    const DType dtype = BufferOf(body, end.program, copy).dtype();
    return CopyPlace{.entry = end.table_begin +
                              end.tensors.begin(copy.buffer_slot()) +
                              box.first_tensor,
                     .byte_offset = box.first_element * DTypeBytes(dtype),
                     .dtype = dtype};
  };
  const fb::CopyList& packs = *body.copy_lists()->Get(send.message.copies());
  const fb::CopyList& unpacks = *body.copy_lists()->Get(recv.message.copies());
  absl::flat_hash_map<uint64_t, const fb::Copy*> pack_at;
  for (uint32_t i = 0; i < packs.count(); ++i) {
    const fb::Copy* pack = body.copies()->Get(packs.begin() + i);
    pack_at[pack->staging_offset()] = pack;
  }
  for (uint32_t i = 0; i < unpacks.count(); ++i) {
    const fb::Copy& unpack = *body.copies()->Get(unpacks.begin() + i);
    const auto found = pack_at.find(unpack.staging_offset());
    bool joined = found != pack_at.end();
    if (joined) {
      const fb::Copy& pack = *found->second;
      const TensorBox from = BoxOf(body, send.program, pack);
      const TensorBox to = BoxOf(body, recv.program, unpack);
      StridedCopy copy = {
          .from = place(send, pack, from),
          .to = place(recv, unpack, to),
          .loops_begin = static_cast<uint32_t>(batch.loops.size()),
          .lane = lane};
      const CopyLoops loops =
          JoinLoops(LoopWalk(from, DTypeBytes(copy.from.dtype)),
                    LoopWalk(to, DTypeBytes(copy.to.dtype)), joined);
      joined = joined && pack.wire_dtype() == unpack.wire_dtype() &&
               (copy.from.dtype == copy.to.dtype ||
                IsSupportedCast(copy.from.dtype, copy.to.dtype));
      copy.loops_count = static_cast<uint32_t>(loops.size());
      batch.loops.insert(batch.loops.end(), loops.begin(), loops.end());
      batch.copies.push_back(copy);
    }
    if (!joined) {
      return absl::UnimplementedError(absl::StrCat(
          "round ", recv.message.round(), ": a direct copy to rank ",
          send.message.peer(),
          " is not one copy of the sender; refit-verify tells more"));
    }
  }
  return absl::OkStatus();
}

}  // namespace refit
