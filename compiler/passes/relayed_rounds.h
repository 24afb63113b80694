// Rounds of what ranks relay by packing it again.
#ifndef REFIT_COMPILER_PASSES_RELAYED_ROUNDS_H_
#define REFIT_COMPILER_PASSES_RELAYED_ROUNDS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/ir/module.h"
#include "compiler/passes/rounds.h"

namespace refit {

// Places staged messages of one route. Those that are passed on come first, so
// that relays have their part early; then the relays, in the order in which
// their contents arrive; what nobody passes on fills the room that is left, of
// which a rank takes `most_each_way` in a round if that is given.
//
// Where ranks relay, a round has few messages each way for a rank: senders of
// many would only make receivers wait, and the pipeline longer.
void PlaceRelayed(Module& module, const std::vector<Message*>& messages,
                  Route route, std::optional<int64_t> most_each_way,
                  Scheduler& scheduler);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_RELAYED_ROUNDS_H_
