#include "executor/device/cuda/cuda_sharing.h"

#include <cuda.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/driver_function.h"
#include "executor/device/process_identity.h"

namespace refit {
namespace {

// The form of an export: a header, then allocations, then ranges. Both ends run
// the same build on one host, so structs are copied as they are.
struct ExportHeader {
  uint64_t magic;
  ProcessIdentity process;
  int32_t device;
  int32_t reserved;
  uint64_t allocations;
  uint64_t ranges;
};
struct ExportedAllocation {
  uint64_t base;
  uint64_t size_bytes;
  cudaIpcMemHandle_t handle;
  int64_t has_handle;  // 0: memory that IPC cannot share
};
struct ExportedRange {
  uint64_t allocation;  // kNoAllocation: an empty range
  uint64_t offset;
};
constexpr uint64_t kExportMagic = 0x5445465f41445543;  // "CUDA_FET"
constexpr uint64_t kNoAllocation = ~uint64_t{0};

using AddressRangeFunction = CUresult (*)(CUdeviceptr* base, size_t* size,
                                          CUdeviceptr address);

ExportedAllocation ExportAllocation(uint64_t base, uint64_t size_bytes) {
  ExportedAllocation allocation = {};
  allocation.base = base;
  allocation.size_bytes = size_bytes;
  allocation.has_handle =
      cudaIpcGetMemHandle(&allocation.handle, reinterpret_cast<void*>(base)) ==
      cudaSuccess;
  // Not an error yet: a rank of the same process needs no handle.
  if (allocation.has_handle == 0) cudaGetLastError();
  return allocation;
}

template <typename T>
void AppendTo(const T* values, size_t count, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

// A view of an export, checked.
struct ExportView {
  ExportHeader header;
  std::vector<ExportedAllocation> allocations;
  std::vector<ExportedRange> ranges;
};

absl::StatusOr<ExportView> ParseExport(std::string_view bytes) {
  const absl::Status bad =
      absl::InvalidArgumentError("not memory exported by a CUDA device");
  ExportView view;
  if (bytes.size() < sizeof(view.header)) return bad;
  std::memcpy(&view.header, bytes.data(), sizeof(view.header));
  bytes.remove_prefix(sizeof(view.header));
  const uint64_t most = bytes.size() / sizeof(ExportedRange);
  if (view.header.magic != kExportMagic || view.header.allocations > most ||
      view.header.ranges > most ||
      bytes.size() != view.header.allocations * sizeof(ExportedAllocation) +
                          view.header.ranges * sizeof(ExportedRange)) {
    return bad;
  }
  view.allocations.resize(view.header.allocations);
  view.ranges.resize(view.header.ranges);
  const size_t allocation_bytes =
      view.allocations.size() * sizeof(ExportedAllocation);
  std::memcpy(view.allocations.data(), bytes.data(), allocation_bytes);
  std::memcpy(view.ranges.data(), bytes.data() + allocation_bytes,
              view.ranges.size() * sizeof(ExportedRange));
  for (const ExportedRange& range : view.ranges) {
    if (range.allocation != kNoAllocation &&
        (range.allocation >= view.allocations.size() ||
         range.offset >= view.allocations[range.allocation].size_bytes)) {
      return bad;
    }
  }
  return view;
}

// An allocation of another process, mapped once per device however many users
// it has: a process cannot map it twice.
class IpcMapping {
 public:
  static absl::StatusOr<std::shared_ptr<IpcMapping>> Open(
      int device, const cudaIpcMemHandle_t& handle) {
    static std::mutex mutex;
    static std::map<std::pair<int, std::string>, std::weak_ptr<IpcMapping>>
        open;
    const std::pair key(
        device,
        std::string(reinterpret_cast<const char*>(&handle), sizeof(handle)));
    std::lock_guard lock(mutex);
    if (std::shared_ptr<IpcMapping> known = open[key].lock()) return known;
    void* address = nullptr;
    absl::Status status = CudaStatus(
        cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess),
        "cudaIpcOpenMemHandle");
    if (!status.ok()) return status;
    std::shared_ptr<IpcMapping> mapping(
        new IpcMapping(device, static_cast<std::byte*>(address)));
    open[key] = mapping;
    return mapping;
  }
  ~IpcMapping() {
    const ScopedDevice current(device_);
    cudaIpcCloseMemHandle(address_);
  }
  std::byte* address() const { return address_; }

 private:
  IpcMapping(int device, std::byte* address)
      : device_(device), address_(address) {}

  const int device_;
  std::byte* const address_;
};

class CudaMappedMemory : public MappedMemory {
 public:
  CudaMappedMemory(std::vector<std::byte*> addresses,
                   std::vector<std::shared_ptr<IpcMapping>> mappings)
      : addresses_(std::move(addresses)), mappings_(std::move(mappings)) {}
  absl::Span<std::byte* const> addresses() const override { return addresses_; }

