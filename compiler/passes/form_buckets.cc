#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/container/node_hash_map.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/passes/packer.h"
#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

constexpr int64_t kWasteDivisor = Packer::kWasteDivisor;
// Messages that ranks pass on waste less, so that all of a round are of one
// size: it takes as long as its largest. Not where a pair
// has more than so many: then the last of them may be small.
constexpr int64_t kAlikeDivisor = 256;
constexpr int64_t kAlikeMost = 8;
// Sizes of messages that are tried: the largest, and down to half of it in as
// many steps as half of these. A smaller one must be better by more than this.
constexpr int64_t kPartsTried = 16;
constexpr double kFinerGain = 0.995;

// The buckets of one list of pieces, which many pairs share.
struct PackedPieces {
  std::vector<int32_t> contents;  // into Module::contents
  std::vector<int64_t> size_bytes;
};

// Pieces, and the size of buckets. A view finds what its key names, without a
// copy of the pieces.
using PackKey = std::pair<int64_t, std::vector<PieceId>>;
using PackKeyView = std::pair<int64_t, absl::Span<const PieceId>>;
struct PackKeyHash {
  using is_transparent = void;
  size_t operator()(const PackKeyView& key) const {
    return absl::Hash<PackKeyView>()(key);
  }
};
struct PackKeyEqual {
  using is_transparent = void;
  bool operator()(const PackKeyView& a, const PackKeyView& b) const {
    return a == b;
  }
};

// What is stored directly fills no bucket.
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 2;

// The size to fill buckets to: messages of one size keep the ranks of a round
// equally busy, so that a pair's bytes are cut evenly rather than into full
// buckets and a remainder. The slack is what closing buckets early may waste.
int64_t EvenBytes(int64_t total, int64_t count,
                  int64_t waste_divisor = kWasteDivisor) {
  const int64_t even = std::max<int64_t>(total / count, 1);
  return AlignStaging(even + even / waste_divisor * 2);
}

// More chunks than these save less than their fences cost.
constexpr int64_t kChunksMax = 32;
// A stream of less than this part of what the busiest rank moves is not cut.
constexpr int64_t kUncutPart = 256;

// Messages of a rank, each way, in a full round between hosts. With more, their
// starts take longer than what is gained by rounds that are filled more alike.
constexpr double kMessagesOfRound = 8;

// As small as a job may ask for buckets to be.
constexpr int64_t kRelayedBytesMin = 4096;

// Buckets that would cut a job into more messages than these are refused. A
// message takes about 500 bytes here and 80 in the plan: a gigabyte, and a plan
// of 200 MB that takes a minute to compile, for what larger buckets move
// faster.
constexpr int64_t kMessagesMax = int64_t{1} << 21;
// A job of many pairs of ranks may have so many messages for each all the same.
constexpr int64_t kMessagesOfPairMax = 4;

// Messages between hosts: one of this size takes more than a millisecond, so
// its start costs little, and several fill a round that none of twice the size
// would. A job of more of them than the second figure has larger ones.
constexpr int64_t kNetworkBucketBytes = int64_t{64} << 20;
constexpr int64_t kNetworkMessagesMax = int64_t{1} << 18;

// What a link of this speed moves while a round starts. Smaller messages would
// gain nothing, and those of a wave that nobody passes on have the same size.
int64_t WorthItsStart(double bytes_per_second) {
  return std::max<int64_t>(
      static_cast<int64_t>(bytes_per_second * kStagedRoundSeconds) /
          kStagingAlignmentBytes * kStagingAlignmentBytes,
      kStagingAlignmentBytes);
}

// Pieces that a source gives one receiver, and that `relays` pass on.
struct Stream {
  Rank source{};
  Rank receiver{};
  Route route = Route::kUnspecified;
  absl::Span<const Relay> relays;  // those of its pieces
  absl::Span<const Rank> others;   // to whom it is broadcast with the receiver
  bool is_routed = false;          // so are its pieces
  bool broadcasts = false;         // so do its pieces
  bool receiver_keeps = true;      // what is routed
  std::vector<PieceId> pieces;
};

