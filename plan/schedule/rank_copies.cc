#include "plan/schedule/rank_copies.h"

#include <algorithm>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "plan/broadcasts.h"
#include "plan/schedule/copy_batches.h"
#include "plan/schedule/direct_steps.h"

namespace refit {

RankCopies::RankCopies(const PlanFile& plan, int32_t rank,
                       const RankSchedule& schedule, const DirectPairs& peers)
    : plan_(plan),
      body_(plan.body()),
      rank_(rank),
      program_(*body_.programs()->Get(rank)),
      schedule_(schedule),
      peers_(peers),
      tensors_(plan, rank),
      is_dealt_(DealtReceives(plan.messages(), program_)),
      has_steps_(HasDirectSteps(plan)) {
  result_.batches.resize(schedule.batches());
  result_.operations = schedule.operations();
  result_.in_tensor.resize(result_.operations.size());
}

void RankCopies::Place(absl::Span<std::byte* const> tensors, std::byte* staging,
                       const PeerAddresses& peer_tensors) {
  staging_ = staging;
  result_.table.assign(tensors.begin(), tensors.end());
  result_.table.push_back(staging);
  for (const auto& [peer, addresses] : peer_tensors) AddPeer(peer, addresses);
}

void RankCopies::PlaceNowhere() {
  Place(std::vector<std::byte*>(tensors_.size()), /*staging=*/nullptr, {});
  std::set<int32_t> all;
  for (const int32_t peer : schedule_.DirectReceivers()) all.insert(peer);
  for (const int32_t peer : schedule_.DirectSenders()) all.insert(peer);
  for (const int32_t peer : all) {
    AddPeer(peer, std::vector<std::byte*>(TensorTable(plan_, peer).size()));
  }
}

void RankCopies::AddPeer(int32_t peer, absl::Span<std::byte* const> addresses) {
  peer_begin_[peer] = result_.table.size();
  result_.table.insert(result_.table.end(), addresses.begin(), addresses.end());
}

void RankCopies::AddFills() {
  CopyBatch& batch = result_.batches[RankSchedule::kFillBatch];
  batch.kind = CopyKind::kZero;
  for (const fb::Copy& copy : CopiesOf(body_, program_.fills())) {
    AppendZero(BoxOf(body_, tensors_, copy), batch);
  }
}

void RankCopies::AddQuantizes() {
  for (const QuantizeLaunch& work : schedule_.quantizes()) {
    CopyBatch& batch = result_.batches[work.batch];
    batch.kind = CopyKind::kQuantize;
    if (work.beside_rounds) batch.share = DeviceShare::kHalf;
    for (const uint32_t operation : work.operations) {
      AppendQuantize(body_, tensors_, *program_.quantizes()->Get(operation),
                     batch);
    }
  }
}

void RankCopies::ShareWithExchanges() {
  std::vector<size_t> packs;
  std::vector<size_t> unpacks;
  const DeviceShare share = !schedule_.quantizes().empty() ? DeviceShare::kHalf
                            : schedule_.RelaysInStages()
                                ? DeviceShare::kTwoLinks
                                : DeviceShare::kLink;
  for (const RoundWork& work : schedule_.rounds()) {
    if (work.pack_batch.has_value()) packs.push_back(*work.pack_batch);
    if (work.unpack_batch.has_value()) unpacks.push_back(*work.unpack_batch);
  }
  for (size_t i = 1; i < packs.size(); ++i) {
    result_.batches[packs[i]].share = share;
  }
  for (size_t i = 0; i + 1 < unpacks.size(); ++i) {
    result_.batches[unpacks[i]].share = share;
  }
}

absl::Status RankCopies::AddStagedRound(const RoundWork& work) {
  RepeatedSends sends;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const MessagePart& part = schedule_.parts()[number];
    Operation& operation = result_.operations[number];
    const bool repeats = sends.Repeats(MessageAt(part.message));
    const uint64_t size_bytes = operation.size_bytes;
    const absl::StatusOr<std::vector<StagedBox>> boxes =
        BoxesOf(MessageAt(part.message), part.begin_byte, size_bytes);
    if (!boxes.ok()) return boxes.status();
    if (!is_dealt_[part.message] && boxes->size() == 1) {
      // One run of a tensor, which is not cast, is sent from there.
      const auto& [box, begin_byte, wire_dtype] = boxes->front();
      const CopyAddress& first = box.first;
      if (wire_dtype == first.dtype && begin_byte == 0 && box.IsOneRun() &&
          box.Elements() * box.ElementBytes() == size_bytes) {
        result_.in_tensor[number] = first;
        operation.data = result_.table[first.entry] + first.byte_offset;
        continue;
      }
    }
    operation.data = staging_ + part.staging_offset;
    if (repeats) continue;
    const bool send = operation.kind == fb::MessageKind::kSend;
    for (const auto& [box, begin_byte, wire_dtype] : *boxes) {
      const TensorBox staged =
          RunOf({.entry = tensors_.size(),
                 .byte_offset = part.staging_offset + begin_byte,
                 .dtype = wire_dtype},
                box.Elements());
      // A run joins with any box of its size.
      (void)AppendCopy(
          send ? box : staged, send ? staged : box, /*link=*/0,
          result_.batches[send ? *work.pack_batch : *work.unpack_batch]);
    }
  }
  return absl::OkStatus();
}

