#include "compiler/passes/message_sizes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "plan/plan_file.h"

namespace refit {
namespace {

// More chunks than these save less than their fences cost.
constexpr int64_t kChunksMax = 32;
// Messages of a rank, each way, in a full round between hosts. With more, their
// starts take longer than what is gained by rounds that are filled more alike.
constexpr double kMessagesOfRound = 8;

// As small as a job may ask for buckets to be.
constexpr int64_t kRelayedBytesMin = 4096;

// Sizes of messages that are tried: the largest, and down to half of it in as
// many steps as half of these. A smaller one must be better by more than this.
constexpr int64_t kPartsTried = 16;
constexpr double kFinerGain = 0.995;

// Messages between hosts: one of this size takes more than a millisecond, so
// its start costs little, and several fill a round that none of twice the size
// would. A job of more of them than the second figure has larger ones.
constexpr int64_t kNetworkBucketBytes = int64_t{64} << 20;
constexpr int64_t kNetworkMessagesMax = int64_t{1} << 18;

// How many bytes a rank receives over the network in a round, if it deals out
// `dealt` times as many to others, and is dealt as many. Where hosts pass on to
// hosts, it sends as many at the same time.
int64_t RoomOf(const Module& module, const NetworkLoad& load, double dealt) {
  const double held = (load.between_hosts ? 2 : 1) + dealt;
  return static_cast<int64_t>(static_cast<double>(module.limits.staging_bytes /
                                                  StagingTurns(module)) /
                              held) /
         kStagingAlignmentBytes * kStagingAlignmentBytes;
}

}  // namespace

bool StaysInside(const Module& module, absl::Span<const Relay> relays,
                 const Relay& relay) {
  if (module.RouteBetween(relay.sender, relay.receiver) != Route::kNetwork) {
    return true;
  }
  return module.LinkBetween(relay.sender, relay.receiver) != Route::kNetwork &&
         std::none_of(relays.begin(), relays.end(), [&](const Relay& other) {
           return other.sender == relay.receiver;
         });
}

int64_t EvenBytes(int64_t total, int64_t count, int64_t waste_divisor) {
  const int64_t even = std::max<int64_t>(total / count, 1);
  return AlignStaging(even + even / waste_divisor * 2);
}

MessageSizes::MessageSizes(const Module& module) : module_(module) {
  for (const Piece& piece : module.pieces) {
    staged_bytes_.push_back(AlignStaging(module.WireBytes(piece)));
  }
}

NetworkLoad MessageSizes::LoadOf(const std::vector<Stream>& streams) const {
  NetworkLoad load;
  const auto world = static_cast<size_t>(module_.world_size());
  std::vector<int64_t> sent(world, 0), received(world, 0);
  std::vector<int64_t> steps(world, 0), passed_on(world, 0);
  std::vector<size_t> others(world, 0);
  double inside = 0;
  double entered = 0;
  bool leaves_domains = false;
  for (const Stream& stream : streams) {
    const int64_t bytes = BytesOf(stream.pieces);
    const auto send = [&](Rank source) {
      load.busiest = std::max(load.busiest, sent[IndexOf(source)] += bytes);
    };
    const auto receive = [&](Rank receiver) {
      entered += static_cast<double>(bytes);
      load.busiest =
          std::max(load.busiest, received[IndexOf(receiver)] += bytes);
    };
    if (stream.route == Route::kNetwork) {
      send(stream.source);
      receive(stream.receiver);
      for (const Rank other : stream.others) receive(other);
    }
    if (!stream.is_routed) continue;
    load.routes = true;
    load.broadcasts |= stream.broadcasts;
    leaves_domains |=
        module_.LinkBetween(stream.source, stream.receiver) == Route::kNetwork;
    load.largest = std::max(load.largest, bytes);
    steps[IndexOf(stream.receiver)] = 0;
    for (const Rank other : stream.others) steps[IndexOf(other)] = 0;
    for (const Relay& relay : stream.relays) {
      others[IndexOf(relay.sender)] = 0;
      passed_on[IndexOf(relay.sender)] = 0;
    }
    for (const Relay& relay : stream.relays) {
      if (StaysInside(module_, stream.relays, relay)) {
        load.others = std::max(load.others, ++others[IndexOf(relay.sender)]);
        inside += static_cast<double>(bytes);
        continue;
      }
      load.between_hosts = true;
      receive(relay.receiver);
      int64_t& turns = passed_on[IndexOf(relay.sender)];
      if (turns == 0 || !stream.broadcasts) {
        send(relay.sender);
        ++turns;
      }
      steps[IndexOf(relay.receiver)] = steps[IndexOf(relay.sender)] + turns;
      load.steps = std::max(load.steps, steps[IndexOf(relay.receiver)]);
    }
  }
  if (entered > 0) load.dealt = inside / entered;
  load.on_nvlink = module_.JoinsHosts() && load.routes && !load.between_hosts &&
                   !leaves_domains;
  return load;
}

int64_t MessageSizes::BytesOf(const std::vector<PieceId>& pieces) const {
  int64_t total = 0;
  for (PieceId id : pieces) total += staged_bytes_[IndexOf(id)];
  return total;
}

int64_t MessageSizes::CountChunks(const std::vector<Stream>& streams,
                                  int64_t& busiest_bytes) const {
  const size_t world = static_cast<size_t>(module_.world_size());
  std::vector<int64_t> sent(world, 0);
  std::vector<int64_t> received(world, 0);
  bool relays = false;
  for (const Stream& stream : streams) {
    if (stream.route != Route::kPeer) continue;
    const int64_t bytes = BytesOf(stream.pieces);
    relays |= !stream.relays.empty();
    sent[IndexOf(stream.source)] += bytes;
    received[IndexOf(stream.receiver)] += bytes;
    for (const Relay& relay : stream.relays) {
      sent[IndexOf(relay.sender)] += bytes;
      received[IndexOf(relay.receiver)] += bytes;
    }
  }
  busiest_bytes = std::max(*std::max_element(sent.begin(), sent.end()),
                           *std::max_element(received.begin(), received.end()));
  if (!relays) return 1;
  const double seconds = static_cast<double>(busiest_bytes) /
                         module_.topology.peer_bytes_per_second;
  return std::clamp<int64_t>(
      std::llround(std::sqrt(seconds / kDirectRoundSeconds)), 1, kChunksMax);
}

bool MessageSizes::IsRelayedInStages(const Stream& stream) const {
  return std::any_of(
      stream.relays.begin(), stream.relays.end(),
      [&](const Relay& relay) { return module_.IsStaged(relay); });
}

int64_t MessageSizes::RelayedBucketBytes(const std::vector<Stream>& streams,
                                         Route route,
                                         const Limits& limits) const {
  const size_t world = static_cast<size_t>(module_.world_size());
  std::vector<int64_t> received(world, 0);
  int64_t turns = 1;
  for (const Stream& stream : streams) {
    if (stream.route != route || !IsRelayedInStages(stream)) continue;
    const int64_t bytes = BytesOf(stream.pieces);
    received[IndexOf(stream.receiver)] += bytes;
    int64_t of_receiver = 1;
    for (const Relay& relay : stream.relays) {
      if (module_.RouteBetween(relay.sender, relay.receiver) != route) continue;
      received[IndexOf(relay.receiver)] += bytes;
      if (relay.sender == stream.receiver) ++of_receiver;
    }
    turns = std::max(turns, of_receiver);
  }
  const int64_t busiest = *std::max_element(received.begin(), received.end());
  const double seconds =
      static_cast<double>(busiest) / module_.topology.BytesPerSecond(route);
  const StagedRound round = StagedRoundOf(route);
  const int64_t per_round = round.relayed_messages;
  const int64_t rounds = std::llround(std::sqrt(
      static_cast<double>(turns) * seconds / round.StartSeconds(per_round)));
  // A rank's staging of a round holds what it sends and what it receives.
  const int64_t each_way = limits.staging_bytes / StagingTurns(module_) / 2;
  const int64_t most = std::min(
      limits.bucket_bytes,
      each_way / per_round / kStagingAlignmentBytes * kStagingAlignmentBytes);
  return std::clamp(busiest / std::max<int64_t>(rounds, 1) / per_round,
                    std::min(kRelayedBytesMin, limits.bucket_bytes),
                    std::max(kRelayedBytesMin, most));
}

bool MessageSizes::Holds(const NetworkLoad& load) const {
  // A rank that relays packs into staging that what it deals out would need.
  if (!load.routes || module_.stats.levels_sources) return false;
  // A rank sends and receives a message, deals it out, and is dealt as many. A
  // message takes as long as its start, at least.
  return 2 + 2 * static_cast<int64_t>(load.others) <=
             module_.limits.operations_per_round &&
         static_cast<double>(std::min(module_.limits.bucket_bytes,
                                      RoomOf(module_, load, load.dealt))) >=
             module_.topology.network_bytes_per_second * kStagedRoundSeconds;
}

int64_t MessageSizes::RoutedBucketBytes(const std::vector<Stream>& streams,
                                        const NetworkLoad& load,
                                        bool holds) const {
  if (load.between_hosts || load.broadcasts || load.on_nvlink) {
    return TreeBucketBytes(load, holds);
  }
  const Limits& limits = module_.limits;
  const Topology& topology = module_.topology;
  const double dealt = holds ? load.dealt : 0;
  int64_t room = RoomOf(module_, load, dealt);
  // As many in a round as start beside the network, on NVLink, where each
  // starts alone.
  const auto bytes = static_cast<double>(room);
  const double beside = bytes / topology.network_bytes_per_second +
                        kStagedRoundSeconds -
                        dealt * bytes / topology.peer_bytes_per_second;
  const double starts = std::min(
      dealt > 0 ? beside / (dealt * kDealtMessageSeconds) : kMessagesOfRound,
      limits.operations_per_round / (1 + 2 * dealt));
  const auto count =
      static_cast<int64_t>(std::clamp(starts, 1.0, kMessagesOfRound));
  if (limits.shape.sizes == RoundShape::Sizes::kEven) {
    const auto busiest = static_cast<int64_t>(
        static_cast<double>(load.busiest) * kSlackOfRounds);
    room = std::min(room, busiest / (busiest / room + 1) + 1);
  }
  if (count == 1) {
    // Those of a stream are alike.
    const int64_t most = std::min(room, limits.bucket_bytes);
    return std::min(most,
                    EvenBytes(load.largest, (load.largest + most - 1) / most,
                              kAlikeDivisor));
  }
  const int64_t most = std::min(room / count, limits.bucket_bytes);
  const int64_t bytes_of_message =
      limits.shape.sizes == RoundShape::Sizes::kFitted
          ? FittedBytes(streams, most, room, starts, dealt)
          : most;
  return std::max(
      bytes_of_message / kStagingAlignmentBytes * kStagingAlignmentBytes,
      std::min(kRelayedBytesMin, limits.bucket_bytes));
}

int64_t MessageSizes::FittedBytes(const std::vector<Stream>& streams,
                                  int64_t most, int64_t room, double starts,
                                  double dealt) const {
  const Topology& topology = module_.topology;
  int64_t best = most;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t part = kPartsTried; part >= kPartsTried / 2; --part) {
    const int64_t size = std::max<int64_t>(most * part / kPartsTried, 1);
    const auto turns = static_cast<double>(CountTurns(streams, size));
    const double together = std::clamp(
        std::floor(static_cast<double>(room) / static_cast<double>(size)), 1.0,
        std::max(1.0, std::floor(starts)));
    const double of_round = together * static_cast<double>(size);
    const double seconds =
        turns / together *
        std::max(
            of_round / topology.network_bytes_per_second + kStagedRoundSeconds,
            dealt * (of_round / topology.peer_bytes_per_second +
                     together * kDealtMessageSeconds));
    if (seconds >= least * kFinerGain) continue;
    least = seconds;
    best = size;
  }
  return best;
}

