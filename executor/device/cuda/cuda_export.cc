#include "executor/device/cuda/cuda_export.h"

#include <cstring>
#include <type_traits>

namespace refit {
namespace {

constexpr uint64_t kMagic = 0x3245465f41445543;  // "CUDA_FE2"

template <typename T>
void Append(const T* values, size_t count, std::string& bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

template <typename T>
void Take(std::string_view& bytes, size_t count, T* values) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memcpy(static_cast<void*>(values), bytes.data(), count * sizeof(T));
  bytes.remove_prefix(count * sizeof(T));
}

bool AreGood(const std::vector<ExportedAllocation>& allocations) {
  uint64_t end = 0;
  for (const ExportedAllocation& allocation : allocations) {
    if (allocation.base < end || allocation.end() <= allocation.base ||
        allocation.by > SharedBy::kPage ||
        allocation.page.handle > PageHandle::kFabric) {
      return false;
    }
    end = allocation.end();
  }
  return true;
}

}  // namespace

std::string WriteCudaExport(const CudaExport& exported) {
  ExportHeader header = exported.header;
  header.magic = kMagic;
  header.allocations = exported.allocations.size();
  header.ranges = exported.ranges.size();
  std::string bytes;
  Append(&header, 1, bytes);
  Append(exported.allocations.data(), exported.allocations.size(), bytes);
  Append(exported.ranges.data(), exported.ranges.size(), bytes);
  return bytes;
}

absl::StatusOr<CudaExport> ReadCudaExport(std::string_view bytes) {
  const absl::Status bad =
      absl::InvalidArgumentError("not memory exported by a CUDA device");
  CudaExport exported;
  ExportHeader& header = exported.header;
  if (bytes.size() < sizeof(header)) return bad;
  Take(bytes, 1, &header);
  const uint64_t most = bytes.size() / sizeof(ExportedRange);
  if (header.magic != kMagic || header.allocations > most ||
      header.ranges > most ||
      bytes.size() != header.allocations * sizeof(ExportedAllocation) +
                          header.ranges * sizeof(ExportedRange) ||
      header.server[sizeof(header.server) - 1] != '\0') {
    return bad;
  }
  exported.allocations.resize(header.allocations);
  exported.ranges.resize(header.ranges);
  Take(bytes, header.allocations, exported.allocations.data());
  Take(bytes, header.ranges, exported.ranges.data());
  if (!AreGood(exported.allocations)) return bad;
  for (const ExportedRange& range : exported.ranges) {
    if (range.allocation != kNoAllocation &&
        (range.allocation >= header.allocations ||
         range.offset >= exported.allocations[range.allocation].size_bytes())) {
      return bad;
    }
  }
  return exported;
}

}  // namespace refit
