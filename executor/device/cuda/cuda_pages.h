// Physical memory of cuMemCreate, which cuMemMap puts behind addresses, shared
// with other processes. PyTorch's expandable segments are made of it, one
// allocation of 2 or 20 MiB after the other. `page` here is one such
// allocation.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_PAGES_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_PAGES_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "control/file_descriptor.h"

namespace refit {

// By what another process can have a page. Whoever made it has chosen.
enum class PageHandle : uint32_t {
  kNone = 0,
  kDescriptor,  // a POSIX file descriptor
  kFabric,      // bytes, of hosts with fabric handles (IMEX)
};

struct SharedPage {
  uint64_t size_bytes = 0;
  PageHandle handle = PageHandle::kNone;
  CUmemFabricHandle fabric = {};  // of kFabric
};

// The page mapped at `address`, but for its size. Error: kNotFound, the memory
// there is none of cuMemMap.
absl::StatusOr<SharedPage> FindPage(uint64_t address);

// A descriptor of the page mapped at `address`. Errors: kNotFound as above;
// kInternal, it is not one of kDescriptor.
absl::StatusOr<FileDescriptor> OpenPage(uint64_t address);

// Lets `device` reach what is mapped in this process at `address`: peer access
// between devices does not cover pages. Error: kFailedPrecondition.
absl::Status AllowAccess(int device, uint64_t address, uint64_t size_bytes);

// Pages of another process, mapped side by side for one device.
class MappedPages {
 public:
  // `open` gives the descriptor of page number i.
  static absl::StatusOr<std::unique_ptr<MappedPages>> Map(
      int device, absl::Span<const SharedPage> pages,
      const std::function<absl::StatusOr<FileDescriptor>(size_t)>& open);
  ~MappedPages();
  std::byte* address() const;

 private:
  MappedPages(int device, uint64_t size_bytes)
      : device_(device), size_bytes_(size_bytes) {}
  absl::Status Add(const SharedPage& page, FileDescriptor descriptor);

  const int device_;
  const uint64_t size_bytes_;
  CUdeviceptr address_ = 0;
  std::vector<uint64_t> mapped_;  // bytes of each page that is
  uint64_t mapped_bytes_ = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_PAGES_H_
