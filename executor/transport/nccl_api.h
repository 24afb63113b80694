// The functions of libnccl that the transport calls, reached at run time.
//
// The declarations are those of nccl.h 2.18, from which every later version can
// be called: ncclConfig_t carries its size and version, and the library reads
// only that much of it (NVIDIA, "NCCL User Guide", ncclConfig_t).
#ifndef REFIT_EXECUTOR_TRANSPORT_NCCL_API_H_
#define REFIT_EXECUTOR_TRANSPORT_NCCL_API_H_

#include <climits>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/payload.h"

namespace refit::nccl {

using Comm = struct OpaqueComm*;
using CudaStream = void*;

struct UniqueId {
  char internal[128];
};
void WriteFields(const UniqueId& id, PayloadWriter& writer);
void ReadFields(PayloadReader& reader, UniqueId& id);

// ncclResult_t. Versions add codes: treat one not named here as an error.
enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int { kUint8 = 1 };

struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = INT_MIN;  // INT_MIN: the library's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// ncclEncryptionConfig_t of 2.32.
struct EncryptionConfig {
  size_t size = sizeof(EncryptionConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kEncryptionVersion;
  int mode = kPreSharedKey;
  // Ends with a zero, after 32 bytes or more. NCCL copies it.
  const char* key = nullptr;

  static constexpr int kEncryptionVersion = 23200;
  static constexpr int kPreSharedKey = 1;
};

struct Api {
  // All of these are there after Load.
  Result (*GetVersion)(int* version) = nullptr;
  Result (*GetUniqueId)(UniqueId* id) = nullptr;
  Result (*CommInitRankConfig)(Comm* comm, int ranks, UniqueId id, int rank,
                               Config* config) = nullptr;
  Result (*CommGetAsyncError)(Comm comm, Result* error) = nullptr;
  Result (*CommAbort)(Comm comm) = nullptr;
  Result (*GroupStart)() = nullptr;
  Result (*GroupEnd)() = nullptr;
  Result (*Send)(const void* data, size_t count, DataType type, int peer,
                 Comm comm, CudaStream stream) = nullptr;
  Result (*Recv)(void* data, size_t count, DataType type, int peer, Comm comm,
                 CudaStream stream) = nullptr;
  const char* (*GetErrorString)(Result result) = nullptr;
  const char* (*GetLastError)(Comm comm) = nullptr;

  // Not of a refit's needs; each may be null.
  Result (*Broadcast)(const void* from, void* to, size_t count, DataType type,
                      int root, Comm comm, CudaStream stream) = nullptr;
  Result (*SetEncryption)(const EncryptionConfig* config) = nullptr;

  int version = 0;      // as GetVersion says: 22809 is 2.28.9
  std::string library;  // the file that holds the functions
};

// The copy of libnccl that this process has loaded already (PyTorch's), else
// the file that REFIT_NCCL_LIBRARY names, else libnccl.so.2 as the loader finds
// it. It stays loaded. Errors: kNotFound, with what was tried; kUnimplemented,
// older than 2.18 or a function is missing, with version and file.
absl::StatusOr<Api> Load();

// "2.28.9" for 22809.
std::string VersionText(int version);

// OK for kSuccess and kInProgress; else kInternal (kUnavailable for
// kRemoteError and kSystemError) with the call, NCCL's own text for the result
// and, of `comm` if it is not null, its last error.
absl::Status StatusOf(const Api& api, Result result, const char* call,
                      Comm comm);

}  // namespace refit::nccl

#endif  // REFIT_EXECUTOR_TRANSPORT_NCCL_API_H_
