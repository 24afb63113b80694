// Names of the features that a plan requires of executors.
#ifndef REFIT_PLAN_FEATURES_H_
#define REFIT_PLAN_FEATURES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace refit {

// What bits of Plan.required_features stand for, ascending: "direct rounds",
// "relays". Bits that this build does not know have no name.
std::vector<std::string> FeatureNames(uint64_t features);

}  // namespace refit

#endif  // REFIT_PLAN_FEATURES_H_
