#include "plan/schedule/rank_schedule.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "plan/scratch_windows.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

template <typename T, typename Less>
void SortDistinct(std::vector<T>& values, const Less& less) {
  std::sort(values.begin(), values.end(), less);
  values.erase(std::unique(values.begin(), values.end(),
                           [&](const T& a, const T& b) {
                             return !less(a, b) && !less(b, a);
                           }),
               values.end());
}

void SortDistinct(std::vector<int32_t>& values) {
  SortDistinct(values, [](int32_t a, int32_t b) { return a < b; });
}

}  // namespace

RankSchedule::RankSchedule(const PlanFile& plan, int32_t rank,
                           DirectRounds direct, uint64_t part_bytes) {
  const fb::Body& body = plan.body();
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const MessageVector& messages = plan.messages().Of(program);
  staging_bytes_ = program.staging_bytes();
  const auto peer_of = [&](const fb::Message& message) {
    return static_cast<int32_t>(PeerOf(body, program, message));
  };
  const uint64_t parts_begin = AlignStaging(staging_bytes_);
  for (uint32_t m = 0; m < messages.size();) {
    const uint32_t begin = m, index = messages.Get(m)->round();
    while (m < messages.size() && messages.Get(m)->round() == index) ++m;
    const fb::Round& round = *body.rounds()->Get(index);
    if (direct == DirectRounds::kSent &&
        round.mechanism() == fb::Mechanism::kDirect) {
      AddParts(body, messages, peer_of, begin, m, round, parts_begin,
               part_bytes);
      continue;
    }
    AddWork(round, index);
    for (uint32_t i = begin; i < m; ++i) {
      const fb::Message& message = *messages.Get(i);
      AddOperation(body, message, peer_of(message),
                   {.message = i, .staging_offset = message.staging_offset()},
                   message.size_bytes());
    }
  }
  const auto self = static_cast<uint32_t>(rank);
  for (const Operation& operation : operations_) {
    const auto peer = static_cast<uint32_t>(operation.peer);
    const bool send = operation.kind == fb::MessageKind::kSend;
    routes_.push_back(
        RouteBetween(body, send ? self : peer, send ? peer : self));
  }
  if (plan.side(rank) == fb::Side::kDestination) AddRelays(plan, rank);
  AddQuantizes(plan, rank);
  const uint32_t slots = std::max<uint32_t>(1, body.limits()->slots());
  size_t reusable = 0;  // works before it are at least `slots` rounds older
  std::optional<size_t> staged, unpacked;     // the last of those
  std::optional<size_t> part, unpacked_part;  // the last before this
  for (size_t i = 0; i < rounds_.size(); ++i) {
    RoundWork& work = rounds_[i];
    SortDistinct(work.receivers);
    SortDistinct(work.senders);
    for (; work.index - rounds_[reusable].index >= slots; ++reusable) {
      if (rounds_[reusable].mechanism != fb::Mechanism::kStaged) continue;
      staged = reusable;
      if (rounds_[reusable].unpack_batch.has_value()) unpacked = reusable;
    }
    if (work.mechanism != fb::Mechanism::kStaged) continue;
    work.reuses = staged;
    work.reuses_unpacked = unpacked;
    if (!work.is_part) continue;
    if (part.has_value()) work.reuses = part;
    if (unpacked_part.has_value()) work.reuses_unpacked = unpacked_part;
    part = i;
    if (work.unpack_batch.has_value()) unpacked_part = i;
  }
}

// What a relay passes on came in rounds of one mechanism, up to that of the
// message that feeds it. It is unpacked in order on one stream, so the relay
// waits for the last of it. Where the plan does not say what feeds a relay,
// that is all that came.
void RankSchedule::AddRelays(const PlanFile& plan, int32_t rank) {
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  // Of the first n works: the last that unpacks, and whether peers store.
  std::vector<std::optional<size_t>> unpacks = {std::nullopt};
  std::vector<bool> stores = {false};
  for (size_t i = 0; i < rounds_.size(); ++i) {
    const RoundWork& work = rounds_[i];
    unpacks.push_back(work.unpack_batch.has_value() ? i : unpacks.back());
    stores.push_back(!work.senders.empty() || stores.back());
  }
  for (RoundWork& work : rounds_) {
    const bool staged = work.mechanism == fb::Mechanism::kStaged;
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      if (operations_[number].kind != fb::MessageKind::kSend) continue;
      // It came in an earlier exchange, and stayed there.
      const uint32_t message = parts_[number].message;
      if (IsHeld(plan.body(), *plan.messages().Of(program).Get(message))) {
        continue;
      }
      const fb::Message* fed_by = FedBy(plan.messages(), program, message);
      const size_t works =
          WorksBefore(fed_by == nullptr ? work.index : fed_by->round() + 1);
      const bool only_stored =
          fed_by != nullptr &&
          rounds_[works - 1].mechanism == fb::Mechanism::kDirect;
      const bool only_staged = fed_by != nullptr && !only_stored;
      if (!only_stored) work.relays = std::max(work.relays, unpacks[works]);
      if (!only_staged) work.relays_stored |= staged && stores[works];
    }
  }
}