 private:
  std::vector<std::byte*> addresses_;
  std::vector<std::shared_ptr<IpcMapping>> mappings_;
};

absl::Status EnablePeerAccess(int from, int to) {
  if (from == to) return absl::OkStatus();
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return absl::OkStatus();
  }
  absl::Status status = CudaStatus(error, "cudaDeviceEnablePeerAccess");
  if (status.ok()) return status;
  return absl::FailedPreconditionError(absl::StrCat(
      "device ", from, " cannot reach memory of device ", to, " (",
      status.message(), "); compile the plan with options.peer \"staged\""));
}

}  // namespace

absl::StatusOr<std::string> ExportCudaMemory(
    int device, absl::Span<const MemoryRange> ranges) {
  const ScopedDevice current(device);
  absl::StatusOr<AddressRangeFunction> address_range =
      FindDriverFunction<AddressRangeFunction>("cuMemGetAddressRange");
  if (!address_range.ok()) return address_range.status();
  std::map<uint64_t, uint64_t> index_of_base;
  std::vector<ExportedAllocation> allocations;
  std::vector<ExportedRange> exported;
  for (const MemoryRange& range : ranges) {
    if (range.data == nullptr || range.size_bytes == 0) {
      exported.push_back({.allocation = kNoAllocation, .offset = 0});
      continue;
    }
    const auto address = reinterpret_cast<uint64_t>(range.data);
    auto found = index_of_base.upper_bound(address);
    const bool known = found != index_of_base.begin() &&
                       address - std::prev(found)->first <
                           allocations[std::prev(found)->second].size_bytes;
    if (!known) {
      CUdeviceptr base = 0;
      size_t size_bytes = 0;
      if ((*address_range)(&base, &size_bytes, address) != CUDA_SUCCESS) {
        return absl::FailedPreconditionError(absl::StrCat(
            "address 0x", absl::Hex(address), " is not device memory"));
      }
      index_of_base[base] = allocations.size();
      allocations.push_back(ExportAllocation(base, size_bytes));
    }
    const uint64_t allocation =
        std::prev(index_of_base.upper_bound(address))->second;
    exported.push_back({.allocation = allocation,
                        .offset = address - allocations[allocation].base});
  }
  const ExportHeader header = {.magic = kExportMagic,
                               .process = ThisProcess(),
                               .device = device,
                               .reserved = 0,
                               .allocations = allocations.size(),
                               .ranges = exported.size()};
  std::string bytes;
  AppendTo(&header, 1, bytes);
  AppendTo(allocations.data(), allocations.size(), bytes);
  AppendTo(exported.data(), exported.size(), bytes);
  return bytes;
}

absl::StatusOr<std::unique_ptr<MappedMemory>> ImportCudaMemory(
    int device, std::string_view exported) {
  const ScopedDevice current(device);
  absl::StatusOr<ExportView> view = ParseExport(exported);
  if (!view.ok()) return view.status();
  std::vector<std::byte*> bases;
  std::vector<std::shared_ptr<IpcMapping>> mappings;
  const bool same_process = view->header.process == ThisProcess();
  if (same_process) {
    absl::Status status = EnablePeerAccess(device, view->header.device);
    if (!status.ok()) return status;
  }
  for (const ExportedAllocation& allocation : view->allocations) {
    if (same_process) {
      bases.push_back(reinterpret_cast<std::byte*>(allocation.base));
      continue;
    }
    if (allocation.has_handle == 0) {
      return absl::FailedPreconditionError(
          "memory that CUDA IPC cannot share, such as PyTorch's expandable "
          "segments; allocate it with cudaMalloc, or compile the plan with "
          "options.peer \"staged\"");
    }
    absl::StatusOr<std::shared_ptr<IpcMapping>> mapping =
        IpcMapping::Open(device, allocation.handle);
    if (!mapping.ok()) return mapping.status();
    bases.push_back((*mapping)->address());
    mappings.push_back(*std::move(mapping));
  }
  std::vector<std::byte*> addresses;
  for (const ExportedRange& range : view->ranges) {
    addresses.push_back(range.allocation == kNoAllocation
                            ? nullptr
                            : bases[range.allocation] + range.offset);
  }
  return std::make_unique<CudaMappedMemory>(std::move(addresses),
                                            std::move(mappings));
}

}  // namespace refit
