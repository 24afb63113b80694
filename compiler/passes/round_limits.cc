#include "compiler/passes/round_limits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "plan/plan_file.h"

namespace refit {
namespace {

// If more than this part of what is received is relayed, a round has as many
// messages as are in flight along a chain; else relays go beside the rest.
constexpr double kManyRelays = 0.5;

int64_t MostOf(const std::vector<int64_t>& numbers) {
  return *std::max_element(numbers.begin(), numbers.end());
}

}  // namespace

RoundTotals TotalsOf(Module& module, absl::Span<Message* const> messages) {
  RoundTotals totals(static_cast<size_t>(module.world_size()));
  totals.on_nvlink = module.JoinsHosts();
  for (Message* message : messages) {
    const size_t source = IndexOf(message->source);
    const int64_t bytes = message->size_bytes;
    const bool relays = FedBy(module, *message) != nullptr;
    totals.most_bytes = std::max(totals.most_bytes, AlignStaging(bytes));
    totals.bytes += static_cast<double>(bytes);
    totals.routes |= message->is_routed;
    totals.between_hosts |=
        message->is_routed && (relays || message->is_broadcast());
    totals.on_nvlink = totals.on_nvlink &&
                       module.LinkBetween(message->source,
                                          message->destination) == Route::kPeer;
    if (relays) {
      totals.relayed_bytes += static_cast<double>(bytes);
      totals.most_relayed_bytes =
          std::max(totals.most_relayed_bytes, AlignStaging(bytes));
    }
    if (!IsBesideNetwork(*message)) totals.sent[source] += bytes;
    // What goes on along a tree lies where it came.
    if (!relays || !message->is_routed) totals.staged[source] += bytes;
    ++totals.own_operations[source];
    ++totals.operations[source];
    ForEachSentWith(module, *message, [&](const Message& received) {
      const size_t destination = IndexOf(received.destination);
      (IsBesideNetwork(received) ? totals.entering
                                 : totals.received)[destination] += bytes;
      totals.staged[destination] += bytes;
      ++totals.own_operations[destination];
      ++totals.operations[destination];
      for (const Message& held : DealtBy(module, received)) {
        totals.dealt_bytes += static_cast<double>(bytes);
        totals.dealt_messages += 1;
        totals.staged[IndexOf(held.destination)] += bytes;
        ++totals.operations[IndexOf(held.source)];
        ++totals.operations[IndexOf(held.destination)];
      }
    });
  }
  return totals;
}

// By rank: of its staging and operations, those for what it receives itself.
static std::vector<RankRoom> RoomOfDealt(const RoundTotals& totals,
                                         int32_t operations_per_round,
                                         double part_of_staging) {
  std::vector<RankRoom> rooms;
  for (size_t rank = 0; rank < totals.sent.size(); ++rank) {
    const auto bytes = static_cast<int64_t>(
        part_of_staging * static_cast<double>(totals.received[rank]));
    rooms.push_back(
        {.staging_bytes = bytes / totals.most_bytes * totals.most_bytes,
         .operations = static_cast<int32_t>(
             operations_per_round * totals.own_operations[rank] /
             std::max<int64_t>(totals.operations[rank], 1))});
  }
  return rooms;
}

RoundLimits::RoundLimits(const Module& module, const RoundTotals& totals,
                         bool ends, Route route, RoundLoads& loads)
    : module_(module), most_bytes_(totals.most_bytes) {
  const Limits& limits = module.limits;
  const int64_t most = std::max(MostOf(totals.sent), MostOf(totals.received));
  // Each round has as large a part of what a rank sends and receives as of what
  // it stages in all.
  const double part_of_staging =
      static_cast<double>(loads.staging_bytes_max()) /
      static_cast<double>(std::max<int64_t>(MostOf(totals.staged), 1));
  const auto room =
      static_cast<int64_t>(part_of_staging * static_cast<double>(most));
  loads.LimitEntering(std::numeric_limits<int64_t>::max());
  loads.LimitSends(1);
  loads.Reserve({});
  if (totals.dealt_bytes > 0) {
    loads.Reserve(
        RoomOfDealt(totals, limits.operations_per_round, part_of_staging));
  }
  if (totals.between_hosts) {
    direction_bytes_ = WholeMessages(most_bytes_);
    const double entering =
        static_cast<double>(MostOf(totals.entering)) /
        static_cast<double>(std::max<int64_t>(MostOf(totals.received), 1));
    loads.LimitEntering(direction_bytes_ *
                        std::max<int64_t>(std::llround(entering), 1));
  } else if (totals.relayed_bytes > totals.bytes * kManyRelays) {
    direction_bytes_ =
        std::max(most_bytes_, totals.most_relayed_bytes *
                                  StagedRoundOf(route).relayed_messages);
  } else if (totals.dealt_bytes > 0) {
    const auto operations =
        static_cast<int64_t>(limits.operations_per_round /
                             (1 + 2 * totals.dealt_bytes / totals.bytes));
    const int64_t count =
        std::max<int64_t>(std::min(room / most_bytes_, operations), 1);
    direction_bytes_ = std::max(
        most_bytes_, std::min(room, WholeMessages(count * most_bytes_)));
    // A source feeds all in each round, for they pass on as much meanwhile.
    if (totals.on_nvlink) {
      direction_bytes_ = WholeMessages(most_bytes_);
      loads.LimitSends(most / std::max<int64_t>(MostOf(totals.received), 1) +
                       1);
    }
  } else if (totals.routes || totals.relayed_bytes > 0) {
    direction_bytes_ = std::max(room, most_bytes_);
  }
  const double part_of_operations =
      static_cast<double>(limits.operations_per_round) /
      static_cast<double>(MostOf(totals.operations));
  if (!totals.between_hosts && totals.dealt_bytes == 0 &&
      part_of_operations < std::min(part_of_staging, 1.0)) {
    direction_bytes_ = std::min(
        direction_bytes_, WholeMessages(static_cast<int64_t>(
                              part_of_operations * static_cast<double>(most))));
  }
  small_direction_bytes_ = totals.between_hosts
                               ? direction_bytes_
                               : std::max(room, direction_bytes_);
  if (limits.shape.sizes == RoundShape::Sizes::kEven && totals.routes &&
      !totals.between_hosts && most > room) {
    const auto with_slack =
        static_cast<int64_t>(static_cast<double>(most) * kSlackOfRounds);
    direction_bytes_ = std::min(
        direction_bytes_, WholeMessages(with_slack / (with_slack / room + 1)));
  }
  if (ends && !totals.between_hosts && !totals.on_nvlink) {
    const Topology& topology = module_.topology;
    dealt_part_ = topology.network_bytes_per_second *
                  (totals.dealt_bytes / topology.peer_bytes_per_second +
                   totals.dealt_messages * kDealtMessageSeconds) /
                  std::max(totals.bytes, 1.0);
  }
}

int64_t RoundLimits::OfRound(
    const std::array<std::vector<int64_t>, 2>& left_of_ranks) const {
  if (dealt_part_ == 0) return direction_bytes_;
  const auto left = static_cast<double>(std::max(
      MostOf(left_of_ranks[kSends]), MostOf(left_of_ranks[kReceives])));
  const double start =
      kStagedRoundSeconds * module_.topology.network_bytes_per_second;
  const double bytes = (left + start) / (1 + dealt_part_);
  if (bytes * dealt_part_ <= start) return direction_bytes_;
  return std::min(direction_bytes_, WholeMessages(static_cast<int64_t>(bytes)));
}

}  // namespace refit
