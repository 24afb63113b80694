// The loader's checks of what a body says once, whichever ranks use it.
#ifndef REFIT_PLAN_DECLARATION_CHECK_H_
#define REFIT_PLAN_DECLARATION_CHECK_H_

#include "absl/status/status.h"
#include "plan_generated.h"

namespace refit {

// That the body has its parts, and what of rounds, loops, copies and their
// lists does not depend on who uses them.
absl::Status CheckPools(const fb::Body& body);

// Skips, casts, limits, what the compiler expects, and requirements: words for
// programs, in an order that gives each once.
absl::Status CheckDeclarations(const fb::Body& body);

// What one may divide by.
absl::Status CheckTopology(const fb::Body& body);

// That every message can leave out what did not change: its sender's own
// tensors are what is sent. Of a body whose programs were checked.
absl::Status CheckDelta(const fb::Body& body);

}  // namespace refit

#endif  // REFIT_PLAN_DECLARATION_CHECK_H_
