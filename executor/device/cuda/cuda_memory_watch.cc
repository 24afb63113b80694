#include "executor/device/cuda/cuda_memory_watch.h"

#include <cuda.h>

#include <set>
#include <utility>
#include <vector>

#include "executor/device/cuda/cuda_allocations.h"
#include "executor/device/cuda/driver_function.h"

namespace refit {
namespace {

using GetAttribute = CUresult (*)(void* value, CUpointer_attribute attribute,
                                  CUdeviceptr address);

// 0: memory without a number, or none at all. Allocations of cudaMalloc have
// one kind of number, pages of cuMemMap another.
uint64_t MemoryNumber(GetAttribute get, CUdeviceptr address) {
  for (const CUpointer_attribute kind :
       {CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID}) {
    unsigned long long number = 0;
    if (get(&number, kind, address) == CUDA_SUCCESS && number != 0) {
      return number;
    }
  }
  return 0;
}

class CudaMemoryWatch : public MemoryWatch {
 public:
  struct Watched {
    size_t range;  // the first in it
    CUdeviceptr address;
    uint64_t number;
  };

  CudaMemoryWatch(GetAttribute get, std::vector<Watched> watched,
                  std::set<size_t> unwatched)
      : get_(get),
        watched_(std::move(watched)),
        unwatched_(std::move(unwatched)) {}

  std::optional<size_t> FirstGone() override {
    for (const Watched& one : watched_) {
      if (MemoryNumber(get_, one.address) != one.number) return one.range;
    }
    return std::nullopt;
  }

  std::vector<size_t> Unwatched() const override {
    return {unwatched_.begin(), unwatched_.end()};
  }

 private:
  const GetAttribute get_;
  const std::vector<Watched> watched_;
  const std::set<size_t> unwatched_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryWatch>> WatchCudaMemory(
    absl::Span<const MemoryRange> ranges) {
  const absl::StatusOr<GetAttribute> get =
      FindDriverFunction<GetAttribute>("cuPointerGetAttribute");
  if (!get.ok()) return get.status();
  std::vector<CudaMemoryWatch::Watched> watched;
  std::set<size_t> unwatched;
  const absl::Status status =
      VisitCudaAllocations(ranges, [&](const CudaAllocation& allocation) {
        const uint64_t number = MemoryNumber(*get, allocation.base);
        if (number != 0) {
          watched.push_back({allocation.range, allocation.base, number});
        } else {
          unwatched.insert(allocation.range);
        }
      });
  // What is not device memory is not watched.
  if (!status.ok() && !absl::IsFailedPrecondition(status)) return status;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].size_bytes == 0) continue;
    const auto address = reinterpret_cast<CUdeviceptr>(ranges[i].data);
    if (MemoryNumber(*get, address) == 0) unwatched.insert(i);
  }
  return std::make_unique<CudaMemoryWatch>(*get, std::move(watched),
                                           std::move(unwatched));
}

}  // namespace refit
