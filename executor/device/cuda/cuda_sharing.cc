#include "executor/device/cuda/cuda_sharing.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/cuda_allocations.h"
#include "executor/device/cuda/cuda_export.h"
#include "executor/device/cuda/cuda_pages.h"
#include "executor/device/cuda/cuda_status.h"

namespace refit {
namespace {

// Of cudaMalloc, or a page; else memory that cannot be shared, which is not an
// error yet: a rank of the same process needs no handle.
ExportedAllocation Describe(const CudaAllocation& allocation) {
  ExportedAllocation described = {};
  described.base = allocation.base;
  if (cudaIpcGetMemHandle(&described.ipc,
                          reinterpret_cast<void*>(allocation.base)) ==
      cudaSuccess) {
    described.by = SharedBy::kIpc;
  } else {
    cudaGetLastError();
    const absl::StatusOr<SharedPage> page = FindPage(allocation.base);
    if (page.ok()) {
      described.by = SharedBy::kPage;
      described.page = *page;
    }
  }
  described.page.size_bytes = allocation.size_bytes;
  return described;
}

// The one that holds `address`. Requires: there is one.
uint64_t IndexOf(uint64_t address,
                 const std::vector<ExportedAllocation>& allocations) {
  const auto after =
      std::upper_bound(allocations.begin(), allocations.end(), address,
                       [](uint64_t a, const ExportedAllocation& allocation) {
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
  explicit CudaMappedMemory(int device) : device_(device) {}

  absl::Status Map(const CudaExport& exported) {
    absl::Status status = exported.header.process == ThisProcess()
                              ? Reach(exported)
                              : MapAllocations(exported);
    if (status.ok()) status = Resolve(exported);
    return status;
  }

  absl::Span<std::byte* const> addresses() const override { return addresses_; }

 private:
  // An allocation as this device reaches it, and how much follows in one piece.
  struct Place {
    std::byte* address = nullptr;
    uint64_t size_bytes = 0;
  };

  // Of this process.
  absl::Status Reach(const CudaExport& exported) {
    const int owner = exported.header.device;
    absl::Status status = EnablePeerAccess(device_, owner);
    for (const ExportedAllocation& allocation : exported.allocations) {
      if (!status.ok()) return status;
      if (owner != device_ && allocation.by == SharedBy::kPage) {
        const absl::Status allowed =
            AllowAccess(device_, allocation.base, allocation.size_bytes());
        if (!allowed.ok()) {
          status = CannotReach(device_, owner, allowed);
        }
      }
      places_.push_back({reinterpret_cast<std::byte*>(allocation.base),
                         exported.allocations.back().end() - allocation.base});
    }
    return status;
  }

  absl::Status MapAllocations(const CudaExport& exported) {
    const std::vector<ExportedAllocation>& allocations = exported.allocations;
    absl::Status status;
    while (places_.size() < allocations.size() && status.ok()) {
      const ExportedAllocation& next = allocations[places_.size()];
      switch (next.by) {
        case SharedBy::kIpc:
          status = MapIpc(next);
          break;
        case SharedBy::kPage:
          status = MapPagesFrom(places_.size(), exported);
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
        IpcMapping::Open(device_, allocation.ipc);
    if (!mapping.ok()) return mapping.status();
    places_.push_back({(*mapping)->address(), allocation.size_bytes()});
    ipc_.push_back(*std::move(mapping));
    return absl::OkStatus();
  }

  // All pages that follow each other without a gap.
  absl::Status MapPagesFrom(size_t first, const CudaExport& exported) {
    const std::vector<ExportedAllocation>& allocations = exported.allocations;
    std::vector<SharedPage> pages;
    for (size_t i = first; i < allocations.size(); ++i) {
      if (allocations[i].by != SharedBy::kPage ||
          (i > first && allocations[i].base != allocations[i - 1].end())) {
        break;
      }
      if (allocations[i].page.handle == PageHandle::kNone) {
        return absl::FailedPreconditionError(
            "memory of cuMemCreate without a handle for other processes (file "
            "descriptor or fabric), such as that of vLLM's sleep mode or "
            "torch_memory_saver");
      }
      pages.push_back(allocations[i].page);
    }
    absl::StatusOr<std::unique_ptr<MappedPages>> mapped =
        MappedPages::Map(device_, pages, [&](size_t i) {
          return FetchDescriptor(exported.header.server,
                                 allocations[first + i].base);
        });
    if (!mapped.ok()) {
      return absl::Status(
          mapped.status().code(),
          absl::StrCat("memory of cuMemMap that process ",
                       exported.header.process.process,
                       " shares: ", mapped.status().message(),
                       "; options.peer \"staged\" does without"));
    }
    std::byte* address = (*mapped)->address();
    std::byte* const end = address +
                           allocations[first + pages.size() - 1].end() -
                           allocations[first].base;
    for (const SharedPage& page : pages) {
      places_.push_back({address, static_cast<uint64_t>(end - address)});
      address += page.size_bytes;
    }
    pages_.push_back(*std::move(mapped));
    return absl::OkStatus();
  }

  absl::Status Resolve(const CudaExport& exported) {
    for (const ExportedRange& range : exported.ranges) {
      if (range.allocation == kNoAllocation) {
        addresses_.push_back(nullptr);
        continue;
      }
      const Place& place = places_[range.allocation];
      if (range.size_bytes > place.size_bytes - range.offset) {
        return absl::FailedPreconditionError(
            "a tensor that lies across allocations that are shared apart");
      }
      addresses_.push_back(place.address + range.offset);
    }
    return absl::OkStatus();
  }

  const int device_;
  std::vector<Place> places_;  // by allocation
  std::vector<std::byte*> addresses_;
  std::vector<std::shared_ptr<IpcMapping>> ipc_;
  std::vector<std::unique_ptr<MappedPages>> pages_;
};

}  // namespace

absl::StatusOr<std::string> CudaSharing::ServerName() {
  std::lock_guard lock(mutex_);
  if (server_ == nullptr) {
    absl::StatusOr<std::unique_ptr<DescriptorServer>> server =
        DescriptorServer::Start(
            [device =
                 device_](uint64_t address) -> absl::StatusOr<FileDescriptor> {
              const absl::Status current =
                  CudaStatus(cudaSetDevice(device), "cudaSetDevice");
              if (!current.ok()) return current;
              return OpenPage(address);
            });
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
  }
  return server_->name();
}

absl::StatusOr<std::string> CudaSharing::Export(
    absl::Span<const MemoryRange> ranges) {
  const ScopedDevice current(device_);
  CudaExport exported;
  exported.header.process = ThisProcess();
  exported.header.device = device_;
  const absl::Status status =
      VisitCudaAllocations(ranges, [&](const CudaAllocation& allocation) {
        exported.allocations.push_back(Describe(allocation));
      });
  if (!status.ok()) return status;
  std::sort(exported.allocations.begin(), exported.allocations.end(),
            [](const ExportedAllocation& a, const ExportedAllocation& b) {
              return a.base < b.base;
            });
  for (const MemoryRange& range : ranges) {
    if (range.data == nullptr || range.size_bytes == 0) {
      exported.ranges.push_back({kNoAllocation, 0, 0});
      continue;
    }
    const auto address = reinterpret_cast<uint64_t>(range.data);
    const uint64_t allocation = IndexOf(address, exported.allocations);
    exported.ranges.push_back({allocation,
                               address - exported.allocations[allocation].base,
                               range.size_bytes});
  }
  const bool by_descriptor =
      std::any_of(exported.allocations.begin(), exported.allocations.end(),
                  [](const ExportedAllocation& allocation) {
                    return allocation.page.handle == PageHandle::kDescriptor;
                  });
  if (by_descriptor) {
    const absl::StatusOr<std::string> server = ServerName();
    if (!server.ok()) return server.status();
    server->copy(exported.header.server, DescriptorServer::kNameBytesMax);
  }
  return WriteCudaExport(exported);
}

absl::StatusOr<std::unique_ptr<MappedMemory>> CudaSharing::Import(
    std::string_view exported) {
  const ScopedDevice current(device_);
  const absl::StatusOr<CudaExport> read = ReadCudaExport(exported);
  if (!read.ok()) return read.status();
  auto mapped = std::make_unique<CudaMappedMemory>(device_);
  const absl::Status status = mapped->Map(*read);
  if (!status.ok()) return status;
  return mapped;
}

}  // namespace refit
