#include "executor/device/cuda/cuda_allocations.h"

#include <cuda.h>

#include <iterator>
#include <map>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/driver_function.h"

namespace refit {

absl::Status VisitCudaAllocations(
    absl::Span<const MemoryRange> ranges,
    const std::function<void(const CudaAllocation&)>& visit) {
  using AddressRange = CUresult (*)(CUdeviceptr * base, size_t * size_bytes,
                                    CUdeviceptr address);
  const absl::StatusOr<AddressRange> address_range =
      FindDriverFunction<AddressRange>("cuMemGetAddressRange");
  if (!address_range.ok()) return address_range.status();
  std::map<uint64_t, uint64_t> end_of_base;
  absl::Status status;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].data == nullptr) continue;
    auto address = reinterpret_cast<uint64_t>(ranges[i].data);
    const uint64_t range_end = address + ranges[i].size_bytes;
    while (address < range_end) {
      const auto after = end_of_base.upper_bound(address);
      if (after != end_of_base.begin() && std::prev(after)->second > address) {
        address = std::prev(after)->second;
        continue;
      }
      CUdeviceptr base = 0;
      size_t size_bytes = 0;
      if ((*address_range)(&base, &size_bytes, address) != CUDA_SUCCESS ||
          base + size_bytes <= address) {
        status.Update(absl::FailedPreconditionError(absl::StrCat(
            "address 0x", absl::Hex(address), " is not device memory")));
        break;
      }
      visit({.base = base, .size_bytes = size_bytes, .range = i});
      end_of_base[base] = base + size_bytes;
      address = base + size_bytes;
    }
  }
  return status;
}

}  // namespace refit