// The streams of a wave by mechanism; in order of source, receiver, relays.
using WaveStreams = std::array<std::vector<Stream>, 2>;

// What goes between hosts in a wave.
struct NetworkLoad {
  int64_t busiest = 0;         // sent or received by a rank
  bool routes = false;         // any stream is routed
  bool between_hosts = false;  // some hosts pass on to others
  bool broadcasts = false;     // any stream does
  bool on_nvlink = false;      // all that is routed comes from its own domain
  int64_t largest = 0;         // of a routed stream
  size_t others = 0;  // to whom a rank passes on inside its host, at most
  int64_t steps = 0;  // rounds of the longest way from a root
  // To how many a rank passes on inside its host what it receives, in the mean
  // of all streams.
  double dealt = 0;
};

// Whether NVLink takes what goes along `relays` to other hosts. Then also what
// begins inside a host is one of the messages between them.
bool SpanHosts(const Module& module, absl::Span<const Relay> relays) {
  return std::any_of(relays.begin(), relays.end(), [&](const Relay& relay) {
    return module.RouteBetween(relay.sender, relay.receiver) !=
           module.LinkBetween(relay.sender, relay.receiver);
  });
}

// Whether one of `relays` stays inside a site. To another host of a domain it
// does if nobody passes it on from there: else it is an edge of a tree.
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

