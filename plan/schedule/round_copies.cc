#include "plan/schedule/round_copies.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "plan/broadcasts.h"
#include "plan/schedule/copy_batches.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/direct_steps.h"
#include "plan/schedule/fused_quantizes.h"
#include "plan/schedule/pulled_quantizes.h"
#include "plan/schedule/tensor_box.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

class RoundCopiesBuilder {
 public:
  RoundCopiesBuilder(const PlanFile& plan, int32_t rank,
                     const RankSchedule& schedule,
                     absl::Span<std::byte* const> tensors, std::byte* staging,
                     const DirectPairs& peers,
                     const PeerAddresses& peer_tensors, bool joins_rounds)
      : plan_(plan),
        body_(plan.body()),
        rank_(rank),
        program_(*body_.programs()->Get(rank)),
        schedule_(schedule),
        is_dealt_(DealtReceives(plan.messages(), program_)),
        tensors_(plan, rank),
        staging_entry_(tensors.size()),
        staging_(staging),
        peers_(peers),
        joins_rounds_(joins_rounds),
        has_steps_(HasDirectSteps(plan)) {
    result_.table.assign(tensors.begin(), tensors.end());
    result_.table.push_back(staging);
    for (const auto& [peer, addresses] : peer_tensors) {
      AddPeer(peer, addresses);
    }
    result_.batches.resize(schedule.batches());
    result_.operations = schedule.operations();
    result_.in_tensor.resize(result_.operations.size());
  }

  // Tensors of a peer; those that Build was given are there already.
  void AddPeer(int32_t peer, absl::Span<std::byte* const> addresses) {
    peer_begin_[peer] = result_.table.size();
    result_.table.insert(result_.table.end(), addresses.begin(),
                         addresses.end());
  }

  absl::StatusOr<RoundCopies> Build() {
    AddFills();
    AddQuantizes();
    ShareWithExchanges();
    for (const RoundWork& work : schedule_.rounds()) {
      absl::Status status = work.mechanism == fb::Mechanism::kDirect
                                ? AddDirectRound(work)
                                : AddStagedRound(work);
      if (!status.ok()) return status;
    }
    if (absl::Status status = AddChoices(); !status.ok()) return status;
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
    Fusion fusion = FusionOf(result_.batches);
    if (multiprocessors > 0 && fusion.in_peer_rounds) fusion.is_fused.clear();
    fusion.is_fused.resize(Length(program_.quantizes()), false);
    return std::move(fusion.is_fused);
  }

