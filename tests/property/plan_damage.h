// A compiler's plan with one field changed, and all its digests right again.
#ifndef REFIT_TESTS_PROPERTY_PLAN_DAMAGE_H_
#define REFIT_TESTS_PROPERTY_PLAN_DAMAGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan_file.h"
#include "tests/property/draw.h"

namespace refit {

// The plan file around `body`. FlatBuffers' object API leaves empty lists out,
// so that the loader refuses a rank without messages.
std::vector<uint8_t> PackPlan(const fb::BodyT& body,
                              uint64_t required_features);

// Draws one field, or one list, of one table of `body` and changes it. All
// kinds of fields are drawn equally often, however many of them there are.
// Returns what was done, such as "copy.offset 64 -> 65".
std::string DamageBody(Draw& draw, fb::BodyT& body);

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_PLAN_DAMAGE_H_
