// State digests on the CPU.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_DIGEST_H_
#define REFIT_EXECUTOR_DEVICE_HOST_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "executor/device/cast.h"
#include "plan/schedule/copy_batch.h"
#include "plan/schedule/copy_batches.h"
#include "refit/device_types.h"

namespace refit {

// A digested box whose innermost part is runs of bytes that are contiguous on
// both tensors.
struct HostDigest {
  CopyAddress from;
  uint64_t param_byte = 0;  // in the param, of the first element
  DigestTarget target;
  uint64_t run_elements = 1;
  uint64_t element_bytes = 0;   // as digested
  CastFunction cast = nullptr;  // of elements that are digested after a cast
  CopyLoops loops;              // around the runs, outermost first
};

HostDigest MakeHostDigest(const StridedCopy& copy,
                          absl::Span<const CopyLoop> loops,
                          const DigestTarget& target);

void RunHostDigest(const HostDigest& digest, std::byte* const* table);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_DIGEST_H_
