// Memory of a GPU that other ranks of the host map.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_SHARING_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_SHARING_H_

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/device/descriptor_server.h"
#include "refit/device.h"

namespace refit {

// Device::Export and Device::Import. A rank of the same process gets the
// exporter's own addresses, with access for its device; one of another process
// maps what holds the ranges:
//
// - Allocations of cudaMalloc as wholes, through CUDA IPC. Ranges may lie
//   anywhere inside, as PyTorch's caching allocator places tensors.
// - Pages of cuMemMap (PyTorch's expandable segments) that the ranges touch,
//   each once, neighbours side by side: a range may go on from page to page.
//   Those that are shared as file descriptors come through a socket of the
//   exporter while its export and its device live. A mapping keeps the physical
//   memory, also if the exporter unmaps it.
//
// Memory that nobody can share (pages whose maker asked for no handle, as those
// of vLLM's sleep mode) is an error of the Import. Thread-safe.
class CudaSharing {
 public:
  explicit CudaSharing(int device) : device_(device) {}

  // `memory`, unless null, holds the ranges. Ranks of this process that map
  // them share it, so that what they store goes to no memory that was freed.
  absl::StatusOr<std::unique_ptr<ExportedMemory>> Export(
      absl::Span<const MemoryRange> ranges,
      std::shared_ptr<const void> memory = nullptr);
  absl::StatusOr<std::unique_ptr<MappedMemory>> Import(
      std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
      std::chrono::steady_clock::time_point deadline);

 private:
  // Where other processes get the pages' descriptors.
  absl::StatusOr<std::string> ServerName();

  const int device_;
  std::mutex mutex_;
  std::unique_ptr<DescriptorServer> server_;  // from its first use
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_SHARING_H_
