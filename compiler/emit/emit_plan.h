// Writes a scheduled module as a plan file.
#ifndef REFIT_COMPILER_EMIT_EMIT_PLAN_H_
#define REFIT_COMPILER_EMIT_EMIT_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/ir/module.h"

namespace refit {

// Requires: all passes ran. The same module gives the same bytes: tables are
// numbered by first use, walking ranks and rounds in order. Error: kInternal, a
// pass left a message that its ranks cannot send.
absl::StatusOr<std::vector<uint8_t>> EmitPlan(const Module& module);

}  // namespace refit

#endif  // REFIT_COMPILER_EMIT_EMIT_PLAN_H_
