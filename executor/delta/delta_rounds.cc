#include "executor/delta/delta_rounds.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/copies/copy_batches.h"
#include "executor/copies/tensor_table.h"
#include "executor/digest/param_box.h"
#include "plan/sent_ranges.h"

namespace refit {
namespace {

constexpr uint64_t kBytesPerMark = 16;
constexpr uint64_t kWordBytes = sizeof(uint32_t);

uint64_t WordBytesOf(uint64_t bits) {
  return (bits + 8 * kWordBytes - 1) / (8 * kWordBytes) * kWordBytes;
}

// By buffer stack of `rank`: whether some element of it may be received by more
// than one tensor of the destination.
std::vector<bool> SharedStacks(const PlanFile& plan, int32_t rank) {
  const fb::Body& body = plan.body();
  std::map<uint32_t, std::vector<ParamBox>> held;  // by param, disjoint
  std::map<uint32_t, bool> shared;                 // by param
  const auto add = [&](const fb::Fragment& fragment) {
    if (shared[fragment.param()]) return;
    const ParamBox box = BoxOf(fragment);
    std::vector<ParamBox>& others = held[fragment.param()];
    for (const ParamBox& other : others) {
      if (!Meet(box, other).has_value()) continue;
      shared[fragment.param()] = true;
      return;
    }
    others.push_back(box);
  };
  for (int32_t other = plan.source_ranks(); other < plan.world_size();
       ++other) {
    const auto* buffers = body.programs()->Get(other)->buffers();
    if (buffers == nullptr) continue;
    for (const uint32_t buffer : *buffers) {
      const auto* fragments = body.buffers()->Get(buffer)->fragments();
      if (fragments == nullptr) continue;
      for (const fb::Fragment* fragment : *fragments) add(*fragment);
    }
  }
  std::vector<bool> stacks;
  for (const uint32_t buffer : *body.programs()->Get(rank)->buffers()) {
    bool any = false;
    if (const auto* fragments = body.buffers()->Get(buffer)->fragments()) {
      for (const fb::Fragment* fragment : *fragments) {
        any |= shared[fragment->param()];
      }
    }
    stacks.push_back(any);
  }
  return stacks;
}

class DeltaRoundsBuilder {
 public:
  DeltaRoundsBuilder(const PlanFile& plan, int32_t rank,
                     const RankSchedule& schedule, const PeerTensors& peers,
                     absl::Span<std::byte* const> bitmaps, std::byte* snapshot,
                     std::byte* staging, absl::Span<const uint8_t> merge_powers,
                     Device& device, RoundCopies& copies, DeltaRounds& rounds)
      : plan_(plan),
        rank_(rank),
        schedule_(schedule),
        bitmaps_(bitmaps),
        snapshot_(snapshot),
        staging_(staging),
        merge_powers_(merge_powers),
        device_(device),
        compares_(plan.body().delta()->changes() ==
                  fb::DeltaChanges::kSnapshot),
        tensors_(plan, rank),
        copies_(copies),
        rounds_(rounds) {
    // As round_copies.cc fills the table: own tensors, staging, peers'.
    uint64_t entry = tensors_.size() + 1;
    is_hooked_.resize(entry, false);
    for (const auto& [peer, memory] : peers.mapped) {
      const TensorTable theirs(plan, peer);
      for (size_t slot = 0; slot < theirs.stacks(); ++slot) {
        const auto* hooks = theirs.buffer(slot).post_hooks();
        is_hooked_.insert(is_hooked_.end(),
                          theirs.begin(slot + 1) - theirs.begin(slot),
                          hooks != nullptr && hooks->size() > 0);
      }
    }
  }

  absl::Status Build() {
    rounds_.compares = compares_;
    rounds_.dense.moves.resize(schedule_.rounds().size());
    rounds_.delta.moves.resize(schedule_.rounds().size());
    if (absl::Status status = Allocate(); !status.ok()) return status;
    rounds_.delta.before.push_back(AddZero(counts_entry_, sizeof(DeltaCounts)));
    rounds_.dense.before = rounds_.delta.before;
    for (size_t i = 0; i < schedule_.rounds().size(); ++i) {
      const RoundWork& work = schedule_.rounds()[i];
      if (work.move_batch.has_value()) AddRound(i, *work.move_batch);
    }
    absl::Status status;
    if (HasRungs(plan_.body())) status = AddStaged();
    AddAfter();
    return status;
  }

