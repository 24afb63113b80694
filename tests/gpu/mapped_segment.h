// MappedSegment: memory of cuMemMap, as expandable segments make it.
#ifndef REFIT_TESTS_GPU_MAPPED_SEGMENT_H_
#define REFIT_TESTS_GPU_MAPPED_SEGMENT_H_

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "refit/device.h"

namespace refit {

template <typename Function>
Function DriverFunction(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &found, 12000,
                                             cudaEnableDefault, &result),
            cudaSuccess);
  return reinterpret_cast<Function>(found);
}

// Addresses with room for pages, of which some are mapped: a small expandable
// segment.
class MappedSegment {
 public:
  explicit MappedSegment(
      size_t pages,
      unsigned handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
      int device = 0)
      : pages_(pages) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = device;
    properties_.requestedHandleTypes =
        static_cast<CUmemAllocationHandleType>(handle_types);
    EXPECT_EQ(DriverFunction<PFN_cuMemGetAllocationGranularity_v10020>(
                  "cuMemGetAllocationGranularity")(
                  &page_bytes_, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
              CUDA_SUCCESS);
    EXPECT_EQ(
        DriverFunction<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve")(
            &address_, pages_.size() * page_bytes_, 0, 0, 0),
        CUDA_SUCCESS);
  }
  ~MappedSegment() {
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (pages_[i]) Unmap(i);
    }
    DriverFunction<PFN_cuMemAddressFree_v10020>("cuMemAddressFree")(
        address_, pages_.size() * page_bytes_);
  }

  // Physical memory that is new, at page `i`.
  void Map(size_t i) {
    CUmemGenericAllocationHandle handle = 0;
    ASSERT_EQ(DriverFunction<PFN_cuMemCreate_v10020>("cuMemCreate")(
                  &handle, page_bytes_, &properties_, 0),
              CUDA_SUCCESS);
    ASSERT_EQ(DriverFunction<PFN_cuMemMap_v10020>("cuMemMap")(
                  At(i), page_bytes_, 0, handle, 0),
              CUDA_SUCCESS);
    ASSERT_EQ(DriverFunction<PFN_cuMemRelease_v10020>("cuMemRelease")(handle),
              CUDA_SUCCESS);
    CUmemAccessDesc access = {};
    access.location = properties_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    ASSERT_EQ(DriverFunction<PFN_cuMemSetAccess_v10020>("cuMemSetAccess")(
                  At(i), page_bytes_, &access, 1),
              CUDA_SUCCESS);
    pages_[i] = true;
  }
  void Unmap(size_t i) {
    EXPECT_EQ(
        DriverFunction<PFN_cuMemUnmap_v10020>("cuMemUnmap")(At(i), page_bytes_),
        CUDA_SUCCESS);
    pages_[i] = false;
  }

  size_t page_bytes() const { return page_bytes_; }
  MemoryRange Range(size_t offset, size_t size_bytes) const {
    return {reinterpret_cast<std::byte*>(address_ + offset), size_bytes};
  }

 private:
  CUdeviceptr At(size_t i) const { return address_ + i * page_bytes_; }

  CUmemAllocationProp properties_ = {};
  size_t page_bytes_ = 0;
  CUdeviceptr address_ = 0;
  std::vector<bool> pages_;
};

}  // namespace refit

#endif  // REFIT_TESTS_GPU_MAPPED_SEGMENT_H_
