// What a plan has to keep to, and what its rounds cost before their bytes.
#ifndef REFIT_COMPILER_IR_LIMITS_H_
#define REFIT_COMPILER_IR_LIMITS_H_

#include <cstdint>

#include "plan/group_limit.h"
#include "plan_generated.h"

namespace refit {

using Route = fb::Route;
using Mechanism = fb::Mechanism;

// Messages that a rank sends, and receives, in a staged round that relays: as
// the sizes of messages differ, two fill rounds better than one. Inside a host
// NCCL gives a pair of ranks a part of NVLink's speed: three pairs each way
// fill it, two 88 % of it (docs/benchmarks.md).
inline constexpr int64_t kRelayedPerRound = 2;
inline constexpr int64_t kRelayedPerPeerRound = 3;

// A message that goes on to other hosts from staging leaves a rank so many
// rounds after it came, at most: along a tree the rank passes it on to two
// others, one in a round, and it broadcasts to all at once. Staging has as many
// rounds more.
inline constexpr int32_t kHeldRounds = 2;
inline constexpr int32_t kHeldRoundsOfBroadcast = 1;
// No message of a tree is made smaller: the least that options.bucket_bytes may
// be.
inline constexpr int64_t kFlowMessageBytesMin = 4096;

// What is relayed is packed this many rounds after the one that brings it, so
// that it can be unpacked and packed again while another round is on the wire.
inline constexpr int32_t kRelayRounds = 2;

// Rounds that are to be alike have so much more room than their bytes, for what
// does not fill them exactly.
inline constexpr double kSlackOfRounds = 1.01;

// How rounds between hosts are filled. None is best for all jobs, so that the
// simulator compares plans of all shapes.
struct RoundShape {
  enum class Sizes : uint8_t {
    kFull,    // rounds are full but for the last of a wave
    kEven,    // those of a wave are alike
    kFitted,  // messages are of a size that what pairs send is a multiple of
  };
  Sizes sizes = Sizes::kFull;
};

// Parts of staging that consecutive rounds take in turn. With two, one round is
// packed or unpacked while another is on the wire. More would divide the same
// staging into smaller rounds, each of which costs its start.
inline constexpr int32_t kStagingSlots = 2;

// Jobs of so many ranks have a compact file. Smaller plans gain little from
// shared lists and packed messages, and are written for executors that do not
// know of these too.
inline constexpr int32_t kCompactRanksMin = 1025;

// What a plan has to keep to. No job says `slots`, `operations_per_round` and
// `compact_ranks_min`: tests change them, to see small plans of all forms.
struct Limits {
  int64_t bucket_bytes = 0;
  bool fills_buckets = false;  // also between hosts: the job says their size
  int64_t staging_bytes = 0;
  int32_t slots = kStagingSlots;
  int32_t operations_per_round = kGroupOperationsMax;  // of a rank
  int32_t compact_ranks_min = kCompactRanksMin;
  int32_t network_peers = 0;  // of a rank; 0: no limit
  // Of a GPU, most that move bytes in direct rounds; 0: all.
  int32_t direct_multiprocessors = 0;
  // Whether receivers of direct rounds read, instead of being stored to.
  bool direct_pulls = false;
  // How bytes travel between ranks that can map each other's memory.
  Mechanism mapped = Mechanism::kStaged;
  int64_t scratch_bytes = 0;  // of a rank, for quantization
  bool relays = false;      // destination ranks may pass on what they received
  bool broadcasts = false;  // ranks may broadcast, if they relay
  bool trees = true;        // hosts may pass on to hosts, or be broadcast to
  // Where the ways of leaves are narrow, they may do so in one chain, however
  // many they are.
  bool long_chains = true;
  bool joins_hosts = true;      // NVLink domains may be sites (Module::SiteOf)
  bool relays_directly = true;  // and store it into each other's tensors
  // A source sends a host all that it wants by way of few ranks (route-flows).
  bool by_rails = false;
  RoundShape shape;
};

// What a round costs before its bytes. Two fences, and the launch of a kernel.
inline constexpr double kDirectRoundSeconds = 20e-6;
// A staged round between hosts: packing, launch and rendezvous.
inline constexpr double kStagedRoundSeconds = 120e-6;
// A staged round inside a host, and each of its messages: they start one after
// the other. On H100 and NVLink rounds of one message took 20 to 26 µs more
// than its bytes, and each further message of a group 12 µs
// (docs/benchmarks.md).
inline constexpr double kStagedPeerRoundSeconds = 13e-6;
inline constexpr double kStagedPeerMessageSeconds = 12e-6;
// A message that is dealt out beside messages between hosts, before its bytes.
// Its sender receives as much meanwhile, which slows it down.
inline constexpr double kDealtMessageSeconds = 20e-6;

// These of a staged round, by its route.
struct StagedRound {
  double seconds = 0;
  double message_seconds = 0;
  int64_t relayed_messages = 0;  // each way of a rank, where ranks relay

  // With so many messages of a rank.
  double StartSeconds(int64_t messages) const {
    return seconds + static_cast<double>(messages) * message_seconds;
  }
};
constexpr StagedRound StagedRoundOf(Route route) {
  return route == Route::kNetwork
             ? StagedRound{.seconds = kStagedRoundSeconds,
                           .message_seconds = 0,
                           .relayed_messages = kRelayedPerRound}
             : StagedRound{.seconds = kStagedPeerRoundSeconds,
                           .message_seconds = kStagedPeerMessageSeconds,
                           .relayed_messages = kRelayedPerPeerRound};
}

// Bytes of staging that a rank has for a round of a plan in which hosts pass on
// to hosts: those that use it in turn are more by kHeldRounds than of others.
inline int64_t RoomOfHeldRound(const Limits& limits) {
  return limits.staging_bytes / (limits.slots + kHeldRounds);
}

}  // namespace refit

#endif  // REFIT_COMPILER_IR_LIMITS_H_
