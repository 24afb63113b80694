// In which round each message comes that its receiver deals out.
#ifndef REFIT_COMPILER_PASSES_TURNS_H_
#define REFIT_COMPILER_PASSES_TURNS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"

namespace refit {

// By message, from its source and destination: its turn. No rank sends two
// messages in one turn, or receives two. There are as many turns as the busiest
// rank sends or receives messages.
std::vector<int32_t> TurnsOf(absl::Span<const std::pair<Rank, Rank>> messages);

// What the messages of one turn take.
struct TurnSeconds {
  double network = 0;
  double dealt = 0;  // out, in the round after
};

// By turn: its round, from 0 on, so that all rounds take least. A round has
// `most_together` turns at most. It takes as long as the network, or as long as
// what came in the round before is dealt out.
//
// `ends`: what comes in the last round is dealt out alone.
std::vector<int32_t> RoundsOfTurns(int32_t turns, int32_t most_together,
                                   const TurnSeconds& seconds, bool ends);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_TURNS_H_
