#include "bench/m2n_api.h"

#include "absl/strings/str_cat.h"
#include "executor/transport/loaded_library.h"

namespace refit::m2n {
namespace {

static_assert(offsetof(Mesh, version) == 8);
static_assert(offsetof(Mesh, axes) == 12);
static_assert(offsetof(Mesh, extents) == 16);
static_assert(offsetof(Mesh, start_rank) == 24);
static_assert(sizeof(Mesh) == 32);
static_assert(offsetof(DistTensor, version) == 8);
static_assert(offsetof(DistTensor, data) == 16);
static_assert(offsetof(DistTensor, local_shape) == 24);
static_assert(offsetof(DistTensor, dims) == 32);
static_assert(offsetof(DistTensor, dtype) == 36);
static_assert(offsetof(DistTensor, mesh) == 40);
static_assert(offsetof(DistTensor, placements) == 48);
static_assert(sizeof(DistTensor) == 56);

constexpr int kOldestNccl = 23005;
constexpr char kVariable[] = "REFIT_NCCL_M2N_LIBRARY";
constexpr char kLibrary[] = "libnccl_m2n.so";

}  // namespace

absl::StatusOr<Api> Load(const nccl::Api& nccl) {
  if (nccl.version < kOldestNccl) {
    return absl::UnimplementedError(
        absl::StrCat("nccl_m2n needs NCCL ", nccl::VersionText(kOldestNccl),
                     " or later, and ", nccl.library, " is ",
                     nccl::VersionText(nccl.version),
                     "; REFIT_NCCL_LIBRARY may name another file"));
  }
  const absl::StatusOr<void*> handle = OpenLibrary(
      "libnccl_m2n", kVariable, kLibrary,
      "; the wheel nccl-extensions has it as nccl/m2n/lib/cu13/libnccl_m2n.so");
  if (!handle.ok()) return handle.status();
  Api api;
  SymbolTable symbols{*handle};
  symbols.Find("ncclM2nInit", api.Init);
  symbols.Find("ncclM2nFinalize", api.Finalize);
  symbols.Find("ncclM2nGetLastError", api.GetLastError);
  symbols.Find("ncclM2nGroupStart", api.GroupStart);
  symbols.Find("ncclM2nGroupEnd", api.GroupEnd);
  symbols.Find("ncclReshard", api.Reshard);
  if (symbols.missing != nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("libnccl_m2n has no ", symbols.missing));
  }
  // Its communicator is one of ours.
  const std::string brought = FileOf(dlsym(*handle, "ncclGetVersion"));
  if (brought != nccl.library) {
    return absl::FailedPreconditionError(
        absl::StrCat("libnccl_m2n uses ", brought.empty() ? "no NCCL" : brought,
                     ", and this program ", nccl.library));
  }
  return api;
}

int NcclDataType(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUint8:
    case DType::kBool:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kInt64:
      return 4;
    case DType::kFp16:
    case DType::kInt16:  // which NCCL does not have; nothing is computed
      return 6;
    case DType::kFp32:
      return 7;
    case DType::kFp64:
      return 8;
    case DType::kBf16:
      return 9;
    case DType::kFp8E4m3:
      return 10;
    case DType::kFp8E5m2:
      return 11;
    case DType::kUnspecified:
      break;
  }
  return -1;
}

}  // namespace refit::m2n
