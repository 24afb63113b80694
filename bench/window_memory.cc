#include "bench/window_memory.h"

#include "bench/measured_communicator.h"

namespace refit {

absl::StatusOr<std::unique_ptr<WindowMemory>> WindowMemory::Create(
    const nccl::Api& api, const nccl::WindowApi& windows,
    NcclCommunicator& communicator, uint64_t size_bytes) {
  std::unique_ptr<WindowMemory> made(new WindowMemory(windows));
  void* data = nullptr;
  absl::Status status = nccl::StatusOf(api, windows.MemAlloc(&data, size_bytes),
                                       "ncclMemAlloc", nullptr);
  if (!status.ok()) return status;
  made->data_ = static_cast<std::byte*>(data);
  const auto register_all = [&](nccl::Comm comm) {
    return windows.CommWindowRegister(comm, data, size_bytes, &made->window_,
                                      nccl::WindowApi::kSymmetric);
  };
  status = communicator.Call("ncclCommWindowRegister", register_all,
                             MeasurementDeadline(), NeverInterrupted);
  if (!status.ok()) return status;
  if (made->window_ == nullptr) {
    return absl::UnimplementedError(
        "NCCL registers no windows here: it needs memory that GPUs map "
        "(NCCL_CUMEM_ENABLE, NCCL_WIN_ENABLE)");
  }
  return made;
}

WindowMemory::~WindowMemory() {
  if (data_ != nullptr) windows_.MemFree(data_);
}

void WindowMemory::Deregister(NcclCommunicator& communicator) {
  if (window_ == nullptr) return;
  const auto deregister = [&](nccl::Comm comm) {
    return windows_.CommWindowDeregister(comm, window_);
  };
  // Nobody asks whether this works: the memory goes in any case.
  communicator
      .Call("ncclCommWindowDeregister", deregister, MeasurementDeadline(),
            NeverInterrupted)
      .IgnoreError();
  window_ = nullptr;
}

}  // namespace refit
