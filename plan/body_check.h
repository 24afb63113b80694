// The semantic half of the loader: every index and range of a plan's body.
#ifndef REFIT_PLAN_BODY_CHECK_H_
#define REFIT_PLAN_BODY_CHECK_H_

#include "absl/status/status.h"
#include "plan_generated.h"

namespace refit {

// Checks what plan/plan_file.h promises of an open plan. Requires that `body`
// passed the FlatBuffers verifier and starts at an address divisible by 8.
// Time is bounded by the size of the body, however often it shares tables. What
// it lets pass bounds its readers alike: limits.slots is at most kSlotsMax, and
// ranks and lists share what they list only so often.
absl::Status CheckBody(const fb::Body& body, size_t body_bytes);

}  // namespace refit

#endif  // REFIT_PLAN_BODY_CHECK_H_
