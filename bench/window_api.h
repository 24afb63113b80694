// NCCL's functions for memory that all ranks register, reached at run time. The
// declarations are those of nccl.h 2.30.
#ifndef REFIT_BENCH_WINDOW_API_H_
#define REFIT_BENCH_WINDOW_API_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "executor/transport/nccl_api.h"

namespace refit::nccl {

using Window = struct OpaqueWindow*;

struct WindowApi {
  Result (*MemAlloc)(void** data, size_t size) = nullptr;
  Result (*MemFree)(void* data) = nullptr;
  Result (*CommWindowRegister)(Comm comm, void* data, size_t size,
                               Window* window, int flags) = nullptr;
  Result (*CommWindowDeregister)(Comm comm, Window window) = nullptr;

  static constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
};

// Those of the library that `api` is of. Error: kUnimplemented, with the first
// function of windows that it does not have.
absl::StatusOr<WindowApi> LoadWindowApi(const Api& api);

}  // namespace refit::nccl

#endif  // REFIT_BENCH_WINDOW_API_H_
