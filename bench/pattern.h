// Bytes that tell which rank sent them, and from where in its memory.
#ifndef REFIT_BENCH_PATTERN_H_
#define REFIT_BENCH_PATTERN_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "refit/device.h"

namespace refit {

// Fills memory of `device` with the pattern of `rank`. Waits for `stream`.
absl::Status FillPattern(Device& device, Stream stream, int32_t rank,
                         std::byte* data, uint64_t size_bytes);
// The same with zeroes.
absl::Status FillZeroes(Device& device, Stream stream, std::byte* data,
                        uint64_t size_bytes);

// How many bytes at `data` are not those that rank `from` has at its
// `from_offset`, a multiple of 8. Waits for `stream`.
absl::StatusOr<uint64_t> CountWrongBytes(Device& device, Stream stream,
                                         const std::byte* data,
                                         uint64_t size_bytes, int32_t from,
                                         uint64_t from_offset);

}  // namespace refit

#endif  // REFIT_BENCH_PATTERN_H_