size_t RankSchedule::WorksBefore(uint32_t index) const {
  return static_cast<size_t>(
      std::partition_point(
          rounds_.begin(), rounds_.end(),
          [&](const RoundWork& work) { return work.index < index; }) -
      rounds_.begin());
}

// Operations of one window are one work. A source's comes after the windows
// before it in the same bytes and is done before its own begins; a
// destination's comes after its own and is done before the next in the same
// bytes. The proof has shown that these windows come one after the other.
void RankSchedule::AddQuantizes(const PlanFile& plan, int32_t rank) {
  const fb::Body& body = plan.body();
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const uint32_t count = Length(program.quantizes());
  const bool is_source = plan.side(rank) == fb::Side::kSource;
  const std::vector<ScratchRange> ranges = ScratchRanges(body, program);
  // By the window's rounds, in the order in which the works are done: that in
  // which windows begin at a source, and end at a destination.
  std::map<std::pair<uint32_t, uint32_t>, std::vector<uint32_t>> windows;
  for (uint32_t i = 0; i < count; ++i) {
    const fb::Quantize& op = *program.quantizes()->Get(i);
    const fb::ScratchWindow* window =
        WindowOf(program, is_source ? op.output_slot() : op.input_slot());
    const uint32_t begin = window == nullptr ? 0 : window->begin();
    const uint32_t end =
        window == nullptr ? body.rounds()->size() : window->end();
    windows[is_source ? std::pair(begin, end) : std::pair(end, begin)]
        .push_back(i);
  }
  std::vector<size_t> done_by;  // works: the round before which each is done
  for (auto& [rounds, operations] : windows) {
    const auto [begin, end] =
        is_source ? rounds : std::pair(rounds.second, rounds.first);
    // The window's neighbours in time among those that share its bytes.
    uint32_t earlier_end = 0;
    uint32_t later_begin = body.rounds()->size();
    for (const ScratchRange& range : ranges) {
      if (range.begin != begin || range.end != end) continue;
      for (const ScratchRange& other : ranges) {
        if (!range.SharesBytes(other)) continue;
        if (other.end <= begin) earlier_end = std::max(earlier_end, other.end);
        if (other.begin >= end) {
          later_begin = std::min(later_begin, other.begin);
        }
      }
    }
    size_t after = WorksBefore(is_source ? earlier_end : end);
    if (!quantizes_.empty()) after = std::max(after, quantizes_.back().after);
    done_by.push_back(WorksBefore(is_source ? begin : later_begin));
    quantizes_.push_back(
        {.batch = batches_++,
         .operations = std::move(operations),
         .after = after,
         .beside_rounds = is_source ? after > 0 : after < rounds_.size()});
  }
  for (size_t q = 0; q < quantizes_.size(); ++q) {
    for (size_t i = done_by[q]; i < rounds_.size(); ++i) {
      rounds_[i].quantized = std::max(rounds_[i].quantized.value_or(0), q);
    }
  }
}

RoundWork& RankSchedule::AddWork(const fb::Round& round, uint32_t index) {
  RoundWork& work = rounds_.emplace_back();
  work.index = index;
  work.route = round.route();
  work.mechanism = round.mechanism();
  work.operations_begin = static_cast<uint32_t>(operations_.size());
  return work;
}

// To the last work.
void RankSchedule::AddOperation(const fb::Body& body,
                                const fb::Message& message, int32_t peer,
                                const MessagePart& part, uint64_t size_bytes) {
  RoundWork& work = rounds_.back();
  const bool send = message.kind() == fb::MessageKind::kSend;
  const bool direct = work.mechanism == fb::Mechanism::kDirect;
  if (direct) (send ? work.receivers : work.senders).push_back(peer);
  const bool copies = body.copy_lists()->Get(message.copies())->count() > 0;
  packs_ |= send && !direct && copies;
  std::optional<size_t>& batch = direct ? work.move_batch
                                 : send ? work.pack_batch
                                        : work.unpack_batch;
  if (!batch.has_value() && (direct || copies)) batch = batches_++;
  ++work.operations_count;
  operations_.push_back({.kind = message.kind(),
                         .peer = peer,
                         .size_bytes = size_bytes,
                         .broadcast = message.broadcast()});
  parts_.push_back(part);
}