NetworkLoad LoadOf(const Module& module,
                   const std::vector<int64_t>& staged_bytes,
                   const std::vector<Stream>& streams) {
  NetworkLoad load;
  const auto world = static_cast<size_t>(module.world_size());
  std::vector<int64_t> sent(world, 0), received(world, 0);
  std::vector<int64_t> steps(world, 0), passed_on(world, 0);
  std::vector<size_t> others(world, 0);
  double inside = 0;
  double entered = 0;
  bool leaves_domains = false;
  for (const Stream& stream : streams) {
    int64_t bytes = 0;
    for (const PieceId id : stream.pieces) bytes += staged_bytes[IndexOf(id)];
    const auto send = [&](Rank source) {
      load.busiest = std::max(load.busiest, sent[IndexOf(source)] += bytes);
    };
    const auto receive = [&](Rank receiver) {
      entered += static_cast<double>(bytes);
      load.busiest =
          std::max(load.busiest, received[IndexOf(receiver)] += bytes);
    };
    if (stream.route == Route::kNetwork ||
        (stream.is_routed && SpanHosts(module, stream.relays))) {
      send(stream.source);
      receive(stream.receiver);
      for (const Rank other : stream.others) receive(other);
    }
    if (!stream.is_routed) continue;
    load.routes = true;
    load.broadcasts |= stream.broadcasts;
    leaves_domains |=
        module.LinkBetween(stream.source, stream.receiver) == Route::kNetwork;
    load.largest = std::max(load.largest, bytes);
    steps[IndexOf(stream.receiver)] = 0;
    for (const Rank other : stream.others) steps[IndexOf(other)] = 0;
    for (const Relay& relay : stream.relays) {
      others[IndexOf(relay.sender)] = 0;
      passed_on[IndexOf(relay.sender)] = 0;
    }
    for (const Relay& relay : stream.relays) {
      if (StaysInside(module, stream.relays, relay)) {
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
  load.on_nvlink = module.JoinsHosts() && load.routes && !load.between_hosts &&
                   !leaves_domains;
  return load;
}

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

class MessageBuilder {
 public:
  MessageBuilder(const PassOptions& options, Module& module)
      : options_(options), module_(module) {
    feeds_.resize(static_cast<size_t>(module.world_size()));
    for (const Piece& piece : module.pieces) {
      staged_bytes_.push_back(AlignStaging(module.WireBytes(piece)));
    }
  }

  // Forms nothing after an error.
  void Build();

 private:
  int64_t BytesOf(const std::vector<PieceId>& pieces) const;
  // How many chunks the streams inside hosts are cut into, if any is relayed:
  // with n chunks the first round, in which nothing is relayed yet, takes 1/n
  // of the time of all bytes, and each round costs its fences. `busiest_bytes`:
  // of the rank that sends or receives most of them.
  int64_t CountChunks(const std::vector<Stream>& streams,
                      int64_t& busiest_bytes) const;
  std::vector<Bucket> Fill(const std::vector<PieceId>& pieces,
                           int64_t bucket_bytes, int64_t waste_divisor) const;
  template <typename FillBuckets>
  const PackedPieces& PackBy(const std::vector<PieceId>& pieces,
                             int64_t bucket_bytes, const FillBuckets& fill);
  const PackedPieces& Pack(const std::vector<PieceId>& pieces,
                           int64_t bucket_bytes);
  void Send(Rank source, Rank destination, const PackedPieces& packed,
            const Message& like);
  // The same for a relay of what `feeds_` brings its sender.
  void SendOn(const Relay& relay, const PackedPieces& packed, Message like);
  // Whether staged rounds pass on what the stream brings: their messages have
  // the contents of its own.
  bool IsRelayedInStages(const Stream& stream) const;
  // The bytes of a bucket of streams by `route` that are relayed in stages. A
  // stream that a receiver passes on to n others ends n rounds after it began,
  // so that short rounds make short ends, and many of them cost time.
  int64_t RelayedBucketBytes(const std::vector<Stream>& streams, Route route,
                             const Limits& limits) const;
  // How many messages BuildStaged makes of `streams` under `limits`, those
  // between hosts of at most `network_bytes`.
  int64_t CountStaged(const std::vector<Stream>& streams, const Limits& limits,
                      int64_t network_bytes) const;
  // The bytes of a bucket between hosts that nobody passes on in stages.
  int64_t NetworkBucketBytes(const std::vector<WaveStreams>& waves) const;
  // Reports buckets so small that there are too many messages, before they are
  // made.
  void CheckCount(const std::vector<WaveStreams>& waves) const;
  void BuildDirect(int32_t wave, const std::vector<Stream>& streams);
  void BuildStaged(int32_t wave, const std::vector<Stream>& streams);
  // Whether ranks pass on what is routed from staging.
  bool Holds(const NetworkLoad& load) const;
  // The bytes of a message between hosts, where anything is routed.
  int64_t RoutedBucketBytes(const std::vector<Stream>& streams,
                            const NetworkLoad& load, bool holds) const;
  // A size of at most `most` that all streams are about a multiple of: a turn
  // takes as long as its largest message. A round has `room` for a rank's, and
  // no more of them than `starts`.
  int64_t FittedBytes(const std::vector<Stream>& streams, int64_t most,
                      int64_t room, double starts, double dealt) const;
  // How many messages of this size the busiest rank sends or receives.
  int64_t CountTurns(const std::vector<Stream>& streams,
                     int64_t bucket_bytes) const;
  // The same where hosts pass on to hosts, or ranks broadcast: a rank sends one
  // in a round.
  int64_t TreeBucketBytes(const NetworkLoad& load, bool holds) const;
  // Of the last messages, those of `hosts` receivers one after the other, of
  // each `stride`: what goes to all of them is broadcast.
  void Broadcast(size_t hosts, size_t stride);
  // Messages along the tree of the stream.
  void BuildFlow(int32_t wave, const Stream& stream, int64_t bucket_bytes,
                 bool may_hold);
  // Those by which `rank` passes on, from its staging, what it was just sent.
  void SendHeld(int32_t wave, Rank rank, const Stream& stream,
                const PackedPieces& packed);
  const PackedPieces& PackEvenly(const std::vector<PieceId>& pieces,
                                 int64_t bucket_bytes);
  // Into as many messages, of sizes that differ less.
  const PackedPieces& PackAlike(const std::vector<PieceId>& pieces,
                                int64_t bucket_bytes);
  const PassOptions& options_;
  Module& module_;
  std::vector<int64_t> staged_bytes_;  // by piece
  int64_t network_bucket_bytes_ = 0;
  // By size and pieces.
  absl::node_hash_map<PackKey, PackedPieces, PackKeyHash, PackKeyEqual> packed_;
  // By rank: the messages that bring it what the stream at hand moves. Those of
  // other ranks are of earlier streams.
  std::vector<MessageRange> feeds_;
};

int64_t MessageBuilder::BytesOf(const std::vector<PieceId>& pieces) const {
  int64_t total = 0;
  for (PieceId id : pieces) total += staged_bytes_[IndexOf(id)];
  return total;
}

std::vector<Bucket> MessageBuilder::Fill(const std::vector<PieceId>& pieces,
                                         int64_t bucket_bytes,
                                         int64_t waste_divisor) const {
  Packer packer(bucket_bytes, waste_divisor, pieces.size());
  for (PieceId id : pieces) {
    const Piece& piece = module_.piece(id);
    packer.Add(id, piece.box, DTypeBytes(piece.wire_dtype));
  }
  return packer.Take();
}

template <typename FillBuckets>
const PackedPieces& MessageBuilder::PackBy(const std::vector<PieceId>& pieces,
                                           int64_t bucket_bytes,
                                           const FillBuckets& fill) {
  const auto known = packed_.find(PackKeyView(bucket_bytes, pieces));
  if (known != packed_.end()) return known->second;
  PackedPieces& packed = packed_[PackKey(bucket_bytes, pieces)];
  for (Bucket& bucket : fill()) {
    packed.contents.push_back(static_cast<int32_t>(module_.contents.size()));
    packed.size_bytes.push_back(bucket.size_bytes);
    module_.contents.push_back(std::move(bucket.contents));
  }
  return packed;
}

const PackedPieces& MessageBuilder::Pack(const std::vector<PieceId>& pieces,
                                         int64_t bucket_bytes) {
  return PackBy(pieces, bucket_bytes,
                [&] { return Fill(pieces, bucket_bytes, kWasteDivisor); });
}

// One message per bucket, in successive rounds from that of `like` on.
void MessageBuilder::Send(Rank source, Rank destination,
                          const PackedPieces& packed, const Message& like) {
  feeds_[IndexOf(destination)] = {module_.messages.size(),
                                  packed.contents.size()};
  const Route route = like.route != Route::kUnspecified
                          ? like.route
                          : module_.RouteBetween(source, destination);
  const Mechanism mechanism =
      like.is_routed && like.relayed_from == Route::kUnspecified
          ? Mechanism::kStaged
          : module_.MechanismOf(route);
  for (size_t i = 0; i < packed.contents.size(); ++i) {
    Message& message = module_.messages.emplace_back(like);
    message.source = source;
    message.destination = destination;
    message.route = route;
    message.mechanism = mechanism;
    message.contents = packed.contents[i];
    message.size_bytes = packed.size_bytes[i];
    if (message.mechanism == Mechanism::kDirect || message.is_routed) {
      message.pipeline_round += static_cast<int32_t>(i);
    }
  }
}

// A relay in the buckets that its sender received passes on one for one;
// larger ones hold all that came.
void MessageBuilder::SendOn(const Relay& relay, const PackedPieces& packed,
                            Message like) {
  const MessageRange fed_by = feeds_[IndexOf(relay.sender)];
  const size_t begin = module_.messages.size();
  Send(relay.sender, relay.receiver, packed, like);
  const bool one_for_one = packed.contents.size() == fed_by.count;
  for (size_t i = 0; i < packed.contents.size(); ++i) {
    module_.messages[begin + i].fed_by =
        one_for_one ? MessageRange{fed_by.begin + i, 1} : fed_by;
  }
}

int64_t MessageBuilder::CountChunks(const std::vector<Stream>& streams,
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

bool MessageBuilder::IsRelayedInStages(const Stream& stream) const {
  return std::any_of(
      stream.relays.begin(), stream.relays.end(),
      [&](const Relay& relay) { return module_.IsStaged(relay); });
}

int64_t MessageBuilder::RelayedBucketBytes(const std::vector<Stream>& streams,
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

void MessageBuilder::BuildDirect(int32_t wave,
                                 const std::vector<Stream>& streams) {
  int64_t busiest_bytes = 0;
  const int64_t chunks = CountChunks(streams, busiest_bytes);
  for (const Stream& stream : streams) {
    const int64_t bytes = BytesOf(stream.pieces);
    const bool cut = chunks > 1 && stream.route == Route::kPeer &&
                     bytes >= busiest_bytes / kUncutPart;
    const PackedPieces& packed =
        Pack(stream.pieces, cut ? EvenBytes(bytes, chunks) : kNoLimit);
    Send(stream.source, stream.receiver, packed, {.wave = wave, .fed_by = {}});
    for (const Relay& relay : stream.relays) {
      SendOn(relay, packed,
             {.wave = wave,
              .pipeline_round = 1,
              .fed_by = {},
              .relayed_from = Route::kPeer});
    }
  }
}

const PackedPieces& MessageBuilder::PackEvenly(
    const std::vector<PieceId>& pieces, int64_t bucket_bytes) {
  const int64_t bytes = BytesOf(pieces);
  return Pack(pieces, std::min(bucket_bytes,
                               EvenBytes(bytes, (bytes + bucket_bytes - 1) /
                                                    bucket_bytes)));
}

const PackedPieces& MessageBuilder::PackAlike(
    const std::vector<PieceId>& pieces, int64_t bucket_bytes) {
  const int64_t bytes = BytesOf(pieces);
  const int64_t count = (bytes + bucket_bytes - 1) / bucket_bytes;
  // The last one of many may be small.
  if (count > kAlikeMost) return Pack(pieces, bucket_bytes);
  return PackBy(pieces, bucket_bytes, [&] {
    // The less may be wasted, the more messages it may take.
    for (int64_t divisor = kAlikeDivisor;; divisor /= 2) {
      std::vector<Bucket> buckets =
          Fill(pieces, std::min(bucket_bytes, EvenBytes(bytes, count, divisor)),
               kAlikeDivisor);
      if (std::ssize(buckets) <= count || divisor <= kWasteDivisor) {
        return buckets;
      }
    }
  });
}

bool MessageBuilder::Holds(const NetworkLoad& load) const {
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

int64_t MessageBuilder::RoutedBucketBytes(const std::vector<Stream>& streams,
                                          const NetworkLoad& load,
                                          bool holds) const {
  if (load.between_hosts || load.broadcasts) {
    return TreeBucketBytes(load, holds);
  }
  const Limits& limits = module_.limits;
  const Topology& topology = module_.topology;
  const double dealt = holds ? load.dealt : 0;
  int64_t room = RoomOf(module_, load, dealt);
  if (load.on_nvlink) {
    // What comes in a round takes as long as what is passed on of the one
    // before, which nothing does in the first and the last.
    const double seconds = static_cast<double>(load.largest) * (1 + dealt) /
                           topology.peer_bytes_per_second;
    const int64_t most = std::min(room, limits.bucket_bytes);
    const int64_t rounds = std::max<int64_t>(
        std::llround(std::sqrt(seconds / kStagedRoundSeconds)),
        (load.largest + most - 1) / most);
    return std::clamp(
        EvenBytes(load.largest, std::max<int64_t>(rounds, 1), kAlikeDivisor),
        std::min(most, WorthItsStart(topology.peer_bytes_per_second)), most);
  }
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

int64_t MessageBuilder::FittedBytes(const std::vector<Stream>& streams,
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

int64_t MessageBuilder::CountTurns(const std::vector<Stream>& streams,
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

int64_t MessageBuilder::TreeBucketBytes(const NetworkLoad& load,
                                        bool holds) const {
  const Topology& topology = module_.topology;
  const double others = holds ? load.dealt : 0;
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
        static_cast<double>(bytes) / topology.network_bytes_per_second +
        kStagedRoundSeconds;
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
  return std::max<int64_t>(
      best, std::min(most, WorthItsStart(topology.network_bytes_per_second)));
}

void MessageBuilder::SendHeld(int32_t wave, Rank rank, const Stream& stream,
                              const PackedPieces& packed) {
  std::vector<Rank> receivers;
  for (const Relay& relay : stream.relays) {
    if (relay.sender == rank && StaysInside(module_, stream.relays, relay)) {
      receivers.push_back(relay.receiver);
    }
  }
  const size_t fed = feeds_[IndexOf(rank)].begin;
  for (size_t i = 0; i < packed.contents.size(); ++i) {
    module_.messages[fed + i].dealt_by = {.begin = module_.messages.size(),
                                          .count = receivers.size()};
    for (const Rank receiver : receivers) {
      module_.messages.push_back({.source = rank,
                                  .destination = receiver,
                                  .route = Route::kPeer,
                                  .wave = wave,
                                  .contents = packed.contents[i],
                                  .size_bytes = packed.size_bytes[i],
                                  .fed_by = {.begin = fed + i, .count = 1},
                                  .relayed_from = Route::kNetwork,
                                  .is_held = true,
                                  .is_routed = true});
    }
  }
}

void MessageBuilder::Broadcast(size_t hosts, size_t stride) {
  if (hosts < 2) return;
  const size_t begin = module_.messages.size() - hosts * stride;
  for (size_t i = begin; i < begin + stride; ++i) {
    for (size_t host = 0; host < hosts; ++host) {
      module_.messages[i + host * stride].broadcast.first =
          static_cast<int32_t>(i);
    }
    module_.messages[i].broadcast.others = static_cast<int32_t>(hosts - 1);
    module_.messages[i].broadcast.stride = static_cast<int32_t>(stride);
  }
}

void MessageBuilder::BuildFlow(int32_t wave, const Stream& stream,
                               int64_t bucket_bytes, bool may_hold) {
  // Who receives for others alone has it nowhere else.
  const bool holds = may_hold || !stream.receiver_keeps;
  const Message relayed = {.wave = wave,
                           .fed_by = {},
                           .relayed_from = Route::kNetwork,
                           .is_routed = true};
  const PackedPieces& packed = PackAlike(stream.pieces, bucket_bytes);
  const Message first = {.route = SpanHosts(module_, stream.relays)
                                      ? Route::kNetwork
                                      : Route::kUnspecified,
                         .wave = wave,
                         .fed_by = {},
                         .is_unpacked = stream.receiver_keeps,
                         .is_routed = true};
  Send(stream.source, stream.receiver, packed, first);
  for (const Rank other : stream.others) {
    Send(stream.source, other, packed, first);
  }
  Broadcast(1 + stream.others.size(), packed.contents.size());
  if (holds) SendHeld(wave, stream.receiver, stream, packed);
  for (const Rank other : stream.others) {
    if (holds) SendHeld(wave, other, stream, packed);
  }
  if (stream.broadcasts) {
    size_t hosts = 0;
    for (const Relay& relay : stream.relays) {
      if (StaysInside(module_, stream.relays, relay)) continue;
      SendOn(relay, packed, relayed);
      ++hosts;
    }
    Broadcast(hosts, packed.contents.size());
  }
  for (const Relay& relay : stream.relays) {
    if (!StaysInside(module_, stream.relays, relay)) {
      if (!stream.broadcasts) SendOn(relay, packed, relayed);
      if (holds) SendHeld(wave, relay.receiver, stream, packed);
    } else if (!holds) {
      // Between hosts it is packed again, since no tree keeps it in staging.
      Message packed_again = relayed;
      packed_again.is_routed =
          module_.RouteBetween(relay.sender, relay.receiver) != Route::kNetwork;
      SendOn(relay,
             module_.IsStaged(relay) ? packed : Pack(stream.pieces, kNoLimit),
             packed_again);
    }
  }
}

void MessageBuilder::BuildStaged(int32_t wave,
                                 const std::vector<Stream>& streams) {
  const int64_t peer_bytes =
      RelayedBucketBytes(streams, Route::kPeer, module_.limits);
  const int64_t relayed_bytes =
      RelayedBucketBytes(streams, Route::kNetwork, module_.limits);
  const NetworkLoad load = LoadOf(module_, staged_bytes_, streams);
  const bool holds = Holds(load);
  int64_t network_bytes = network_bucket_bytes_;
  int64_t routed_bytes = 0;
  if (load.routes) {
    routed_bytes = RoutedBucketBytes(streams, load, holds);
    network_bytes = std::min(network_bytes, routed_bytes);
  }
  std::vector<PieceId> pieces;  // of a pair, that share its buckets
  std::vector<size_t> relays;   // of these pieces, in Module::messages
  for (size_t begin = 0; begin < streams.size();) {
    const Rank source = streams[begin].source;
    const Rank receiver = streams[begin].receiver;
    pieces.clear();
    relays.clear();
    for (; begin < streams.size() && streams[begin].source == source &&
           streams[begin].receiver == receiver;
         ++begin) {
      const Stream& stream = streams[begin];
      if (stream.is_routed) {
        BuildFlow(wave, stream, routed_bytes, holds);
        continue;
      }
      const Message relayed = {
          .wave = wave, .fed_by = {}, .relayed_from = stream.route};
      const bool in_stages = IsRelayedInStages(stream);
      if (!in_stages) {
        feeds_[IndexOf(receiver)] = {};  // not formed yet
        pieces.insert(pieces.end(), stream.pieces.begin(), stream.pieces.end());
      } else {
        const PackedPieces& packed = PackEvenly(
            stream.pieces,
            stream.route == Route::kPeer ? peer_bytes : relayed_bytes);
        Send(source, receiver, packed, {.wave = wave, .fed_by = {}});
        for (const Relay& relay : stream.relays) {
          if (!module_.IsStaged(relay)) continue;
          SendOn(relay, packed, relayed);
        }
      }
      for (const Relay& relay : stream.relays) {
        if (module_.IsStaged(relay)) continue;
        if (!in_stages) relays.push_back(module_.messages.size());
        SendOn(relay, Pack(stream.pieces, kNoLimit), relayed);
      }
    }
    if (pieces.empty()) continue;
    std::sort(pieces.begin(), pieces.end());
    const bool network =
        module_.RouteBetween(source, receiver) == Route::kNetwork;
    Send(source, receiver,
         PackEvenly(pieces,
                    network ? network_bytes : module_.limits.bucket_bytes),
         {.wave = wave, .fed_by = {}});
    for (const size_t relay : relays) {
      module_.messages[relay].fed_by = feeds_[IndexOf(receiver)];
    }
  }
}

int64_t MessageBuilder::NetworkBucketBytes(
    const std::vector<WaveStreams>& waves) const {
  const Limits& limits = module_.limits;
  int64_t bytes = limits.bucket_bytes;
  if (!limits.fills_buckets) bytes = std::min(bytes, kNetworkBucketBytes);
  for (; bytes < limits.bucket_bytes; bytes *= 2) {
    int64_t messages = 0;
    for (const WaveStreams& streams : waves) {
      messages += CountStaged(streams[static_cast<size_t>(Mechanism::kStaged)],
                              limits, bytes);
    }
    if (messages <= kNetworkMessagesMax) break;
  }
  return std::min(bytes, limits.bucket_bytes);
}

int64_t MessageBuilder::CountStaged(const std::vector<Stream>& streams,
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

void MessageBuilder::CheckCount(const std::vector<WaveStreams>& waves) const {
  const auto count_with = [&](int64_t bucket_bytes) {
    Limits limits = module_.limits;
    limits.bucket_bytes = bucket_bytes;
    limits.staging_bytes =
        std::max(limits.staging_bytes, bucket_bytes * limits.slots);
    int64_t messages = 0;
    for (const WaveStreams& streams : waves) {
      messages += CountStaged(streams[static_cast<size_t>(Mechanism::kStaged)],
                              limits, bucket_bytes);
    }
    return messages;
  };
  const int64_t found = module_.limits.bucket_bytes;
  const int64_t messages = count_with(found);
  if (messages <= kMessagesMax) return;
  constexpr int64_t kLargest = int64_t{1} << 40;  // of a job's buckets
  const int64_t most =
      std::max(kMessagesMax, kMessagesOfPairMax * count_with(kLargest));
  if (messages <= most) return;
  int64_t wanted = std::bit_ceil(static_cast<uint64_t>(found));
  while (count_with(wanted) > most) wanted *= 2;
  const int64_t staging = wanted * module_.limits.slots;
  options_.diagnostics.Error(
      options_.job.options.bucket_bytes.place,
      absl::StrFormat(
          "options.bucket_bytes %d cuts this job into %d messages; wanted at "
          "least %d%s, which makes %d",
          found, messages, wanted,
          staging > module_.limits.staging_bytes
              ? absl::StrFormat(" (and staging_bytes %d)", staging)
              : "",
          count_with(wanted)));
}

void MessageBuilder::Build() {
  std::vector<WaveStreams> streams(static_cast<size_t>(module_.waves));
  const std::vector<Transfer>& transfers = module_.transfers;
  // Of a pair of ranks: its pieces, ascending.
  using RelaysOfWave =
      std::tuple<int32_t, bool, bool, bool, absl::Span<const Rank>,
                 absl::Span<const Relay>>;
  std::vector<std::pair<RelaysOfWave, std::vector<PieceId>>> by_relays;
  for (size_t begin = 0; begin < transfers.size();) {
    const Rank source = transfers[begin].source;
    const Rank receiver = transfers[begin].destination;
    if (module_.IsRelay(source)) {  // formed with what feeds it
      ++begin;
      continue;
    }
    by_relays.clear();
    size_t last = 0;  // in by_relays
    for (; begin < transfers.size() && transfers[begin].source == source &&
           transfers[begin].destination == receiver;
         ++begin) {
      const PieceId id = transfers[begin].piece;
      const Piece& piece = module_.piece(id);
      // As a rule all of a pair are alike.
      absl::Span<const Rank> others;
      if (piece.broadcasts) {
        if (receiver != piece.destinations.front()) continue;
        others = absl::MakeConstSpan(piece.destinations).subspan(1);
      }
      const RelaysOfWave key(piece.wave, piece.is_routed, piece.root_keeps,
                             piece.broadcasts, others, piece.relays);
      if (by_relays.empty() || by_relays[last].first != key) {
        const auto place = std::lower_bound(
            by_relays.begin(), by_relays.end(), key,
            [](const auto& a, const RelaysOfWave& b) { return a.first < b; });
        last = static_cast<size_t>(place - by_relays.begin());
        if (place == by_relays.end() || place->first != key) {
          // As many as the smallest allocation has room for.
          constexpr size_t kFirst = 24 / sizeof(PieceId);
          by_relays.insert(place, {key, {}})->second.reserve(kFirst);
        }
      }
      by_relays[last].second.push_back(id);
    }
    const Route route = module_.RouteBetween(source, receiver);
    for (auto& [key, pieces] : by_relays) {
      const auto& [wave, is_routed, keeps, broadcasts, others, relays] = key;
      const Mechanism mechanism =
          is_routed ? Mechanism::kStaged : module_.MechanismOf(route);
      streams[static_cast<size_t>(wave)][static_cast<size_t>(mechanism)]
          .push_back({.source = source,
                      .receiver = receiver,
                      .route = route,
                      .relays = relays,
                      .others = others,
                      .is_routed = is_routed,
                      .broadcasts = broadcasts,
                      .receiver_keeps = keeps,
                      .pieces = std::move(pieces)});
    }
  }
  CheckCount(streams);
  if (!options_.diagnostics.ok()) return;
  network_bucket_bytes_ = NetworkBucketBytes(streams);
  for (int32_t wave = 0; wave < module_.waves; ++wave) {
    const auto& of_wave = streams[static_cast<size_t>(wave)];
    BuildDirect(wave, of_wave[static_cast<size_t>(Mechanism::kDirect)]);
    BuildStaged(wave, of_wave[static_cast<size_t>(Mechanism::kStaged)]);
  }
}

}  // namespace

absl::Status FormBuckets(const PassOptions& options, Module& module) {
  MessageBuilder(options, module).Build();
  return absl::OkStatus();
}

}  // namespace refit
