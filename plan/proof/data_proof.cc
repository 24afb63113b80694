#include "plan/proof/data_proof.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/proof/tiling.h"
#include "plan/scratch_windows.h"

namespace refit::proof {
namespace {

int64_t CountOf(const Digits& digits) {
  int64_t count = 1;
  for (const Digit& digit : digits) count *= digit.extent;
  return count;
}

}  // namespace

DataProof::DataProof(const fb::Body& body,
                     const std::vector<BufferFacts>& facts,
                     const Partners& partners, Violations& violations)
    : body_(body), facts_(facts), partners_(partners), violations_(violations) {
  if (body.casts() == nullptr) return;
  for (const fb::Cast* cast : *body.casts()) {
    casts_.insert({cast->from(), cast->to()});
  }
}

const BufferFacts& DataProof::FactsAt(uint32_t rank, uint32_t slot) const {
  return facts_[body_.programs()->Get(rank)->buffers()->Get(slot)];
}

const fb::Buffer& DataProof::BufferAt(uint32_t rank, uint32_t slot) const {
  return *body_.buffers()->Get(
      body_.programs()->Get(rank)->buffers()->Get(slot));
}

Digits DataProof::LoopsOf(const fb::Copy& copy) const {
  Digits digits;
  for (uint32_t i = 0; i < copy.loops_count(); ++i) {
    const fb::Loop& loop = *body_.loops()->Get(copy.loops_begin() + i);
    digits.push_back({.extent = static_cast<int64_t>(loop.extent()),
                      .stride = static_cast<int64_t>(loop.stride())});
  }
  return digits;
}

absl::Span<const fb::Copy* const> DataProof::CopiesOf(uint32_t list) {
  const fb::CopyList& range = *body_.copy_lists()->Get(list);
  copies_.clear();
  for (uint32_t i = 0; i < range.count(); ++i) {
    copies_.push_back(body_.copies()->Get(range.begin() + i));
  }
  return copies_;
}

// Invariant 3: the widest access of a GPU never straddles two copies.
bool DataProof::CheckAlignment(const End& end, const fb::Copy& copy) {
  if (copy.staging_offset() % kStagingAlignmentBytes == 0) return true;
  violations_.Report(end.At(copy, static_cast<int64_t>(copy.offset())),
                     Invariant::kInBounds, [&] {
                       return absl::StrFormat(
                           "staging offset %d of a copy is not a multiple of "
                           "%d",
                           copy.staging_offset(), kStagingAlignmentBytes);
                     });
  return false;
}

void DataProof::CheckWindow(const End& end, const fb::Copy& copy) {
  const fb::ScratchWindow* window =
      WindowOf(*body_.programs()->Get(end.rank), copy.buffer_slot());
  const uint32_t round = end.message->round();
  if (window == nullptr ||
      (window->begin() <= round && round < window->end())) {
    return;
  }
  violations_.Report(end.At(copy, static_cast<int64_t>(copy.offset())),
                     Invariant::kInBounds, [&] {
                       return absl::StrFormat(
                           "the copy that begins here is not in the rounds of "
                           "its scratch, %d to %d",
                           window->begin(), window->end() - 1);
                     });
}

bool DataProof::IsFollowed(uint32_t rank, uint32_t alike) const {
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  const fb::RankProgram& there = *body_.programs()->Get(alike);
  if (!AreShared(program, there) || partners_[rank] != partners_[alike]) {
    return false;
  }
  const auto are_alike = [&](uint32_t sender, uint32_t sender_there) {
    const uint32_t sources = body_.source_ranks();
    return (sender < sources) == (sender_there < sources) &&
           AreShared(*body_.programs()->Get(sender),
                     *body_.programs()->Get(sender_there));
  };
  for (uint32_t i = 0; i < program.messages()->size(); ++i) {
    const fb::Message* message = program.messages()->Get(i);
    if (message->kind() != fb::MessageKind::kRecv) continue;
    const uint32_t sender = PeerOf(body_, program, *message);
    const uint32_t sender_there = PeerOf(body_, there, *message);
    if (!are_alike(sender, sender_there)) return false;
    if (partners_[rank][i] < 0) continue;
    const auto position = static_cast<uint32_t>(partners_[rank][i]);
    const auto* sends = body_.programs()->Get(sender)->messages();
    if (!IsHeldSend(sender, *sends->Get(position))) continue;
    const std::optional<Held> held = HeldBy(sender, position);
    const std::optional<Held> held_there = HeldBy(sender_there, position);
    if (!held.has_value() || !held_there.has_value() ||
        held->position != held_there->position ||
        !are_alike(held->rank, held_there->rank)) {
      return false;
    }
  }
  return true;
}

bool DataProof::IsHeldSend(uint32_t rank, const fb::Message& send) const {
  return rank >= body_.source_ranks() && IsHeld(body_, send) &&
         body_.rounds()->Get(send.round())->mechanism() ==
             fb::Mechanism::kStaged;
}

// CheckStaging has shown that the bytes are those of the message that feeds it,
// and that nothing overwrites them; it reported what is not so.
std::optional<DataProof::Held> DataProof::HeldBy(uint32_t rank,
                                                 uint32_t position) const {
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  const fb::Message& send = *program.messages()->Get(position);
  const fb::Message* fed_by = FedBy(program, position);
  if (fed_by == nullptr) return std::nullopt;
  const auto feed = static_cast<uint32_t>(fed_by - program.messages()->Get(0));
  const int32_t partner = partners_[rank][feed];
  if (partner < 0) return std::nullopt;  // reported by MatchMessages
  Held held;
  held.rank = PeerOf(body_, program, *fed_by);
  held.position = static_cast<uint32_t>(partner);
  held.begin = static_cast<int64_t>(send.staging_offset()) -
               static_cast<int64_t>(fed_by->staging_offset());
  held.end = held.begin + static_cast<int64_t>(send.size_bytes());
  const fb::Message& packed =
      *body_.programs()->Get(held.rank)->messages()->Get(held.position);
  if (IsHeldSend(held.rank, packed)) {
    violations_.Report({.rank = rank, .round = send.round()},
                       Invariant::kRightElement, [&] {
                         return absl::StrFormat(
                             "deals out what rank %d deals out as well: bytes "
                             "are held by one rank only",
                             held.rank);
                       });
    return std::nullopt;
  }
  return held;
}

bool DataProof::PackSend(uint32_t rank, uint32_t position) {
  const fb::Message* send =
      body_.programs()->Get(rank)->messages()->Get(position);
  packed_by_ = rank;
  if (!IsHeldSend(rank, *send)) {
    Pack({rank, send});
    return true;
  }
  const std::optional<Held> held = HeldBy(rank, position);
  packed_.clear();
  if (!held.has_value()) return false;
  packed_by_ = held->rank;
  Pack({held->rank,
        body_.programs()->Get(held->rank)->messages()->Get(held->position)});
  std::erase_if(packed_, [&](const Packed& packed) {
    return packed.end <= held->begin || packed.begin >= held->end;
  });
  for (Packed& packed : packed_) {
    if (packed.begin < held->begin || packed.end > held->end) {
      violations_.Report(
          {.rank = rank, .round = send->round()}, Invariant::kRightElement,
          [&] {
            return absl::StrFormat(
                "deals out bytes [%d, %d) of the message from rank %d, which "
                "packs bytes [%d, %d) as one copy; wanted whole copies",
                held->begin, held->end, held->rank, packed.begin, packed.end);
          });
      return false;
    }
    packed.begin -= held->begin;
    packed.end -= held->begin;
  }
  return true;
}

void DataProof::FollowInto(uint32_t rank) {
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  const auto [alike, is_new] =
      followed_.try_emplace(program.messages(), Followed{.rank = rank});
  if (!is_new && IsFollowed(rank, alike->second.rank)) {
    moved_bytes_ += alike->second.moved_bytes;
    return;
  }
  const int64_t moved_before = moved_bytes_;
  writes_.clear();
  for (uint32_t i = 0; i < program.messages()->size(); ++i) {
    const fb::Message& message = *program.messages()->Get(i);
    if (message.kind() != fb::MessageKind::kRecv) continue;
    const int32_t partner = partners_[rank][i];
    if (partner < 0) continue;  // reported by MatchMessages
    is_packed_known_ = PackSend(PeerOf(body_, program, message),
                                static_cast<uint32_t>(partner));
    const int64_t moved = moved_bytes_;
    Unpack({rank, &message});
    // What the rank only holds is moved too.
    int64_t packed = 0;
    for (const Packed& part : packed_) packed += part.end - part.begin;
    moved_bytes_ = std::max(moved_bytes_, moved + packed);
  }
  Fill(rank);
  Quantize(rank);
  CheckWrites(rank);
  ListReads(rank);
  if (!reads_.empty()) CheckRelays(rank);
  if (is_new) alike->second.moved_bytes = moved_bytes_ - moved_before;
}

void DataProof::Pack(const End& send) {
  packed_.clear();
  for (const fb::Copy* copy : CopiesOf(send.message->copies())) {
    PackOne(send, *copy);
  }
  const auto before = [](const Packed& a, const Packed& b) {
    return a.begin < b.begin;
  };
  if (!std::is_sorted(packed_.begin(), packed_.end(), before)) {
    std::stable_sort(packed_.begin(), packed_.end(), before);
  }
  for (size_t i = 1; i < packed_.size(); ++i) {
    if (packed_[i].begin >= packed_[i - 1].end) continue;
    violations_.Report(
        {.rank = send.rank, .round = send.message->round()},
        Invariant::kInBounds, [&] {
          return absl::StrFormat(
              "the message to rank %d packs staging byte %d twice",
              PeerOf(body_, send.rank, *send.message), packed_[i].begin);
        });
  }
}

void DataProof::PackOne(const End& send, const fb::Copy& copy) {
  CheckAlignment(send, copy);
  CheckWindow(send, copy);
  const auto offset = static_cast<int64_t>(copy.offset());
  const BufferFacts& facts = FactsAt(send.rank, copy.buffer_slot());
  if (facts.flaw().has_value()) return;  // reported for its rank
  const Digits loops = LoopsOf(copy);
  const int32_t index = facts.Find(offset, loops, placement_);
  if (index < 0) {
    const int32_t start = facts.Find(offset);
    violations_.Report(
        send.At(copy, offset), Invariant::kRightElement, [&]() -> std::string {
          return start < 0
                     ? "packs an element that holds no param"
                     : "packs elements beyond those of the fragment in which "
                       "the copy begins";
        });
    return;
  }
  const Part& part = facts.parts()[static_cast<size_t>(index)];
  if (part.fragment == nullptr) {
    violations_.Report(send.At(copy, offset), Invariant::kRightElement, [] {
      return std::string("packs an element that holds no param");
    });
    return;
  }
  const uint32_t param = part.fragment->param();
  if (body_.params()->Get(param)->skip() != fb::SkipReason::kUnspecified) {
    violations_.Report(send.At(copy, offset), Invariant::kWrittenOnce, [&] {
      return absl::StrCat("packs an element of param ",
                          TensorName(*body_.params()->Get(param), 0),
                          ", which is declared as skipped");
    });
    return;
  }
  const DType dtype = BufferAt(send.rank, copy.buffer_slot()).dtype();
  // What a relay holds was perhaps cast when it arrived; it is not cast again.
  if (send.rank >= body_.source_ranks() && copy.wire_dtype() != dtype) {
    violations_.Report(send.At(copy, offset), Invariant::kRightElement, [&] {
      return absl::StrFormat("relays as %s what it received as %s",
                             DTypeName(copy.wire_dtype()), DTypeName(dtype));
    });
    return;
  }
  Packed& packed = packed_.emplace_back();
  packed.begin = static_cast<int64_t>(copy.staging_offset());
  packed.end = packed.begin + CountOf(loops) * DTypeBytes(copy.wire_dtype());
  packed.param = param;
  packed.wire = copy.wire_dtype();
  packed.buffer = dtype;
  packed.elements = facts.ParamSequence(part, placement_);
  packed.loops = loops;
}

void DataProof::Unpack(const End& recv) {
  for (const fb::Copy* copy : CopiesOf(recv.message->copies())) {
    UnpackOne(recv, *copy);
  }
}

void DataProof::UnpackOne(const End& recv, const fb::Copy& copy) {
  CheckAlignment(recv, copy);
  CheckWindow(recv, copy);
  const auto offset = static_cast<int64_t>(copy.offset());
  const BufferFacts& facts = FactsAt(recv.rank, copy.buffer_slot());
  if (facts.flaw().has_value()) return;  // reported for its rank
  const Digits loops = LoopsOf(copy);
  moved_bytes_ += CountOf(loops) * DTypeBytes(copy.wire_dtype());
  const int32_t index = facts.Find(offset, loops, placement_);
  if (index < 0 ||
      facts.parts()[static_cast<size_t>(index)].fragment == nullptr) {
    ReportOutside(recv, copy);
    return;
  }
  const Part& part = facts.parts()[static_cast<size_t>(index)];
  const uint32_t param = part.fragment->param();
  if (body_.params()->Get(param)->skip() != fb::SkipReason::kUnspecified) {
    violations_.Report(recv.At(copy, offset), Invariant::kWrittenOnce, [&] {
      return absl::StrCat("is written although param ",
                          TensorName(*body_.params()->Get(param), 0),
                          " is declared as skipped");
    });
    return;
  }
  if (!placement_.FillsHull()) {
    violations_.Report(recv.At(copy, offset), Invariant::kWrittenOnce, [] {
      return std::string(
          "cannot prove the copy that begins here: it does not write a box of "
          "its fragment once");
    });
    return;
  }
  Write& write = writes_.emplace_back();
  write.slot = copy.buffer_slot();
  write.part = index;
  write.round = recv.message->round();
  write.box = placement_.Hull();
  if (!is_packed_known_) return;  // reported for its sender
  Compare(recv, copy, loops, param, facts.ParamSequence(part, placement_));
  if (body_.rounds()->Get(recv.message->round())->mechanism() ==
      fb::Mechanism::kDirect) {
    CheckDirect(recv, copy, loops);
  }
}

namespace {

// Whether one nest of loops visits both: from the innermost outwards, the
// shorter loop always divides what is left of the other.
bool HaveCommonLoops(const Digits& a, const Digits& b) {
  size_t i = a.size();
  size_t j = b.size();
  int64_t left_a = 1;
  int64_t left_b = 1;
  while (true) {
    if (left_a == 1 && i > 0) left_a = a[--i].extent;
    if (left_b == 1 && j > 0) left_b = b[--j].extent;
    if (left_a == 1 || left_b == 1) return left_a == left_b;
    const int64_t part = std::min(left_a, left_b);
    if (left_a % part != 0 || left_b % part != 0) return false;
    left_a /= part;
    left_b /= part;
  }
}

}  // namespace

// Compare has shown that the bytes are packed.
void DataProof::CheckDirect(const End& recv, const fb::Copy& copy,
                            const Digits& loops) {
  const auto begin = static_cast<int64_t>(copy.staging_offset());
  const auto packed = std::lower_bound(
      packed_.begin(), packed_.end(), begin,
      [](const Packed& p, int64_t byte) { return p.begin < byte; });
  if (packed != packed_.end() && packed->begin == begin &&
      CountOf(packed->loops) == CountOf(loops) &&
      HaveCommonLoops(packed->loops, loops)) {
    return;
  }
  violations_.Report(recv.At(copy, static_cast<int64_t>(copy.offset())),
                     Invariant::kRightElement, [&] {
                       return absl::StrFormat(
                           "the direct copy that begins here is not one copy "
                           "of rank %d",
                           PeerOf(body_, recv.rank, *recv.message));
                     });
}

void DataProof::ReportOutside(const End& recv, const fb::Copy& copy) {
  const auto offset = static_cast<int64_t>(copy.offset());
  const BufferFacts& facts = FactsAt(recv.rank, copy.buffer_slot());
  const int32_t start = facts.Find(offset);
  const Part* part =
      start < 0 ? nullptr : &facts.parts()[static_cast<size_t>(start)];
  if (part != nullptr && part->fragment != nullptr) {
    violations_.Report(recv.At(copy, offset), Invariant::kRightElement, [] {
      return std::string(
          "the copy that begins here leaves the fragment in which it begins");
    });
    return;
  }
  violations_.Report(
      recv.At(copy, offset), Invariant::kWrittenOnce, [&]() -> std::string {
        if (part == nullptr) return "is written although it holds no param";
        return part->IsFill() ? "is written although it is padding, to be zero"
                              : "is written although it is declared as skipped";
      });
}

// Invariant 2: the bytes that `copy` reads were packed, from `elements`.
void DataProof::Compare(const End& recv, const fb::Copy& copy,
                        const Digits& loops, uint32_t param,
                        const Sequence& elements) {
  const int64_t width = DTypeBytes(copy.wire_dtype());
  const auto begin = static_cast<int64_t>(copy.staging_offset());
  const int64_t end = begin + CountOf(loops) * width;
  const Sequence offsets = {static_cast<int64_t>(copy.offset()), loops};
  const auto report = [&](int64_t byte, absl::FunctionRef<std::string()> text) {
    violations_.Report(recv.At(copy, ValueAt(offsets, (byte - begin) / width)),
                       Invariant::kRightElement, text);
  };
  const fb::Param& wanted = *body_.params()->Get(param);
  auto packed = std::upper_bound(
      packed_.begin(), packed_.end(), begin,
      [](int64_t byte, const Packed& p) { return byte < p.end; });
  int64_t at = begin;
  for (; at < end; ++packed) {
    if (packed == packed_.end() || packed->begin > at) {
      report(at, [&] {
        return absl::StrFormat(
            "holds staging bytes that rank %d does not pack when it should be "
            "%s",
            PeerOf(body_, recv.rank, *recv.message),
            ElementText(wanted, ValueAt(elements, (at - begin) / width)));
      });
      return;
    }
    if (!CompareDTypes(recv, copy, *packed)) return;
    const int64_t stop = std::min(end, packed->end);
    if ((at - packed->begin) % width != 0 || (stop - at) % width != 0) {
      report(at, [&] {
        return absl::StrFormat("holds parts of two elements that rank %d packs",
                               PeerOf(body_, recv.rank, *recv.message));
      });
      return;
    }
    const int64_t first = (at - begin) / width;
    const int64_t packed_first = (at - packed->begin) / width;
    const std::optional<int64_t> difference =
        packed->param != param
            ? 0
            : FirstDifference(packed->elements, packed_first, elements, first,
                              (stop - at) / width);
    if (difference.has_value()) {
      report(at + *difference * width, [&] {
        return absl::StrFormat(
            "holds %s when it should be %s",
            ElementText(*body_.params()->Get(packed->param),
                        ValueAt(packed->elements, packed_first + *difference)),
            ElementText(wanted, ValueAt(elements, first + *difference)));
      });
      return;
    }
    at = stop;
  }
}

bool DataProof::CompareDTypes(const End& recv, const fb::Copy& copy,
                              const Packed& packed) {
  const Site site = recv.At(copy, static_cast<int64_t>(copy.offset()));
  if (copy.wire_dtype() != packed.wire) {
    violations_.Report(site, Invariant::kRightElement, [&] {
      return absl::StrFormat("is read as %s from staging that holds %s",
                             DTypeName(copy.wire_dtype()),
                             DTypeName(packed.wire));
    });
    return false;
  }
  const DType to = BufferAt(recv.rank, copy.buffer_slot()).dtype();
  if (packed_by_ >= body_.source_ranks() && packed.wire != to) {
    violations_.Report(site, Invariant::kRightElement, [&] {
      return absl::StrFormat("is cast from %s to %s after it was relayed",
                             DTypeName(packed.wire), DTypeName(to));
    });
    return false;
  }
  if (packed.buffer != packed.wire && packed.wire != to) {
    violations_.Report(site, Invariant::kRightElement, [&] {
      return absl::StrFormat("is cast twice, %s to %s to %s",
                             DTypeName(packed.buffer), DTypeName(packed.wire),
                             DTypeName(to));
    });
    return false;
  }
  if (packed.buffer != to && !casts_.contains({packed.buffer, to})) {
    violations_.Report(site, Invariant::kWellFormedInputs, [&] {
      return absl::StrFormat("is cast from %s to %s without a declared cast",
                             DTypeName(packed.buffer), DTypeName(to));
    });
    return false;
  }
  return true;
}

void DataProof::Fill(uint32_t rank) {
  for (const fb::Copy* copy : CopiesOf(body_.programs()->Get(rank)->fills())) {
    const auto offset = static_cast<int64_t>(copy->offset());
    const BufferFacts& facts = FactsAt(rank, copy->buffer_slot());
    if (facts.flaw().has_value()) continue;  // reported for its rank
    const int32_t index = facts.Find(offset, LoopsOf(*copy), placement_);
    if (index < 0 || !facts.parts()[static_cast<size_t>(index)].IsFill() ||
        !placement_.FillsHull()) {
      violations_.Report(
          {.rank = rank, .buffer_slot = copy->buffer_slot(), .offset = offset},
          Invariant::kWrittenOnce, [] {
            return std::string(
                "the fill that begins here does not zero a box of one fill "
                "region");
          });
      continue;
    }
    Write& write = writes_.emplace_back();
    write.slot = copy->buffer_slot();
    write.part = index;
    write.box = placement_.Hull();
  }
}

// Invariant 1: all that must be written is, once.
void DataProof::CheckWrites(uint32_t rank) {
  std::stable_sort(writes_.begin(), writes_.end(),
                   [](const Write& a, const Write& b) {
                     return std::tie(a.slot, a.part) < std::tie(b.slot, b.part);
                   });
  absl::Span<const Write> rest = writes_;
  const uint32_t slots = body_.programs()->Get(rank)->buffers()->size();
  for (uint32_t slot = 0; slot < slots; ++slot) {
    const BufferFacts& facts = FactsAt(rank, slot);
    if (facts.flaw().has_value()) continue;  // and nothing was written
    if (rank < body_.source_ranks() &&
        !IsScratch(*body_.programs()->Get(rank), slot)) {
      continue;
    }
    for (size_t i = 0; i < facts.parts().size(); ++i) {
      size_t count = 0;
      while (count < rest.size() && rest[count].slot == slot &&
             rest[count].part == static_cast<int32_t>(i)) {
        ++count;
      }
      const Part& part = facts.parts()[i];
      const bool is_written =
          part.fragment != nullptr
              ? body_.params()->Get(part.fragment->param())->skip() ==
                    fb::SkipReason::kUnspecified
              : part.IsFill();
      // Writes into any other part were reported and not kept.
      if (is_written) CheckTiling(rank, slot, part, rest.subspan(0, count));
      rest = rest.subspan(count);
    }
  }
}

void DataProof::CheckTiling(uint32_t rank, uint32_t slot, const Part& part,
                            absl::Span<const Write> writes) {
  std::vector<Box> boxes;
  __int128 volume = 0;
  for (const Write& write : writes) {
    boxes.push_back(write.box);
    volume += VolumeOf(write.box);
  }
  const auto overlap = FindOverlap(boxes, [](size_t, size_t) { return true; });
  if (overlap.has_value()) {
    const size_t a = overlap->first;
    const size_t b = overlap->second;
    violations_.Report(
        {.rank = rank,
         .round = writes[b].round,
         .buffer_slot = slot,
         .offset = part.lattice.At(FirstShared(boxes[a], boxes[b]))},
        Invariant::kWrittenOnce, [&] {
          if (writes[b].round == Site::kAfterRounds) {
            return std::string("is written a second time, by a quantization");
          }
          return writes[a].round == Site::kBeforeRounds
                     ? std::string("is zeroed twice")
                     : absl::StrFormat(
                           "is written a second time, after round "
                           "%d",
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
  const auto open = FirstUncovered(space, boxes);
  violations_.Report({.rank = rank,
                      .round = Site::kAfterRounds,
                      .buffer_slot = slot,
                      .offset = open.has_value() ? part.lattice.At(*open)
                                                 : part.lattice.offset},
                     Invariant::kWrittenOnce, [&] {
                       return std::string(part.fragment != nullptr
                                              ? "is never written"
                                              : "is never zeroed");
                     });
}

// What `rank` sends, once per copy list and what feeds it: the earliest round
// counts.
void DataProof::ListReads(uint32_t rank) {
  reads_.clear();
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  absl::flat_hash_set<std::pair<uint32_t, const fb::Message*>> listed;
  for (uint32_t i = 0; i < program.messages()->size(); ++i) {
    const fb::Message* message = program.messages()->Get(i);
    if (message->kind() != fb::MessageKind::kSend) continue;
    const fb::Message* fed_by = FedBy(program, i);
    if (!listed.emplace(message->copies(), fed_by).second) continue;
    for (const fb::Copy* copy : CopiesOf(message->copies())) {
      const auto offset = static_cast<int64_t>(copy->offset());
      const BufferFacts& facts = FactsAt(rank, copy->buffer_slot());
      if (facts.flaw().has_value()) continue;  // reported for its rank
      const int32_t index = facts.Find(offset, LoopsOf(*copy), placement_);
      if (index < 0) continue;  // reported where it is received
      reads_.push_back({.slot = copy->buffer_slot(),
                        .part = index,
                        .round = message->round(),
                        .fed_by = fed_by,
                        .offset = offset,
                        .box = placement_.Hull()});
    }
  }
}

bool DataProof::IsAwaited(const Write& write, const Read& read) const {
  if (read.fed_by == nullptr) return write.round < read.round;
  const auto is_direct = [&](int64_t round) {
    return body_.rounds()->Get(static_cast<uint32_t>(round))->mechanism() ==
           fb::Mechanism::kDirect;
  };
  const int64_t fed_by = read.fed_by->round();
  return write.round == Site::kBeforeRounds ||
         (write.round <= fed_by && is_direct(write.round) == is_direct(fed_by));
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
    const auto of_part = [&](const auto& access) {
      return access.slot == first.slot && access.part == first.part;
    };
    while (w < writes_.size() && std::tie(writes_[w].slot, writes_[w].part) <
                                     std::tie(first.slot, first.part)) {
      ++w;
    }
    // The writes of the part, then the reads.
    std::vector<Box> boxes;
    for (; w < writes_.size() && of_part(writes_[w]); ++w) {
      boxes.push_back(writes_[w].box);
    }
    const size_t writes = boxes.size();
    size_t end = begin;
    for (; end < reads_.size() && of_part(reads_[end]); ++end) {
      boxes.push_back(reads_[end].box);
    }
    const auto overlap = FindOverlap(boxes, [&](size_t a, size_t b) {
      return a < writes && b >= writes &&
             !IsAwaited(writes_[w - writes + a], reads_[begin + b - writes]);
    });
    if (overlap.has_value()) {
      const Write& write = writes_[w - writes + overlap->first];
      const Read& read = reads_[begin + overlap->second - writes];
      violations_.Report(
          {.rank = rank,
           .round = read.round,
           .buffer_slot = read.slot,
           .offset = read.offset},
          Invariant::kRightElement, [&] {
            return read.fed_by != nullptr && write.round < read.round
                       ? absl::StrFormat(
                             "the copy that begins here relays elements that "
                             "arrive in round %d, but is fed by round %d",
                             write.round, read.fed_by->round())
                       : absl::StrFormat(
                             "the copy that begins here relays elements that "
                             "arrive only in round %d",
                             write.round);
          });
    }
    begin = end;
  }
}

}  // namespace refit::proof
