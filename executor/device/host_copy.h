// Strided copies on the CPU.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_COPY_H_
#define REFIT_EXECUTOR_DEVICE_HOST_COPY_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "executor/device/cast.h"
#include "plan/schedule/copy_batch.h"
#include "plan/schedule/copy_batches.h"

namespace refit {

// The source or the target of the innermost part of a copy: runs of contiguous
// elements, `stride_bytes` apart.
struct HostRuns {
  uint64_t stride_bytes = 0;
  uint64_t run_bytes = 0;
  uint64_t element_bytes = 0;
};

// The innermost part of a copy.
struct HostRows {
  uint64_t rows = 1;
  uint64_t run_elements = 1;
  HostRuns from;
  HostRuns to;
  CastFunction cast = nullptr;  // of a copy that casts
};

using HostRowsFunction = void (*)(std::byte* to, const std::byte* from,
                                  const HostRows& rows);

// A copy in the form that runs fastest: loops that continue each other are one
// loop, and the innermost are a HostRows with the function that fits it.
struct HostCopy {
  HostRowsFunction copy_rows = nullptr;
  HostRows rows;
  CopyAddress from;
  CopyAddress to;
  bool reads = true;  // false: zero bytes are written
  CopyLoops loops;    // around the rows, outermost first
};

HostCopy MakeHostCopy(CopyKind kind, const StridedCopy& copy,
                      absl::Span<const CopyLoop> loops);

// A contiguous copy, for ranges that are likely in another core's cache or in
// memory: prefetching both tensors, it is faster than memcpy there.
void CopyContiguous(std::byte* to, const std::byte* from, uint64_t size_bytes);

void RunHostCopy(const HostCopy& copy, std::byte* const* table);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_COPY_H_
