// How large messages are: from what ranks move, how far, and what starts cost.
#ifndef REFIT_COMPILER_PASSES_MESSAGE_SIZES_H_
#define REFIT_COMPILER_PASSES_MESSAGE_SIZES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/passes/packer.h"

namespace refit {

// Messages that ranks pass on waste less, so that all of a round are of one
// size: it takes as long as its largest. Not where a pair
// has more than so many: then the last of them may be small.
constexpr int64_t kAlikeDivisor = 256;
constexpr int64_t kAlikeMost = 8;

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

// Whether one of `relays` stays inside a site. To another host of a domain it
// does if nobody passes it on from there: else it is an edge of a tree.
bool StaysInside(const Module& module, absl::Span<const Relay> relays,
                 const Relay& relay);

// The size to fill buckets to: messages of one size keep the ranks of a round
// equally busy, so that a pair's bytes are cut evenly rather than into full
// buckets and a remainder. The slack is what closing buckets early may waste.
int64_t EvenBytes(int64_t total, int64_t count,
                  int64_t waste_divisor = Packer::kWasteDivisor);

class MessageSizes {
 public:
  // `module` must outlive it.
  explicit MessageSizes(const Module& module);

  int64_t BytesOf(const std::vector<PieceId>& pieces) const;

  // How many chunks the streams inside hosts are cut into, if any is relayed:
  // with n chunks the first round, in which nothing is relayed yet, takes 1/n
  // of the time of all bytes, and each round costs its fences. `busiest_bytes`:
  // of the rank that sends or receives most of them.
  int64_t CountChunks(const std::vector<Stream>& streams,
                      int64_t& busiest_bytes) const;

  // Whether staged rounds pass on what the stream brings: their messages have
  // the contents of its own.
  bool IsRelayedInStages(const Stream& stream) const;
  // The bytes of a bucket of streams by `route` that are relayed in stages. A
  // stream that a receiver passes on to n others ends n rounds after it began,
  // so that short rounds make short ends, and many of them cost time.
  int64_t RelayedBucketBytes(const std::vector<Stream>& streams, Route route,
                             const Limits& limits) const;

  NetworkLoad LoadOf(const std::vector<Stream>& streams) const;
  // Whether ranks pass on what is routed from staging.
  bool Holds(const NetworkLoad& load) const;
  // The bytes of a message between hosts, where anything is routed.
  int64_t RoutedBucketBytes(const std::vector<Stream>& streams,
                            const NetworkLoad& load, bool holds) const;
  // The bytes of a bucket between hosts that nobody passes on in stages.
  int64_t NetworkBucketBytes(const std::vector<WaveStreams>& waves) const;

  // How many staged messages there are under `limits`, those between hosts of
  // at most `network_bytes`.
  int64_t CountStaged(const std::vector<WaveStreams>& waves,
                      const Limits& limits, int64_t network_bytes) const;

 private:
  int64_t CountStaged(const std::vector<Stream>& streams, const Limits& limits,
                      int64_t network_bytes) const;
  // A size of at most `most` that all streams are about a multiple of: a turn
  // takes as long as its largest message. A round has `room` for a rank's, and
  // no more of them than `starts`.
  int64_t FittedBytes(const std::vector<Stream>& streams, int64_t most,
                      int64_t room, double starts, double dealt) const;
  // How many messages of this size the busiest rank sends or receives.
  int64_t CountTurns(const std::vector<Stream>& streams,
                     int64_t bucket_bytes) const;
  // The bytes of a message where hosts pass on to hosts, ranks broadcast, or
  // all comes by NVLink: a rank receives one in a round.
  int64_t TreeBucketBytes(const NetworkLoad& load, bool holds) const;

  const Module& module_;
  std::vector<int64_t> staged_bytes_;  // by piece
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_MESSAGE_SIZES_H_
