#include "executor/device/cuda/cuda_sharing.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control/payload.h"
#include "executor/device/cuda/cuda_allocations.h"
#include "executor/device/cuda/cuda_pages.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/scoped_device.h"
#include "executor/device/memory_export.h"

namespace refit {
namespace {

// Handles of both kinds travel in the same bytes.
static_assert(sizeof(cudaIpcMemHandle_t) == ExportedAllocation::kHandleBytes);
static_assert(sizeof(CUmemFabricHandle) == ExportedAllocation::kHandleBytes);

template <typename Handle>
Handle HandleIn(const ExportedAllocation& allocation) {
  Handle handle;
  std::memcpy(&handle, allocation.handle.data(), sizeof(handle));
  return handle;
}

// Of cudaMalloc, or a page; else memory that cannot be shared, which is not an
// error yet: a rank of the same process needs no handle.
ExportedAllocation Describe(const CudaAllocation& allocation) {
  ExportedAllocation described;
  described.size_bytes = allocation.size_bytes;
  cudaIpcMemHandle_t ipc;
  if (cudaIpcGetMemHandle(&ipc, reinterpret_cast<void*>(allocation.base)) ==
      cudaSuccess) {
    described.by = SharedBy::kIpc;
    std::memcpy(described.handle.data(), &ipc, sizeof(ipc));
    return described;
  }
  cudaGetLastError();
  const absl::StatusOr<SharedPage> page = FindPage(allocation.base);
  if (!page.ok()) return described;
  switch (page->handle) {
    case PageHandle::kNone:
      described.by = SharedBy::kPage;
      break;
    case PageHandle::kDescriptor:
      described.by = SharedBy::kDescriptorPage;
      break;
    case PageHandle::kFabric:
      described.by = SharedBy::kFabricPage;
      std::memcpy(described.handle.data(), &page->fabric, sizeof(page->fabric));
      break;
  }
  return described;
}

bool IsPage(const ExportedAllocation& allocation) {
  return allocation.by == SharedBy::kPage ||
         allocation.by == SharedBy::kDescriptorPage ||
         allocation.by == SharedBy::kFabricPage;
}

// What a rank of another process asks the owner's server for.
struct PageRequest {
  Token token = {};     // of the export
  uint32_t number = 0;  // of the allocation
};

std::string WriteRequest(const PageRequest& request) {
  return PayloadWriter()
      .Bytes(TokenBytes(request.token))
      .U32(request.number)
      .Take();
}

// Opens a page that is lent at this moment, and no other.
absl::StatusOr<FileDescriptor> OpenLentPage(std::string_view bytes) {
  PayloadReader reader(bytes);
  const std::optional<Token> token = TokenOf(reader.Bytes(sizeof(Token)));
  const uint32_t number = reader.U32();
  if (!reader.Complete() || !token.has_value()) {
    return absl::InvalidArgumentError("no request for a page");
  }
  const std::shared_ptr<const LentMemory> lent = LentMemories().Find(*token);
  if (lent == nullptr || number >= lent->pages.size() ||
      lent->pages[number].data == nullptr) {
    return absl::NotFoundError("its owner shows no such memory any more");
  }
  return OpenPage(reinterpret_cast<uint64_t>(lent->pages[number].data));
}

// The one that holds `address`. Requires: there is one.
uint64_t IndexOf(uint64_t address,
                 const std::vector<CudaAllocation>& allocations) {
  const auto after =
      std::upper_bound(allocations.begin(), allocations.end(), address,
                       [](uint64_t a, const CudaAllocation& allocation) {
                         return a < allocation.base;
                       });
  return static_cast<uint64_t>(after - allocations.begin()) - 1;
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
    std::erase_if(open,
                  [](const auto& entry) { return entry.second.expired(); });
    if (std::shared_ptr<IpcMapping> known = open[key].lock()) return known;
    void* address = nullptr;
    absl::Status status = CudaStatus(
        cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess),
        "cudaIpcOpenMemHandle");
    if (!status.ok()) return status;
    std::shared_ptr<IpcMapping> mapping(
        new IpcMapping(device, static_cast<std::byte*>(address)));
    const MemoryRange first = {.data = mapping->address_, .size_bytes = 1};
    status = VisitCudaAllocations(
        {&first, 1}, [&](const CudaAllocation& allocation) {
          mapping->size_bytes_ = allocation.base + allocation.size_bytes -
                                 reinterpret_cast<uint64_t>(address);
        });
    if (!status.ok()) return status;
    open[key] = mapping;
    return mapping;
  }
  ~IpcMapping() {
    const ScopedDevice current(device_);
    cudaIpcCloseMemHandle(address_);
  }
  std::byte* address() const { return address_; }
  // As the driver says, whatever the owner does.
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  IpcMapping(int device, std::byte* address)
      : device_(device), address_(address) {}

  const int device_;
  std::byte* const address_;
  uint64_t size_bytes_ = 0;
};

