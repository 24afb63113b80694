// Invariant 6, of values: replicas are one value, so they have one dtype.
#ifndef REFIT_PLAN_PROOF_DTYPE_PROOF_H_
#define REFIT_PLAN_PROOF_DTYPE_PROOF_H_

#include "plan/plan_file.h"
#include "plan/proof/steps.h"
#include "plan/proof/violations.h"

namespace refit::proof {

// All source ranks that hold a part of a tensor hold it in one dtype. With two
// it would depend on the sender what a destination receives.
void CheckSourceDTypes(const fb::Body& body, Steps& steps,
                       Violations& violations);

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_DTYPE_PROOF_H_
