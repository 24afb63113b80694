#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/container/node_hash_map.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/passes/message_sizes.h"
#include "compiler/passes/packer.h"
#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

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

// A stream of less than this part of what the busiest rank moves is not cut.
constexpr int64_t kUncutPart = 256;

// Buckets that would cut a job into more messages than these are refused. A
// message takes about 500 bytes here and 80 in the plan: a gigabyte, and a plan
// of 200 MB that takes a minute to compile, for what larger buckets move
// faster.
constexpr int64_t kMessagesMax = int64_t{1} << 21;
// A job of many pairs of ranks may have so many messages for each all the same.
constexpr int64_t kMessagesOfPairMax = 4;

// Whether NVLink takes what goes along `relays` to other hosts. Then also what
// begins inside a host is one of the messages between them.
bool SpanHosts(const Module& module, absl::Span<const Relay> relays) {
  return std::any_of(relays.begin(), relays.end(), [&](const Relay& relay) {
    return module.RouteBetween(relay.sender, relay.receiver) !=
           module.LinkBetween(relay.sender, relay.receiver);
  });
}

class MessageBuilder {
 public:
  MessageBuilder(const PassOptions& options, Module& module)
      : options_(options),
        module_(module),
        sizes_(module),
        feeds_(static_cast<size_t>(module.world_size())) {}

  // Forms nothing after an error.
  void Build();

 private:
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
  // Reports buckets so small that there are too many messages, before they are
  // made.
  void CheckCount(const std::vector<WaveStreams>& waves) const;
  void BuildDirect(int32_t wave, const std::vector<Stream>& streams);
  void BuildStaged(int32_t wave, const std::vector<Stream>& streams);
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
  const MessageSizes sizes_;
  int64_t network_bucket_bytes_ = 0;
  // By size and pieces.
  absl::node_hash_map<PackKey, PackedPieces, PackKeyHash, PackKeyEqual> packed_;
  // By rank: the messages that bring it what the stream at hand moves. Those of
  // other ranks are of earlier streams.
  std::vector<MessageRange> feeds_;
};

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
  return PackBy(pieces, bucket_bytes, [&] {
    return Fill(pieces, bucket_bytes, Packer::kWasteDivisor);
  });
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

void MessageBuilder::BuildDirect(int32_t wave,
                                 const std::vector<Stream>& streams) {
  int64_t busiest_bytes = 0;
  const int64_t chunks = sizes_.CountChunks(streams, busiest_bytes);
  for (const Stream& stream : streams) {
    const int64_t bytes = sizes_.BytesOf(stream.pieces);
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
  const int64_t bytes = sizes_.BytesOf(pieces);
  return Pack(pieces, std::min(bucket_bytes,
                               EvenBytes(bytes, (bytes + bucket_bytes - 1) /
                                                    bucket_bytes)));
}

const PackedPieces& MessageBuilder::PackAlike(
    const std::vector<PieceId>& pieces, int64_t bucket_bytes) {
  const int64_t bytes = sizes_.BytesOf(pieces);
  const int64_t count = (bytes + bucket_bytes - 1) / bucket_bytes;
  // The last one of many may be small.
  if (count > kAlikeMost) return Pack(pieces, bucket_bytes);
  return PackBy(pieces, bucket_bytes, [&] {
    // The less may be wasted, the more messages it may take.
    for (int64_t divisor = kAlikeDivisor;; divisor /= 2) {
      std::vector<Bucket> buckets =
          Fill(pieces, std::min(bucket_bytes, EvenBytes(bytes, count, divisor)),
               kAlikeDivisor);
      if (std::ssize(buckets) <= count || divisor <= Packer::kWasteDivisor) {
        return buckets;
      }
    }
  });
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
      sizes_.RelayedBucketBytes(streams, Route::kPeer, module_.limits);
  const int64_t relayed_bytes =
      sizes_.RelayedBucketBytes(streams, Route::kNetwork, module_.limits);
  const NetworkLoad load = sizes_.LoadOf(streams);
  const bool holds = sizes_.Holds(load);
  int64_t network_bytes = network_bucket_bytes_;
  int64_t routed_bytes = 0;
  if (load.routes) {
    routed_bytes = sizes_.RoutedBucketBytes(streams, load, holds);
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
      const bool in_stages = sizes_.IsRelayedInStages(stream);
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

void MessageBuilder::CheckCount(const std::vector<WaveStreams>& waves) const {
  const auto count_with = [&](int64_t bucket_bytes) {
    Limits limits = module_.limits;
    limits.bucket_bytes = bucket_bytes;
    limits.staging_bytes =
        std::max(limits.staging_bytes, bucket_bytes * limits.slots);
    return sizes_.CountStaged(waves, limits, bucket_bytes);
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
          // The smallest allocation has room for six.
          by_relays.insert(place, {key, {}})->second.reserve(6);
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
  network_bucket_bytes_ = sizes_.NetworkBucketBytes(streams);
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