absl::Status CannotReach(int from, int to, const absl::Status& why) {
  return absl::FailedPreconditionError(absl::StrCat(
      "device ", from, " cannot reach memory of device ", to, " (",
      why.message(), "); compile the plan with options.peer \"staged\""));
}

absl::Status EnablePeerAccess(int from, int to) {
  if (from == to) return absl::OkStatus();
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return absl::OkStatus();
  }
  const absl::Status status = CudaStatus(error, "cudaDeviceEnablePeerAccess");
  return status.ok() ? status : CannotReach(from, to, status);
}

class CudaMappedMemory : public MappedMemory {
 public:
  CudaMappedMemory(int device, std::chrono::steady_clock::time_point deadline)
      : device_(device), deadline_(deadline) {}

  // Of this process: where the ranges are is in `lent`.
  absl::Status Reach(std::shared_ptr<const LentMemory> owned) {
    lent_ = std::move(owned);
    const LentMemory& lent = *lent_;
    const int owner = lent.device;
    absl::Status status = EnablePeerAccess(device_, owner);
    for (const MemoryRange& page : lent.pages) {
      if (!status.ok()) return status;
      if (owner == device_ || page.data == nullptr) continue;
      const absl::Status allowed = AllowAccess(
          device_, reinterpret_cast<uint64_t>(page.data), page.size_bytes);
      if (!allowed.ok()) status = CannotReach(device_, owner, allowed);
    }
    for (const MemoryRange& range : lent.ranges) {
      addresses_.push_back(range.size_bytes != 0 ? range.data : nullptr);
    }
    return status;
  }

  // Of another process.
  absl::Status Map(const MemoryExport& exported) {
    absl::Status status = MapAllocations(exported);
    if (status.ok()) status = Resolve(exported);
    return status;
  }

  absl::Span<std::byte* const> addresses() const override { return addresses_; }

 private:
  // An allocation as this device reaches it, and how much follows in one piece.
  struct Mapping {
    std::byte* address = nullptr;
    uint64_t size_bytes = 0;
  };

  absl::Status MapAllocations(const MemoryExport& exported) {
    const std::vector<ExportedAllocation>& allocations = exported.allocations;
    absl::Status status;
    while (mappings_.size() < allocations.size() && status.ok()) {
      const ExportedAllocation& next = allocations[mappings_.size()];
      switch (next.by) {
        case SharedBy::kIpc:
          status = MapIpc(next);
          break;
        case SharedBy::kPage:
        case SharedBy::kDescriptorPage:
        case SharedBy::kFabricPage:
          status = MapPagesFrom(mappings_.size(), exported);
          break;
        case SharedBy::kNothing:
          status = absl::FailedPreconditionError(
              "memory that processes cannot share: neither of cudaMalloc nor "
              "of cuMemMap");
          break;
      }
    }
    return status;
  }

  absl::Status MapIpc(const ExportedAllocation& allocation) {
    absl::StatusOr<std::shared_ptr<IpcMapping>> mapping =
        IpcMapping::Open(device_, HandleIn<cudaIpcMemHandle_t>(allocation));
    if (!mapping.ok()) return mapping.status();
    mappings_.push_back({(*mapping)->address(), (*mapping)->size_bytes()});
    ipc_.push_back(*std::move(mapping));
    return absl::OkStatus();
  }

  // All pages that follow each other without a gap.
  absl::Status MapPagesFrom(size_t first, const MemoryExport& exported) {
    const std::vector<ExportedAllocation>& allocations = exported.allocations;
    std::vector<SharedPage> pages;
    uint64_t total_bytes = 0;
    for (size_t i = first; i < allocations.size(); ++i) {
      if (!IsPage(allocations[i]) || (i > first && !allocations[i].continues)) {
        break;
      }
      if (allocations[i].by == SharedBy::kPage) {
        return absl::FailedPreconditionError(
            "memory of cuMemCreate without a handle for other processes (file "
            "descriptor or fabric), such as that of vLLM's sleep mode or "
            "torch_memory_saver");
      }
      SharedPage page = {.size_bytes = allocations[i].size_bytes,
                         .handle = PageHandle::kDescriptor,
                         .fabric = {}};
      if (allocations[i].by == SharedBy::kFabricPage) {
        page.handle = PageHandle::kFabric;
        page.fabric = HandleIn<CUmemFabricHandle>(allocations[i]);
      }
      total_bytes += page.size_bytes;
      pages.push_back(page);
    }
    absl::StatusOr<std::unique_ptr<MappedPages>> mapped =
        MappedPages::Map(device_, pages, [&](size_t i) {
          return FetchDescriptor(
              exported.server,
              WriteRequest({exported.token, static_cast<uint32_t>(first + i)}),
              deadline_);
        });
    if (!mapped.ok()) {
      return absl::Status(
          mapped.status().code(),
          absl::StrCat("memory of cuMemMap that process ",
                       exported.process.process,
                       " shares: ", mapped.status().message(),
                       "; options.peer \"staged\" does without"));
    }
    std::byte* address = (*mapped)->address();
    for (const SharedPage& page : pages) {
      mappings_.push_back({address, total_bytes});
      address += page.size_bytes;
      total_bytes -= page.size_bytes;
    }
    pages_.push_back(*std::move(mapped));
    return absl::OkStatus();
  }