 private:
  // What a rank holds beside its tensors, and where in the table.
  absl::Status Allocate() {
    const std::vector<SentRange> ranges = SentRanges(plan_, rank_);
    // Staged rounds find changes before the others, so they share.
    const std::vector<bool> shared = schedule_.DirectReceivers().empty()
                                         ? std::vector<bool>(tensors_.stacks())
                                         : SharedStacks(plan_, rank_);
    stack_of_.resize(tensors_.size());
    for (size_t slot = 0; slot < tensors_.stacks(); ++slot) {
      for (uint64_t entry = tensors_.begin(slot);
           entry < tensors_.begin(slot + 1); ++entry) {
        stack_of_[entry] = slot;
      }
    }
    is_shared_ = shared;
    uint64_t marks_bytes = 0;
    if (compares_) {
      for (uint64_t entry = 0; entry < ranges.size(); ++entry) {
        if (shared[stack_of_[entry]]) marks_bytes += MarksBytes(ranges[entry]);
      }
    }
    absl::Status status = Allocate(marks_bytes, rounds_.marks);
    status.Update(Allocate(2 * sizeof(DeltaCounts), rounds_.counts));
    if (!status.ok()) return status;
    shadow_entries_ = copies_.table.size();
    PlaceShadows(ranges);
    marks_entries_ = copies_.table.size();
    PlaceMarks(ranges, marks_bytes);
    counts_entry_ = copies_.table.size();
    copies_.table.push_back(rounds_.counts->data());
    copies_.table.push_back(rounds_.counts->data() + sizeof(DeltaCounts));
    return absl::OkStatus();
  }

  absl::Status Allocate(uint64_t size_bytes,
                        std::unique_ptr<DeviceMemory>& memory) {
    auto allocated = device_.Allocate(size_bytes);
    if (allocated.ok()) memory = *std::move(allocated);
    return allocated.status();
  }

  static uint64_t MarksBytes(const SentRange& range) {
    if (range.size_bytes() == 0) return 0;
    return WordBytesOf((range.end_byte - 1) / kBytesPerMark + 1);
  }

  // A shadow is as far from its entry as what it shadows is from its own.
  void PlaceShadows(absl::Span<const SentRange> ranges) {
    uint64_t used = 0;
    for (uint64_t entry = 0; entry < tensors_.size(); ++entry) {
      std::byte* shadow = nullptr;
      if (snapshot_ != nullptr && ranges[entry].size_bytes() > 0) {
        const uint64_t begin = ranges[entry].begin_byte;
        const auto address =
            reinterpret_cast<uintptr_t>(copies_.table[entry]) + begin;
        const auto shadow_address = reinterpret_cast<uintptr_t>(
            snapshot_ + used + address % kSnapshotAlignmentBytes);
        shadow = reinterpret_cast<std::byte*>(shadow_address - begin);
        used += SnapshotBytes(ranges[entry]);
      }
      copies_.table.push_back(shadow);
    }
  }

  void PlaceMarks(absl::Span<const SentRange> ranges, uint64_t marks_bytes) {
    uint64_t used = 0;
    for (uint64_t entry = 0; entry < tensors_.size(); ++entry) {
      if (!compares_) {
        copies_.table.push_back(bitmaps_[entry]);
      } else if (is_shared_[stack_of_[entry]] && marks_bytes > 0) {
        copies_.table.push_back(rounds_.marks->data() + used);
        used += MarksBytes(ranges[entry]);
      } else {
        copies_.table.push_back(nullptr);
      }
    }
    ranges_.assign(ranges.begin(), ranges.end());
  }

  CopyBatch NewBatch(CopyKind kind) const {
    CopyBatch batch;
    batch.kind = kind;
    batch.delta.shadow_entries = shadow_entries_;
    batch.delta.marks_entries = marks_entries_;
    batch.delta.bytes_per_mark = kBytesPerMark;
    batch.delta.counts_entry = counts_entry_;
    return batch;
  }

  static void Append(const CopyBatch& from, const StridedCopy& copy,
                     CopyBatch& batch) {
    batch.copies.push_back(copy);
    batch.copies.back().loops_begin = static_cast<uint32_t>(batch.loops.size());
    const auto loops = from.loops.begin() + copy.loops_begin;
    batch.loops.insert(batch.loops.end(), loops, loops + copy.loops_count);
  }

  // Adds `batch` to the list, unless it does nothing.
  void Add(CopyBatch batch, std::vector<size_t>& numbers) {
    if (batch.copies.empty()) return;
    numbers.push_back(copies_.batches.size());
    copies_.batches.push_back(std::move(batch));
  }

