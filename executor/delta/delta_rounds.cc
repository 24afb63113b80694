#include "executor/delta/delta_rounds.h"

#include <map>
#include <utility>

#include "executor/delta/bitmaps.h"
#include "plan/schedule/copy_batches.h"
#include "plan/schedule/tensor_table.h"
#include "plan/sent_ranges.h"

namespace refit {
namespace {

class DeltaRoundsBuilder {
 public:
  DeltaRoundsBuilder(const PlanFile& plan, int32_t rank,
                     const RankSchedule& schedule,
                     absl::Span<std::byte* const> bitmaps, RoundCopies& copies,
                     DeltaRounds& rounds)
      : schedule_(schedule),
        bitmaps_(bitmaps),
        tensors_(plan, rank),
        ranges_(SentRanges(plan, rank)),
        change_entries_(copies.table.size()),
        copies_(copies),
        rounds_(rounds) {
    rounds_.compares =
        plan.body().delta()->changes() == fb::DeltaChanges::kSnapshot;
    rounds_.staged = std::make_unique<StagedDeltas>(plan, rank, schedule);
  }

  absl::Status Build(std::byte* snapshot, std::byte* staging, Device& device) {
    if (rounds_.compares) {
      PlaceShadows(snapshot);
    } else {
      copies_.table.insert(copies_.table.end(), bitmaps_.begin(),
                           bitmaps_.end());
    }
    for (const RoundWork& work : schedule_.rounds()) AddRound(work);
    AddAfter();
    return rounds_.staged->Bind(
        copies_.operations, staging, copies_.table,
        {rounds_.compares ? ChangesBy::kShadows : ChangesBy::kMarks,
         change_entries_},
        device);
  }

 private:
  // A shadow is as far from its entry as what it shadows is from its own.
  void PlaceShadows(std::byte* snapshot) {
    uint64_t used = 0;
    for (uint64_t entry = 0; entry < tensors_.size(); ++entry) {
      std::byte* shadow = nullptr;
      if (snapshot != nullptr && ranges_[entry].size_bytes() > 0) {
        const uint64_t begin = ranges_[entry].begin_byte;
        const auto address =
            reinterpret_cast<uintptr_t>(copies_.table[entry]) + begin;
        const auto shadow_address = reinterpret_cast<uintptr_t>(
            snapshot + used + address % kSnapshotAlignmentBytes);
        shadow = reinterpret_cast<std::byte*>(shadow_address - begin);
        used += SnapshotBytes(ranges_[entry]);
      }
      copies_.table.push_back(shadow);
    }
  }

  void AddRound(const RoundWork& work) {
    StagedDeltaBatches& batches = rounds_.staged_batches.emplace_back();
    if (work.mechanism != fb::Mechanism::kStaged) return;
    std::map<uint64_t, uint32_t> sends, receives;  // by their staging
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const Operation& operation = schedule_.operations()[number];
      const bool send = operation.kind == fb::MessageKind::kSend;
      if (const auto& in_tensor = copies_.in_tensor[number]) {
        if (!rounds_.staged->sizes().IsCoded(number)) continue;
        AddRun(number, *in_tensor, operation.size_bytes, send);
      } else {
        const uint64_t begin = schedule_.parts()[number].staging_offset;
        (send ? sends : receives)[begin] = number;
      }
    }
    batches.pack = AddStagedCopies(work.pack_batch, sends, /*send=*/true);
    batches.unpack =
        AddStagedCopies(work.unpack_batch, receives, /*send=*/false);
  }

  // The message is a run of a tensor.
  void AddRun(uint32_t number, const CopyAddress& in_tensor,
              uint64_t size_bytes, bool send) {
    const uint64_t elements = size_bytes / DTypeBytes(in_tensor.dtype);
    CopyBatch batch;
    (void)AppendCopy(
        RunOf(in_tensor, elements),
        RunOf({.entry = 0, .byte_offset = 0, .dtype = in_tensor.dtype},
              elements),
        /*link=*/0, batch);
    const StridedCopy& copy = batch.copies.front();
    rounds_.staged->AddCopy(number, copy, batch.loops,
                            !send || TellsChanges(copy, batch.loops));
  }

