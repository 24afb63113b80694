#include "executor/transport/ucx_api.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "control/log.h"
#include "executor/transport/loaded_library.h"

namespace refit::ucx {
namespace {

constexpr unsigned kApiMajor = 1;
constexpr unsigned kApiMinor = 12;
constexpr char kLibraryVariable[] = "REFIT_UCX_LIBRARY";
constexpr char kLibraryName[] = "libucp.so.0";

thread_local int quiet_logs = 0;

// The first of ucs_log_level_t.
constexpr int kFatal = 0;
constexpr int kError = 1;
constexpr int kWarn = 2;

// ucs_log_func_t: 0 says that the message needs no other handler. Programs of
// ours write data to the standard output, where UCX's own handler would put it.
int LogOfUcx(const char*, unsigned, const char*, int level, const void*,
             const char* message, va_list arguments) {
  if (quiet_logs > 0) return 0;
  char text[512] = "UCX: ";
  constexpr size_t kPrefix = sizeof("UCX: ") - 1;
  std::vsnprintf(text + kPrefix, sizeof(text) - kPrefix, message, arguments);
  if (level == kFatal) {
    // UCX ends the process next, before a sink hands its lines on.
    std::fprintf(stderr, "refit: %s\n", text);
    return 0;
  }
  Log(level == kError  ? LogLevel::kError
      : level == kWarn ? LogLevel::kWarning
                       : LogLevel::kInfo,
      text);
  return 0;
}

void RedirectLog(void* handle) {
  using Handler = int(const char*, unsigned, const char*, int, const void*,
                      const char*, va_list);
  void (*push)(Handler*) = nullptr;
  // In libucs, which libucp needs: a lookup takes in what a library needs.
  push =
      reinterpret_cast<decltype(push)>(dlsym(handle, "ucs_log_push_handler"));
  if (push != nullptr) push(LogOfUcx);
}

absl::StatusOr<void*> Open() {
  if (void* handle = OpenLoaded(kLibraryName)) return handle;
  absl::StatusOr<void*> handle =
      OpenLibrary("UCX", kLibraryVariable, kLibraryName,
                  " (Debian and Ubuntu: apt-get install libucx0)");
  if (handle.ok()) RedirectLog(*handle);
  return handle;
}

// The name of the first function that is missing, else null.
const char* FindFunctions(void* handle, Api& api) {
  SymbolTable symbols{handle};
  symbols.Find("ucp_config_read", api.ConfigRead);
  symbols.Find("ucp_config_modify", api.ConfigModify);
  symbols.Find("ucp_config_release", api.ConfigRelease);
  symbols.Find("ucp_init_version", api.InitVersion);
  symbols.Find("ucp_cleanup", api.Cleanup);
  symbols.Find("ucp_worker_create", api.WorkerCreate);
  symbols.Find("ucp_worker_destroy", api.WorkerDestroy);
  symbols.Find("ucp_worker_get_address", api.WorkerGetAddress);
  symbols.Find("ucp_worker_release_address", api.WorkerReleaseAddress);
  symbols.Find("ucp_worker_progress", api.WorkerProgress);
  symbols.Find("ucp_worker_get_efd", api.WorkerGetEfd);
  symbols.Find("ucp_worker_arm", api.WorkerArm);
  symbols.Find("ucp_worker_flush_nbx", api.WorkerFlush);
  symbols.Find("ucp_ep_create", api.EndpointCreate);
  symbols.Find("ucp_ep_close_nbx", api.EndpointClose);
  symbols.Find("ucp_tag_send_sync_nbx", api.TagSendSync);
  symbols.Find("ucp_tag_recv_nbx", api.TagReceive);
  symbols.Find("ucp_tag_probe_nb", api.TagProbe);
  symbols.Find("ucp_tag_msg_recv_nbx", api.TagMessageReceive);
  symbols.Find("ucp_request_cancel", api.RequestCancel);
  symbols.Find("ucp_request_free", api.RequestFree);
  symbols.Find("ucs_status_string", api.StatusString);
  return symbols.missing;
}

}  // namespace

absl::StatusOr<Api> Load() {
  const std::lock_guard lock(LoaderMutex());
  const absl::StatusOr<void*> handle = Open();
  if (!handle.ok()) return handle.status();
  Api api;
  SymbolTable symbols{*handle};
  symbols.Find("ucp_get_version", api.GetVersion);
  if (symbols.missing != nullptr) {
    return absl::UnimplementedError(absl::StrCat(
        "the UCX library that was loaded has no ", symbols.missing));
  }
  api.library = FileOf(reinterpret_cast<const void*>(api.GetVersion));
  unsigned major = 0, minor = 0, release = 0;
  api.GetVersion(&major, &minor, &release);
  api.version = major * 1000000 + minor * 1000 + release;
  if (major != kApiMajor || minor < kApiMinor) {
    return absl::UnimplementedError(absl::StrCat(
        api.library, ": UCX ", VersionText(api.version), ", but ", kApiMajor,
        ".", kApiMinor, " or a later ", kApiMajor, ".x is needed"));
  }
  if (const char* missing = FindFunctions(*handle, api)) {
    return absl::UnimplementedError(absl::StrCat(
        api.library, ": UCX ", VersionText(api.version), " has no ", missing));
  }
  return api;
}

QuietLog::QuietLog() { ++quiet_logs; }
QuietLog::~QuietLog() { --quiet_logs; }

std::string VersionText(uint32_t version) {
  return absl::StrCat(version / 1000000, ".", version / 1000 % 1000, ".",
                      version % 1000);
}

absl::Status StatusOf(const Api& api, Status status, const char* call) {
  if (status >= kOk) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(call, ": UCX error ",
                                             static_cast<int>(status), ", ",
                                             api.StatusString(status)));
}

}  // namespace refit::ucx