  size_t AddZero(uint64_t entry, uint64_t size_bytes) {
    CopyBatch zero;
    zero.kind = CopyKind::kZero;
    TensorBox box =
        RunOf({.entry = entry, .byte_offset = 0, .dtype = DType::kInt32},
              size_bytes / kWordBytes);
    AppendZero(box, zero);
    copies_.batches.push_back(std::move(zero));
    return copies_.batches.size() - 1;
  }

  void AddRound(size_t round, size_t move_batch) {
    // A copy: batches are added.
    const CopyBatch moves = copies_.batches[move_batch];
    CopyBatch kept = NewBatch(CopyKind::kKept);
    CopyBatch updating = NewBatch(CopyKind::kChanged);
    CopyBatch marking = NewBatch(CopyKind::kChanged);
    marking.delta.marks = true;
    std::map<uint32_t, CopyBatch> marked;  // by bytes per mark
    CopyBatch always;
    for (const StridedCopy& copy : moves.copies) {
      uint64_t elements = 1;
      for (uint32_t l = 0; l < copy.loops_count; ++l) {
        elements *= moves.loops[copy.loops_begin + l].extent;
      }
      const uint64_t bytes =
          elements * static_cast<uint64_t>(DTypeBytes(copy.to.dtype));
      if (!CanBeDelta(moves, copy)) {
        rounds_.always_bytes += bytes;
        Append(moves, copy, always);
        continue;
      }
      rounds_.moved.elements += elements;
      rounds_.moved.bytes += bytes;
      if (!compares_) {
        const auto per_mark =
            static_cast<uint32_t>(DTypeBytes(copy.from.dtype));
        CopyBatch& batch =
            marked.try_emplace(per_mark, NewBatch(CopyKind::kMarked))
                .first->second;
        batch.delta.bytes_per_mark = per_mark;
        Append(moves, copy, batch);
        continue;
      }
      Append(moves, copy, kept);
      Append(moves, copy,
             is_shared_[stack_of_[copy.from.entry]] ? marking : updating);
    }
    std::vector<size_t>& dense = rounds_.dense.moves[round];
    std::vector<size_t>& delta = rounds_.delta.moves[round];
    if (compares_) {
      Add(std::move(kept), dense);
    } else {
      dense.push_back(move_batch);
    }
    Add(std::move(updating), delta);
    Add(std::move(marking), delta);
    for (auto& [per_mark, batch] : marked) Add(std::move(batch), delta);
    const size_t before = delta.size();
    Add(std::move(always), delta);
    if (compares_ && delta.size() > before) dense.push_back(delta.back());
  }

