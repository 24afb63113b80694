// NVIDIA's NCCL M2N (libnccl_m2n), reached at run time.
//
// The declarations are those of nccl_m2n.h of the wheel nccl-extensions 0.1.0:
// version 2 of its structs.
#ifndef REFIT_BENCH_M2N_API_H_
#define REFIT_BENCH_M2N_API_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "executor/transport/nccl_api.h"
#include "plan/dtype.h"

namespace refit::m2n {

inline constexpr unsigned int kStructVersion = 2;

using Handle = struct OpaqueHandle*;

struct Mesh {
  size_t size = sizeof(Mesh);
  unsigned int version = kStructVersion;
  int axes = 2;
  const int* extents = nullptr;
  int start_rank = 0;
};

struct DistTensor {
  size_t size = sizeof(DistTensor);
  unsigned int version = kStructVersion;
  void* data = nullptr;  // null: the rank is not of this side
  const size_t* local_shape = nullptr;
  int dims = 0;
  int dtype = 0;  // NcclDataType
  const Mesh* mesh = nullptr;
  const int* placements = nullptr;
};

struct Api {
  nccl::Result (*Init)(Handle* handle, const void* config) = nullptr;
  nccl::Result (*Finalize)(Handle handle) = nullptr;
  const char* (*GetLastError)() = nullptr;
  nccl::Result (*GroupStart)() = nullptr;
  nccl::Result (*GroupEnd)() = nullptr;
  nccl::Result (*Reshard)(Handle handle, nccl::Comm comm,
                          const DistTensor* source,
                          const DistTensor* destination,
                          nccl::CudaStream stream) = nullptr;
};

// The file that REFIT_NCCL_M2N_LIBRARY names, else libnccl_m2n.so as the loader
// finds it. Errors: kUnimplemented, `nccl` is older than 2.30.5, or a function
// is missing; kNotFound, with what was tried; kFailedPrecondition, the library
// has brought a NCCL of its own.
absl::StatusOr<Api> Load(const nccl::Api& nccl);

// ncclDataType_t of elements of this size and kind.
int NcclDataType(DType dtype);

}  // namespace refit::m2n

#endif  // REFIT_BENCH_M2N_API_H_
