// The proof's question answered the slow way: every element of every buffer
// and every byte of staging exists, and the programs are carried out on them.
// Shares no code with the proof.
#ifndef REFIT_TESTS_PLAN_PROOF_ORACLE_H_
#define REFIT_TESTS_PLAN_PROOF_ORACLE_H_

#include <string>

#include "tests/plan/plan_spec.h"

namespace refit {

// What goes wrong when `spec` runs; "" when nothing does. Requires that the
// loader lets the plan in.
std::string FaultOf(const PlanSpec& spec);

}  // namespace refit

#endif  // REFIT_TESTS_PLAN_PROOF_ORACLE_H_