  absl::Status Resolve(const MemoryExport& exported) {
    for (const ExportedRange& range : exported.ranges) {
      if (range.allocation == ExportedRange::kNoAllocation) {
        addresses_.push_back(nullptr);
        continue;
      }
      const Mapping& mapping = mappings_[range.allocation];
      if (range.offset > mapping.size_bytes ||
          range.size_bytes > mapping.size_bytes - range.offset) {
        return absl::FailedPreconditionError(
            "a tensor that lies across allocations that are shared apart");
      }
      addresses_.push_back(mapping.address + range.offset);
    }
    return absl::OkStatus();
  }

  const int device_;
  const std::chrono::steady_clock::time_point deadline_;
  std::shared_ptr<const LentMemory> lent_;  // null: another process's
  std::vector<Mapping> mappings_;           // by allocation
  std::vector<std::byte*> addresses_;
  std::vector<std::shared_ptr<IpcMapping>> ipc_;
  std::vector<std::unique_ptr<MappedPages>> pages_;
};

}  // namespace

absl::StatusOr<std::string> CudaSharing::ServerName() {
  std::lock_guard lock(mutex_);
  if (server_ == nullptr) {
    absl::StatusOr<std::unique_ptr<DescriptorServer>> server =
        DescriptorServer::Start([device = device_](std::string_view request)
                                    -> absl::StatusOr<FileDescriptor> {
          // The thread is Refit's own; others may capture meanwhile.
          cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
          cudaThreadExchangeStreamCaptureMode(&mode);
          const absl::Status current =
              CudaStatus(cudaSetDevice(device), "cudaSetDevice");
          if (!current.ok()) return current;
          return OpenLentPage(request);
        });
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
  }
  return server_->name();
}

absl::StatusOr<std::unique_ptr<ExportedMemory>> CudaSharing::Export(
    absl::Span<const MemoryRange> ranges, std::shared_ptr<const void> memory) {
  const ScopedDevice current(device_);
  std::vector<CudaAllocation> allocations;
  const absl::Status status = VisitCudaAllocations(
      ranges,
      [&](const CudaAllocation& found) { allocations.push_back(found); });
  if (!status.ok()) return status;
  std::sort(allocations.begin(), allocations.end(),
            [](const CudaAllocation& a, const CudaAllocation& b) {
              return a.base < b.base;
            });
  MemoryExport exported;
  LentMemory lent = {.kind = MemoryKind::kCuda,
                     .device = device_,
                     .ranges = {ranges.begin(), ranges.end()},
                     .pages = {},
                     .memory = std::move(memory)};
  bool by_descriptor = false;
  uint64_t end = 0;
  for (const CudaAllocation& allocation : allocations) {
    ExportedAllocation described = Describe(allocation);
    described.continues = allocation.base == end;
    end = allocation.base + allocation.size_bytes;
    by_descriptor |= described.by == SharedBy::kDescriptorPage;
    lent.pages.push_back(
        IsPage(described)
            ? MemoryRange{reinterpret_cast<std::byte*>(allocation.base),
                          allocation.size_bytes}
            : MemoryRange{});
    exported.allocations.push_back(described);
  }
  for (MemoryRange& range : lent.ranges) {
    if (range.data == nullptr || range.size_bytes == 0) {
      range = {};
      exported.ranges.push_back({});
      continue;
    }
    const auto address = reinterpret_cast<uint64_t>(range.data);
    const uint64_t allocation = IndexOf(address, allocations);
    exported.ranges.push_back(
        {.size_bytes = range.size_bytes,
         .allocation = allocation,
         .offset = address - allocations[allocation].base});
  }
  if (by_descriptor) {
    absl::StatusOr<std::string> server = ServerName();
    if (!server.ok()) return server.status();
    exported.server = *std::move(server);
  }
  return Lend(std::move(lent), std::move(exported));
}

absl::StatusOr<std::unique_ptr<MappedMemory>> CudaSharing::Import(
    std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
    std::chrono::steady_clock::time_point deadline) {
  const ScopedDevice current(device_);
  const absl::StatusOr<MemoryExport> read =
      ReadMemoryExport(exported, MemoryKind::kCuda, sizes_bytes);
  if (!read.ok()) return read.status();
  const absl::StatusOr<std::shared_ptr<const LentMemory>> lent =
      FindLent(*read);
  if (!lent.ok()) return lent.status();
  auto mapped = std::make_unique<CudaMappedMemory>(device_, deadline);
  const absl::Status status =
      *lent != nullptr ? mapped->Reach(*lent) : mapped->Map(*read);
  if (!status.ok()) return status;
  return mapped;
}

}  // namespace refit
