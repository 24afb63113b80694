// HostDevice: the CPU as a Device. Work is done on the calling thread before
// each call returns; streams are ignored.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_HOST_DEVICE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_HOST_DEVICE_H_

#include <memory>

#include "refit/device.h"

namespace refit {

class HostDevice : public Device {
 public:
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
      uint64_t size_bytes) override;
  absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> tensors,
      absl::Span<const CopyBatch> batches) override;
  absl::Status Copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                    Stream stream) override;
  absl::Status Zero(std::byte* to, uint64_t size_bytes, Stream stream) override;
  absl::Status Synchronize(Stream stream) override;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_HOST_DEVICE_H_
