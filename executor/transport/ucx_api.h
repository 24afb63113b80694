// The functions of libucp that the transport calls, reached at run time.
//
// The declarations are those of ucp.h 1.12. Later versions of libucp.so.0 take
// them too: the structs carry masks of the fields that the caller has set, and
// the library reads only those.
#ifndef REFIT_EXECUTOR_TRANSPORT_UCX_API_H_
#define REFIT_EXECUTOR_TRANSPORT_UCX_API_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace refit::ucx {

using Config = struct OpaqueConfig*;
using Context = struct OpaqueContext*;
using Worker = struct OpaqueWorker*;
using Endpoint = struct OpaqueEndpoint*;
using Address = struct OpaqueAddress;
using Message = struct OpaqueMessage*;
using Tag = uint64_t;

// ucs_status_t. Negative values are errors; versions add codes.
enum Status : int8_t {
  kOk = 0,
  kInProgress = 1,
  kMessageTruncated = -9,
  kBusy = -15,
};

// Null or a status in the guise of an address: done. Else a request.
using StatusPointer = void*;
inline bool IsRequest(StatusPointer pointer) {
  return reinterpret_cast<uintptr_t>(pointer) - 1 <
         static_cast<uintptr_t>(-100) - 1;
}
inline Status StatusOfPointer(StatusPointer pointer) {
  return IsRequest(pointer)
             ? kInProgress
             : static_cast<Status>(reinterpret_cast<intptr_t>(pointer));
}

// Of ContextParams::features.
inline constexpr uint64_t kFeatureTag = 1 << 0;
inline constexpr uint64_t kFeatureWakeup = 1 << 4;

// ucp_params_t
struct ContextParams {
  static constexpr uint64_t kFeatures = 1 << 0;
  static constexpr uint64_t kEstimatedEndpoints = 1 << 6;

  uint64_t field_mask = 0;
  uint64_t features = 0;
  size_t request_size = 0;
  void (*request_init)(void* request) = nullptr;
  void (*request_cleanup)(void* request) = nullptr;
  uint64_t tag_sender_mask = 0;
  int workers_shared = 0;
  size_t estimated_endpoints = 0;
};

enum ThreadMode : int { kThreadSingle = 0, kThreadSerialized = 1 };

// ucp_worker_params_t, as far as it is used.
struct WorkerParams {
  static constexpr uint64_t kThreadMode = 1 << 0;

  uint64_t field_mask = 0;
  ThreadMode thread_mode = kThreadSingle;
  uint64_t reserved[32] = {};  // a set of CPUs and more
};

// ucp_ep_params_t, as far as it is used.
struct EndpointParams {
  static constexpr uint64_t kRemoteAddress = 1 << 0;
  static constexpr uint64_t kErrorMode = 1 << 1;
  static constexpr uint64_t kErrorHandler = 1 << 2;

  uint64_t field_mask = 0;
  const Address* address = nullptr;
  int error_mode = 0;  // kErrorModePeer, or none
  void (*error_handler)(void* argument, Endpoint endpoint,
                        Status status) = nullptr;
  void* error_argument = nullptr;
  uint64_t reserved[16] = {};  // socket addresses and more
};

// Sends to a peer that is gone end with an error, and EndpointClose may force.
inline constexpr int kErrorModePeer = 1;

// ucp_tag_recv_info_t
struct ReceiveInfo {
  Tag sender_tag = 0;
  size_t length = 0;
};

using SendCallback = void (*)(void* request, Status status, void* user_data);
using ReceiveCallback = void (*)(void* request, Status status,
                                 const ReceiveInfo* info, void* user_data);

// ucp_request_param_t
struct RequestParam {
  static constexpr uint32_t kCallback = 1 << 1;
  static constexpr uint32_t kUserData = 1 << 2;
  static constexpr uint32_t kFlags = 1 << 4;
  static constexpr uint32_t kMemoryType = 1 << 6;
  static constexpr uint32_t kNoImmediateCompletion = 1 << 16;