  // Of a destination. Instead of Build; no tensor needs an address.
  absl::StatusOr<std::set<uint32_t>> Pulled() {
    const absl::StatusOr<Incoming> incoming = IncomingCopies();
    if (!incoming.ok()) return incoming.status();
    const uint32_t count = Length(program_.quantizes());
    const PulledQuantizes pulled = PullQuantizes(
        QuantizesOf([](uint32_t) { return true; }), incoming->copies);
    std::set<uint32_t> slots;
    for (const bool is_pulled : {true, false}) {
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t slot = program_.quantizes()->Get(i)->input_slot();
        if (pulled.is_pulled[i] != is_pulled) continue;
        if (is_pulled && !incoming->kept.contains(slot)) {
          slots.insert(slot);
        } else {
          slots.erase(slot);
        }
      }
    }
    return slots;
  }

 private:
  const fb::Message& MessageAt(uint32_t position) const {
    return *plan_.messages().Of(program_).Get(position);
  }

  const fb::Message& DirectMessageAt(const RoundWork& work, uint32_t i) const {
    return MessageAt(schedule_.parts()[work.operations_begin + i].message);
  }

  void AddFills() {
    CopyBatch& batch = result_.batches[RankSchedule::kFillBatch];
    batch.kind = CopyKind::kZero;
    for (const fb::Copy& copy : CopiesOf(body_, program_.fills())) {
      AppendZero(BoxOf(body_, tensors_, copy), batch);
    }
  }

  void AddQuantizes() {
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

  bool IsInScratch(const CopyAddress& address) const {
    return address.entry >= tensors_.begin(tensors_.workers_stacks()) &&
           address.entry < staging_entry_;
  }

  // What a source stores without scratch.
  struct Fusion {
    std::vector<CopyBatch> batches;  // as the schedule numbers them
    std::vector<bool> is_fused;      // by quantize operation of the rank
    std::vector<bool> is_idle;       // by quantize launch
    bool in_peer_rounds = false;
    uint64_t elements = 0;
  };

  // Of sources alone: what a destination quantizes has come to it.
  Fusion FusionOf(std::vector<CopyBatch> batches) const {
    Fusion fusion;
    const std::vector<QuantizeLaunch>& launches = schedule_.quantizes();
    if (launches.empty() || plan_.side(rank_) != fb::Side::kSource) {
      fusion.batches = std::move(batches);
      return fusion;
    }
    std::vector<size_t> quantize_batches;
    for (const QuantizeLaunch& launch : launches) {
      quantize_batches.push_back(launch.batch);
    }
    QuantizeFusion composed(batches, quantize_batches);
    for (const RoundWork& work : schedule_.rounds()) {
      if (work.mechanism == fb::Mechanism::kDirect) {
        const CopyBatch& batch = batches[*work.move_batch];
        for (size_t i = 0; i < batch.copies.size(); ++i) {
          if (!IsInScratch(batch.copies[i].from)) continue;
          composed.AddCopy({.batch = *work.move_batch, .copy = i});
        }
      }
      AddOtherReads(work, composed);
    }
    fusion.batches = composed.Fuse();
    fusion.is_fused.resize(program_.quantizes()->size(), false);
    size_t number = 0;
    for (const QuantizeLaunch& launch : launches) {
      const CopyBatch& batch = batches[launch.batch];
      for (size_t i = 0; i < launch.operations.size(); ++i, ++number) {
        if (!composed.is_fused()[number]) continue;
        fusion.is_fused[launch.operations[i]] = true;
        fusion.elements += ElementsOf(batch.quantizes[i], batch);
      }
      fusion.is_idle.push_back(fusion.batches[launch.batch].quantizes.empty());
    }
    for (const RoundWork& work : schedule_.rounds()) {
      fusion.in_peer_rounds |=
          work.mechanism == fb::Mechanism::kDirect &&
          work.route == fb::Route::kPeer &&
          !fusion.batches[*work.move_batch].quantizes.empty();
    }
    return fusion;
  }

  static uint64_t ElementsOf(const BlockQuantize& op, const CopyBatch& batch) {
    uint64_t elements = op.rows * op.columns;
    for (uint32_t l = 0; l < op.loops_count; ++l) {
      elements *= batch.quantize_loops[op.loops_begin + l].extent;
    }
    return elements;
  }

  // What of scratch is sent, or read by peers.
  void AddOtherReads(const RoundWork& work, QuantizeFusion& fusion) const {
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const fb::Message& message = DirectMessageAt(work, i);
      if (message.kind() != fb::MessageKind::kSend ||
          (work.mechanism == fb::Mechanism::kDirect && Moves(message))) {
        continue;
      }
      for (const fb::Copy& copy : CopiesOf(body_, message.copies())) {
        const TensorBox box = BoxOf(body_, tensors_, copy);
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

  // Copies that fill this rank's scratch from tensors that it could read.
  struct Incoming {
    CopyBatch copies;
    std::vector<int32_t> senders;  // by copy
    std::set<uint32_t> kept;       // slots that something else fills or reads
  };

  bool IsScratchSlot(uint32_t slot) const {
    return slot >= tensors_.workers_stacks();
  }

  // The slot of scratch of a rank that has `entry` of its TensorTable. None: it
  // is the worker's.
  static std::optional<uint32_t> ScratchSlotOf(const TensorTable& tensors,
                                               uint64_t entry) {
    for (size_t slot = tensors.workers_stacks(); slot < tensors.stacks();
         ++slot) {
      if (tensors.begin(slot) <= entry && entry < tensors.begin(slot + 1)) {
        return static_cast<uint32_t>(slot);
      }
    }
    return std::nullopt;
  }

  absl::StatusOr<Incoming> IncomingCopies() const {
    Incoming incoming;
    for (const RoundWork& work : schedule_.rounds()) {
      for (uint32_t i = 0; i < work.operations_count; ++i) {
        const fb::Message& message = DirectMessageAt(work, i);
        const int32_t peer = PeerAt(message);
        if (work.mechanism == fb::Mechanism::kDirect &&
            message.kind() == fb::MessageKind::kRecv && !Moves(message) &&
            peers_.readable.contains(peer)) {
          absl::Status status = AddIncoming(work, i, incoming);
          if (!status.ok()) return status;
          continue;
        }
        for (const fb::Copy& copy : CopiesOf(body_, message.copies())) {
          const uint32_t slot = copy.buffer_slot();
          if (IsScratchSlot(slot)) incoming.kept.insert(slot);
        }
      }
    }
    return incoming;
  }

  // Those of message `i` of the round.
  absl::Status AddIncoming(const RoundWork& work, uint32_t i,
                           Incoming& incoming) const {
    const int32_t peer = PeerAt(DirectMessageAt(work, i));
    CopyBatch all;
    all.kind = CopyKind::kCopy;
    if (absl::Status s = AddDirectMessage(work, i, all); !s.ok()) return s;
    const TensorTable theirs(plan_, peer);
    const uint64_t begin = peer_begin_.at(peer);
    for (StridedCopy copy : all.copies) {
      const std::optional<uint32_t> slot =
          ScratchSlotOf(tensors_, copy.to.entry);
      if (!slot.has_value()) continue;
      if (copy.from.dtype != copy.to.dtype ||
          ScratchSlotOf(theirs, copy.from.entry - begin).has_value()) {
        incoming.kept.insert(*slot);
        continue;
      }
      const auto loops = all.loops.begin() + copy.loops_begin;
      copy.loops_begin = static_cast<uint32_t>(incoming.copies.loops.size());
      incoming.copies.loops.insert(incoming.copies.loops.end(), loops,
                                   loops + copy.loops_count);
      incoming.copies.copies.push_back(copy);
      incoming.senders.push_back(peer);
    }
    return absl::OkStatus();
  }

  // The rank's operations whose input is in a slot that `takes` names.
  template <typename Takes>
  CopyBatch QuantizesOf(const Takes& takes) const {
    CopyBatch batch;
    batch.kind = CopyKind::kQuantize;
    for (uint32_t i = 0; i < Length(program_.quantizes()); ++i) {
      const fb::Quantize& op = *program_.quantizes()->Get(i);
      if (takes(op.input_slot())) AppendQuantize(body_, tensors_, op, batch);
    }
    return batch;
  }

  // What this rank reads itself, instead of filling and reading scratch; takes
  // its operations out of `batches`. Error: kInternal, it cannot.
  absl::Status AddPull(const std::set<uint32_t>& slots,
                       std::vector<CopyBatch>& batches) {
    const absl::StatusOr<Incoming> incoming = IncomingCopies();
    if (!incoming.ok()) return incoming.status();
    PulledQuantizes pulled = PullQuantizes(
        QuantizesOf([&](uint32_t slot) { return slots.contains(slot); }),
        incoming->copies);
    if (std::find(pulled.is_pulled.begin(), pulled.is_pulled.end(), false) !=
        pulled.is_pulled.end()) {
      return absl::InternalError(
          "what was to be quantized straight from senders' tensors cannot be");
    }
    std::set<int32_t> senders;
    for (size_t i = 0; i < incoming->senders.size(); ++i) {
      const std::optional<uint32_t> slot =
          ScratchSlotOf(tensors_, incoming->copies.copies[i].to.entry);
      if (slots.contains(*slot)) senders.insert(incoming->senders[i]);
    }
    result_.fused.read_sources.assign(senders.begin(), senders.end());
    for (const BlockQuantize& op : pulled.batch.quantizes) {
      result_.fused.pulled_elements += ElementsOf(op, pulled.batch);
    }
    result_.fused.pull_batch = result_.batches.size();
    result_.batches.push_back(std::move(pulled.batch));
    for (const QuantizeLaunch& launch : schedule_.quantizes()) {
      CopyBatch& batch = batches[launch.batch];
      size_t kept = 0;
      for (size_t i = 0; i < launch.operations.size(); ++i) {
        const uint32_t slot =
            program_.quantizes()->Get(launch.operations[i])->input_slot();
        if (!slots.contains(slot)) batch.quantizes[kept++] = batch.quantizes[i];
      }
      batch.quantizes.resize(kept);
    }
    return absl::OkStatus();
  }

  // Takes out of `batches` what receivers read themselves.
  void TakeOutPulled(std::vector<CopyBatch>& batches) {
    for (const auto& [receiver, slots] : peers_.pulled_slots) {
      if (receiver == rank_) continue;
      const TensorTable theirs(plan_, receiver);
      const uint64_t begin = peer_begin_.at(receiver);
      bool is_read = false;
      for (CopyBatch& batch : batches) {
        std::erase_if(batch.copies, [&,
                                     &slots = slots](const StridedCopy& copy) {
          if (copy.to.entry < begin || copy.to.entry >= begin + theirs.size()) {
            return false;
          }
          const std::optional<uint32_t> slot =
              ScratchSlotOf(theirs, copy.to.entry - begin);
          const bool is_pulled = slot.has_value() && slots.contains(*slot);
          is_read |= is_pulled;
          return is_pulled;
        });
      }
      if (is_read) result_.fused.readers.push_back(receiver);
    }
  }

  // The number of what batch `batch` becomes: that one's, where it stays as it
  // is. All changes take copies or operations out, or add operations; of those
  // that JoinRounds joined it is not asked.
  size_t NumberOf(size_t batch, CopyBatch changed) {
    const CopyBatch& before = result_.batches[batch];
    if (changed.copies.size() == before.copies.size() &&
        changed.quantizes.size() == before.quantizes.size() &&
        changed.share == before.share) {
      return batch;
    }
    result_.batches.push_back(std::move(changed));
    return result_.batches.size() - 1;
  }

  absl::Status AddChoices() {
    FusedBatches& fused = result_.fused;
    const size_t count = result_.batches.size();
    std::vector<CopyBatch> left = result_.batches;
    const auto mine = peers_.pulled_slots.find(rank_);
    if (mine != peers_.pulled_slots.end()) {
      if (absl::Status s = AddPull(mine->second, left); !s.ok()) return s;
    }
    TakeOutPulled(left);
    const bool pulls = fused.pull_batch.has_value() || !fused.readers.empty();
    Fusion fusion = FusionOf(left);
    fused.in_peer_rounds = fusion.in_peer_rounds;
    fused.stored_elements = fusion.elements;
    if (!pulls && fusion.elements == 0) return absl::OkStatus();
    if (pulls) {
      for (size_t b = 0; b < count; ++b) {
        fused.bounded.batches.push_back(NumberOf(b, left[b]));
      }
      for (const QuantizeLaunch& launch : schedule_.quantizes()) {
        fused.bounded.is_idle.push_back(left[launch.batch].quantizes.empty());
      }
    }
    if (fusion.elements == 0) {
      fused.fused = fused.bounded;
      return absl::OkStatus();
    }
    const Fusion whole =
        pulls ? FusionOf({result_.batches.begin(),
                          result_.batches.begin() +
                              static_cast<std::ptrdiff_t>(count)})
              : fusion;
    for (size_t b = 0; b < count; ++b) fused.checked.batches.push_back(b);
    for (const RoundWork& work : schedule_.rounds()) {
      if (work.mechanism != fb::Mechanism::kDirect) continue;
      const size_t b = *work.move_batch;
      fused.checked.batches[b] = NumberOf(b, whole.batches[b]);
    }
    fused.fused.is_idle = fusion.is_idle;
    const bool is_beside =
        std::any_of(schedule_.quantizes().begin(), schedule_.quantizes().end(),
                    [&](const QuantizeLaunch& launch) {
                      return launch.beside_rounds &&
                             !fusion.batches[launch.batch].quantizes.empty();
                    });
    if (!is_beside) {
      for (const RoundWork& work : schedule_.rounds()) {
        if (work.mechanism != fb::Mechanism::kDirect) continue;
        fusion.batches[*work.move_batch].share = DeviceShare::kAll;
      }
    }
    std::set<size_t> joined;
    if (joins_rounds_) joined = JoinRounds(pulls, fusion);
    for (size_t b = 0; b < count; ++b) {
      if (joined.contains(b)) {
        fused.fused.batches.push_back(result_.batches.size());
        result_.batches.push_back(std::move(fusion.batches[b]));
      } else {
        fused.fused.batches.push_back(
            NumberOf(b, std::move(fusion.batches[b])));
      }
    }
    return absl::OkStatus();
  }

  // Rounds between which this rank neither waits nor signals nor quantizes
  // become one launch: a kernel ends slowly. Returns the batches that took
  // others.
  std::set<size_t> JoinRounds(bool pulls, Fusion& fusion) const {
    std::set<size_t> joined;
    if (std::find(fusion.is_idle.begin(), fusion.is_idle.end(), false) !=
        fusion.is_idle.end()) {
      return joined;
    }
    const std::vector<RoundWork>& works = schedule_.rounds();
    const std::vector<DirectEnds> ends =
        ListDirectEnds(plan_, rank_, schedule_, peers_, pulls);
    size_t first = 0;
    for (size_t i = 1; i < works.size(); ++i) {
      const bool joins =
          works[i].mechanism == fb::Mechanism::kDirect &&
          works[first].mechanism == fb::Mechanism::kDirect &&
          works[i].route == works[first].route && ends[first].moves &&
          ends[i].grant.empty() && ends[i].await_grants.empty() &&
          ends[i - 1].finish.empty() && ends[i - 1].await_finishes.empty();
      if (!joins) {
        first = i;
        continue;
      }
      AppendBatch(fusion.batches[*works[first].move_batch],
                  fusion.batches[*works[i].move_batch]);
      joined.insert(*works[first].move_batch);
    }
    return joined;
  }

  // Moves all of `more` to the end of `batch`.
  static void AppendBatch(CopyBatch& batch, CopyBatch& more) {
    for (StridedCopy copy : more.copies) {
      copy.loops_begin += static_cast<uint32_t>(batch.loops.size());
      batch.copies.push_back(copy);
    }
    for (BlockQuantize op : more.quantizes) {
      op.loops_begin += static_cast<uint32_t>(batch.quantize_loops.size());
      op.runs_begin += static_cast<uint32_t>(batch.row_runs.size());
      batch.quantizes.push_back(op);
    }
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(batch.loops, more.loops);
    append(batch.quantize_loops, more.quantize_loops);
    append(batch.row_runs, more.row_runs);
    more = CopyBatch{};
  }

  // A box of a tensor that lies in one piece in a message.
  struct StagedBox {
    TensorBox box;
    uint64_t begin_byte = 0;  // from the start of the part
    DType wire_dtype = DType::kUnspecified;
  };

  // Packing and unpacking go on beside the exchanges of other rounds: all but
  // the first and the last. A rank that relays unpacks, and packs again, within
  // one exchange. One that quantizes packs what is just ready.
  void ShareWithExchanges() {
    std::vector<size_t> packs;
    std::vector<size_t> unpacks;
    const DeviceShare share =
        !schedule_.quantizes().empty() ? DeviceShare::kHalf
        : schedule_.RelaysInStages()   ? DeviceShare::kTwoLinks
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

  absl::Status AddStagedRound(const RoundWork& work) {
    RepeatedSends sends;
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const MessagePart& part = schedule_.parts()[number];
      Operation& operation = result_.operations[number];
      const bool repeats = sends.Repeats(MessageAt(part.message));
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
      if (boxes->empty() || repeats) continue;
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
    if (work.route == fb::Route::kPeer && schedule_.QuantizesBesideRounds()) {
      result_.batches[*work.move_batch].share = DeviceShare::kHalf;
    }
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      if (!Moves(DirectMessageAt(work, i))) continue;
      absl::Status status =
          AddDirectMessage(work, i, result_.batches[*work.move_batch]);
      if (!status.ok()) return status;
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

  absl::Status AddDirectMessage(const RoundWork& work, uint32_t i,
                                CopyBatch& batch) const {
    const fb::Message& message = DirectMessageAt(work, i);
    const bool push = message.kind() == fb::MessageKind::kSend;
    const int32_t peer = PeerAt(message);
    const fb::Message* partner =
        PartnerOf(plan_.messages(), static_cast<uint32_t>(rank_),
                  schedule_.parts()[work.operations_begin + i].message);
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

  const PlanFile& plan_;
  const fb::Body& body_;
  const int32_t rank_;
  const fb::RankProgram& program_;
  const RankSchedule& schedule_;
  const std::vector<bool> is_dealt_;  // by message
  const TensorTable tensors_;
  const uint64_t staging_entry_;
  std::byte* const staging_;
  const DirectPairs& peers_;
  const bool joins_rounds_;
  const bool has_steps_;
  std::map<int32_t, uint64_t> peer_begin_;  // in the table
  RoundCopies result_;
};

}  // namespace

absl::StatusOr<RoundCopies> BuildRoundCopies(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    absl::Span<std::byte* const> tensors, std::byte* staging,
    const DirectPairs& peers, const PeerAddresses& peer_tensors,
    bool joins_rounds) {
  return RoundCopiesBuilder(plan, rank, schedule, tensors, staging, peers,
                            peer_tensors, joins_rounds)
      .Build();
}

namespace {

// A builder of what is the same wherever tensors are.
template <typename Result>
Result WithoutAddresses(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    const DirectPairs& peers,
    absl::FunctionRef<Result(RoundCopiesBuilder&)> of_builder) {
  const auto nowhere = [&](int32_t of) {
    return std::vector<std::byte*>(TensorTable(plan, of).size());
  };
  const std::vector<std::byte*> tensors = nowhere(rank);
  RoundCopiesBuilder builder(plan, rank, schedule, tensors, nullptr, peers,
                             /*peer_tensors=*/{}, /*joins_rounds=*/false);
  std::set<int32_t> all;
  for (const int32_t peer : schedule.DirectReceivers()) all.insert(peer);
  for (const int32_t peer : schedule.DirectSenders()) all.insert(peer);
  for (const int32_t peer : all) builder.AddPeer(peer, nowhere(peer));
  return of_builder(builder);
}

}  // namespace

std::vector<bool> FusedQuantizes(const PlanFile& plan, int32_t rank,
                                 const RankSchedule& schedule,
                                 const DirectPairs& peers) {
  const uint32_t count = Length(plan.body().programs()->Get(rank)->quantizes());
  if (count == 0) return {};
  absl::StatusOr<std::vector<bool>> fused =
      WithoutAddresses<absl::StatusOr<std::vector<bool>>>(
          plan, rank, schedule, peers, [&](RoundCopiesBuilder& builder) {
            return builder.Fused(
                plan.body().limits()->direct_multiprocessors());
          });
  return fused.ok() ? *std::move(fused) : std::vector<bool>(count, false);
}

std::set<uint32_t> PulledSlots(const PlanFile& plan, int32_t rank,
                               const RankSchedule& schedule,
                               const DirectPairs& peers) {
  absl::StatusOr<std::set<uint32_t>> slots =
      WithoutAddresses<absl::StatusOr<std::set<uint32_t>>>(
          plan, rank, schedule, peers,
          [](RoundCopiesBuilder& builder) { return builder.Pulled(); });
  return slots.ok() ? *std::move(slots) : std::set<uint32_t>();
}

}  // namespace refit
