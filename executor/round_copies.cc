#include "executor/round_copies.h"

#include "absl/strings/str_cat.h"
#include "executor/copy_boxes.h"
#include "executor/direct_copies.h"
#include "executor/quantise_boxes.h"

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
    AddQuantises();
    for (const RoundWork& work : schedule_.rounds()) {
      if (work.mechanism == fb::Mechanism::kDirect) {
        if (absl::Status s = AddDirectRound(work); !s.ok()) return s;
      } else {
        AddStagedRound(work);
      }
    }
    return std::move(result_);
  }

 private:
  const fb::Message& MessageAt(uint32_t position) const {
    return *program_.messages()->Get(position);
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

  void AddQuantises() {
    for (const QuantiseStep& work : schedule_.quantises()) {
      CopyBatch& batch = result_.batches[work.batch];
      batch.kind = CopyKind::kQuantise;
      batch.leaves_room = work.beside_rounds;
      for (const uint32_t operation : work.operations) {
        AppendQuantise(body_, tensors_, *program_.quantises()->Get(operation),
                       batch);
      }
    }
  }

  void AddStagedRound(const RoundWork& work) {
    for (uint32_t i = 0; i < work.messages_count; ++i) {
      const uint32_t position = work.messages_begin + i;
      const fb::Message& message = MessageAt(position);
      Operation& operation = result_.operations[position];
      operation.data = PlaceInTensor(message);
      if (operation.data != nullptr) continue;
      operation.data = staging_ + message.staging_offset();
      const bool send = message.kind() == fb::MessageKind::kSend;
      AddStagedCopies(
          message, send,
          result_.batches[send ? *work.pack_batch : *work.unpack_batch]);
    }
  }

  // Where a message lies in a tensor itself, byte for byte; null when it is
  // more than one run, or casts.
  std::byte* PlaceInTensor(const fb::Message& message) const {
    const fb::CopyList& list = *body_.copy_lists()->Get(message.copies());
    if (list.count() != 1) return nullptr;
    const fb::Copy& copy = *body_.copies()->Get(list.begin());
    const TensorBox box = BoxOf(body_, program_, copy);
    const CopyPlace place = PlaceOf(copy, box);
    if (copy.wire_dtype() != place.dtype || copy.staging_offset() != 0) {
      return nullptr;
    }
    uint64_t elements = 1;
    for (size_t l = box.loops.size(); l-- > 0;) {
      const BoxLoop& loop = box.loops[l];
      if (loop.tensor_step != 0 || loop.element_step != elements) {
        return nullptr;
      }
      elements *= loop.extent;
    }
    if (elements * DTypeBytes(place.dtype) != message.size_bytes()) {
      return nullptr;
    }
    return result_.table[place.entry] + place.byte_offset;
  }

  void AddStagedCopies(const fb::Message& message, bool send,
                       CopyBatch& batch) const {
    const fb::CopyList& list = *body_.copy_lists()->Get(message.copies());
    for (uint32_t c = list.begin(); c < list.begin() + list.count(); ++c) {
      const fb::Copy& copy = *body_.copies()->Get(c);
      const TensorBox box = BoxOf(body_, program_, copy);
      const CopyPlace tensor = PlaceOf(copy, box);
      const CopyPlace staging = {
          .entry = staging_entry_,
          .byte_offset = message.staging_offset() + copy.staging_offset(),
          .dtype = copy.wire_dtype()};
      const auto loops_begin = static_cast<uint32_t>(batch.loops.size());
      batch.copies.push_back(
          {.from = send ? tensor : staging,
           .to = send ? staging : tensor,
           .loops_begin = loops_begin,
           .loops_count = static_cast<uint32_t>(box.loops.size())});
      batch.loops.resize(batch.loops.size() + box.loops.size());
      uint64_t staged_bytes = DTypeBytes(copy.wire_dtype());
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
        work.route == fb::Route::kPeer && schedule_.QuantisesBesideRounds();
    for (uint32_t i = 0; i < work.messages_count; ++i) {
      if (!Moves(MessageAt(work.messages_begin + i))) continue;
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
    const fb::Message& message = MessageAt(work.messages_begin + i);
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
    const fb::Message& mine = MessageAt(work.messages_begin + i);
    uint32_t before = 0;
    for (uint32_t k = 0; k < i; ++k) {
      const fb::Message& other = MessageAt(work.messages_begin + k);
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