// What `size_bytes` of the message hold. Error: kUnimplemented, an element
// lies across an end of them; refit-verify refuses such a plan.
absl::StatusOr<std::vector<RankCopies::StagedBox>> RankCopies::BoxesOf(
    const fb::Message& message, uint64_t begin_byte,
    uint64_t size_bytes) const {
  std::vector<StagedBox> boxes;
  const uint64_t end_byte = begin_byte + size_bytes;
  for (const fb::Copy& copy : CopiesOf(body_, message.copies())) {
    const TensorBox box = BoxOf(body_, tensors_, copy);
    const uint64_t element_bytes = DTypeBytes(copy.wire_dtype());
    const uint64_t copy_begin = copy.staging_offset();
    const uint64_t begin = std::max(begin_byte, copy_begin);
    const uint64_t end =
        std::min(end_byte, copy_begin + box.Elements() * element_bytes);
    if (begin >= end) continue;
    if ((begin - copy_begin) % element_bytes != 0 ||
        (end - copy_begin) % element_bytes != 0) {
      return absl::UnimplementedError(absl::StrCat(
          "round ", message.round(),
          ": a message cannot be cut between two elements; refit-verify "
          "tells more"));
    }
    uint64_t at_byte = begin - begin_byte;
    ForEachPart(box, (begin - copy_begin) / element_bytes,
                (end - copy_begin) / element_bytes, [&](const TensorBox& part) {
                  boxes.push_back({.box = part,
                                   .begin_byte = at_byte,
                                   .wire_dtype = copy.wire_dtype()});
                  at_byte += part.Elements() * element_bytes;
                });
  }
  return boxes;
}

absl::Status RankCopies::AddDirectRound(const RoundWork& work) {
  if (work.route == fb::Route::kPeer && schedule_.QuantizesBesideRounds()) {
    result_.batches[*work.move_batch].share = DeviceShare::kHalf;
  }
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    if (!Moves(MessageOf(work, i))) continue;
    absl::Status status =
        AddDirectMessage(work, i, result_.batches[*work.move_batch]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RankCopies::AddDirectMessage(const RoundWork& work, uint32_t i,
                                          CopyBatch& batch) const {
  const fb::Message& message = MessageOf(work, i);
  const bool push = message.kind() == fb::MessageKind::kSend;
  const int32_t peer = PeerAt(message);
  const fb::Message* partner =
      PartnerOf(plan_.messages(), static_cast<uint32_t>(rank_),
                schedule_.parts()[work.operations_begin + i].message);
  if (partner == nullptr) {
    const int32_t sender = push ? rank_ : peer;
    const int32_t receiver = push ? peer : rank_;
    return absl::UnimplementedError(absl::StrCat(
        "round ", work.index, ": what rank ", sender, " sends rank ", receiver,
        " is not what that receives; refit-verify tells more"));
  }
  const TensorTable their_tensors(plan_, peer);
  const MessageEnd here = {
      .rank = rank_, .tensors = tensors_, .message = message};
  const MessageEnd other = {.rank = peer,
                            .tensors = their_tensors,
                            .first_entry = peer_begin_.at(peer),
                            .message = *partner};
  // Ranks start with different peers, so that none is everyone's first.
  const int32_t world_size = plan_.world_size();
  const auto link =
      static_cast<uint32_t>((peer - rank_ + world_size) % world_size);
  const MessageEnd& send = push ? here : other;
  const MessageEnd& recv = push ? other : here;
  const size_t first_copy = batch.copies.size();
  const absl::Status status = AddDirectCopies(send, recv, link, batch);
  if (status.ok() && has_steps_) {
    CutBySteps(DirectSteps(plan_, send.rank, recv.rank, work.index),
               recv.first_entry, first_copy, batch);
  }
  return status;
}

// What moves the elements of a direct message: every copy of the receiver,
// joined with the sender's copy of the same bytes. Error: kUnimplemented,
// copies whose bytes or loops do not fit together; refit-verify refuses such
// a plan.
absl::Status RankCopies::AddDirectCopies(const MessageEnd& send,
                                         const MessageEnd& recv, uint32_t link,
                                         CopyBatch& batch) const {
  absl::flat_hash_map<uint64_t, const fb::Copy*> pack_at;
  for (const fb::Copy& pack : CopiesOf(body_, send.message.copies())) {
    pack_at[pack.staging_offset()] = &pack;
  }
  for (const fb::Copy& unpack : CopiesOf(body_, recv.message.copies())) {
    const auto found = pack_at.find(unpack.staging_offset());
    if (found != pack_at.end() &&
        found->second->wire_dtype() == unpack.wire_dtype()) {
      const TensorBox from =
          BoxOf(body_, send.tensors, *found->second, send.first_entry);
      const TensorBox to = BoxOf(body_, recv.tensors, unpack, recv.first_entry);
      if ((from.first.dtype == to.first.dtype ||
           IsSupportedCast(from.first.dtype, to.first.dtype)) &&
          AppendCopy(from, to, link, batch)) {
        continue;
      }
    }
    return absl::UnimplementedError(absl::StrCat(
        "round ", recv.message.round(), ": a direct copy to rank ", recv.rank,
        " is not one copy of the sender; refit-verify tells more"));
  }
  return absl::OkStatus();
}

}  // namespace refit
