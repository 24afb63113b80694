#include "plan/text/stats.h"

#include <algorithm>
#include <set>
#include <utility>

#include "plan/add_up_to.h"
#include "plan/broadcasts.h"
#include "plan/network_peers.h"
#include "plan/scratch_windows.h"
#include "plan/sent_ranges.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

Totals TotalsOf(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  const SendPayloads payloads(plan.messages());
  Totals totals;
  totals.sent_bytes.resize(body.programs()->size());
  totals.received_bytes.resize(body.programs()->size());
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    uint64_t operations = 0;
    uint32_t round = 0;
    RepeatedSends sends;
    const MessageVector& messages = plan.messages().Of(rank);
    for (uint32_t position = 0; position < messages.size(); ++position) {
      const fb::Message* message = messages.Get(position);
      if (message->round() != round) operations = 0;
      round = message->round();
      const bool repeats = sends.Repeats(*message);
      if (!repeats) ++operations;
      const bool direct = IsDirect(body, round);
      if (!direct && operations > totals.most_operations) {
        totals.most_operations = operations;
        totals.most_operations_rank = rank;
        totals.most_operations_round = round;
      }
      // Each message stands in two programs; it counts at its sender.
      if (message->kind() != fb::MessageKind::kSend) continue;
      const uint64_t bytes = payloads.Bytes(rank, position);
      const uint32_t peer = PeerOf(body, rank, *message);
      AddUpTo(bytes, totals.route_bytes[static_cast<size_t>(
                         RouteBetween(body, rank, peer))]);
      if (!repeats) AddUpTo(bytes, totals.sent_bytes[rank]);
      AddUpTo(bytes, totals.received_bytes[peer]);
      totals.messages += 1;
      if (rank >= body.source_ranks()) AddUpTo(bytes, totals.relayed_bytes);
      if (direct) {
        AddUpTo(bytes, totals.direct_bytes);
        continue;
      }
      totals.largest_message_bytes =
          std::max(totals.largest_message_bytes, message->size_bytes());
    }
  }
  return totals;
}

// Of the ranks [begin, end).
Balance BalanceOf(absl::Span<const uint64_t> bytes, uint32_t begin,
                  uint32_t end) {
  Balance balance = {.busiest = begin};
  uint64_t sum = 0;
  for (uint32_t rank = begin; rank < end; ++rank) {
    AddUpTo(bytes[rank], sum);
    if (bytes[rank] <= balance.max_bytes) continue;
    balance.max_bytes = bytes[rank];
    balance.busiest = rank;
  }
  if (end > begin) {
    balance.mean_bytes = static_cast<double>(sum) / (end - begin);
  }
  return balance;
}

// None in a program without windows.
Waves WavesOf(const fb::Body& body, const fb::RankProgram& program) {
  if (Length(program.scratch_windows()) == 0) return {};
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> bytes;  // by rounds
  for (const ScratchRange& range : ScratchRanges(body, program)) {
    bytes[{range.begin, range.end}] += range.end_byte - range.begin_byte;
  }
  Waves waves = {.count = bytes.size()};
  for (const auto& [rounds, of_wave] : bytes) {
    waves.largest_bytes = std::max(waves.largest_bytes, of_wave);
  }
  return waves;
}

void AddMemory(const PlanFile& plan, PlanStats& stats) {
  for (uint32_t rank = 0; rank < plan.body().programs()->size(); ++rank) {
    const fb::RankProgram& program = *plan.body().programs()->Get(rank);
    if (plan.body().delta() != nullptr &&
        plan.body().delta()->changes() == fb::DeltaChanges::kSnapshot) {
      const uint64_t bytes = SnapshotBytes(plan, static_cast<int32_t>(rank));
      if (bytes > stats.snapshot_bytes) {
        stats.snapshot_bytes = bytes;
        stats.snapshot_rank = rank;
      }
    }
    if (program.staging_bytes() > stats.largest_staging_bytes) {
      stats.largest_staging_bytes = program.staging_bytes();
      stats.largest_staging_rank = rank;
    }
    const auto number = static_cast<int32_t>(rank);
    ScratchUse& scratch = stats.scratch[static_cast<size_t>(plan.side(number))];
    const uint64_t bytes = ScratchBytes(plan, number);
    if (bytes <= scratch.bytes) continue;
    scratch = {
        .rank = rank, .bytes = bytes, .waves = WavesOf(plan.body(), program)};
  }
}

void AddTables(const fb::Body& body, PlanStats& stats) {
  stats.skips = Length(body.skips());
  for (const fb::Param* param : *body.params()) {
    const uint64_t count = StackTensors(*param);
    stats.params += count;
    if (param->skip() != fb::SkipReason::kUnspecified) stats.skips += count;
  }
  const std::vector<std::vector<int32_t>> holders = HoldersByBuffer(body);
  for (uint32_t id = 0; id < body.buffers()->size(); ++id) {
    const fb::Buffer& buffer = *body.buffers()->Get(id);
    const uint64_t tensors = StackTensors(buffer) * holders[id].size();
    stats.fragments += Length(buffer.fragments());
    for (uint32_t i = 0; i < Length(buffer.post_hooks()); ++i) {
      stats.post_hooks[buffer.post_hooks()->Get(i)->name()->str()] += tensors;
    }
  }
  for (const fb::RankProgram* program : *body.programs()) {
    for (const uint32_t buffer : *program->buffers()) {
      stats.tensors += StackTensors(*body.buffers()->Get(buffer));
    }
  }
}

}  // namespace

PlanStats StatsOf(const PlanFile& plan) {
  const auto source_ranks = static_cast<uint32_t>(plan.source_ranks());
  const auto world_size = static_cast<uint32_t>(plan.world_size());
  PlanStats stats;
  std::set<uint32_t> hosts;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    hosts.insert(program->host());
  }
  stats.hosts = hosts.size();
  stats.totals = TotalsOf(plan);
  stats.dealt = DealtOf(plan);
  stats.sent = BalanceOf(stats.totals.sent_bytes, 0, source_ranks);
  stats.received =
      BalanceOf(stats.totals.received_bytes, source_ranks, world_size);
  AddMemory(plan, stats);
  AddTables(plan.body(), stats);
  const std::vector<uint32_t> peers = NetworkPeers(plan.body());
  if (const auto most = std::max_element(peers.begin(), peers.end());
      most != peers.end()) {
    stats.most_network_peers = *most;
    stats.most_network_peers_rank = static_cast<uint32_t>(most - peers.begin());
  }
  return stats;
}

}  // namespace refit
