#include "plan/proof/data_proof.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/add_up_to.h"
#include "plan/proof/order_proof.h"
#include "plan/proof/tiling.h"
#include "plan/scratch_windows.h"

namespace refit::proof {
namespace {

// Comparisons of lists that are kept. Ranks of a small file may have many
// million messages, no two of them alike.
constexpr size_t kMostCompared = size_t{1} << 20;

constexpr uint64_t kStepsPerCopy = 16;      // to find where it is
constexpr uint64_t kStepsPerKnownCopy = 4;  // where that is known

int64_t CountOf(const Digits& digits) {
  int64_t count = 1;
  for (const Digit& digit : digits) count *= digit.extent;
  return count;
}

}  // namespace

DataProof::DataProof(const MessageLists& messages,
                     const std::vector<BufferFacts>& facts,
                     const Partners& partners, Steps& steps,
                     Violations& violations)
    : body_(messages.body()),
      messages_(messages),
      facts_(facts),
      partners_(partners),
      steps_(steps),
      violations_(violations),
      kept_left_((1 << 16) + 4 * uint64_t{body_.copies()->size()}),
      packed_lists_(body_.copy_lists()->size()),
      unpacked_lists_(body_.copy_lists()->size()) {
  FindGeometries();
  if (body_.casts() == nullptr) return;
  for (const fb::Cast* cast : *body_.casts()) {
    casts_.insert({cast->from(), cast->to()});
  }
}

void DataProof::FindGeometries() {
  absl::flat_hash_map<std::vector<int64_t>, uint32_t> of_buffers;
  std::vector<uint32_t> of_buffer;
  for (uint32_t i = 0; i < facts_.size(); ++i) {
    std::vector<int64_t> geometry = facts_[i].Geometry();
    geometry.push_back(static_cast<int64_t>(body_.buffers()->Get(i)->dtype()));
    of_buffer.push_back(
        of_buffers
            .try_emplace(std::move(geometry),
                         static_cast<uint32_t>(of_buffers.size()))
            .first->second);
  }
  absl::flat_hash_map<std::vector<uint32_t>, uint32_t> of_lists;
  absl::flat_hash_map<const void*, uint32_t> of_list;
  for (const fb::RankProgram* program : *body_.programs()) {
    const auto [known, is_new] = of_list.try_emplace(program->buffers(), 0);
    if (is_new) {
      std::vector<uint32_t> geometries;
      for (const uint32_t buffer : *program->buffers()) {
        geometries.push_back(of_buffer[buffer]);
      }
      known->second = of_lists
                          .try_emplace(std::move(geometries),
                                       static_cast<uint32_t>(of_lists.size()))
                          .first->second;
    }
    geometry_.push_back(known->second);
  }
}

const BufferFacts& DataProof::FactsAt(uint32_t rank, uint32_t slot) const {
  return facts_[body_.programs()->Get(rank)->buffers()->Get(slot)];
}

bool DataProof::IsDirect(const fb::Message& message) const {
  return body_.rounds()->Get(message.round())->mechanism() ==
         fb::Mechanism::kDirect;
}

const fb::Buffer& DataProof::BufferAt(uint32_t rank, uint32_t slot) const {
  return *body_.buffers()->Get(
      body_.programs()->Get(rank)->buffers()->Get(slot));
}

Digits DataProof::DigitsOf(const fb::Copy& copy) const {
  Digits digits;
  for (const fb::Loop& loop : LoopsOf(body_, copy)) {
    digits.push_back({.extent = static_cast<int64_t>(loop.extent()),
                      .stride = static_cast<int64_t>(loop.stride())});
  }
  return digits;
}

absl::Span<const fb::Copy> DataProof::TakeCopies(uint32_t list,
                                                 uint64_t steps_per_copy) {
  const absl::Span<const fb::Copy> copies = CopiesOf(body_, list);
  if (steps_.Take(steps_per_copy * copies.size())) return copies;
  return {};
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

void DataProof::CheckWindows(const End& end) {
  const fb::RankProgram& program = *body_.programs()->Get(end.rank);
  if (program.scratch_windows() == nullptr) return;
  for (const fb::Copy& copy :
       TakeCopies(end.message->copies(), kStepsPerKnownCopy)) {
    CheckWindow(end, copy);
  }
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
  const MessageVector& messages = messages_.Of(program);
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message* message = messages.Get(i);
    if (message->kind() != fb::MessageKind::kRecv) continue;
    const uint32_t sender = PeerOf(body_, program, *message);
    const uint32_t sender_there = PeerOf(body_, there, *message);
    if (!are_alike(sender, sender_there)) return false;
    if (partners_[rank][i] < 0) continue;
    const auto position = static_cast<uint32_t>(partners_[rank][i]);
    if (!IsHeldSend(sender, *messages_.Of(sender).Get(position))) continue;
    const std::optional<Held> held = HeldBy(sender, position);
    const std::optional<Held> held_there = HeldBy(sender_there, position);
    if (!held.has_value() || !held_there.has_value() ||
        held->position != held_there->position ||
        held->begin != held_there->begin || held->end != held_there->end ||
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
// and that nothing overwrites them; it reported what is not so. That one may be
// held as well: each is of an earlier round than the one before.
std::optional<DataProof::Held> DataProof::HeldBy(uint32_t rank,
                                                 uint32_t position) const {
  Held held = {.rank = rank, .position = position};
  const fb::Message* send = messages_.Of(rank).Get(position);
  held.end = static_cast<int64_t>(send->size_bytes());
  while (IsHeldSend(held.rank, *send)) {
    if (!steps_.Take(1)) return std::nullopt;
    const fb::RankProgram& program = *body_.programs()->Get(held.rank);
    const MessageVector& messages = messages_.Of(program);
    const fb::Message* fed_by = FedBy(messages_, program, held.position);
    if (fed_by == nullptr) return std::nullopt;
    const auto feed = static_cast<uint32_t>(fed_by - messages.Get(0));
    const int32_t partner = partners_[held.rank][feed];
    if (partner < 0) return std::nullopt;  // reported by MatchMessages
    const int64_t skipped = static_cast<int64_t>(send->staging_offset()) -
                            static_cast<int64_t>(fed_by->staging_offset());
    held.begin += skipped;
    held.end += skipped;
    held.rank = PeerOf(body_, program, *fed_by);
    held.position = static_cast<uint32_t>(partner);
    send = messages_.Of(held.rank).Get(held.position);
  }
  return held;
}

std::optional<DataProof::Origin> DataProof::OriginOf(uint32_t rank,
                                                     uint32_t position) const {
  const End sends = {rank, messages_.Of(rank).Get(position)};
  if (!IsHeldSend(rank, *sends.message)) return Origin{sends, sends, {}};
  const std::optional<Held> held = HeldBy(rank, position);
  if (!held.has_value()) return std::nullopt;
  return Origin{
      sends, {held->rank, messages_.Of(held->rank).Get(held->position)}, held};
}

void DataProof::FollowMessage(const End& recv,
                              const std::optional<Origin>& origin) {
  const UnpackedList& unpacked = Unpack(recv);
  if (!steps_.Take(kStepsPerKnownCopy * unpacked.copies.size())) return;
  for (const Unpacked& copy : unpacked.copies) {
    writes_.push_back({&copy.landing, recv.message->round()});
  }
  if (!origin.has_value()) {
    AddUpTo(unpacked.bytes, moved_bytes_);
    return;
  }
  const PackedList& packed = Pack(origin->packs);
  const Held held = origin->held.value_or(Held{});
  const Comparison comparison = {
      .packed = &packed,
      .packed_from = body_.programs()->Get(origin->packs.rank)->buffers(),
      .unpacked = &unpacked,
      .unpacked_to = body_.programs()->Get(recv.rank)->buffers(),
      .is_direct = IsDirect(*recv.message),
      .held_begin = held.begin,
      .held_end = held.end};
  const bool are_kept = packed.is_kept && unpacked.is_kept;
  if (are_kept) {
    if (unpacked.last == comparison) {
      AddUpTo(unpacked.last_bytes, moved_bytes_);
      return;
    }
    const auto known = compared_.find(comparison);
    if (known != compared_.end()) {
      AddUpTo(known->second, moved_bytes_);
      unpacked.last = comparison;
      unpacked.last_bytes = known->second;
      return;
    }
  }
  const int64_t reports = violations_.reports();
  const int64_t bytes = CompareLists(recv, *origin, packed, unpacked);
  AddUpTo(bytes, moved_bytes_);
  if (are_kept && violations_.reports() == reports &&
      compared_.size() < kMostCompared) {
    compared_[comparison] = bytes;
    unpacked.last = comparison;
    unpacked.last_bytes = bytes;
  }
}

int64_t DataProof::CompareLists(const End& recv, const Origin& origin,
                                const PackedList& packed,
                                const UnpackedList& unpacked) {
  const PackedList* sent = &packed;
  std::optional<PackedList> held;
  if (origin.held.has_value()) {
    held = CutToHeld(origin.sends, *origin.held, packed);
    if (!held.has_value()) return unpacked.bytes;
    sent = &*held;
  }
  for (const Unpacked& copy : unpacked.copies) {
    Compare(recv, copy, origin.packs.rank, *sent);
    if (IsDirect(*recv.message)) CheckDirect(recv, copy, *sent);
  }
  // What the rank only holds is moved too.
  int64_t bytes = 0;
  for (const Packed& copy : sent->copies) {
    AddUpTo(copy.end - copy.begin, bytes);
  }
  return std::max(bytes, unpacked.bytes);
}

DataProof::Landing DataProof::LandingIn(uint32_t slot, int32_t part) const {
  Landing landing = {.slot = slot, .part = part, .box = placement_.Hull()};
  landing.volume = VolumeOf(landing.box);
  return landing;
}

void DataProof::AddWrite(const Landing& landing, int64_t round) {
  writes_.push_back({&landings_of_rank_.emplace_back(landing), round});
}

std::optional<DataProof::PackedList> DataProof::CutToHeld(
    const End& send, const Held& held, const PackedList& packed) {
  PackedList cut = {.copies = {}, .relays = packed.relays};
  if (!steps_.Take(packed.copies.size())) return std::nullopt;
  for (const Packed& copy : packed.copies) {
    if (copy.end <= held.begin || copy.begin >= held.end) continue;
    if (copy.begin < held.begin || copy.end > held.end) {
      violations_.Report(
          {.rank = send.rank, .round = send.message->round()},
          Invariant::kRightElement, [&] {
            return absl::StrFormat(
                "deals out bytes [%d, %d) of the message from rank %d, which "
                "packs bytes [%d, %d) as one copy; wanted whole copies",
                held.begin, held.end, held.rank, copy.begin, copy.end);
          });
      return std::nullopt;
    }
    Packed& held_copy = cut.copies.emplace_back(copy);
    held_copy.begin -= held.begin;
    held_copy.end -= held.begin;
  }
  return cut;
}

void DataProof::FollowInto(uint32_t rank) {
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  const MessageVector& messages = messages_.Of(program);
  const auto [alike, is_new] =
      followed_.try_emplace(&messages, Followed{.rank = rank});
  if (!is_new && IsFollowed(rank, alike->second.rank)) {
    AddUpTo(alike->second.moved_bytes, moved_bytes_);
    return;
  }
  const int64_t moved_before = moved_bytes_;
  writes_.clear();
  landings_of_rank_.clear();
  unpacked_of_rank_.clear();
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message& message = *messages.Get(i);
    if (message.kind() != fb::MessageKind::kRecv) continue;
    const int32_t partner = partners_[rank][i];
    if (partner < 0) continue;  // reported by MatchMessages
    FollowMessage({rank, &message}, OriginOf(PeerOf(body_, program, message),
                                             static_cast<uint32_t>(partner)));
  }
  Fill(rank);
  Quantize(rank);
  CheckWrites(rank);
  ListReads(rank);
  if (!reads_.empty()) CheckRelays(rank);
  if (is_new) alike->second.moved_bytes = moved_bytes_ - moved_before;
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
    violations_.Report(
        {.rank = send.rank, .round = send.message->round()},
        Invariant::kInBounds, [&] {
          return absl::StrFormat(
              "the message to rank %d packs staging byte %d twice",
              PeerOf(body_, send.rank, *send.message), copies[i].begin);
        });
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
  const auto offset = static_cast<int64_t>(copy.offset());
  const BufferFacts& facts = FactsAt(send.rank, copy.buffer_slot());
  if (facts.flaw().has_value()) return;  // reported for its rank
  const Digits loops = DigitsOf(copy);
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
  Packed& part_of_message = packed.copies.emplace_back();
  part_of_message.begin = static_cast<int64_t>(copy.staging_offset());
  part_of_message.end =
      part_of_message.begin + CountOf(loops) * DTypeBytes(copy.wire_dtype());
  part_of_message.param = param;
  part_of_message.wire = copy.wire_dtype();
  part_of_message.buffer = dtype;
  part_of_message.part = index;
  part_of_message.elements = facts.ParamSequence(part, placement_);
  part_of_message.elements.base -= part.param_base;
  part_of_message.copy = &copy;
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
  const auto offset = static_cast<int64_t>(copy.offset());
  const BufferFacts& facts = FactsAt(recv.rank, copy.buffer_slot());
  if (facts.flaw().has_value()) return;  // reported for its rank
  const Digits loops = DigitsOf(copy);
  AddUpTo(CountOf(loops) * DTypeBytes(copy.wire_dtype()), unpacked.bytes);
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
  Unpacked& unpacked_copy = unpacked.copies.emplace_back();
  unpacked_copy.landing = LandingIn(copy.buffer_slot(), index);
  unpacked_copy.param = param;
  unpacked_copy.buffer = BufferAt(recv.rank, copy.buffer_slot()).dtype();
  unpacked_copy.elements = facts.ParamSequence(part, placement_);
  unpacked_copy.elements.base -= part.param_base;
  unpacked_copy.copy = &copy;
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
  const Site site = recv.At(copy, static_cast<int64_t>(copy.offset()));
  if (copy.wire_dtype() != packed.wire) {
    violations_.Report(site, Invariant::kRightElement, [&] {
      return absl::StrFormat("is read as %s from staging that holds %s",
                             DTypeName(copy.wire_dtype()),
                             DTypeName(packed.wire));
    });
    return false;
  }
  const DType to = unpacked.buffer;
  if (relays && packed.wire != to) {
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
  for (const fb::Copy& copy :
       TakeCopies(body_.programs()->Get(rank)->fills(), kStepsPerCopy)) {
    const auto offset = static_cast<int64_t>(copy.offset());
    const BufferFacts& facts = FactsAt(rank, copy.buffer_slot());
    if (facts.flaw().has_value()) continue;  // reported for its rank
    const int32_t index = facts.Find(offset, DigitsOf(copy), placement_);
    if (index < 0 || !facts.parts()[static_cast<size_t>(index)].IsFill() ||
        !placement_.FillsHull()) {
      violations_.Report(
          {.rank = rank, .buffer_slot = copy.buffer_slot(), .offset = offset},
          Invariant::kWrittenOnce, [] {
            return std::string(
                "the fill that begins here does not zero a box of one fill "
                "region");
          });
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
  const auto open = FirstUncovered(space, boxes_);
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
  const MessageVector& messages = messages_.Of(program);
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message* message = messages.Get(i);
    if (message->kind() != fb::MessageKind::kSend) continue;
    const fb::Message* fed_by = FedBy(messages_, program, i);
    if (!listed.emplace(message->copies(), fed_by).second) continue;
    for (const fb::Copy& copy : TakeCopies(message->copies(), kStepsPerCopy)) {
      const auto offset = static_cast<int64_t>(copy.offset());
      const BufferFacts& facts = FactsAt(rank, copy.buffer_slot());
      if (facts.flaw().has_value()) continue;  // reported for its rank
      const int32_t index = facts.Find(offset, DigitsOf(copy), placement_);
      if (index < 0) continue;  // reported where it is received
      reads_.push_back({.slot = copy.buffer_slot(),
                        .part = index,
                        .round = message->round(),
                        .fed_by = fed_by,
                        .offset = offset,
                        .box = placement_.Hull()});
    }
  }
}

bool DataProof::IsAwaited(const Write& write, const Read& read) const {
  if (write.round == Site::kBeforeRounds) return true;
  if (write.round >= read.round) return false;
  const AwaitedRounds awaited =
      AwaitedBy(body_, static_cast<uint32_t>(read.round), read.fed_by);
  const bool is_direct =
      body_.rounds()->Get(static_cast<uint32_t>(write.round))->mechanism() ==
      fb::Mechanism::kDirect;
  return write.round <= (is_direct ? awaited.direct : awaited.staged);
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
