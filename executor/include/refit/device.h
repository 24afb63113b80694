// Device: memory, and strided copies between a rank's tensors and its staging.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_DEVICE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/dtype.h"

namespace refit {

// A queue of work in issue order: a cudaStream_t on a GPU, ignored by a device
// that works on the calling thread.
using Stream = void*;

// One loop of a strided copy, outermost first.
struct CopyLoop {
  uint64_t extent = 1;
  uint64_t tensor_step = 0;  // entries of the tensor table per iteration
  uint64_t byte_step = 0;    // bytes of the tensor per iteration
};

// A strided box of elements of one or more tensors = a dense run of staging,
// visited row-major over the loops. The dtypes differ when the copy casts.
struct StridedCopy {
  uint64_t first_tensor = 0;  // into the tensor table
  uint64_t byte_offset = 0;   // of the first element in its tensor
  uint32_t loops_begin = 0;   // into CopyBatch::loops
  uint32_t loops_count = 0;
  DType tensor_dtype = DType::kUnspecified;
  DType staging_dtype = DType::kUnspecified;
  std::byte* staging = nullptr;  // unused by kZero
};

enum class CopyKind : uint8_t {
  kPack,    // tensors to staging
  kUnpack,  // staging to tensors
  kZero,    // zero bytes to tensors
};

// Copies that are issued together. No byte is written by two of them.
struct CopyBatch {
  CopyKind kind = CopyKind::kPack;
  std::vector<StridedCopy> copies;
  std::vector<CopyLoop> loops;
};

// Batches made ready for a device. Nothing is allocated or checked after this.
class PreparedCopies {
 public:
  virtual ~PreparedCopies() = default;
  // Enqueues batch number `batch`. Its bytes are in place when `stream`
  // reaches this point.
  virtual absl::Status Enqueue(size_t batch, Stream stream) = 0;
};

// Memory of a device, freed by scope.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }

 protected:
  DeviceMemory(std::byte* data, uint64_t size_bytes)
      : data_(data), size_bytes_(size_bytes) {}

 private:
  std::byte* data_;
  uint64_t size_bytes_;
};

// Thread-safe: one device may serve several ranks.
class Device {
 public:
  virtual ~Device() = default;

  // At least 256-byte aligned, contents unspecified. Error: kResourceExhausted.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
      uint64_t size_bytes) = 0;

  // Makes `batches` ready over the table `tensors` of tensor addresses.
  // Requires: every copy inside its tensors and its staging. The tensors and
  // the staging must outlive the result; the arguments need not.
  virtual absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> tensors,
      absl::Span<const CopyBatch> batches) = 0;

  // Enqueues a contiguous copy between ranges that do not overlap.
  virtual absl::Status Copy(std::byte* to, const std::byte* from,
                            uint64_t size_bytes, Stream stream) = 0;

  // Enqueues zero bytes.
  virtual absl::Status Zero(std::byte* to, uint64_t size_bytes,
                            Stream stream) = 0;

  // Returns when all work enqueued on `stream` is done, with its first error.
  virtual absl::Status Synchronize(Stream stream) = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_DEVICE_H_
