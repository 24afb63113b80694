#include "executor/copies/round_copies.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "executor/copies/copy_batches.h"
#include "executor/copies/fused_quantizes.h"
#include "executor/copies/tensor_box.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

class RoundCopiesBuilder {
 public:
  RoundCopiesBuilder(const PlanFile& plan, int32_t rank,
                     const RankSchedule& schedule,
                     absl::Span<std::byte* const> tensors, std::byte* staging,
                     const PeerTensors& peers)
      : plan_(plan),
        body_(plan.body()),
        rank_(rank),
        program_(*body_.programs()->Get(rank)),
        schedule_(schedule),
        is_dealt_(DealtReceives(body_, program_)),
        tensors_(plan, rank),
        staging_entry_(tensors.size()),
        staging_(staging),
        peers_(peers) {
    result_.table.assign(tensors.begin(), tensors.end());
    result_.table.push_back(staging);
    for (const auto& [peer, memory] : peers.mapped) {
      AddPeer(peer, memory->addresses());
    }
    result_.batches.resize(schedule.batches());
    result_.operations = schedule.operations();
    result_.in_tensor.resize(result_.operations.size());
  }

  // Tensors of a peer. Those that are mapped are there already.
  void AddPeer(int32_t peer, absl::Span<std::byte* const> addresses) {
    peer_begin_[peer] = result_.table.size();
    result_.table.insert(result_.table.end(), addresses.begin(),
                         addresses.end());
  }

  absl::StatusOr<RoundCopies> Build() {
    AddFills();
    AddQuantizes();
    for (const RoundWork& work : schedule_.rounds()) {
      absl::Status status = work.mechanism == fb::Mechanism::kDirect
                                ? AddDirectRound(work)
                                : AddStagedRound(work);
      if (!status.ok()) return status;
    }
    Fuse();
    return std::move(result_);
  }

  // By quantize operation of the rank: whether direct rounds do it instead.
  // `multiprocessors` bounds these, if not 0. Instead of Build; no tensor needs
  // an address.
  absl::StatusOr<std::vector<bool>> Fused(uint32_t multiprocessors) {
    AddQuantizes();
    for (const RoundWork& work : schedule_.rounds()) {
      if (work.mechanism != fb::Mechanism::kDirect) continue;
      if (absl::Status status = AddDirectRound(work); !status.ok()) {
        return status;
      }
    }
    Fuse();
    if (multiprocessors > 0 && result_.fused.in_peer_rounds) is_fused_.clear();
    is_fused_.resize(Length(program_.quantizes()), false);
    return std::move(is_fused_);
  }

 private:
  const fb::Message& MessageAt(uint32_t position) const {
    return *program_.messages()->Get(position);
  }

  const fb::Message& DirectMessageAt(const RoundWork& work, uint32_t i) const {
    return MessageAt(schedule_.parts()[work.operations_begin + i].message);
  }

  void AddFills() {
    CopyBatch& batch = result_.batches[RankSchedule::kFillBatch];
    batch.kind = CopyKind::kZero;
    const fb::CopyList& list = *body_.copy_lists()->Get(program_.fills());
    for (uint32_t c = list.begin(); c < list.begin() + list.count(); ++c) {
      const fb::Copy& copy = *body_.copies()->Get(c);
      AppendZero(BoxOf(body_, tensors_, copy), batch);
    }
  }

  void AddQuantizes() {
    for (const QuantizeLaunch& work : schedule_.quantizes()) {
      CopyBatch& batch = result_.batches[work.batch];
      batch.kind = CopyKind::kQuantize;
      batch.leaves_room = work.beside_rounds;
      for (const uint32_t operation : work.operations) {
        AppendQuantize(body_, tensors_, *program_.quantizes()->Get(operation),
                       batch);
      }
    }
  }

  bool IsInScratch(const CopyAddress& address) const {
    return address.entry >= tensors_.begin(tensors_.workers_stacks()) &&
           address.entry < staging_entry_;
  }

