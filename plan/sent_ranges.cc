#include "plan/sent_ranges.h"

#include <algorithm>
#include <set>

#include "plan/dtype.h"

namespace refit {
namespace {

class RangeCollector {
 public:
  RangeCollector(const PlanFile& plan, int32_t rank)
      : body_(plan.body()), program_(*body_.programs()->Get(rank)) {
    uint64_t tensors = 0;
    for (const uint32_t buffer : *program_.buffers()) {
      begin_.push_back(tensors);
      tensors += StackTensors(*body_.buffers()->Get(buffer));
    }
    ranges_.resize(tensors);
  }

  std::vector<SentRange> Collect() {
    // Messages share lists.
    std::set<uint32_t> lists;
    ForEachMessage(body_, program_, [&](const fb::Message& message) {
      if (message.kind() != fb::MessageKind::kSend ||
          IsDirect(body_, message.round()) ||
          !lists.insert(message.copies()).second) {
        return true;
      }
      for (const fb::Copy& copy : CopiesOf(body_, message.copies())) Add(copy);
      return true;
    });
    return std::move(ranges_);
  }

 private:
  void Add(const fb::Copy& copy) {
    const fb::Buffer& buffer =
        *body_.buffers()->Get(program_.buffers()->Get(copy.buffer_slot()));
    elements_ = TensorElements(buffer);
    element_bytes_ = static_cast<uint64_t>(DTypeBytes(buffer.dtype()));
    span_ = 0;
    tensor_loops_.clear();
    for (const fb::Loop& loop : LoopsOf(body_, copy)) {
      // Other loops stay inside a tensor.
      if (loop.stride() >= elements_ && loop.stride() % elements_ == 0) {
        tensor_loops_.push_back(&loop);
      } else {
        span_ += (loop.extent() - 1) * loop.stride();
      }
    }
    first_ = copy.offset() % elements_;
    Visit(begin_[copy.buffer_slot()] + copy.offset() / elements_, 0);
  }

  void Visit(uint64_t tensor, size_t depth) {
    if (depth < tensor_loops_.size()) {
      const fb::Loop& loop = *tensor_loops_[depth];
      for (uint64_t i = 0; i < loop.extent(); ++i) {
        Visit(tensor + i * (loop.stride() / elements_), depth + 1);
      }
      return;
    }
    SentRange& range = ranges_[tensor];
    const uint64_t begin = first_ * element_bytes_;
    const uint64_t end = (first_ + span_ + 1) * element_bytes_;
    if (range.size_bytes() == 0) {
      range = {.begin_byte = begin, .end_byte = end};
      return;
    }
    range.begin_byte = std::min(range.begin_byte, begin);
    range.end_byte = std::max(range.end_byte, end);
  }

  const fb::Body& body_;
  const fb::RankProgram& program_;
  std::vector<uint64_t> begin_;  // first tensor, by slot
  std::vector<SentRange> ranges_;
  // Of the copy that is added.
  uint64_t elements_ = 0;  // of a tensor
  uint64_t element_bytes_ = 0;
  uint64_t first_ = 0;  // in its tensor
  uint64_t span_ = 0;   // from there to the last in the tensor
  std::vector<const fb::Loop*> tensor_loops_;
};

}  // namespace

std::vector<SentRange> SentRanges(const PlanFile& plan, int32_t rank) {
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  if (program.buffers() == nullptr) return {};
  return RangeCollector(plan, rank).Collect();
}

uint64_t SnapshotBytes(const SentRange& range) {
  if (range.size_bytes() == 0) return 0;
  const uint64_t rounded = range.size_bytes() + kSnapshotAlignmentBytes - 1;
  return rounded - rounded % kSnapshotAlignmentBytes + kSnapshotAlignmentBytes;
}

uint64_t SnapshotBytes(const PlanFile& plan, int32_t rank) {
  uint64_t bytes = 0;
  for (const SentRange& range : SentRanges(plan, rank)) {
    bytes += SnapshotBytes(range);
  }
  return bytes;
}

}  // namespace refit