// The k-th part of each message, at both ends, belongs to the k-th part of the
// round. All parts of rounds use the same staging, behind the plan's own.
void RankSchedule::AddParts(const fb::Body& body, const MessageVector& messages,
                            const PeerOfMessage& peer_of, uint32_t begin,
                            uint32_t end, const fb::Round& round,
                            uint64_t staging_begin, uint64_t part_bytes) {
  const uint32_t index = messages.Get(begin)->round();
  uint64_t staging_end = staging_begin;
  bool left = true;
  for (uint64_t begin_byte = 0; left; begin_byte += part_bytes) {
    RoundWork& work = AddWork(round, index);
    work.mechanism = fb::Mechanism::kStaged;
    work.is_part = true;
    left = false;
    uint64_t staging_offset = staging_begin;
    for (uint32_t i = begin; i < end; ++i) {
      const fb::Message& message = *messages.Get(i);
      const uint64_t size_bytes = message.size_bytes();
      // An empty message has one part.
      if (begin_byte > 0 && begin_byte >= size_bytes) continue;
      const uint64_t part = std::min(part_bytes, size_bytes - begin_byte);
      AddOperation(body, message, peer_of(message),
                   {.message = i,
                    .begin_byte = begin_byte,
                    .staging_offset = staging_offset},
                   part);
      staging_offset = AlignStaging(staging_offset + part);
      left |= size_bytes - begin_byte > part_bytes;
    }
    staging_end = std::max(staging_end, staging_offset);
  }
  staging_bytes_ = std::max(staging_bytes_, staging_end);
}

std::vector<Edge> RankSchedule::Edges() const {
  std::vector<Edge> edges;
  for (const RoundWork& work : rounds_) {
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const Operation& operation = operations_[work.operations_begin + i];
      edges.push_back({.peer = operation.peer,
                       .kind = operation.kind,
                       .route = work.route,
                       .mechanism = work.mechanism,
                       .broadcasts = operation.broadcast != 0});
    }
  }
  const auto key = [](const Edge& edge) {
    return std::tie(edge.peer, edge.kind, edge.route, edge.mechanism,
                    edge.broadcasts);
  };
  SortDistinct(edges,
               [&](const Edge& a, const Edge& b) { return key(a) < key(b); });
  return edges;
}

bool RankSchedule::RelaysInStages() const {
  return std::any_of(rounds_.begin(), rounds_.end(), [](const RoundWork& work) {
    return work.mechanism == fb::Mechanism::kStaged && work.relays.has_value();
  });
}

bool RankSchedule::QuantizesBesideRounds() const {
  return std::any_of(
      quantizes_.begin(), quantizes_.end(),
      [](const QuantizeLaunch& work) { return work.beside_rounds; });
}

bool RankSchedule::Stages() const {
  return std::any_of(rounds_.begin(), rounds_.end(), [](const RoundWork& work) {
    return work.mechanism == fb::Mechanism::kStaged;
  });
}

bool RankSchedule::SharesGpu() const {
  return std::any_of(rounds_.begin(), rounds_.end(), [](const RoundWork& work) {
    return work.mechanism == fb::Mechanism::kDirect &&
           work.route == fb::Route::kLocal;
  });
}

std::vector<int32_t> RankSchedule::DirectReceivers() const {
  std::vector<int32_t> peers;
  for (const RoundWork& work : rounds_) {
    peers.insert(peers.end(), work.receivers.begin(), work.receivers.end());
  }
  SortDistinct(peers);
  return peers;
}

std::vector<int32_t> RankSchedule::DirectSenders() const {
  std::vector<int32_t> peers;
  for (const RoundWork& work : rounds_) {
    peers.insert(peers.end(), work.senders.begin(), work.senders.end());
  }
  SortDistinct(peers);
  return peers;
}

bool HasDirectRounds(const PlanFile& plan) {
  const auto& rounds = *plan.body().rounds();
  return std::any_of(rounds.begin(), rounds.end(), [](const fb::Round* round) {
    return round->mechanism() == fb::Mechanism::kDirect;
  });
}

}  // namespace refit