  // Tells where the elements of those of `staged`, operations by their staging,
  // lie that are coded. Returns by rung the batch of what is left of batch
  // `number`, which packs or unpacks.
  std::vector<std::optional<size_t>> AddStagedCopies(
      std::optional<size_t> number, const std::map<uint64_t, uint32_t>& staged,
      bool send) {
    const size_t rungs = rounds_.staged->rungs();
    std::vector<std::optional<size_t>> by_rung(rungs, number);
    if (!number.has_value()) return by_rung;
    const CopyBatch all = copies_.batches[*number];  // batches are added
    std::vector<uint32_t> operations;                // by copy
    for (const StridedCopy& copy : all.copies) {
      const uint64_t byte = (send ? copy.to : copy.from).byte_offset;
      const auto& [begin, operation] = *--staged.upper_bound(byte);
      operations.push_back(operation);
      if (!rounds_.staged->sizes().IsCoded(operation)) continue;
      StridedCopy in_tensor = copy;
      const auto first = all.loops.begin() + copy.loops_begin;
      CopyLoops loops(first, first + copy.loops_count);
      if (!send) {
        std::swap(in_tensor.from, in_tensor.to);
        for (CopyLoop& loop : loops) std::swap(loop.from, loop.to);
      }
      in_tensor.to.entry = 0;
      in_tensor.to.byte_offset = byte - begin;
      rounds_.staged->AddCopy(operation, in_tensor, loops,
                              !send || TellsChanges(in_tensor, loops));
    }
    for (size_t rung = 0; rung < rungs; ++rung) {
      CopyBatch whole;
      whole.share = all.share;
      for (size_t c = 0; c < all.copies.size(); ++c) {
        if (!rounds_.staged->sizes().IsWhole(operations[c], rung)) continue;
        StridedCopy copy = all.copies[c];
        const auto loops = all.loops.begin() + copy.loops_begin;
        copy.loops_begin = static_cast<uint32_t>(whole.loops.size());
        whole.loops.insert(whole.loops.end(), loops, loops + copy.loops_count);
        whole.copies.push_back(copy);
      }
      if (whole.copies.size() == all.copies.size()) continue;
      by_rung[rung] = Add(std::move(whole));
    }
    return by_rung;
  }

  std::optional<size_t> Add(CopyBatch batch) {
    if (batch.copies.empty()) return std::nullopt;
    copies_.batches.push_back(std::move(batch));
    return copies_.batches.size() - 1;
  }

  // Whether something tells which elements of this rank's tensors changed, of
  // all that the copy reads.
  bool TellsChanges(const StridedCopy& copy,
                    absl::Span<const CopyLoop> loops) const {
    if (rounds_.compares) return true;
    bool marked = true;
    const auto visit = [&](const auto& self, uint64_t entry,
                           size_t loop) -> void {
      if (loop == loops.size()) {
        marked &= bitmaps_[entry] != nullptr;
        return;
      }
      const CopyLoop& of = loops[loop];
      const uint64_t times = of.from.entries == 0 ? 1 : of.extent;
      for (uint64_t i = 0; i < times; ++i) {
        self(self, entry + i * of.from.entries, loop + 1);
      }
    };
    visit(visit, copy.from.entry, 0);
    return marked;
  }

  void AddAfter() {
    CopyBatch after;
    if (!rounds_.compares) after.kind = CopyKind::kZero;
    for (size_t slot = 0; slot < tensors_.stacks(); ++slot) {
      const fb::Buffer& buffer = tensors_.buffer(slot);
      for (uint64_t entry = tensors_.begin(slot);
           entry < tensors_.begin(slot + 1); ++entry) {
        if (rounds_.compares) {
          AppendShadow(entry, buffer.dtype(), after);
        } else if (bitmaps_[entry] != nullptr) {
          AppendClear(entry, BitmapBytes(TensorElements(buffer)), after);
        }
      }
    }
    rounds_.after = Add(std::move(after));
  }

  void AppendClear(uint64_t entry, uint64_t size_bytes,
                   CopyBatch& batch) const {
    if (size_bytes == 0) return;
    AppendZero(RunOf({.entry = entry + change_entries_,
                      .byte_offset = 0,
                      .dtype = DType::kInt32},
                     size_bytes / sizeof(uint32_t)),
               batch);
  }

  // From what is sent of a tensor to its shadow.
  void AppendShadow(uint64_t entry, DType dtype, CopyBatch& batch) const {
    const SentRange& range = ranges_[entry];
    if (range.size_bytes() == 0) return;
    const uint64_t elements = range.size_bytes() / DTypeBytes(dtype);
    const auto run = [&](uint64_t at) {
      return RunOf(
          {.entry = at, .byte_offset = range.begin_byte, .dtype = dtype},
          elements);
    };
    (void)AppendCopy(run(entry), run(entry + change_entries_), /*link=*/0,
                     batch);
  }

  const RankSchedule& schedule_;
  const absl::Span<std::byte* const> bitmaps_;
  const TensorTable tensors_;
  const std::vector<SentRange> ranges_;  // by entry of the rank's tensors
  const uint64_t change_entries_;  // from a tensor to its shadow or its marks
  RoundCopies& copies_;
  DeltaRounds& rounds_;
};

}  // namespace

absl::Status AddDeltaRounds(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            absl::Span<std::byte* const> bitmaps,
                            std::byte* snapshot, std::byte* staging,
                            Device& device, RoundCopies& copies,
                            DeltaRounds& rounds) {
  return DeltaRoundsBuilder(plan, rank, schedule, bitmaps, copies, rounds)
      .Build(snapshot, staging, device);
}

}  // namespace refit
