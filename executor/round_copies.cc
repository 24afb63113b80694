#include "executor/round_copies.h"

#include "absl/strings/str_cat.h"
#include "executor/copy_boxes.h"
#include "executor/direct_copies.h"
#include "executor/quantise_boxes.h"

namespace refit {
namespace {

class RoundCopiesBuilder {
 public:
  RoundCopiesBuilder(
      const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
      absl::Span<std::byte* const> tensors, std::byte* staging,
      const std::map<int32_t, std::unique_ptr<MappedMemory>>& peers)
      : plan_(plan),
        body_(plan.body()),
        rank_(rank),
        program_(*body_.programs()->Get(rank)),
        schedule_(schedule),
        tensors_(plan, rank),
        staging_entry_(tensors.size()),
        staging_(staging) {
    result_.table.assign(tensors.begin(), tensors.end());
    result_.table.push_back(staging);
    for (const auto& [peer, memory] : peers) {
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
    if (work.pack_batch.has_value()) {
      result_.batches[*work.pack_batch].leaves_room =
          work.route == fb::Route::kPeer && schedule_.QuantisesBesideRounds();
    }
    for (uint32_t i = 0; i < work.messages_count; ++i) {
      const fb::Message& message = MessageAt(work.messages_begin + i);
      if (message.kind() != fb::MessageKind::kSend) continue;
      const uint32_t peer = message.peer();
      const fb::RankProgram& there = *body_.programs()->Get(peer);
      const fb::Message* received = Partner(work, i, there);
      if (received == nullptr) {
        return absl::UnimplementedError(absl::StrCat(
            "round ", work.index, ": rank ", peer, " does not receive what ",
            "rank ", rank_, " stores; refit-verify tells more"));
      }
      const TensorTable their_tensors(plan_, static_cast<int32_t>(peer));
      // Ranks start with different receivers, so that none is everyone's first.
      const int32_t world_size = plan_.world_size();
      const auto lane = static_cast<uint32_t>(
          (static_cast<int32_t>(peer) - rank_ + world_size) % world_size);
      absl::Status status = AppendDirectCopies(
          body_, {.program = program_, .tensors = tensors_, .message = message},
          {.program = there,
           .tensors = their_tensors,
           .table_begin = peer_begin_.at(static_cast<int32_t>(peer)),
           .message = *received},
          lane, result_.batches[*work.pack_batch]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // The receive of `there` that meets message `i` of `work`: both ends count
  // their messages of a round and a pair in order.
  const fb::Message* Partner(const RoundWork& work, uint32_t i,
                             const fb::RankProgram& there) const {
    const uint32_t peer = MessageAt(work.messages_begin + i).peer();
    uint32_t before = 0;
    for (uint32_t k = 0; k < i; ++k) {
      const fb::Message& other = MessageAt(work.messages_begin + k);
      before += other.kind() == fb::MessageKind::kSend && other.peer() == peer;
    }
    for (const fb::Message* message : *there.messages()) {
      if (message->round() == work.index &&
          message->kind() == fb::MessageKind::kRecv &&
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
  std::map<int32_t, uint64_t> peer_begin_;  // in the table
  RoundCopies result_;
};

}  // namespace

absl::StatusOr<RoundCopies> BuildRoundCopies(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    absl::Span<std::byte* const> tensors, std::byte* staging,
    const std::map<int32_t, std::unique_ptr<MappedMemory>>& peers) {
  return RoundCopiesBuilder(plan, rank, schedule, tensors, staging, peers)
      .Build();
}

}  // namespace refit