  absl::Status AddStaged() {
    rounds_.staged = std::make_unique<StagedDeltas>(plan_, rank_, schedule_);
    absl::Status merged = rounds_.staged->Merge(merge_powers_);
    if (!merged.ok()) return merged;
    is_staged_.resize(tensors_.stacks());
    packed_.resize(schedule_.rounds().size());
    unpacked_.resize(schedule_.rounds().size());
    for (size_t r = 0; r < schedule_.rounds().size(); ++r) {
      const RoundWork& work = schedule_.rounds()[r];
      if (work.mechanism != fb::Mechanism::kStaged) continue;
      std::map<uint64_t, uint32_t> sends, receives;  // by their staging
      for (uint32_t i = 0; i < work.operations_count; ++i) {
        const uint32_t number = work.operations_begin + i;
        const Operation& operation = schedule_.operations()[number];
        const MessagePart& part = schedule_.parts()[number];
        const bool send = operation.kind == fb::MessageKind::kSend;
        const bool is_coded = rounds_.staged->IsCoded(number);
        if (send && is_coded) NoteStaged(part.message);
        if (const auto& in_tensor = copies_.in_tensor[number]) {
          if (!is_coded) continue;
          AddRun(number, *in_tensor, operation.size_bytes, send);
        } else {
          (send ? sends : receives)[part.staging_offset] = number;
        }
      }
      packed_[r] = AddStagedCopies(work.pack_batch, sends, /*send=*/true);
      unpacked_[r] =
          AddStagedCopies(work.unpack_batch, receives, /*send=*/false);
    }
    AddStagedBatches();
    const ChangeEntries changes =
        compares_ ? ChangeEntries{ChangesBy::kShadows, shadow_entries_}
                  : ChangeEntries{ChangesBy::kMarks, marks_entries_};
    return rounds_.staged->Bind(copies_.operations, staging_, copies_.table,
                                changes, device_);
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

  // A batch that packs or unpacks, and the operation that each copy is of.
  struct StagedCopies {
    std::optional<size_t> batch;
    std::vector<uint32_t> operations;
  };

  // Tells where the elements of those of `staged`, operations by their staging,
  // lie that are coded.
  StagedCopies AddStagedCopies(std::optional<size_t> number,
                               const std::map<uint64_t, uint32_t>& staged,
                               bool send) {
    StagedCopies of = {.batch = number, .operations = {}};
    if (!number.has_value()) return of;
    const CopyBatch& all = copies_.batches[*number];
    for (const StridedCopy& copy : all.copies) {
      const uint64_t byte = (send ? copy.to : copy.from).byte_offset;
      const auto& [begin, operation] = *--staged.upper_bound(byte);
      of.operations.push_back(operation);
      if (!rounds_.staged->IsCoded(operation)) continue;
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
    return of;
  }

  // The batches that pack and unpack what travels whole, rung by rung.
  void AddStagedBatches() {
    const size_t works = schedule_.rounds().size();
    const size_t rungs = rounds_.staged->rungs();
    rounds_.staged_batches.resize(works);
    for (StagedDeltaBatches& batches : rounds_.staged_batches) {
      batches.pack.resize(rungs);
      batches.unpack.resize(rungs);
    }
    for (size_t rung = 0; rung < rungs; ++rung) {
      const auto add = [&](size_t begin, size_t end) {
        StagedDeltaBatches& batches = rounds_.staged_batches[begin];
        batches.pack[rung] = AddWhole(packed_, begin, end, rung, true);
        batches.unpack[rung] = AddWhole(unpacked_, begin, end, rung, false);
      };
      const MergedLayout* const layout = rounds_.staged->MergedOn(rung);
      std::vector<bool> is_merged(works);
      if (layout != nullptr) {
        for (const MergedRound& merged : layout->rounds) {
          add(merged.begin, merged.end);
          std::fill(is_merged.begin() + static_cast<ptrdiff_t>(merged.begin),
                    is_merged.begin() + static_cast<ptrdiff_t>(merged.end),
                    true);
        }
      }
      for (size_t r = 0; r < works; ++r) {
        if (!is_merged[r]) add(r, r + 1);
      }
    }
  }

  // The copies of works [begin, end) that travel whole on a rung, from or to
  // where these are staged on it. The schedule's batch where these are all.
  std::optional<size_t> AddWhole(const std::vector<StagedCopies>& by_work,
                                 size_t begin, size_t end, size_t rung,
                                 bool send) {
    CopyBatch whole;
    bool moves = end - begin > 1;
    size_t copies = 0;
    for (size_t r = begin; r < end; ++r) {
      const StagedCopies& of = by_work[r];
      if (!of.batch.has_value()) continue;
      const CopyBatch& all = copies_.batches[*of.batch];
      copies += all.copies.size();
      whole.share = all.share;
      for (size_t c = 0; c < all.copies.size(); ++c) {
        const uint32_t operation = of.operations[c];
        if (!rounds_.staged->IsWhole(operation, rung)) continue;
        Append(all, all.copies[c], whole);
        StridedCopy& copy = whole.copies.back();
        const uint64_t from = schedule_.parts()[operation].staging_offset;
        const uint64_t to = rounds_.staged->StagingOffset(operation, rung);
        moves |= from != to;
        (send ? copy.to : copy.from).byte_offset += to - from;
      }
    }
    if (!moves && whole.copies.size() == copies) return by_work[begin].batch;
    return AddUnlessEmpty(std::move(whole));
  }

  // The stacks of which it is made are sent in staged rounds.
  void NoteStaged(uint32_t message) {
    const fb::Body& body = plan_.body();
    const fb::CopyList& list = *body.copy_lists()->Get(
        plan_.messages().Of(rank_).Get(message)->copies());
    for (uint32_t i = 0; i < list.count(); ++i) {
      is_staged_[body.copies()->Get(list.begin() + i)->buffer_slot()] = true;
    }
  }

  std::optional<size_t> AddUnlessEmpty(CopyBatch batch) {
    if (batch.copies.empty()) return std::nullopt;
    copies_.batches.push_back(std::move(batch));
    return copies_.batches.size() - 1;
  }

  // Whether the copy is of this rank's own tensors, all of which have marks
  // where workers mark, to one that holds what an earlier refit stored.
  bool CanBeDelta(const CopyBatch& batch, const StridedCopy& copy) const {
    if (copy.from.entry >= tensors_.size() || is_hooked_[copy.to.entry]) {
      return false;
    }
    return TellsChanges(copy, absl::MakeConstSpan(batch.loops)
                                  .subspan(copy.loops_begin, copy.loops_count));
  }

  // Whether something tells which elements of this rank's tensors changed, of
  // all that the copy reads.
  bool TellsChanges(const StridedCopy& copy,
                    absl::Span<const CopyLoop> loops) const {
    if (compares_) return true;
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

  // What is behind the rounds: the snapshot takes what was marked, and nothing
  // is marked any more.
  void AddAfter() {
    if (!compares_) {
      CopyBatch clear;
      clear.kind = CopyKind::kZero;
      for (uint64_t entry = 0; entry < tensors_.size(); ++entry) {
        if (bitmaps_[entry] == nullptr) continue;
        const fb::Buffer& buffer = tensors_.buffer(stack_of_[entry]);
        AppendClear(entry, WordBytesOf(TensorElements(buffer)), clear);
      }
      Add(std::move(clear), rounds_.delta.after);
      rounds_.dense.after = rounds_.delta.after;
      return;
    }
    if (rounds_.staged != nullptr) {
      CopyBatch keep;
      for (uint64_t entry = 0; entry < tensors_.size(); ++entry) {
        if (is_staged_[stack_of_[entry]]) AppendShadow(entry, keep);
      }
      rounds_.keep_staged = AddUnlessEmpty(std::move(keep));
      if (rounds_.keep_staged.has_value()) {
        rounds_.dense.after.push_back(*rounds_.keep_staged);
      }
    }
    CopyBatch take = NewBatch(CopyKind::kMarked);
    CopyBatch clear;
    clear.kind = CopyKind::kZero;
    for (uint64_t entry = 0; entry < tensors_.size(); ++entry) {
      const SentRange& range = ranges_[entry];
      if (range.size_bytes() == 0 || !is_shared_[stack_of_[entry]]) continue;
      AppendClear(entry, MarksBytes(range), clear);
      AppendShadow(entry, take);
    }
    // Counted aside: these are no stores to receivers.
    take.delta.counts_entry = counts_entry_ + 1;
    Add(std::move(take), rounds_.delta.after);
    Add(clear, rounds_.delta.after);
    Add(std::move(clear), rounds_.dense.after);
  }

  // From what is sent of a tensor to its shadow.
  void AppendShadow(uint64_t entry, CopyBatch& batch) const {
    const SentRange& range = ranges_[entry];
    if (range.size_bytes() == 0) return;
    const DType dtype = tensors_.buffer(stack_of_[entry]).dtype();
    const uint64_t elements = range.size_bytes() / DTypeBytes(dtype);
    const auto run = [&](uint64_t at) {
      return RunOf(
          {.entry = at, .byte_offset = range.begin_byte, .dtype = dtype},
          elements);
    };
    (void)AppendCopy(run(entry), run(entry + shadow_entries_), /*link=*/0,
                     batch);
  }

  void AppendClear(uint64_t entry, uint64_t size_bytes, CopyBatch& batch) {
    if (size_bytes == 0) return;
    AppendZero(RunOf({.entry = entry + marks_entries_,
                      .byte_offset = 0,
                      .dtype = DType::kInt32},
                     size_bytes / kWordBytes),
               batch);
  }

  const PlanFile& plan_;
  const int32_t rank_;
  const RankSchedule& schedule_;
  const absl::Span<std::byte* const> bitmaps_;
  std::byte* const snapshot_;
  std::byte* const staging_;
  const absl::Span<const uint8_t> merge_powers_;
  Device& device_;
  const bool compares_;  // with a snapshot
  const TensorTable tensors_;
  RoundCopies& copies_;
  DeltaRounds& rounds_;
  std::vector<bool> is_hooked_;  // by entry of the table
  std::vector<bool> is_shared_;  // by stack
  std::vector<bool> is_staged_;  // likewise
  // By round of the schedule: of staged ones.
  std::vector<StagedCopies> packed_;
  std::vector<StagedCopies> unpacked_;
  std::vector<size_t> stack_of_;   // by entry of the rank's tensors
  std::vector<SentRange> ranges_;  // likewise
  uint64_t shadow_entries_ = 0;
  uint64_t marks_entries_ = 0;
  uint64_t counts_entry_ = 0;
};

}  // namespace

absl::Status AddDeltaRounds(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            const PeerTensors& peers,
                            absl::Span<std::byte* const> bitmaps,
                            std::byte* snapshot, std::byte* staging,
                            absl::Span<const uint8_t> merge_powers,
                            Device& device, RoundCopies& copies,
                            DeltaRounds& rounds) {
  return DeltaRoundsBuilder(plan, rank, schedule, peers, bitmaps, snapshot,
                            staging, merge_powers, device, copies, rounds)
      .Build();
}

}  // namespace refit
