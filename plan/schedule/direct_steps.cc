#include "plan/schedule/direct_steps.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/types/span.h"
#include "plan/schedule/copy_batches.h"
#include "plan/schedule/tensor_box.h"
#include "plan/schedule/tensor_table.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

// Steps that end later than those of as many buckets are worth a signal each.
constexpr uint64_t kLongBuckets = 4;

// Calls visit(entry) for each entry that a box holds something of; `stride_of`
// gives a loop's, in entries.
template <typename Loop, typename StrideOf, typename Visit>
void ForEachEntry(uint64_t entry, absl::Span<const Loop> loops,
                  const StrideOf& stride_of, const Visit& visit) {
  while (!loops.empty() && stride_of(loops.front()) == 0) {
    loops.remove_prefix(1);
  }
  if (loops.empty()) return visit(entry);
  for (uint64_t i = 0; i < loops.front().extent; ++i) {
    ForEachEntry(entry + i * stride_of(loops.front()), loops.subspan(1),
                 stride_of, visit);
  }
}

// Appends to `batch` the parts of a copy.
class CopyCutter {
 public:
  CopyCutter(const DirectSteps& steps, uint64_t first_entry, CopyBatch& batch)
      : steps_(steps), first_entry_(first_entry), batch_(batch) {}

  void Append(StridedCopy copy, const CopyLoops& loops) {
    if (const std::optional<uint32_t> step = OnlyStep(copy, loops)) {
      copy.step = *step;
      copy.loops_begin = static_cast<uint32_t>(batch_.loops.size());
      copy.loops_count = static_cast<uint32_t>(loops.size());
      batch_.copies.push_back(copy);
      batch_.loops.insert(batch_.loops.end(), loops.begin(), loops.end());
      return;
    }
    const auto cut =
        std::find_if(loops.begin(), loops.end(), [](const CopyLoop& loop) {
          return loop.to.entries > 0 && loop.extent > 1;
        });
    const auto depth = static_cast<size_t>(cut - loops.begin());
    CopyLoops one = loops;
    one[depth].extent = 1;
    const auto at = [&](uint64_t i) {
      StridedCopy moved = copy;
      moved.from.entry += i * cut->from.entries;
      moved.from.byte_offset += i * cut->from.bytes;
      moved.to.entry += i * cut->to.entries;
      moved.to.byte_offset += i * cut->to.bytes;
      return moved;
    };
    for (uint64_t i = 0; i < cut->extent;) {
      const std::optional<uint32_t> step = OnlyStep(at(i), one);
      uint64_t end = i + 1;
      while (step.has_value() && end < cut->extent &&
             OnlyStep(at(end), one) == step) {
        ++end;
      }
      CopyLoops part = loops;
      part[depth].extent = end - i;
      Append(at(i), part);
      i = end;
    }
  }

 private:
  // The step of all that is stored; none if there are several.
  std::optional<uint32_t> OnlyStep(const StridedCopy& copy,
                                   const CopyLoops& loops) const {
    uint32_t least = kDirectSteps;
    uint32_t most = 0;
    ForEachEntry(
        copy.to.entry - first_entry_, absl::MakeConstSpan(loops),
        [](const CopyLoop& loop) { return loop.to.entries; },
        [&](uint64_t entry) {
          least = std::min(least, steps_.StepOf(entry));
          most = std::max(most, steps_.StepOf(entry));
        });
    return least == most ? std::optional(most) : std::nullopt;
  }

  const DirectSteps& steps_;
  const uint64_t first_entry_;
  CopyBatch& batch_;
};

}  // namespace

bool HasDirectSteps(const PlanFile& plan) {
  const auto& rounds = *plan.body().rounds();
  const auto& programs = *plan.body().programs();
  return std::none_of(rounds.begin(), rounds.end(),
                      [](const fb::Round* round) {
                        return round->mechanism() == fb::Mechanism::kDirect &&
                               round->route() == fb::Route::kLocal;
                      }) &&
         std::none_of(programs.begin(), programs.end(),
                      [](const fb::RankProgram* program) {
                        return Length(program->quantizes()) > 0;
                      });
}

DirectSteps::DirectSteps(const PlanFile& plan, int32_t sender, int32_t receiver,
                         uint32_t round) {
  const fb::Body& body = plan.body();
  const fb::RankProgram& program =
      *body.programs()->Get(static_cast<uint32_t>(receiver));
  const TensorTable tensors(plan, receiver);
  std::vector<uint64_t> bytes(tensors.size());
  uint64_t total = 0;
  for (const fb::Message* message : plan.messages().Of(program)) {
    if (message->round() != round ||
        message->kind() != fb::MessageKind::kRecv ||
        PeerOf(body, program, *message) != static_cast<uint32_t>(sender)) {
      continue;
    }
    for (const fb::Copy& copy : CopiesOf(body, message->copies())) {
      const TensorBox box = BoxOf(body, tensors, copy);
      uint64_t of_entry = box.ElementBytes();
      for (const BoxLoop& loop : box.loops) {
        if (loop.stride.entries == 0) of_entry *= loop.extent;
      }
      ForEachEntry(
          box.first.entry, absl::MakeConstSpan(box.loops),
          [](const BoxLoop& loop) { return loop.stride.entries; },
          [&](uint64_t entry) {
            bytes[entry] += of_entry;
            total += of_entry;
          });
    }
  }
  are_long_ = total >= kLongBuckets * body.limits()->bucket_bytes();
  uint64_t before = 0;
  for (const uint64_t of_entry : bytes) {
    const uint64_t end = before + of_entry;
    // Of the last of its bytes.
    steps_.push_back(
        static_cast<uint32_t>(end == 0 ? 0 : (end - 1) * kDirectSteps / total));
    before = end;
  }
}

void CutBySteps(const DirectSteps& steps, uint64_t first_entry,
                size_t first_copy, CopyBatch& batch) {
  const std::vector<StridedCopy> whole(
      batch.copies.begin() + static_cast<std::ptrdiff_t>(first_copy),
      batch.copies.end());
  batch.copies.resize(first_copy);
  CopyCutter cutter(steps, first_entry, batch);
  for (const StridedCopy& copy : whole) {
    const auto loops = batch.loops.begin() + copy.loops_begin;
    const CopyLoops copied(loops, loops + copy.loops_count);
    cutter.Append(copy, copied);
  }
}

}  // namespace refit
