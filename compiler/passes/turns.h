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

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_TURNS_H_
