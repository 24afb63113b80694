// Invariant 1, and what of invariant 2 is about time: all that must be written
// is, once, and before it is relayed.
#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/proof/data_proof.h"
#include "plan/proof/order_proof.h"
#include "plan/proof/tiling.h"
#include "plan/scratch_windows.h"

namespace refit::proof {

void DataProof::Fill(uint32_t rank) {
  for (const fb::Copy& copy :
       TakeCopies(body_.programs()->Get(rank)->fills(), kStepsPerCopy)) {
    const BufferFacts& facts = FactsAt(rank, copy.buffer_slot());
    if (facts.flaw().has_value()) continue;  // reported for its rank
    const int32_t index = PlaceCopy(facts, copy);
    const Part* const part = facts.part(index);
    if (part == nullptr || !part->IsFill() || !placement_.FillsHull()) {
      violations_.Report(
          {.rank = rank,
           .buffer_slot = copy.buffer_slot(),
           .offset = OffsetOf(copy)},
          Invariant::kWrittenOnce,
          "the fill that begins here does not zero a box of one fill region");
      continue;
    }
    AddWrite(LandingIn(copy.buffer_slot(), index), Site::kBeforeRounds);
  }
}

// By slot and part, else in order: counted, not compared, since there are many.
// First by part, then by slot: a plan may have far more parts in its slots than
// in its buffers.
void DataProof::SortWrites(uint32_t rank) {
  const uint32_t slots = body_.programs()->Get(rank)->buffers()->size();
  size_t parts = 0;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    parts = std::max(parts, FactsAt(rank, slot).parts().size());
  }
  SortWritesBy(parts, [](const Write& write) {
    return static_cast<size_t>(write.landing->part);
  });
  SortWritesBy(slots, [](const Write& write) {
    return static_cast<size_t>(write.landing->slot);
  });
}

void DataProof::SortWritesBy(size_t keys,
                             absl::FunctionRef<size_t(const Write&)> key_of) {
  std::vector<size_t> next(keys + 1, 0);  // place, by key
  for (const Write& write : writes_) ++next[key_of(write) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  sorted_writes_.resize(writes_.size());
  for (const Write& write : writes_) {
    sorted_writes_[next[key_of(write)]++] = write;
  }
  std::swap(writes_, sorted_writes_);
}

// Invariant 1: all that must be written is, once.
void DataProof::CheckWrites(uint32_t rank) {
  SortWrites(rank);
  absl::Span<const Write> rest = writes_;
  const uint32_t slots = body_.programs()->Get(rank)->buffers()->size();
  for (uint32_t slot = 0; slot < slots; ++slot) {
    const BufferFacts& facts = FactsAt(rank, slot);
    if (facts.flaw().has_value()) continue;  // and nothing was written
    if (rank < body_.source_ranks() &&
        !IsScratch(*body_.programs()->Get(rank), slot)) {
      continue;
    }
    if (!steps_.Take(facts.parts().size())) return;
    for (size_t i = 0; i < facts.parts().size(); ++i) {
      size_t count = 0;
      while (count < rest.size() && rest[count].landing->slot == slot &&
             rest[count].landing->part == static_cast<int32_t>(i)) {
        ++count;
      }
      const Part& part = facts.parts()[i];
      const bool is_written =
          part.fragment != nullptr
              ? !IsSkipped(*body_.params()->Get(part.fragment->param()))
              : part.IsFill();
      // Writes into any other part were reported and not kept.
      if (is_written) CheckTiling(rank, slot, part, rest.subspan(0, count));
      rest = rest.subspan(count);
    }
  }
}

void DataProof::CheckTiling(uint32_t rank, uint32_t slot, const Part& part,
                            absl::Span<const Write> writes) {
  boxes_.clear();
  __int128 volume = 0;
  for (const Write& write : writes) {
    boxes_.push_back(&write.box());
    volume += write.landing->volume;
  }
  const auto overlap = FindOverlap(
      boxes_, [](size_t, size_t) { return true; }, steps_);
  if (overlap.has_value()) {
    const size_t a = overlap->first;
    const size_t b = overlap->second;
    violations_.Report(
        {.rank = rank,
         .round = writes[b].round,
         .buffer_slot = slot,
         .offset = part.lattice.At(FirstShared(*boxes_[a], *boxes_[b]))},
        Invariant::kWrittenOnce, [&] {
          return writes[b].round == Site::kAfterRounds
                     ? "is written a second time, by a quantization"
                 : writes[a].round == Site::kBeforeRounds
                     ? "is zeroed twice"
                     : absl::StrCat("is written a second time, after round ",
                                    writes[a].round);
        });
    return;
  }
  // Disjoint boxes inside the part with the part's volume tile it.
  if (volume == part.lattice.Volume()) return;
  Box space;
  for (const Digit& digit : part.lattice.digits) {
    space.lo.push_back(0);
    space.hi.push_back(digit.extent);
  }
  const auto open = FirstUncovered(space, boxes_);
  violations_.Report({.rank = rank,
                      .round = Site::kAfterRounds,
                      .buffer_slot = slot,
                      .offset = open.has_value() ? part.lattice.At(*open)
                                                 : part.lattice.offset},
                     Invariant::kWrittenOnce, "is never %s",
                     part.fragment != nullptr ? "written" : "zeroed");
}

// What `rank` sends, once per copy list and what feeds it: the earliest round
// counts.
void DataProof::ListReads(uint32_t rank) {
  reads_.clear();
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  absl::flat_hash_set<std::pair<uint32_t, const fb::Message*>> listed;
  const MessageVector& messages = messages_.Of(program);
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message* message = messages.Get(i);
    if (message->kind() != fb::MessageKind::kSend) continue;
    const fb::Message* fed_by = FedBy(messages_, program, i);
    if (!listed.emplace(message->copies(), fed_by).second) continue;
    for (const fb::Copy& copy : TakeCopies(message->copies(), kStepsPerCopy)) {
      const BufferFacts& facts = FactsAt(rank, copy.buffer_slot());
      if (facts.flaw().has_value()) continue;  // reported for its rank
      const int32_t index = PlaceCopy(facts, copy);
      if (index < 0) continue;  // reported where it is received
      reads_.push_back({.slot = copy.buffer_slot(),
                        .part = index,
                        .round = message->round(),
                        .fed_by = fed_by,
                        .offset = OffsetOf(copy),
                        .box = placement_.Hull()});
    }
  }
}

