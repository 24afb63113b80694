#include "executor/device/cuda/cuda_pages.h"

#include <cudaTypedefs.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/driver_function.h"
#include "executor/device/cuda/scoped_device.h"

namespace refit {
namespace {

// The driver's functions for virtual memory.
struct PageFunctions {
  PFN_cuMemRetainAllocationHandle_v11000 retain;
  PFN_cuMemRelease_v10020 release;
  PFN_cuMemGetAllocationPropertiesFromHandle_v10020 properties;
  PFN_cuMemExportToShareableHandle_v10020 export_handle;
  PFN_cuMemImportFromShareableHandle_v10020 import_handle;
  PFN_cuMemAddressReserve_v10020 reserve;
  PFN_cuMemAddressFree_v10020 free_reserved;
  PFN_cuMemMap_v10020 map;
  PFN_cuMemUnmap_v10020 unmap;
  PFN_cuMemSetAccess_v10020 set_access;
};

template <typename Function>
void Find(const char* name, Function& function, absl::Status& status) {
  absl::StatusOr<Function> found = FindDriverFunction<Function>(name);
  status.Update(found.status());
  if (found.ok()) function = *found;
}

const absl::StatusOr<PageFunctions>& Functions() {
  static const absl::StatusOr<PageFunctions> functions =
      []() -> absl::StatusOr<PageFunctions> {
    PageFunctions found = {};
    absl::Status status;
    Find("cuMemRetainAllocationHandle", found.retain, status);
    Find("cuMemRelease", found.release, status);
    Find("cuMemGetAllocationPropertiesFromHandle", found.properties, status);
    Find("cuMemExportToShareableHandle", found.export_handle, status);
    Find("cuMemImportFromShareableHandle", found.import_handle, status);
    Find("cuMemAddressReserve", found.reserve, status);
    Find("cuMemAddressFree", found.free_reserved, status);
    Find("cuMemMap", found.map, status);
    Find("cuMemUnmap", found.unmap, status);
    Find("cuMemSetAccess", found.set_access, status);
    if (!status.ok()) return status;
    return found;
  }();
  return functions;
}

// The runtime's errors have the driver's numbers.
absl::Status DriverStatus(CUresult result, const char* call) {
  return CudaStatus(static_cast<cudaError_t>(result), call);
}

// A page, kept by its handle until the end of scope.
class RetainedPage {
 public:
  static absl::StatusOr<RetainedPage> At(const PageFunctions& functions,
                                         uint64_t address) {
    CUmemGenericAllocationHandle handle = 0;
    if (functions.retain(&handle, reinterpret_cast<void*>(address)) !=
        CUDA_SUCCESS) {
      return absl::NotFoundError(absl::StrCat(
          "no memory of cuMemMap at address 0x", absl::Hex(address)));
    }
    return RetainedPage(functions, handle);
  }
  RetainedPage(const PageFunctions& functions,
               CUmemGenericAllocationHandle handle)
      : functions_(&functions), handle_(handle) {}
  RetainedPage(RetainedPage&& other) noexcept
      : functions_(other.functions_),
        handle_(std::exchange(other.handle_, 0)) {}
  ~RetainedPage() {
    if (handle_ != 0) functions_->release(handle_);
  }
  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const PageFunctions* functions_;
  CUmemGenericAllocationHandle handle_;
};

}  // namespace

absl::StatusOr<SharedPage> FindPage(uint64_t address) {
  const absl::StatusOr<PageFunctions>& functions = Functions();
  if (!functions.ok()) return functions.status();
  const absl::StatusOr<RetainedPage> page =
      RetainedPage::At(*functions, address);
  if (!page.ok()) return page.status();
  CUmemAllocationProp properties = {};
  absl::Status status =
      DriverStatus(functions->properties(&properties, page->get()),
                   "cuMemGetAllocationPropertiesFromHandle");
  if (!status.ok()) return status;
  SharedPage shared;
  const auto kinds = static_cast<unsigned>(properties.requestedHandleTypes);
  if ((kinds & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) {
    shared.handle = PageHandle::kDescriptor;
  } else if ((kinds & CU_MEM_HANDLE_TYPE_FABRIC) != 0) {
    const CUresult exported = functions->export_handle(
        &shared.fabric, page->get(), CU_MEM_HANDLE_TYPE_FABRIC, 0);
    if (exported == CUDA_SUCCESS) shared.handle = PageHandle::kFabric;
  }
  return shared;
}

absl::StatusOr<FileDescriptor> OpenPage(uint64_t address) {
  const absl::StatusOr<PageFunctions>& functions = Functions();
  if (!functions.ok()) return functions.status();
  const absl::StatusOr<RetainedPage> page =
      RetainedPage::At(*functions, address);
  if (!page.ok()) return page.status();
  int fd = -1;
  absl::Status status = DriverStatus(
      functions->export_handle(&fd, page->get(),
                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "cuMemExportToShareableHandle");
  if (!status.ok()) return status;
  return FileDescriptor(fd);
}

absl::Status AllowAccess(int device, uint64_t address, uint64_t size_bytes) {
  const absl::StatusOr<PageFunctions>& functions = Functions();
  if (!functions.ok()) return functions.status();
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const absl::Status status = DriverStatus(
      functions->set_access(address, size_bytes, &access, 1), "cuMemSetAccess");
  if (status.ok()) return status;
  return absl::FailedPreconditionError(status.message());
}

absl::StatusOr<std::unique_ptr<MappedPages>> MappedPages::Map(
    int device, absl::Span<const SharedPage> pages,
    const std::function<absl::StatusOr<FileDescriptor>(size_t)>& open) {
  const absl::StatusOr<PageFunctions>& functions = Functions();
  if (!functions.ok()) return functions.status();
  uint64_t size_bytes = 0;
  for (const SharedPage& page : pages) size_bytes += page.size_bytes;
  std::unique_ptr<MappedPages> mapped(new MappedPages(device, size_bytes));
  absl::Status status =
      DriverStatus(functions->reserve(&mapped->address_, size_bytes, 0, 0, 0),
                   "cuMemAddressReserve");
  for (size_t i = 0; i < pages.size() && status.ok(); ++i) {
    FileDescriptor descriptor;
    if (pages[i].handle == PageHandle::kDescriptor) {
      absl::StatusOr<FileDescriptor> opened = open(i);
      if (!opened.ok()) return opened.status();
      descriptor = *std::move(opened);
    }
    status = mapped->Add(pages[i], std::move(descriptor));
  }
  if (status.ok()) status = AllowAccess(device, mapped->address_, size_bytes);
  if (!status.ok()) return status;
  return mapped;
}

// The mapping keeps the page: handle and descriptor are given back at once.
absl::Status MappedPages::Add(const SharedPage& page,
                              FileDescriptor descriptor) {
  const PageFunctions& functions = *Functions();
  CUmemFabricHandle fabric = page.fabric;
  const bool by_descriptor = page.handle == PageHandle::kDescriptor;
  CUmemGenericAllocationHandle handle = 0;
  absl::Status status = DriverStatus(
      functions.import_handle(
          &handle,
          by_descriptor
              ? reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor.fd()))
              : &fabric,
          by_descriptor ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                        : CU_MEM_HANDLE_TYPE_FABRIC),
      "cuMemImportFromShareableHandle");
  if (!status.ok()) return status;
  const RetainedPage imported(functions, handle);
  status = DriverStatus(
      functions.map(address_ + mapped_bytes_, page.size_bytes, 0, handle, 0),
      "cuMemMap");
  if (!status.ok()) return status;
  mapped_.push_back(page.size_bytes);
  mapped_bytes_ += page.size_bytes;
  return absl::OkStatus();
}

MappedPages::~MappedPages() {
  if (address_ == 0) return;
  const PageFunctions& functions = *Functions();
  const ScopedDevice current(device_);
  // Unmapping does not wait for what still stores there.
  cudaDeviceSynchronize();
  CUdeviceptr address = address_;
  for (const uint64_t size_bytes : mapped_) {
    functions.unmap(address, size_bytes);
    address += size_bytes;
  }
  functions.free_reserved(address_, size_bytes_);
}

std::byte* MappedPages::address() const {
  return reinterpret_cast<std::byte*>(address_);
}

}  // namespace refit
