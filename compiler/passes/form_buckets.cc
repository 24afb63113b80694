#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// A slab that does not fit into what is left of a bucket is cut only when
// closing the bucket early would waste more than this part of it.
constexpr int64_t kWasteDivisor = 32;

// One message's contents while it is filled.
struct Bucket {
  std::vector<Packed> contents;
  int64_t size_bytes = 0;
};

// Fills buckets with the boxes of one pair of ranks, in order.
class Packer {
 public:
  explicit Packer(int64_t bucket_bytes) : bucket_bytes_(bucket_bytes) {}

  void Add(PieceId piece, const Box& box, int64_t element_bytes);
  std::vector<Bucket> Take() { return std::move(buckets_); }

 private:
  void Place(PieceId piece, const Box& box, int64_t bytes);
  int64_t Free() const {
    return buckets_.empty()
               ? 0
               : bucket_bytes_ - AlignStaging(buckets_.back().size_bytes);
  }

  int64_t bucket_bytes_;
  std::vector<Bucket> buckets_;
};

void Packer::Place(PieceId piece, const Box& box, int64_t bytes) {
  if (buckets_.empty() || bytes > Free()) buckets_.emplace_back();
  Bucket& bucket = buckets_.back();
  const int64_t offset = AlignStaging(bucket.size_bytes);
  bucket.contents.push_back(
      {.piece = piece, .box = box, .staging_offset = offset});
  bucket.size_bytes = offset + bytes;
}

void Packer::Add(PieceId piece, const Box& box, int64_t element_bytes) {
  const int64_t waste_max = bucket_bytes_ / kWasteDivisor;
  Box rest = box;
  while (!rest.Empty()) {
    const int64_t bytes = rest.Volume() * element_bytes;
    if (bytes <= Free() || (bytes <= bucket_bytes_ && Free() <= waste_max)) {
      Place(piece, rest, bytes);
      return;
    }
    // Cut along the outermost dimension that can be cut: as many whole slabs
    // as fit now, then the rest.
    size_t dim = 0;
    while (rest.extent(dim) == 1) ++dim;
    const int64_t slab_bytes = bytes / rest.extent(dim);
    const int64_t room = Free() <= waste_max ? bucket_bytes_ : Free();
    const int64_t slabs = room / slab_bytes;
    if (slabs == 0 && slab_bytes <= waste_max) {
      // The slab is small and yet does not fit: a new bucket serves it better.
      buckets_.emplace_back();
      continue;
    }
    Box first = rest;
    rest.lo[dim] += std::max<int64_t>(slabs, 1);
    first.hi[dim] = rest.lo[dim];
    if (slabs == 0) {
      Add(piece, first, element_bytes);  // cuts inside one slab
    } else {
      Place(piece, first, slabs * slab_bytes);
    }
  }
}

// The buckets of one list of pieces, which many pairs share.
struct PackedPieces {
  std::vector<int32_t> contents;  // into Module::contents
  std::vector<int64_t> size_bytes;
};

// What is stored directly fills no bucket.
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 2;

// The size to fill buckets to: messages of one size keep the ranks of a round
// equally busy, so that a pair's bytes are cut evenly rather than into full
// buckets and a remainder. The slack is what closing buckets early may waste.
int64_t EvenBytes(int64_t total, int64_t count) {
  const int64_t even = std::max<int64_t>(total / count, 1);
  return AlignStaging(even + even / kWasteDivisor * 2);
}

// More steps than these save less than their fences cost.
constexpr int64_t kStepsMax = 32;
// A stream of less than this part of what the busiest rank moves is not cut.
constexpr int64_t kUncutPart = 256;

// Pieces that a source gives one receiver, which relays them all to `relays`.
struct Stream {
  Rank source{};
  Rank receiver{};
  Route route = Route::kUnspecified;
  std::vector<Rank> relays;
  std::vector<PieceId> pieces;
};

class Former {
 public:
  explicit Former(Module& module) : module_(module) {}

  void Form();

 private:
  int64_t BytesOf(const std::vector<PieceId>& pieces) const;
  // How many steps the streams inside hosts are cut into, if any is relayed:
  // with n steps the first round, in which nothing is relayed yet, takes 1/n of
  // the time of all bytes, and each round costs its fences. `busiest_bytes`: of
  // the rank that sends or receives most of them.
  int64_t CountSteps(const std::vector<Stream>& streams,
                     int64_t& busiest_bytes) const;
  const PackedPieces& Pack(const std::vector<PieceId>& pieces,
                           int64_t bucket_bytes);
  void Send(Rank source, Rank destination, const PackedPieces& packed,
            const Message& like);
  void FormDirect(int32_t wave, const std::vector<Stream>& streams);
  void FormStaged(int32_t wave, const std::vector<Stream>& streams);

  Module& module_;
  absl::flat_hash_map<std::pair<int64_t, std::vector<PieceId>>, PackedPieces>
      packed_;  // by size and pieces
};

int64_t Former::BytesOf(const std::vector<PieceId>& pieces) const {
  int64_t total = 0;
  for (PieceId id : pieces) {
    total += AlignStaging(module_.WireBytes(module_.piece(id)));
  }
  return total;
}

const PackedPieces& Former::Pack(const std::vector<PieceId>& pieces,
                                 int64_t bucket_bytes) {
  const auto [it, is_new] =
      packed_.try_emplace({bucket_bytes, pieces}, PackedPieces());
  PackedPieces& packed = it->second;
  if (!is_new) return packed;
  Packer packer(bucket_bytes);
  for (PieceId id : pieces) {
    const Piece& piece = module_.piece(id);
    packer.Add(id, piece.box, DTypeBytes(piece.wire_dtype));
  }
  for (Bucket& bucket : packer.Take()) {
    packed.contents.push_back(static_cast<int32_t>(module_.contents.size()));
    packed.size_bytes.push_back(bucket.size_bytes);
    module_.contents.push_back(std::move(bucket.contents));
  }
  return packed;
}

