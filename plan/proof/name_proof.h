// Invariant 6: a name stands for one thing.
#ifndef REFIT_PLAN_PROOF_NAME_PROOF_H_
#define REFIT_PLAN_PROOF_NAME_PROOF_H_

#include "plan/proof/violations.h"

namespace refit::proof {

// No two logical parameters, and no two tensors of one rank, have the same
// name: a worker binds by name, so two buffers of one name would be one memory
// that is written twice.
void CheckNames(const fb::Body& body, Violations& violations);

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_NAME_PROOF_H_
