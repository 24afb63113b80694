// How much of the messages of a wave a round has room for.
#ifndef REFIT_COMPILER_PASSES_ROUND_LIMITS_H_
#define REFIT_COMPILER_PASSES_ROUND_LIMITS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/passes/rounds.h"

namespace refit {

// What the messages of a wave and route do to ranks in all.
struct RoundTotals {
  explicit RoundTotals(size_t world)
      : sent(world, 0),
        received(world, 0),
        entering(world, 0),
        staged(world, 0),
        own_operations(world, 0),
        operations(world, 0) {}

  // Bytes, by rank.
  std::vector<int64_t> sent, received;  // not inside a host beside the network
  std::vector<int64_t> entering;  // received inside a host beside the network
  std::vector<int64_t> staged;    // in either direction, and what is dealt out
  // By rank: of messages, and of these and those that deal them out.
  std::vector<int64_t> own_operations, operations;
  int64_t most_bytes = 1;  // of a message
  int64_t most_relayed_bytes = 0;
  double bytes = 0;  // of all messages
  double dealt_bytes = 0;
  double dealt_messages = 0;
  double relayed_bytes = 0;
  bool routes = false;         // any message is routed
  bool between_hosts = false;  // and passed on to another host, or broadcast
  bool on_nvlink = true;       // all go inside a domain that is a site
};

RoundTotals TotalsOf(Module& module, absl::Span<Message* const> messages);

class RoundLimits {
 public:
  // Limits what `loads` take in a round of what `totals` are of. `ends`: no
  // wave follows. `module` must outlive it.
  RoundLimits(const Module& module, const RoundTotals& totals, bool ends,
              Route route, RoundLoads& loads);

  int64_t most_bytes() const { return most_bytes_; }  // of a message
  // Beside its messages of full size a round has room for small ones.
  bool IsSmall(const Message& message) const {
    return message.size_bytes <= most_bytes_ / kSmallBeside;
  }

  // Bytes of a rank in one direction, by those that ranks have left to send
  // and to receive. What comes in the last round is dealt out alone, so that
  // the last rounds get smaller: each so that the next one takes as long as it
  // is dealt out. Not where that saves less than the start of a round.
  int64_t OfRound(
      const std::array<std::vector<int64_t>, 2>& left_of_ranks) const;
  // The same with small messages.
  int64_t small_direction_bytes() const { return small_direction_bytes_; }

 private:
  // Small ones are as large as this part of a message of full size.
  static constexpr int64_t kSmallBeside = 8;

  // Room for about so many bytes in messages of full size, and for small ones
  // beside them.
  int64_t WholeMessages(int64_t bytes) const {
    const int64_t count =
        std::max<int64_t>((bytes + most_bytes_ / 2) / most_bytes_, 1);
    return count * most_bytes_ + most_bytes_ / kSmallBeside;
  }

  const Module& module_;
  const int64_t most_bytes_;
  int64_t direction_bytes_ = std::numeric_limits<int64_t>::max();
  int64_t small_direction_bytes_ = 0;
  // What is dealt out of a round takes this part of its time.
  double dealt_part_ = 0;
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_ROUND_LIMITS_H_
