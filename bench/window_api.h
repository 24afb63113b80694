// NCCL's functions for memory that all ranks register, and for one-sided sends
// into it, reached at run time. The declarations are those of nccl.h 2.30.
#ifndef REFIT_BENCH_WINDOW_API_H_
#define REFIT_BENCH_WINDOW_API_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "executor/transport/nccl_api.h"

namespace refit::nccl {

using Window = struct OpaqueWindow*;

// ncclWaitSignalDesc_t.
struct AwaitedSignals {
  int count = 0;
  int peer = 0;
  // NCCL 2.30 takes 0 alone.
  int signal = 0;
  int context = 0;
};

struct WindowApi {
  Result (*MemAlloc)(void** data, size_t size) = nullptr;
  Result (*MemFree)(void* data) = nullptr;
  Result (*CommWindowRegister)(Comm comm, void* data, size_t size,
                               Window* window, int flags) = nullptr;
  Result (*CommWindowDeregister)(Comm comm, Window window) = nullptr;
  Result (*PutSignal)(const void* data, size_t count, DataType type, int peer,
                      Window window, size_t offset, int signal, int context,
                      unsigned int flags, Comm comm,
                      CudaStream stream) = nullptr;
  Result (*Signal)(int peer, int signal, int context, unsigned int flags,
                   Comm comm, CudaStream stream) = nullptr;
  Result (*WaitSignal)(int count, AwaitedSignals* awaited, Comm comm,
                       CudaStream stream) = nullptr;

  // What one-sided sends need beside windows, NCCL 2.30 or later.
  bool HasPutSignal() const {
    return PutSignal != nullptr && Signal != nullptr && WaitSignal != nullptr;
  }

  static constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
};

// Those of the library that `api` is of. Error: kUnimplemented, with the first
// function of windows that it does not have.
absl::StatusOr<WindowApi> LoadWindowApi(const Api& api);

}  // namespace refit::nccl

#endif  // REFIT_BENCH_WINDOW_API_H_
