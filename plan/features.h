// The features that a plan requires of executors.
#ifndef REFIT_PLAN_FEATURES_H_
#define REFIT_PLAN_FEATURES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "plan_generated.h"

namespace refit {

// What bits of Plan.required_features stand for, ascending: "direct rounds",
// "relays". Bits that this build does not know have no name.
std::vector<std::string> FeatureNames(uint64_t features);

// Whether a plan that requires `required` has no other of this build's
// features.
absl::Status CheckFeatures(const fb::Body& body, uint64_t required);

}  // namespace refit

#endif  // REFIT_PLAN_FEATURES_H_
