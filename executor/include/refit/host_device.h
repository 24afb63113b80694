// HostDevice: the CPU as a Device. Work is done on the calling thread before
// each call returns; streams are ignored, and every event is reached.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_HOST_DEVICE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_HOST_DEVICE_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "refit/device.h"

namespace refit {

class HostDevice : public Device {
 public:
  absl::Status MakeCurrent() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
      uint64_t size_bytes) override;
  absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> table,
      absl::Span<const CopyBatch> batches) override;
  absl::StatusOr<std::unique_ptr<MessageCoder>> PrepareCodes(
      absl::Span<std::byte* const> table, const ChangeEntries& changes,
      std::vector<MessageToCode> messages) override;
  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override;
  absl::StatusOr<bool> IsCapturing(Stream) override { return false; }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override;
  absl::StatusOr<std::unique_ptr<DeviceTimer>> CreateTimer() override;
  absl::StatusOr<std::unique_ptr<DeviceProgress>> CreateProgress() override;
  absl::StatusOr<std::unique_ptr<DeviceGraph>> Record(
      const std::function<absl::Status(Stream)>&) override {
    return nullptr;
  }
  absl::StatusOr<std::unique_ptr<MemoryWatch>> Watch(
      absl::Span<const MemoryRange>) override {
    return nullptr;
  }
  bool IsHost() const override { return true; }
  bool CopiesUnaligned() const override { return true; }
  absl::Status Copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                    Stream stream) override;
  absl::Status CastAndMark(const MarkingCast& cast, Stream stream) override;
  absl::Status Synchronize(Stream stream) override;
  // Only ranks of the same process reach host memory.
  absl::StatusOr<std::unique_ptr<ExportedMemory>> Export(
      absl::Span<const MemoryRange> ranges) override;
  absl::StatusOr<std::unique_ptr<MappedMemory>> Import(
      std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
      std::chrono::steady_clock::time_point) override;
  // kUnimplemented.
  absl::StatusOr<std::unique_ptr<DeviceFence>> CreateFence(
      int32_t rank, int32_t world_size, absl::Span<const int32_t>) override;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_HOST_DEVICE_H_