  uint32_t attributes = 0;
  uint32_t flags = 0;
  void* request = nullptr;
  union {
    SendCallback send;
    ReceiveCallback receive;
  } callback = {nullptr};
  uint64_t datatype = 0;
  void* user_data = nullptr;
  void* reply_buffer = nullptr;
  int memory_type = 0;  // 0: of the host
  void* receive_info = nullptr;
  void* memory_handle = nullptr;
};

// Of RequestParam::flags: what is under way on an endpoint ends with an error.
inline constexpr uint32_t kForceClose = 1 << 0;

struct Api {
  // All of these are there after Load.
  void (*GetVersion)(unsigned* major, unsigned* minor,
                     unsigned* release) = nullptr;
  Status (*ConfigRead)(const char* prefix, const char* file,
                       Config* config) = nullptr;
  Status (*ConfigModify)(Config config, const char* name,
                         const char* value) = nullptr;
  void (*ConfigRelease)(Config config) = nullptr;
  Status (*InitVersion)(unsigned major, unsigned minor,
                        const ContextParams* params, Config config,
                        Context* context) = nullptr;
  void (*Cleanup)(Context context) = nullptr;
  Status (*WorkerCreate)(Context context, const WorkerParams* params,
                         Worker* worker) = nullptr;
  void (*WorkerDestroy)(Worker worker) = nullptr;
  Status (*WorkerGetAddress)(Worker worker, Address** address,
                             size_t* size_bytes) = nullptr;
  void (*WorkerReleaseAddress)(Worker worker, Address* address) = nullptr;
  unsigned (*WorkerProgress)(Worker worker) = nullptr;
  Status (*WorkerGetEfd)(Worker worker, int* fd) = nullptr;
  Status (*WorkerArm)(Worker worker) = nullptr;
  StatusPointer (*WorkerFlush)(Worker worker,
                               const RequestParam* param) = nullptr;
  Status (*EndpointCreate)(Worker worker, const EndpointParams* params,
                           Endpoint* endpoint) = nullptr;
  StatusPointer (*EndpointClose)(Endpoint endpoint,
                                 const RequestParam* param) = nullptr;
  StatusPointer (*TagSendSync)(Endpoint endpoint, const void* data,
                               size_t count, Tag tag,
                               const RequestParam* param) = nullptr;
  StatusPointer (*TagReceive)(Worker worker, void* data, size_t count, Tag tag,
                              Tag mask, const RequestParam* param) = nullptr;
  Message (*TagProbe)(Worker worker, Tag tag, Tag mask, int remove,
                      ReceiveInfo* info) = nullptr;
  StatusPointer (*TagMessageReceive)(Worker worker, void* data, size_t count,
                                     Message message,
                                     const RequestParam* param) = nullptr;
  void (*RequestCancel)(Worker worker, void* request) = nullptr;
  void (*RequestFree)(void* request) = nullptr;
  const char* (*StatusString)(Status status) = nullptr;

  uint32_t version = 0;  // 1013001 is 1.13.1
  std::string library;   // the file that holds the functions
};

// The copy of libucp that this process has loaded already, else the file that
// REFIT_UCX_LIBRARY names, else libucp.so.0 as the loader finds it. It stays
// loaded. A copy that this loads writes its log to the standard error instead
// of the standard output. Errors: kNotFound, with what was tried;
// kUnimplemented, older than 1.12 or a function is missing, with version and
// file.
absl::StatusOr<Api> Load();

// While one exists, a library that Load loaded logs nothing of its thread.
class QuietLog {
 public:
  QuietLog();
  ~QuietLog();
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;
};

// "1.13.1" for 1013001.
std::string VersionText(uint32_t version);

// OK for kOk and kInProgress; else kUnavailable with the call and UCX's own
// text for the status.
absl::Status StatusOf(const Api& api, Status status, const char* call);

}  // namespace refit::ucx

#endif  // REFIT_EXECUTOR_TRANSPORT_UCX_API_H_