bool DataProof::IsAwaited(const Write& write, const Read& read) const {
  if (write.round == Site::kBeforeRounds) return true;
  if (write.round >= read.round) return false;
  const AwaitedRounds awaited =
      AwaitedBy(body_, static_cast<uint32_t>(read.round), read.fed_by);
  return write.round <= (IsDirect(body_, static_cast<uint32_t>(write.round))
                             ? awaited.direct
                             : awaited.staged);
}

// CheckWrites has shown that writes tile each part, and left them sorted by it.
// So what is read was written before, if every write that meets it is awaited.
void DataProof::CheckRelays(uint32_t rank) {
  std::stable_sort(reads_.begin(), reads_.end(),
                   [](const Read& a, const Read& b) {
                     return std::tie(a.slot, a.part) < std::tie(b.slot, b.part);
                   });
  size_t w = 0;
  for (size_t begin = 0; begin < reads_.size();) {
    const Read& first = reads_[begin];
    const auto key = std::tie(first.slot, first.part);
    const auto key_of = [](const Write& write) {
      return std::tie(write.landing->slot, write.landing->part);
    };
    size_t end = begin;
    Box hull = first.box;  // of the reads of the part
    for (; end < reads_.size() &&
           std::tie(reads_[end].slot, reads_[end].part) == key;
         ++end) {
      Extend(hull, reads_[end].box);
    }
    while (w < writes_.size() && key_of(writes_[w]) < key) ++w;
    // The writes of the part that they may meet, then the reads.
    std::vector<const Write*> met;
    boxes_.clear();
    for (; w < writes_.size() && key_of(writes_[w]) == key; ++w) {
      if (!Intersects(writes_[w].box(), hull)) continue;
      met.push_back(&writes_[w]);
      boxes_.push_back(&writes_[w].box());
    }
    for (size_t i = begin; i < end; ++i) boxes_.push_back(&reads_[i].box);
    const size_t writes = met.size();
    const auto overlap = FindOverlap(
        boxes_,
        [&](size_t a, size_t b) {
          return a < writes && b >= writes &&
                 !IsAwaited(*met[a], reads_[begin + b - writes]);
        },
        steps_);
    if (overlap.has_value()) {
      const Write& write = *met[overlap->first];
      const Read& read = reads_[begin + overlap->second - writes];
      violations_.Report(
          {.rank = rank,
           .round = read.round,
           .buffer_slot = read.slot,
           .offset = read.offset},
          Invariant::kRightElement, [&] {
            const bool is_known =
                read.fed_by != nullptr && write.round < read.round;
            return absl::StrCat(
                "the copy that begins here relays elements that arrive ",
                is_known ? "in round " : "only in round ", write.round,
                is_known ? ", but is fed by round " : "",
                is_known ? absl::StrCat(read.fed_by->round()) : "");
          });
    }
    begin = end;
  }
}

}  // namespace refit::proof