  // Of sources alone: what a destination quantizes has come to it. In a refit
  // of a delta plan copies have another form.
  void Fuse() {
    const std::vector<QuantizeLaunch>& launches = schedule_.quantizes();
    if (launches.empty() || plan_.side(rank_) != fb::Side::kSource ||
        body_.delta() != nullptr) {
      return;
    }
    std::vector<size_t> quantize_batches;
    for (const QuantizeLaunch& launch : launches) {
      quantize_batches.push_back(launch.batch);
    }
    QuantizeFusion fusion(result_.batches, quantize_batches);
    for (const RoundWork& work : schedule_.rounds()) {
      if (work.mechanism == fb::Mechanism::kDirect) {
        const CopyBatch& batch = result_.batches[*work.move_batch];
        for (size_t i = 0; i < batch.copies.size(); ++i) {
          if (!IsInScratch(batch.copies[i].from)) continue;
          fusion.AddCopy({.batch = *work.move_batch, .copy = i});
        }
      }
      AddOtherReads(work, fusion);
    }
    std::vector<CopyBatch> fused = fusion.Fuse();
    NumberFused(fusion, fused);
  }

  // What of scratch is sent, or read by peers.
  void AddOtherReads(const RoundWork& work, QuantizeFusion& fusion) const {
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const fb::Message& message = DirectMessageAt(work, i);
      if (message.kind() != fb::MessageKind::kSend ||
          (work.mechanism == fb::Mechanism::kDirect && Moves(message))) {
        continue;
      }
      const fb::CopyList& list = *body_.copy_lists()->Get(message.copies());
      for (uint32_t c = list.begin(); c < list.begin() + list.count(); ++c) {
        const TensorBox box = BoxOf(body_, tensors_, *body_.copies()->Get(c));
        if (!IsInScratch(box.first)) continue;
        CopyStride span = {.entries = 1, .bytes = box.ElementBytes()};
        for (const BoxLoop& loop : box.loops) {
          span.entries += (loop.extent - 1) * loop.stride.entries;
          span.bytes += (loop.extent - 1) * loop.stride.bytes;
        }
        fusion.AddRead(box.first, span);
      }
    }
  }

  void NumberFused(const QuantizeFusion& fusion,
                   std::vector<CopyBatch>& changed) {
    FusedBatches fused;
    const std::vector<QuantizeLaunch>& launches = schedule_.quantizes();
    is_fused_.resize(program_.quantizes()->size(), false);
    size_t number = 0;
    bool is_beside = false;  // what is left
    for (const QuantizeLaunch& launch : launches) {
      const CopyBatch& batch = result_.batches[launch.batch];
      for (size_t i = 0; i < launch.operations.size(); ++i, ++number) {
        if (!fusion.is_fused()[number]) continue;
        is_fused_[launch.operations[i]] = true;
        const BlockQuantize& op = batch.quantizes[i];
        uint64_t elements = op.rows * op.columns;
        for (uint32_t l = 0; l < op.loops_count; ++l) {
          elements *= batch.quantize_loops[op.loops_begin + l].extent;
        }
        fused.elements += elements;
      }
      fused.is_idle.push_back(changed[launch.batch].quantizes.empty());
      is_beside |= launch.beside_rounds && !fused.is_idle.back();
    }
    if (fused.elements == 0) return;
    for (size_t b = 0; b < schedule_.batches(); ++b) fused.batches.push_back(b);
    fused.checked_batches = fused.batches;
    const auto replace = [&](size_t batch) {
      fused.batches[batch] = result_.batches.size();
      result_.batches.push_back(std::move(changed[batch]));
    };
    for (const RoundWork& work : schedule_.rounds()) {
      if (work.mechanism != fb::Mechanism::kDirect) continue;
      CopyBatch& batch = changed[*work.move_batch];
      fused.in_peer_rounds |=
          work.route == fb::Route::kPeer && !batch.quantizes.empty();
      fused.checked_batches[*work.move_batch] = result_.batches.size();
      result_.batches.push_back(batch);
      batch.leaves_room &= is_beside;
      replace(*work.move_batch);
    }
    for (const QuantizeLaunch& launch : launches) replace(launch.batch);
    result_.fused = std::move(fused);
  }

  // A box of a tensor that lies in one piece in a message.
  struct StagedBox {
    TensorBox box;
    uint64_t begin_byte = 0;  // from the start of the part
    DType wire_dtype = DType::kUnspecified;
  };

  absl::Status AddStagedRound(const RoundWork& work) {
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const MessagePart& part = schedule_.parts()[number];
      Operation& operation = result_.operations[number];
      const absl::StatusOr<std::vector<StagedBox>> boxes = BoxesOf(
          MessageAt(part.message), part.begin_byte, operation.size_bytes);
      if (!boxes.ok()) return boxes.status();
      if (!is_dealt_[part.message] &&
          IsInTensor(*boxes, operation.size_bytes)) {
        const CopyAddress& first = boxes->front().box.first;
        result_.in_tensor[number] = first;
        operation.data = result_.table[first.entry] + first.byte_offset;
        continue;
      }
      operation.data = staging_ + part.staging_offset;
      if (boxes->empty()) continue;
      const bool send = operation.kind == fb::MessageKind::kSend;
      AddStagedCopies(
          *boxes, part.staging_offset, send,
          result_.batches[send ? *work.pack_batch : *work.unpack_batch]);
    }
    return absl::OkStatus();
  }

  // What `size_bytes` of the message hold. Error: kUnimplemented, an element
  // lies across an end of them; refit-verify refuses such a plan.
  absl::StatusOr<std::vector<StagedBox>> BoxesOf(const fb::Message& message,
                                                 uint64_t begin_byte,
                                                 uint64_t size_bytes) const {
    std::vector<StagedBox> boxes;
    const uint64_t end_byte = begin_byte + size_bytes;
    const fb::CopyList& list = *body_.copy_lists()->Get(message.copies());
    for (uint32_t c = list.begin(); c < list.begin() + list.count(); ++c) {
      const fb::Copy& copy = *body_.copies()->Get(c);
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
                  (end - copy_begin) / element_bytes,
                  [&](const TensorBox& part) {
                    boxes.push_back({.box = part,
                                     .begin_byte = at_byte,
                                     .wire_dtype = copy.wire_dtype()});
                    at_byte += part.Elements() * element_bytes;
                  });
    }
    return boxes;
  }

  // Whether the bytes are one run of a tensor, and are not cast.
  static bool IsInTensor(absl::Span<const StagedBox> boxes,
                         uint64_t size_bytes) {
    if (boxes.size() != 1) return false;
    const auto& [box, begin_byte, wire_dtype] = boxes.front();
    return wire_dtype == box.first.dtype && begin_byte == 0 && box.IsOneRun() &&
           box.Elements() * box.ElementBytes() == size_bytes;
  }

  void AddStagedCopies(absl::Span<const StagedBox> boxes,
                       uint64_t staging_offset, bool send,
                       CopyBatch& batch) const {
    for (const auto& [box, begin_byte, wire_dtype] : boxes) {
      const TensorBox staged =
          RunOf({.entry = staging_entry_,
                 .byte_offset = staging_offset + begin_byte,
                 .dtype = wire_dtype},
                box.Elements());
      // A run joins with any box of its size.
      (void)AppendCopy(send ? box : staged, send ? staged : box, /*link=*/0,
                       batch);
    }
  }

  absl::Status AddDirectRound(const RoundWork& work) {
    result_.batches[*work.move_batch].leaves_room =
        work.route == fb::Route::kPeer && schedule_.QuantizesBesideRounds();
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      if (!Moves(DirectMessageAt(work, i))) continue;
      if (absl::Status s = AddDirectMessage(work, i); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  int32_t PeerAt(const fb::Message& message) const {
    return static_cast<int32_t>(PeerOf(body_, program_, message));
  }

  // Whether this end of the message is the one that moves it.
  bool Moves(const fb::Message& message) const {
    return peers_.Moves(message.kind(), PeerAt(message));
  }

  absl::Status AddDirectMessage(const RoundWork& work, uint32_t i) {
    const fb::Message& message = DirectMessageAt(work, i);
    const bool push = message.kind() == fb::MessageKind::kSend;
    const int32_t peer = PeerAt(message);
    const fb::RankProgram& there =
        *body_.programs()->Get(static_cast<uint32_t>(peer));
    const fb::Message* partner = Partner(work, i, there);
    if (partner == nullptr) {
      const int32_t sender = push ? rank_ : peer;
      const int32_t receiver = push ? peer : rank_;
      return absl::UnimplementedError(absl::StrCat(
          "round ", work.index, ": what rank ", sender, " sends rank ",
          receiver, " is not what that receives; refit-verify tells more"));
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
    return AddDirectCopies(push ? here : other, push ? other : here, link,
                           result_.batches[*work.move_batch]);
  }

  // One end of a message: the rank's tensors and where they begin in the table
  // of addresses.
  struct MessageEnd {
    int32_t rank = 0;
    const TensorTable& tensors;
    uint64_t first_entry = 0;
    const fb::Message& message;
  };

  // What moves the elements of a direct message: every copy of the receiver,
  // joined with the sender's copy of the same bytes. Error: kUnimplemented,
  // copies whose bytes or loops do not fit together; refit-verify refuses such
  // a plan.
  absl::Status AddDirectCopies(const MessageEnd& send, const MessageEnd& recv,
                               uint32_t link, CopyBatch& batch) const {
    const fb::CopyList& packs = *body_.copy_lists()->Get(send.message.copies());
    const fb::CopyList& unpacks =
        *body_.copy_lists()->Get(recv.message.copies());
    absl::flat_hash_map<uint64_t, const fb::Copy*> pack_at;
    for (uint32_t i = 0; i < packs.count(); ++i) {
      const fb::Copy* pack = body_.copies()->Get(packs.begin() + i);
      pack_at[pack->staging_offset()] = pack;
    }
    for (uint32_t i = 0; i < unpacks.count(); ++i) {
      const fb::Copy& unpack = *body_.copies()->Get(unpacks.begin() + i);
      const auto found = pack_at.find(unpack.staging_offset());
      if (found != pack_at.end() &&
          found->second->wire_dtype() == unpack.wire_dtype()) {
        const TensorBox from =
            BoxOf(body_, send.tensors, *found->second, send.first_entry);
        const TensorBox to =
            BoxOf(body_, recv.tensors, unpack, recv.first_entry);
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

  // The message of `there` that meets message `i` of `work`: both ends count
  // their messages of a round, a pair and a direction in order.
  const fb::Message* Partner(const RoundWork& work, uint32_t i,
                             const fb::RankProgram& there) const {
    const fb::Message& mine = DirectMessageAt(work, i);
    uint32_t before = 0;
    for (uint32_t k = 0; k < i; ++k) {
      const fb::Message& other = DirectMessageAt(work, k);
      before += other.kind() == mine.kind() && other.peer() == mine.peer();
    }
    for (const fb::Message* message : *there.messages()) {
      if (message->round() == work.index && message->kind() != mine.kind() &&
          PeerOf(body_, there, *message) == static_cast<uint32_t>(rank_) &&
          before-- == 0) {
        return message;
      }
    }
    return nullptr;
  }

  const PlanFile& plan_;
  const fb::Body& body_;
  const int32_t rank_;
  const fb::RankProgram& program_;
  const RankSchedule& schedule_;
  const std::vector<bool> is_dealt_;  // by message
  const TensorTable tensors_;
  const uint64_t staging_entry_;
  std::byte* const staging_;
  const PeerTensors& peers_;
  std::map<int32_t, uint64_t> peer_begin_;  // in the table
  RoundCopies result_;
  std::vector<bool> is_fused_;
};

}  // namespace

absl::StatusOr<RoundCopies> BuildRoundCopies(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    absl::Span<std::byte* const> tensors, std::byte* staging,
    const PeerTensors& peers) {
  return RoundCopiesBuilder(plan, rank, schedule, tensors, staging, peers)
      .Build();
}

std::vector<bool> FusedQuantizes(const PlanFile& plan, int32_t rank,
                                 const RankSchedule& schedule,
                                 const PeerTensors& peers) {
  const uint32_t count = Length(plan.body().programs()->Get(rank)->quantizes());
  if (count == 0) return {};
  const auto nowhere = [&](int32_t of) {
    return std::vector<std::byte*>(TensorTable(plan, of).size());
  };
  const std::vector<std::byte*> tensors = nowhere(rank);
  RoundCopiesBuilder builder(plan, rank, schedule, tensors, nullptr, peers);
  std::set<int32_t> all;
  for (const int32_t peer : schedule.DirectReceivers()) all.insert(peer);
  for (const int32_t peer : schedule.DirectSenders()) all.insert(peer);
  for (const int32_t peer : all) builder.AddPeer(peer, nowhere(peer));
  absl::StatusOr<std::vector<bool>> fused =
      builder.Fused(plan.body().limits()->direct_multiprocessors());
  return fused.ok() ? *std::move(fused) : std::vector<bool>(count, false);
}

}  // namespace refit
