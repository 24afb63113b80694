#include "simulator/rank_work.h"

#include <algorithm>

#include "plan/broadcasts.h"
#include "plan/dtype.h"
#include "plan/schedule/round_copies.h"
#include "plan/schedule/tensor_box.h"
#include "plan/sent_ranges.h"

namespace refit::simulator {
namespace {

// Whether the list is one run of a tensor, byte for byte: such bytes are sent
// from the tensor itself, or received into it.
bool IsOneRun(const fb::Body& body, const TensorTable& tensors,
              absl::Span<const fb::Copy> copies) {
  if (copies.size() != 1) return false;
  const TensorBox box = BoxOf(body, tensors, copies[0]);
  return box.first.dtype == copies[0].wire_dtype() && box.IsOneRun();
}

}  // namespace

RankSchedule ScheduleOf(const PlanFile& plan, Executor executor, int32_t rank) {
  return RankSchedule(
      plan, rank,
      executor == Executor::kCpu ? DirectRounds::kSent : DirectRounds::kStored);
}

RankWork::RankWork(const PlanFile& plan, const Options& options,
                   const DeltaRefit& delta, int32_t number,
                   PulledSlotsOfRanks* pulled_slots)
    : rank(number),
      schedule(ScheduleOf(plan, options.executor, number)),
      peers(PlannedPairs(plan, schedule)),
      plan_(plan),
      body_(plan.body()),
      options_(options),
      delta_(delta),
      tensors_(plan, number),
      is_dealt_(DealtReceives(plan.messages(), program())),
      is_fused_(FusedQuantizes(plan, number, schedule, peers)) {
  if (delta.plan != nullptr) deltas.emplace(plan, number, schedule);
  PlanFused();
  if (pulled_slots != nullptr) PlanPulls(*pulled_slots);
  PlanQuantized();
}

void RankWork::PlanFused() {
  std::set<uint32_t> unfused;
  for (uint32_t i = 0; i < is_fused_.size(); ++i) {
    (is_fused_[i] ? fused_slots_ : unfused)
        .insert(program().quantizes()->Get(i)->output_slot());
  }
  for (const uint32_t slot : unfused) fused_slots_.erase(slot);
}

// What sources would store into scratch from which a destination quantizes.
void RankWork::PlanPulls(PulledSlotsOfRanks& pulled_slots) {
  std::vector<int32_t> readers = schedule.DirectReceivers();
  readers.push_back(rank);
  for (const int32_t reader : readers) {
    if (!IsQuantizer(plan_, reader)) continue;
    const auto [slots, is_new] = pulled_slots.try_emplace(reader);
    if (is_new) slots->second = PlannedPulledSlots(plan_, reader);
    if (!slots->second.empty()) peers.pulled_slots.insert(*slots);
  }
  if (peers.pulled_slots.empty()) return;
  pulled_bytes_.assign(schedule.operations().size(), 0);
  for (size_t work = 0; work < schedule.rounds().size(); ++work) {
    const RoundWork& round = schedule.rounds()[work];
    if (round.mechanism != fb::Mechanism::kDirect) continue;
    for (uint32_t i = 0; i < round.operations_count; ++i) {
      const uint32_t number = round.operations_begin + i;
      const uint64_t bytes = PulledBytes(number);
      if (bytes == 0) continue;
      pulled_bytes_[number] = bytes;
      Pull& pull = pulls[schedule.operations()[number].peer];
      pull = {.bytes = pull.bytes + bytes,
              .work = work,
              .position = MessageOf(number)};
    }
  }
}

uint64_t RankWork::PulledBytes(size_t operation) const {
  const auto here = static_cast<uint32_t>(rank);
  const Operation& of = schedule.operations()[operation];
  const bool sends = of.kind == fb::MessageKind::kSend;
  const auto slots = peers.pulled_slots.find(sends ? of.peer : rank);
  if (slots == peers.pulled_slots.end()) return 0;
  const fb::Message* const received =
      sends ? PartnerOf(plan_.messages(), here, MessageOf(operation))
            : plan_.messages().Of(here).Get(MessageOf(operation));
  if (received == nullptr) return 0;
  uint64_t bytes = 0;
  for (const fb::Copy& copy : CopiesOf(body_, received->copies())) {
    if (slots->second.contains(copy.buffer_slot())) {
      bytes += CopyElements(body_, copy) * DTypeBytes(copy.wire_dtype());
    }
  }
  return bytes;
}

void RankWork::PlanQuantized() {
  const auto pulled =
      pulls.empty() ? peers.pulled_slots.end() : peers.pulled_slots.find(rank);
  for (const QuantizeLaunch& launch : schedule.quantizes()) {
    double& elements = quantized_elements.emplace_back(0);
    for (const uint32_t position : launch.operations) {
      if (is_fused_[position]) continue;
      const fb::Quantize& operation = *program().quantizes()->Get(position);
      double matrices = 1;
      for (const fb::QuantizeLoop& loop : LoopsOf(body_, operation)) {
        matrices *= static_cast<double>(loop.extent());
      }
      const bool is_pulled = pulled != peers.pulled_slots.end() &&
                             pulled->second.contains(operation.input_slot());
      (is_pulled ? pulled_elements_ : elements) +=
          matrices * static_cast<double>(operation.rows()) *
          static_cast<double>(operation.columns());
    }
  }
}

const RoundWork& RankWork::LastPull() const {
  size_t last = 0;
  for (const auto& [peer, pull] : pulls) last = std::max(last, pull.work);
  return schedule.rounds()[last];
}

uint64_t RankWork::SizeBytes(size_t operation) const {
  if (deltas.has_value()) return deltas->SizeBytes(operation, delta_.rung);
  const uint64_t size_bytes = schedule.operations()[operation].size_bytes;
  return pulled_bytes_.empty() ? size_bytes
                               : size_bytes - pulled_bytes_[operation];
}

bool RankWork::IsEmptied(size_t operation) const {
  return !pulls.empty() &&
         schedule.operations()[operation].kind == fb::MessageKind::kSend &&
         SizeBytes(operation) == 0;
}

double RankWork::CopySeconds(const RoundWork& work,
                             fb::MessageKind kind) const {
  const MessageVector& messages = plan_.messages().Of(program());
  double bytes = 0;
  double coded_bytes = 0;
  RepeatedSends sends;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const uint32_t message = MessageOf(number);
    const bool repeats = sends.Repeats(*messages.Get(message));
    const Operation& operation = schedule.operations()[number];
    if (repeats || operation.kind != kind) continue;
    if (IsCoded(number)) {
      coded_bytes += static_cast<double>(operation.size_bytes);
      continue;
    }
    const auto copies = CopiesOf(body_, messages.Get(message)->copies());
    // What is dealt out stays in staging.
    if (copies.empty() ||
        (!is_dealt_[message] && IsOneRun(body_, tensors_, copies))) {
      continue;
    }
    bytes += static_cast<double>(operation.size_bytes);
  }
  return bytes / options_.copy_bytes_per_second +
         coded_bytes * (kind == fb::MessageKind::kSend ? delta_.costs.encode
                                                       : delta_.costs.apply);
}