// One message per bucket, in successive steps from that of `like` on.
void Former::Send(Rank source, Rank destination, const PackedPieces& packed,
                  const Message& like) {
  for (size_t i = 0; i < packed.contents.size(); ++i) {
    Message& message = module_.messages.emplace_back(like);
    message.source = source;
    message.destination = destination;
    message.route = module_.RouteBetween(source, destination);
    message.mechanism = module_.MechanismOf(message.route);
    message.contents = packed.contents[i];
    message.size_bytes = packed.size_bytes[i];
    if (message.mechanism == Mechanism::kDirect) {
      message.step += static_cast<int32_t>(i);
    }
  }
}

int64_t Former::CountSteps(const std::vector<Stream>& streams,
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
    for (Rank relay : stream.relays) {
      sent[IndexOf(stream.receiver)] += bytes;
      received[IndexOf(relay)] += bytes;
    }
  }
  busiest_bytes = std::max(*std::max_element(sent.begin(), sent.end()),
                           *std::max_element(received.begin(), received.end()));
  if (!relays) return 1;
  const double seconds = static_cast<double>(busiest_bytes) /
                         module_.topology.peer_bytes_per_second;
  return std::clamp<int64_t>(std::llround(std::sqrt(seconds / kRoundSeconds)),
                             1, kStepsMax);
}

void Former::FormDirect(int32_t wave, const std::vector<Stream>& streams) {
  int64_t busiest_bytes = 0;
  const int64_t steps = CountSteps(streams, busiest_bytes);
  for (const Stream& stream : streams) {
    const int64_t bytes = BytesOf(stream.pieces);
    const bool cut = steps > 1 && stream.route == Route::kPeer &&
                     bytes >= busiest_bytes / kUncutPart;
    const PackedPieces& packed =
        Pack(stream.pieces, cut ? EvenBytes(bytes, steps) : kNoLimit);
    Send(stream.source, stream.receiver, packed, {.wave = wave});
    for (Rank relay : stream.relays) {
      Send(stream.receiver, relay, packed,
           {.wave = wave, .step = 1, .relayed_from = Route::kPeer});
    }
  }
}

void Former::FormStaged(int32_t wave, const std::vector<Stream>& streams) {
  const int64_t limit = module_.limits.bucket_bytes;
  // All of a pair's streams share its buckets.
  for (size_t begin = 0; begin < streams.size();) {
    std::vector<PieceId> pieces;
    size_t end = begin;
    for (;
         end < streams.size() && streams[end].source == streams[begin].source &&
         streams[end].receiver == streams[begin].receiver;
         ++end) {
      const Stream& stream = streams[end];
      pieces.insert(pieces.end(), stream.pieces.begin(), stream.pieces.end());
      if (stream.relays.empty()) continue;
      const PackedPieces& relayed = Pack(stream.pieces, kNoLimit);
      for (Rank relay : stream.relays) {
        Send(stream.receiver, relay, relayed,
             {.wave = wave, .relayed_from = Route::kNetwork});
      }
    }
    std::sort(pieces.begin(), pieces.end());
    const int64_t bytes = BytesOf(pieces);
    const PackedPieces& packed = Pack(
        pieces, std::min(limit, EvenBytes(bytes, (bytes + limit - 1) / limit)));
    Send(streams[begin].source, streams[begin].receiver, packed,
         {.wave = wave});
    begin = end;
  }
}

void Former::Form() {
  // By wave and mechanism; in order of source, receiver, relays.
  std::vector<std::array<std::vector<Stream>, 2>> streams(
      static_cast<size_t>(module_.waves));
  const std::vector<Transfer>& transfers = module_.transfers;
  for (size_t begin = 0; begin < transfers.size();) {
    const Rank source = transfers[begin].source;
    const Rank receiver = transfers[begin].destination;
    std::map<std::pair<int32_t, std::vector<Rank>>, std::vector<PieceId>>
        by_relays;  // and by wave
    for (; begin < transfers.size() && transfers[begin].source == source &&
           transfers[begin].destination == receiver;
         ++begin) {
      const PieceId id = transfers[begin].piece;
      const Piece& piece = module_.piece(id);
      by_relays[{piece.wave, piece.relay_destinations}].push_back(id);
    }
    if (module_.IsRelay(source)) continue;  // with what feeds them
    const Route route = module_.RouteBetween(source, receiver);
    const Mechanism mechanism = module_.MechanismOf(route);
    for (auto& [key, pieces] : by_relays) {
      const auto& [wave, relays] = key;
      streams[static_cast<size_t>(wave)][static_cast<size_t>(mechanism)]
          .push_back({.source = source,
                      .receiver = receiver,
                      .route = route,
                      .relays = relays,
                      .pieces = std::move(pieces)});
    }
  }
  for (int32_t wave = 0; wave < module_.waves; ++wave) {
    const auto& of_wave = streams[static_cast<size_t>(wave)];
    FormDirect(wave, of_wave[static_cast<size_t>(Mechanism::kDirect)]);
    FormStaged(wave, of_wave[static_cast<size_t>(Mechanism::kStaged)]);
  }
}

}  // namespace

absl::Status FormBuckets(const PassOptions&, Module& module) {
  Former(module).Form();
  return absl::OkStatus();
}

}  // namespace refit
