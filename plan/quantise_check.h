// The door's check of block quantisation: what it relates, and its ranges.
#ifndef REFIT_PLAN_QUANTISE_CHECK_H_
#define REFIT_PLAN_QUANTISE_CHECK_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "plan/stack_check.h"
#include "plan_generated.h"

namespace refit {

// Whether anything of the plan needs an executor that can quantise.
bool HasQuantisation(const fb::Body& body);

// Checks Body.quantisations, against the params that CheckStacks has passed,
// and Body.quantise_loops.
absl::Status CheckQuantisations(const fb::Body& body);

// Checks what a rank quantises, and its scratch. Requires that all slots of the
// program name buffers; `buffers` are CheckStacks's.
absl::Status CheckQuantises(const fb::Body& body,
                            const fb::RankProgram& program,
                            const std::vector<BufferSize>& buffers);

// Blocks that `elements` fall into, the last one possibly smaller.
constexpr uint64_t BlockCount(uint64_t elements, uint64_t block) {
  return elements / block + (elements % block != 0 ? 1 : 0);
}

// The dtype in which scales of this format are stored; kUnspecified for a
// format that this build does not know.
fb::DType ScaleDType(fb::ScaleFormat format);

}  // namespace refit

#endif  // REFIT_PLAN_QUANTISE_CHECK_H_