double RankWork::StartSeconds(const RoundWork& work, fb::Route route) const {
  if (route == fb::Route::kNetwork) return options_.network_round_seconds;
  int64_t sends = 0;
  int64_t receives = 0;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    if (schedule.RouteOf(number) != route) continue;
    ++(schedule.operations()[number].kind == fb::MessageKind::kSend ? sends
                                                                    : receives);
  }
  const auto messages = static_cast<double>(std::max(sends, receives));
  if (work.route == fb::Route::kNetwork) {
    return options_.dealt_message_seconds * messages;
  }
  const double message_seconds =
      !schedule.quantizes().empty() ? options_.quantized_message_seconds
      : schedule.RelaysInStages()   ? options_.dealt_message_seconds
                                    : options_.peer_message_seconds;
  return options_.peer_round_seconds + messages * message_seconds;
}

double RankWork::FusedSeconds(const RoundWork& work) const {
  if (fused_slots_.empty()) return 0;
  const MessageVector& messages = plan_.messages().Of(program());
  double elements = 0;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const fb::Message& message = *messages.Get(MessageOf(number));
    if (message.kind() != fb::MessageKind::kSend) continue;
    for (const fb::Copy& copy : CopiesOf(body_, message.copies())) {
      if (!fused_slots_.contains(copy.buffer_slot())) continue;
      elements += static_cast<double>(CopyElements(body_, copy));
    }
  }
  return elements / options_.fused_elements_per_second;
}

double RankWork::CodedSendBytes() const {
  double bytes = 0;
  for (size_t i = 0; i < schedule.operations().size(); ++i) {
    const Operation& operation = schedule.operations()[i];
    if (operation.kind == fb::MessageKind::kSend && deltas->IsCoded(i)) {
      bytes += static_cast<double>(operation.size_bytes);
    }
  }
  return bytes;
}

double RankWork::KeepSeconds() const {
  // Bitmaps are cleared, however many changed.
  const bool is_little =
      delta_.plan->changes() == fb::DeltaChanges::kBitmap ||
      (!deltas->IsAllWhole(delta_.rung) &&
       *options_.change_rate * DeltaSizes::kElementsPerChangeToTakeAll <= 1);
  return is_little ? CodedSendBytes() * delta_.costs.keep
                   : CodedSendBytes() / options_.copy_bytes_per_second;
}

double RankWork::CheckSeconds() const {
  auto bytes = static_cast<double>(SnapshotBytes(plan_, rank));
  for (const Operation& operation : schedule.operations()) {
    if (operation.kind != fb::MessageKind::kRecv) continue;
    bytes += static_cast<double>(operation.size_bytes);
  }
  return bytes * CheckSecondsPerByte(options_.executor);
}

}  // namespace refit::simulator
