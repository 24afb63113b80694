#include "executor/device/cuda/cuda_memory_watch.h"

#include <cuda.h>

#include <set>
#include <utility>
#include <vector>

#include "executor/device/cuda/driver_function.h"

namespace refit {
namespace {

using GetAttribute = CUresult (*)(void* value, CUpointer_attribute attribute,
                                  CUdeviceptr address);

// 0: memory without a number, or none at all.
uint64_t BufferId(GetAttribute get, CUdeviceptr address) {
  unsigned long long id = 0;
  const CUresult result = get(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
  return result == CUDA_SUCCESS ? id : 0;
}

class CudaMemoryWatch : public MemoryWatch {
 public:
  struct Watched {
    size_t range;  // the first in its allocation
    CUdeviceptr address;
    uint64_t id;
  };

  CudaMemoryWatch(GetAttribute get, std::vector<Watched> watched)
      : get_(get), watched_(std::move(watched)) {}

  std::optional<size_t> FirstGone() override {
    for (const Watched& one : watched_) {
      if (BufferId(get_, one.address) != one.id) return one.range;
    }
    return std::nullopt;
  }

 private:
  const GetAttribute get_;
  const std::vector<Watched> watched_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryWatch>> WatchCudaMemory(
    absl::Span<const MemoryRange> ranges) {
  const absl::StatusOr<GetAttribute> get =
      FindDriverFunction<GetAttribute>("cuPointerGetAttribute");
  if (!get.ok()) return get.status();
  std::vector<CudaMemoryWatch::Watched> watched;
  std::set<uint64_t> known;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].data == nullptr || ranges[i].size_bytes == 0) continue;
    const auto address = reinterpret_cast<CUdeviceptr>(ranges[i].data);
    const uint64_t id = BufferId(*get, address);
    if (id != 0 && known.insert(id).second) watched.push_back({i, address, id});
  }
  return std::make_unique<CudaMemoryWatch>(*get, std::move(watched));
}

}  // namespace refit
