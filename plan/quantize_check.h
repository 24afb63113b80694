// The loader's check of block quantization: what it relates, and its ranges.
#ifndef REFIT_PLAN_QUANTIZE_CHECK_H_
#define REFIT_PLAN_QUANTIZE_CHECK_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "plan/stack_check.h"
#include "plan_generated.h"

namespace refit {

// Whether anything of the plan needs an executor that can quantize.
bool HasQuantization(const fb::Body& body);

// Checks Body.quantizations, against the params that CheckStacks has passed,
// and Body.quantize_loops.
absl::Status CheckQuantizations(const fb::Body& body);

// Checks what a rank quantizes, and its scratch. Requires that all slots of the
// program name buffers; `buffers` are CheckStacks's.
absl::Status CheckQuantizes(const fb::Body& body,
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

#endif  // REFIT_PLAN_QUANTIZE_CHECK_H_
