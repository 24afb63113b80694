#include "plan/proof/data_proof.h"

#include <algorithm>
#include <utility>

#include "plan/add_up_to.h"
#include "plan/proof/tiling.h"

namespace refit::proof {
namespace {

// Comparisons of lists that are kept. Ranks of a small file may have many
// million messages, no two of them alike.
constexpr size_t kMostCompared = size_t{1} << 20;

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
         !IsDirect(body_, send.round());
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
      .is_direct = IsDirect(body_, recv.message->round()),
      .held_begin = held.begin,
      .held_end = held.end};
  const bool are_kept = packed.is_kept && unpacked.is_kept;
  if (are_kept && !(unpacked.last == comparison)) {
    const auto known = compared_.find(comparison);
    if (known != compared_.end()) {
      unpacked.last = comparison;
      unpacked.last_bytes = known->second;
    }
  }
  if (are_kept && unpacked.last == comparison) {
    AddUpTo(unpacked.last_bytes, moved_bytes_);
    return;
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
    if (IsDirect(body_, recv.message->round())) CheckDirect(recv, copy, *sent);
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
          Invariant::kRightElement,
          "deals out bytes [%d, %d) of the message from rank %d, which "
          "packs bytes [%d, %d) as one copy; wanted whole copies",
          held.begin, held.end, held.rank, copy.begin, copy.end);
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

}  // namespace refit::proof