int64_t MessageSizes::CountTurns(const std::vector<Stream>& streams,
                                 int64_t bucket_bytes) const {
  const auto world = static_cast<size_t>(module_.world_size());
  std::vector<int64_t> sent(world, 0), received(world, 0);
  int64_t most = 0;
  for (const Stream& stream : streams) {
    if (stream.route != Route::kNetwork) continue;
    const int64_t count =
        (BytesOf(stream.pieces) + bucket_bytes - 1) / bucket_bytes;
    most = std::max({most, sent[IndexOf(stream.source)] += count,
                     received[IndexOf(stream.receiver)] += count});
    for (const Rank other : stream.others) {
      most = std::max(most, received[IndexOf(other)] += count);
    }
  }
  return most;
}

int64_t MessageSizes::TreeBucketBytes(const NetworkLoad& load,
                                      bool holds) const {
  const Topology& topology = module_.topology;
  const double others = holds ? load.dealt : 0;
  const double bytes_per_second = load.on_nvlink
                                      ? topology.peer_bytes_per_second
                                      : topology.network_bytes_per_second;
  const int64_t most =
      std::min(module_.limits.bucket_bytes, RoomOf(module_, load, others));
  // A rank passes a message on one round after it came, to one rank after the
  // other, and deals it out at last: n messages take n times their start, and
  // larger ones leave more for the end, when sources are idle.
  const auto last = static_cast<double>(load.steps + 1);
  double least = std::numeric_limits<double>::infinity();
  int64_t best = most;
  for (int64_t count = (load.largest + most - 1) / most;;
       count += std::max<int64_t>(count / 8, 1)) {
    const int64_t bytes = load.largest / count;
    const double network =
        static_cast<double>(bytes) / bytes_per_second + kStagedRoundSeconds;
    const double dealt =
        others * (static_cast<double>(bytes) / topology.peer_bytes_per_second +
                  kDealtMessageSeconds);
    const double rounds =
        static_cast<double>(load.busiest) / static_cast<double>(bytes + 1);
    const double seconds = (rounds + last) * std::max(network, dealt);
    if (seconds < least) {
      least = seconds;
      best = std::min(most, EvenBytes(load.largest, count, kAlikeDivisor));
    }
    if (bytes <= kFlowMessageBytesMin || seconds > 2 * least) break;
  }
  return best;
}

