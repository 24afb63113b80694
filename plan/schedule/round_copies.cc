#include "plan/schedule/round_copies.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "plan/schedule/copy_batches.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/fused_quantizes.h"
#include "plan/schedule/pulled_quantizes.h"
#include "plan/schedule/rank_copies.h"
#include "plan/schedule/tensor_box.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

class RoundCopiesBuilder : public RankCopies {
 public:
  using RankCopies::RankCopies;

  absl::StatusOr<RoundCopies> Build(bool joins_rounds) {
    AddFills();
    AddQuantizes();
    ShareWithExchanges();
    for (const RoundWork& work : schedule_.rounds()) {
      absl::Status status = work.mechanism == fb::Mechanism::kDirect
                                ? AddDirectRound(work)
                                : AddStagedRound(work);
      if (!status.ok()) return status;
    }
    if (absl::Status status = AddChoices(joins_rounds); !status.ok()) {
      return status;
    }
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
  bool IsInScratch(const CopyAddress& address) const {
    return address.entry >= tensors_.begin(tensors_.workers_stacks()) &&
           address.entry < tensors_.size();
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

  // What of scratch is sent, or read by peers.
  void AddOtherReads(const RoundWork& work, QuantizeFusion& fusion) const {
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const fb::Message& message = MessageOf(work, i);
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
        const fb::Message& message = MessageOf(work, i);
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
    const int32_t peer = PeerAt(MessageOf(work, i));
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

  absl::Status AddChoices(bool joins_rounds) {
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
    if (joins_rounds) joined = JoinRounds(pulls, fusion);
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
      MoveBatch(fusion.batches[*works[i].move_batch],
                fusion.batches[*works[first].move_batch]);
      joined.insert(*works[first].move_batch);
    }
    return joined;
  }
};

}  // namespace

absl::StatusOr<RoundCopies> BuildRoundCopies(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    absl::Span<std::byte* const> tensors, std::byte* staging,
    const DirectPairs& peers, const PeerAddresses& peer_tensors,
    bool joins_rounds) {
  RoundCopiesBuilder builder(plan, rank, schedule, peers);
  builder.Place(tensors, staging, peer_tensors);
  return builder.Build(joins_rounds);
}

std::vector<bool> FusedQuantizes(const PlanFile& plan, int32_t rank,
                                 const RankSchedule& schedule,
                                 const DirectPairs& peers) {
  const uint32_t count = Length(plan.body().programs()->Get(rank)->quantizes());
  if (count == 0) return {};
  RoundCopiesBuilder builder(plan, rank, schedule, peers);
  builder.PlaceNowhere();
  absl::StatusOr<std::vector<bool>> fused =
      builder.Fused(plan.body().limits()->direct_multiprocessors());
  return fused.ok() ? *std::move(fused) : std::vector<bool>(count, false);
}

std::set<uint32_t> PulledSlots(const PlanFile& plan, int32_t rank,
                               const RankSchedule& schedule,
                               const DirectPairs& peers) {
  RoundCopiesBuilder builder(plan, rank, schedule, peers);
  builder.PlaceNowhere();
  absl::StatusOr<std::set<uint32_t>> slots = builder.Pulled();
  return slots.ok() ? *std::move(slots) : std::set<uint32_t>();
}

}  // namespace refit
