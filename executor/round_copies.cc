#include "executor/round_copies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "executor/copy_boxes.h"
#include "executor/direct_copies.h"
#include "executor/quantize_boxes.h"

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
        tensors_(plan, rank),
        staging_entry_(tensors.size()),
        staging_(staging),
        peers_(peers) {
    result_.table.assign(tensors.begin(), tensors.end());
    result_.table.push_back(staging);
    for (const auto& [peer, memory] : peers.mapped) {
      peer_begin_[peer] = result_.table.size();
      result_.table.insert(result_.table.end(), memory->addresses().begin(),
                           memory->addresses().end());
    }
    result_.batches.resize(schedule.batches());
    result_.operations = schedule.operations();
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
    return std::move(result_);
  }

 private:
  const fb::Message& MessageAt(uint32_t position) const {
    return *program_.messages()->Get(position);
  }

  const fb::Message& DirectMessageAt(const RoundWork& work, uint32_t i) const {
    return MessageAt(schedule_.parts()[work.operations_begin + i].message);
  }

  CopyPlace PlaceOf(const fb::Copy& copy, const TensorBox& box) const {
    const DType dtype = BufferOf(body_, program_, copy).dtype();
    return {.entry = tensors_.begin(copy.buffer_slot()) + box.first_tensor,
            .byte_offset = box.first_element * DTypeBytes(dtype),
            .dtype = dtype};
  }

  void AddFills() {
    CopyBatch& batch = result_.batches[RankSchedule::kFillBatch];
    batch.kind = CopyKind::kZero;
    const fb::CopyList& list = *body_.copy_lists()->Get(program_.fills());
    for (uint32_t c = list.begin(); c < list.begin() + list.count(); ++c) {
      const fb::Copy& copy = *body_.copies()->Get(c);
      const TensorBox box = BoxOf(body_, program_, copy);
      const CopyPlace to = PlaceOf(copy, box);
      StridedCopy& fill = batch.copies.emplace_back();
      fill.to = to;
      fill.loops_begin = static_cast<uint32_t>(batch.loops.size());
      fill.loops_count = static_cast<uint32_t>(box.loops.size());
      for (const BoxLoop& loop : box.loops) {
        CopyLoop& zeroed = batch.loops.emplace_back();
        zeroed.extent = loop.extent;
        zeroed.to = StepOf(loop, DTypeBytes(to.dtype));
      }
    }
  }

  void AddQuantizes() {
    for (const QuantizeStep& work : schedule_.quantizes()) {
      CopyBatch& batch = result_.batches[work.batch];
      batch.kind = CopyKind::kQuantize;
      batch.leaves_room = work.beside_rounds;
      for (const uint32_t operation : work.operations) {
        AppendQuantize(body_, tensors_, *program_.quantizes()->Get(operation),
                       batch);
      }
    }
  }

  // A box of a tensor that lies in one piece in a message.
  struct StagedBox {
    TensorBox box;
    CopyPlace tensor;
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
      operation.data = PlaceInTensor(*boxes, operation.size_bytes);
      if (operation.data != nullptr) continue;
      operation.data = staging_ + part.staging_offset;
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
      const TensorBox box = BoxOf(body_, program_, copy);
      const uint64_t element_bytes = DTypeBytes(copy.wire_dtype());
      uint64_t elements = 1;
      for (const BoxLoop& loop : box.loops) elements *= loop.extent;
      const uint64_t copy_begin = copy.staging_offset();
      const uint64_t begin = std::max(begin_byte, copy_begin);
      const uint64_t end =
          std::min(end_byte, copy_begin + elements * element_bytes);
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
                                     .tensor = PlaceOf(copy, part),
                                     .begin_byte = at_byte,
                                     .wire_dtype = copy.wire_dtype()});
                    uint64_t bytes = element_bytes;
                    for (const BoxLoop& loop : part.loops) {
                      bytes *= loop.extent;
                    }
                    at_byte += bytes;
                  });
    }
    return boxes;
  }

  // Where the bytes lie in a tensor itself; null when they are more than one
  // run, or are cast.
  std::byte* PlaceInTensor(absl::Span<const StagedBox> boxes,
                           uint64_t size_bytes) const {
    if (boxes.size() != 1) return nullptr;
    const auto& [box, place, begin_byte, wire_dtype] = boxes.front();
    if (wire_dtype != place.dtype || begin_byte != 0) return nullptr;
    uint64_t elements = 1;
    for (size_t l = box.loops.size(); l-- > 0;) {
      const BoxLoop& loop = box.loops[l];
      if (loop.tensor_step != 0 || loop.element_step != elements) {
        return nullptr;
      }
      elements *= loop.extent;
    }
    if (elements * DTypeBytes(place.dtype) != size_bytes) return nullptr;
    return result_.table[place.entry] + place.byte_offset;
  }

  void AddStagedCopies(absl::Span<const StagedBox> boxes,
                       uint64_t staging_offset, bool send,
                       CopyBatch& batch) const {
    for (const auto& [box, tensor, begin_byte, wire_dtype] : boxes) {
      const CopyPlace staging = {.entry = staging_entry_,
                                 .byte_offset = staging_offset + begin_byte,
                                 .dtype = wire_dtype};
      const auto loops_begin = static_cast<uint32_t>(batch.loops.size());
      batch.copies.push_back(
          {.from = send ? tensor : staging,
           .to = send ? staging : tensor,
           .loops_begin = loops_begin,
           .loops_count = static_cast<uint32_t>(box.loops.size())});
      batch.loops.resize(batch.loops.size() + box.loops.size());
      uint64_t staged_bytes = DTypeBytes(wire_dtype);
      for (size_t l = box.loops.size(); l-- > 0;) {
        const BoxLoop& loop = box.loops[l];
        const CopyStep in_tensor = StepOf(loop, DTypeBytes(tensor.dtype));
        const CopyStep in_staging = {.bytes = staged_bytes};
        batch.loops[loops_begin + l] = {.extent = loop.extent,
                                        .from = send ? in_tensor : in_staging,
                                        .to = send ? in_staging : in_tensor};
        staged_bytes *= loop.extent;
      }
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

  // Whether this end of the message is the one that moves it.
  bool Moves(const fb::Message& message) const {
    const auto peer = static_cast<int32_t>(message.peer());
    return message.kind() == fb::MessageKind::kSend
               ? !peers_.pulled_by.contains(peer)
               : peers_.pulled_from.contains(peer);
  }

  absl::Status AddDirectMessage(const RoundWork& work, uint32_t i) {
    const fb::Message& message = DirectMessageAt(work, i);
    const bool push = message.kind() == fb::MessageKind::kSend;
    const auto peer = static_cast<int32_t>(message.peer());
    const fb::RankProgram& there = *body_.programs()->Get(message.peer());
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
        .program = program_, .tensors = tensors_, .message = message};
    const MessageEnd other = {.program = there,
                              .tensors = their_tensors,
                              .table_begin = peer_begin_.at(peer),
                              .message = *partner};
    // Ranks start with different peers, so that none is everyone's first.
    const int32_t world_size = plan_.world_size();
    const auto lane =
        static_cast<uint32_t>((peer - rank_ + world_size) % world_size);
    return AppendDirectCopies(body_, push ? here : other, push ? other : here,
                              lane, result_.batches[*work.move_batch]);
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
          message->peer() == static_cast<uint32_t>(rank_) && before-- == 0) {
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
  const TensorTable tensors_;
  const uint64_t staging_entry_;
  std::byte* const staging_;
  const PeerTensors& peers_;
  std::map<int32_t, uint64_t> peer_begin_;  // in the table
  RoundCopies result_;
};

}  // namespace

absl::StatusOr<RoundCopies> BuildRoundCopies(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    absl::Span<std::byte* const> tensors, std::byte* staging,
    const PeerTensors& peers) {
  return RoundCopiesBuilder(plan, rank, schedule, tensors, staging, peers)
      .Build();
}

}  // namespace refit
