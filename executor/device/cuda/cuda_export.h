// What a CUDA device's Export says, as bytes.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_EXPORT_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_EXPORT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "executor/device/cuda/cuda_pages.h"
#include "executor/device/descriptor_server.h"
#include "executor/device/process_identity.h"

namespace refit {

// Both ends run the same build on one host, so the bytes are these structs as
// they are: a header, then allocations, then ranges.
struct ExportHeader {
  uint64_t magic;
  ProcessIdentity process;
  int32_t device;
  int32_t reserved;
  // Empty if no page is shared by descriptor; ends with a zero.
  char server[DescriptorServer::kNameBytesMax + 1];
  uint64_t allocations;
  uint64_t ranges;
};

enum class SharedBy : uint32_t {
  kNothing = 0,  // cannot be shared
  kIpc,          // an allocation of cudaMalloc
  kPage,         // one of cuMemMap
};

struct ExportedAllocation {
  uint64_t base;
  SharedBy by;
  cudaIpcMemHandle_t ipc;  // of kIpc
  SharedPage page;         // of kPage; else its size alone

  uint64_t size_bytes() const { return page.size_bytes; }
  uint64_t end() const { return base + page.size_bytes; }
};

struct ExportedRange {
  uint64_t allocation;  // that holds its first byte; kNoAllocation if empty
  uint64_t offset;      // in it
  uint64_t size_bytes;
};
constexpr uint64_t kNoAllocation = ~uint64_t{0};

struct CudaExport {
  ExportHeader header = {};
  std::vector<ExportedAllocation> allocations;  // ascending, disjoint
  std::vector<ExportedRange> ranges;
};

// Sets the header's magic and counts.
std::string WriteCudaExport(const CudaExport& exported);
// Error: kInvalidArgument, these bytes are none; what is returned keeps the
// promises above, but a range may end outside of its allocation.
absl::StatusOr<CudaExport> ReadCudaExport(std::string_view bytes);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_EXPORT_H_
