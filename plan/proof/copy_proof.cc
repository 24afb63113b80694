// Invariants 2, 3 and 6 of copies: what their lists pack and write, and whether
// that is the same.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/add_up_to.h"
#include "plan/proof/data_proof.h"
#include "plan/scratch_windows.h"

namespace refit::proof {

// Invariant 3: the widest access of a GPU never straddles two copies.
void DataProof::CheckAlignment(const End& end, const fb::Copy& copy) {
  if (copy.staging_offset() % kStagingAlignmentBytes == 0) return;
  violations_.Report(end.At(copy), Invariant::kInBounds,
                     "staging offset %d of a copy is not a multiple of %d",
                     copy.staging_offset(), kStagingAlignmentBytes);
}

void DataProof::CheckWindows(const End& end) {
  const fb::RankProgram& program = *body_.programs()->Get(end.rank);
  if (program.scratch_windows() == nullptr) return;
  const uint32_t round = end.message->round();
  for (const fb::Copy& copy :
       TakeCopies(end.message->copies(), kStepsPerKnownCopy)) {
    const fb::ScratchWindow* const window =
        WindowOf(program, copy.buffer_slot());
    if (window == nullptr ||
        (window->begin() <= round && round < window->end())) {
      continue;
    }
    violations_.Report(
        end.At(copy), Invariant::kInBounds,
        "the copy that begins here is not in the rounds of its scratch, %d to "
        "%d",
        window->begin(), window->end() - 1);
  }
}

bool DataProof::Keeps(size_t copies, int64_t reports_before) {
  if (violations_.reports() != reports_before || copies > kept_left_) {
    return false;
  }
  kept_left_ -= copies;
  return true;
}

const DataProof::PackedList& DataProof::Pack(const End& send) {
  CheckWindows(send);
  const bool relays = send.rank >= body_.source_ranks();
  const uint32_t ranks = 2 * geometry_[send.rank] + (relays ? 1 : 0);
  const PackedList* const known =
      packed_lists_.Find(send.message->copies(), ranks);
  if (known != nullptr) return *known;
  const int64_t reports = violations_.reports();
  PackedList packed;
  packed.relays = relays;
  for (const fb::Copy& copy :
       TakeCopies(send.message->copies(), kStepsPerCopy)) {
    PackOne(send, copy, packed);
  }
  std::vector<Packed>& copies = packed.copies;
  const auto before = [](const Packed& a, const Packed& b) {
    return a.begin < b.begin;
  };
  if (!std::is_sorted(copies.begin(), copies.end(), before)) {
    std::stable_sort(copies.begin(), copies.end(), before);
  }
  for (size_t i = 1; i < copies.size(); ++i) {
    if (copies[i].begin >= copies[i - 1].end) continue;
    violations_.Report({.rank = send.rank, .round = send.message->round()},
                       Invariant::kInBounds,
                       "the message to rank %d packs staging byte %d twice",
                       PeerOf(body_, send.rank, *send.message),
                       copies[i].begin);
  }
  packed.is_kept = Keeps(copies.size(), reports);
  if (!packed.is_kept) {
    packed_ = std::move(packed);
    return packed_;
  }
  return packed_lists_.Keep(send.message->copies(), ranks, std::move(packed));
}

void DataProof::PackOne(const End& send, const fb::Copy& copy,
                        PackedList& packed) {
  CheckAlignment(send, copy);
  const BufferFacts& facts = FactsAt(send.rank, copy.buffer_slot());
  if (facts.flaw().has_value()) return;  // reported for its rank
  const int32_t index = PlaceCopy(facts, copy);
  const Part* const part = facts.part(index);
  if (part == nullptr || part->fragment == nullptr) {
    const bool leaves = part == nullptr && facts.Find(OffsetOf(copy)) >= 0;
    violations_.Report(send.At(copy), Invariant::kRightElement, "packs %s",
                       leaves ? "elements beyond those of the fragment in "
                                "which the copy begins"
                              : "an element that holds no param");
    return;
  }
  const fb::Param& param = *body_.params()->Get(part->fragment->param());
  if (IsSkipped(param)) {
    violations_.Report(send.At(copy), Invariant::kWrittenOnce, [&] {
      return absl::StrCat("packs an element of param ", TensorName(param, 0),
                          ", which is declared as skipped");
    });
    return;
  }
  const DType dtype = BufferAt(send.rank, copy.buffer_slot()).dtype();
  // What a relay holds was perhaps cast when it arrived; it is not cast again.
  if (packed.relays && copy.wire_dtype() != dtype) {
    violations_.Report(send.At(copy), Invariant::kRightElement,
                       "relays as %s what it received as %s",
                       DTypeName(copy.wire_dtype()), DTypeName(dtype));
    return;
  }
  const auto begin = static_cast<int64_t>(copy.staging_offset());
  packed.copies.push_back({.begin = begin,
                           .end = begin + BytesOf(copy),
                           .param = part->fragment->param(),
                           .wire = copy.wire_dtype(),
                           .buffer = dtype,
                           .part = index,
                           .elements = ElementsPlaced(facts, *part),
                           .copy = &copy});
}

const DataProof::UnpackedList& DataProof::Unpack(const End& recv) {
  CheckWindows(recv);
  const uint32_t ranks = geometry_[recv.rank];
  const UnpackedList* const known =
      unpacked_lists_.Find(recv.message->copies(), ranks);
  if (known != nullptr) return *known;
  const int64_t reports = violations_.reports();
  UnpackedList unpacked;
  for (const fb::Copy& copy :
       TakeCopies(recv.message->copies(), kStepsPerCopy)) {
    UnpackOne(recv, copy, unpacked);
  }
  unpacked.is_kept = Keeps(unpacked.copies.size(), reports);
  if (!unpacked.is_kept) {
    return unpacked_of_rank_.emplace_back(std::move(unpacked));
  }
  return unpacked_lists_.Keep(recv.message->copies(), ranks,
                              std::move(unpacked));
}

void DataProof::UnpackOne(const End& recv, const fb::Copy& copy,
                          UnpackedList& unpacked) {
  CheckAlignment(recv, copy);
  const BufferFacts& facts = FactsAt(recv.rank, copy.buffer_slot());
  if (facts.flaw().has_value()) return;  // reported for its rank
  AddUpTo(BytesOf(copy), unpacked.bytes);
  const int32_t index = PlaceCopy(facts, copy);
  const Part* const part = facts.part(index);
  if (part == nullptr || part->fragment == nullptr) {
    ReportOutside(recv, copy);
    return;
  }
  const fb::Param& param = *body_.params()->Get(part->fragment->param());
  if (IsSkipped(param)) {
    violations_.Report(recv.At(copy), Invariant::kWrittenOnce, [&] {
      return absl::StrCat("is written although param ", TensorName(param, 0),
                          " is declared as skipped");
    });
    return;
  }
  if (!placement_.FillsHull()) {
    violations_.Report(
        recv.At(copy), Invariant::kWrittenOnce,
        "cannot prove the copy that begins here: it does not write a box of "
        "its fragment once");
    return;
  }
  unpacked.copies.push_back(
      {.landing = LandingIn(copy.buffer_slot(), index),
       .param = part->fragment->param(),
       .buffer = BufferAt(recv.rank, copy.buffer_slot()).dtype(),
       .elements = ElementsPlaced(facts, *part),
       .copy = &copy});
}

void DataProof::ReportOutside(const End& recv, const fb::Copy& copy) {
  const BufferFacts& facts = FactsAt(recv.rank, copy.buffer_slot());
  const Part* const part = facts.part(facts.Find(OffsetOf(copy)));
  if (part != nullptr && part->fragment != nullptr) {
    violations_.Report(
        recv.At(copy), Invariant::kRightElement,
        "the copy that begins here leaves the fragment in which it begins");
    return;
  }
  violations_.Report(recv.At(copy), Invariant::kWrittenOnce,
                     "is written although it %s",
                     part == nullptr  ? "holds no param"
                     : part->IsFill() ? "is padding, to be zero"
                                      : "is declared as skipped");
}

Sequence DataProof::ElementsPlaced(const BufferFacts& facts,
                                   const Part& part) const {
  Sequence elements = facts.ParamSequence(part, placement_);
  elements.base -= part.param_base;
  return elements;
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
void DataProof::CheckDirect(const End& recv, const Unpacked& unpacked,
                            const PackedList& sent) {
  const fb::Copy& copy = *unpacked.copy;
  const auto begin = static_cast<int64_t>(copy.staging_offset());
  const auto found = std::lower_bound(
      sent.copies.begin(), sent.copies.end(), begin,
      [](const Packed& p, int64_t byte) { return p.begin < byte; });
  if (found != sent.copies.end() && found->begin == begin &&
      CountOf(found->elements) == CountOf(unpacked.elements) &&
      HaveCommonLoops(DigitsOf(*found->copy), DigitsOf(copy))) {
    return;
  }
  violations_.Report(recv.At(copy), Invariant::kRightElement,
                     "the direct copy that begins here is not one copy "
                     "of rank %d",
                     PeerOf(body_, recv.rank, *recv.message));
}

int64_t DataProof::ParamBase(uint32_t rank, uint32_t slot, int32_t part) const {
  return FactsAt(rank, slot).parts()[static_cast<size_t>(part)].param_base;
}

Sequence DataProof::ElementsPacked(uint32_t rank, const Packed& packed) const {
  Sequence elements = packed.elements;
  elements.base += ParamBase(rank, packed.copy->buffer_slot(), packed.part);
  return elements;
}

// Invariant 2: the bytes that the copy reads were packed, from its elements.
void DataProof::Compare(const End& recv, const Unpacked& unpacked,
                        uint32_t packed_by, const PackedList& sent) {
  const fb::Copy& copy = *unpacked.copy;
  const Landing& landing = unpacked.landing;
  Sequence elements = unpacked.elements;
  elements.base += ParamBase(recv.rank, landing.slot, landing.part);
  const int64_t width = DTypeBytes(copy.wire_dtype());
  const auto begin = static_cast<int64_t>(copy.staging_offset());
  const int64_t end = begin + CountOf(elements) * width;
  const auto report = [&](int64_t byte, absl::FunctionRef<std::string()> text) {
    const Sequence offsets = {static_cast<int64_t>(copy.offset()),
                              DigitsOf(copy)};
    violations_.Report(recv.At(copy, ValueAt(offsets, (byte - begin) / width)),
                       Invariant::kRightElement, text);
  };
  const fb::Param& wanted = *body_.params()->Get(unpacked.param);
  auto packed = std::upper_bound(
      sent.copies.begin(), sent.copies.end(), begin,
      [](int64_t byte, const Packed& p) { return byte < p.end; });
  int64_t at = begin;
  for (; at < end; ++packed) {
    if (!steps_.Take(kStepsPerCopy)) return;
    if (packed == sent.copies.end() || packed->begin > at) {
      report(at, [&] {
        return absl::StrFormat(
            "holds staging bytes that rank %d does not pack when it should be "
            "%s",
            PeerOf(body_, recv.rank, *recv.message),
            ElementText(wanted, ValueAt(elements, (at - begin) / width)));
      });
      return;
    }
    if (!CompareDTypes(recv, unpacked, *packed, sent.relays)) return;
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
    const Sequence packed_elements = ElementsPacked(packed_by, *packed);
    const std::optional<int64_t> difference =
        packed->param != unpacked.param
            ? 0
            : FirstDifference(packed_elements, packed_first, elements, first,
                              (stop - at) / width);
    if (difference.has_value()) {
      report(at + *difference * width, [&] {
        return absl::StrFormat(
            "holds %s when it should be %s",
            ElementText(*body_.params()->Get(packed->param),
                        ValueAt(packed_elements, packed_first + *difference)),
            ElementText(wanted, ValueAt(elements, first + *difference)));
      });
      return;
    }
    at = stop;
  }
}

bool DataProof::CompareDTypes(const End& recv, const Unpacked& unpacked,
                              const Packed& packed, bool relays) {
  const fb::Copy& copy = *unpacked.copy;
  const Site site = recv.At(copy);
  if (copy.wire_dtype() != packed.wire) {
    violations_.Report(site, Invariant::kRightElement,
                       "is read as %s from staging that holds %s",
                       DTypeName(copy.wire_dtype()), DTypeName(packed.wire));
    return false;
  }
  const DType to = unpacked.buffer;
  if (relays && packed.wire != to) {
    violations_.Report(site, Invariant::kRightElement,
                       "is cast from %s to %s after it was relayed",
                       DTypeName(packed.wire), DTypeName(to));
    return false;
  }
  if (packed.buffer != packed.wire && packed.wire != to) {
    violations_.Report(
        site, Invariant::kRightElement, "is cast twice, %s to %s to %s",
        DTypeName(packed.buffer), DTypeName(packed.wire), DTypeName(to));
    return false;
  }
  if (packed.buffer != to && !casts_.contains({packed.buffer, to})) {
    violations_.Report(site, Invariant::kWellFormedInputs,
                       "is cast from %s to %s without a declared cast",
                       DTypeName(packed.buffer), DTypeName(to));
    return false;
  }
  return true;
}

}  // namespace refit::proof