int64_t MessageSizes::NetworkBucketBytes(
    const std::vector<WaveStreams>& waves) const {
  const Limits& limits = module_.limits;
  int64_t bytes = limits.bucket_bytes;
  if (!limits.fills_buckets) bytes = std::min(bytes, kNetworkBucketBytes);
  for (; bytes < limits.bucket_bytes; bytes *= 2) {
    if (CountStaged(waves, limits, bytes) <= kNetworkMessagesMax) break;
  }
  return std::min(bytes, limits.bucket_bytes);
}

int64_t MessageSizes::CountStaged(const std::vector<WaveStreams>& waves,
                                  const Limits& limits,
                                  int64_t network_bytes) const {
  int64_t messages = 0;
  for (const WaveStreams& streams : waves) {
    messages += CountStaged(streams[static_cast<size_t>(Mechanism::kStaged)],
                            limits, network_bytes);
  }
  return messages;
}

int64_t MessageSizes::CountStaged(const std::vector<Stream>& streams,
                                  const Limits& limits,
                                  int64_t network_bucket_bytes) const {
  const int64_t peer_bytes = RelayedBucketBytes(streams, Route::kPeer, limits);
  const int64_t relayed_bytes =
      RelayedBucketBytes(streams, Route::kNetwork, limits);
  int64_t messages = 0;
  int64_t pair_bytes = 0;  // of what is not relayed in stages
  for (size_t i = 0; i < streams.size(); ++i) {
    const Stream& stream = streams[i];
    const int64_t bytes = BytesOf(stream.pieces);
    if (IsRelayedInStages(stream)) {
      const int64_t bucket =
          stream.route == Route::kPeer ? peer_bytes : relayed_bytes;
      const int64_t staged = std::count_if(
          stream.relays.begin(), stream.relays.end(),
          [&](const Relay& relay) { return module_.IsStaged(relay); });
      messages += (bytes + bucket - 1) / bucket * (1 + staged);
    } else {
      pair_bytes += bytes;
    }
    const bool ends_pair = i + 1 == streams.size() ||
                           streams[i + 1].source != stream.source ||
                           streams[i + 1].receiver != stream.receiver;
    if (!ends_pair) continue;
    const int64_t most = stream.route == Route::kNetwork ? network_bucket_bytes
                                                         : limits.bucket_bytes;
    messages += (pair_bytes + most - 1) / most;
    pair_bytes = 0;
  }
  return messages;
}

}  // namespace refit
