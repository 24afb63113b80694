#include "executor/transport/nccl_api.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/transport/loaded_library.h"

namespace refit::nccl {
namespace {

// The library reads the configuration by its own nccl.h, so ours must lie in
// memory as ncclConfig_t of 2.18 does.
static_assert(offsetof(Config, size) == 0);
static_assert(offsetof(Config, magic) == 8);
static_assert(offsetof(Config, version) == 12);
static_assert(offsetof(Config, blocking) == 16);
static_assert(offsetof(Config, cga_cluster_size) == 20);
static_assert(offsetof(Config, min_ctas) == 24);
static_assert(offsetof(Config, max_ctas) == 28);
static_assert(offsetof(Config, net_name) == 32);
static_assert(offsetof(Config, split_share) == 40);
static_assert(sizeof(Config) == 48);
static_assert(sizeof(UniqueId) == 128);
// And as ncclEncryptionConfig_t of 2.32.
static_assert(offsetof(EncryptionConfig, magic) == 8);
static_assert(offsetof(EncryptionConfig, version) == 12);
static_assert(offsetof(EncryptionConfig, mode) == 16);
static_assert(offsetof(EncryptionConfig, key) == 24);
static_assert(sizeof(EncryptionConfig) == 32);

constexpr int kOldestVersion = 21800;
constexpr char kLibraryVariable[] = "REFIT_NCCL_LIBRARY";
constexpr char kLibraryName[] = "libnccl.so.2";

int CollectLibnccl(dl_phdr_info* info, size_t, void* files) {
  const std::string_view path = info->dlpi_name;
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name.starts_with("libnccl.so")) {
    static_cast<std::vector<std::string>*>(files)->emplace_back(path);
  }
  return 0;
}

// A handle for dlsym, null if this process has loaded no copy.
void* FindLoaded() {
  if (const void* symbol = dlsym(RTLD_DEFAULT, "ncclGetVersion")) {
    void* handle = OpenLoaded(FileOf(symbol).c_str());
    // A program that NCCL is linked into cannot be opened by its name.
    return handle != nullptr ? handle : dlopen(nullptr, RTLD_LAZY);
  }
  // Python loads extensions with RTLD_LOCAL: their libraries are loaded, but
  // the global scope does not hold them.
  std::vector<std::string> files;
  dl_iterate_phdr(CollectLibnccl, &files);
  for (const std::string& file : files) {
    if (void* handle = OpenLoaded(file.c_str())) return handle;
  }
  return nullptr;
}

// The name of the first function that is missing, else null.
const char* FindFunctions(void* handle, Api& api) {
  SymbolTable symbols{handle};
  symbols.Find("ncclGetUniqueId", api.GetUniqueId);
  symbols.Find("ncclCommInitRankConfig", api.CommInitRankConfig);
  symbols.Find("ncclCommGetAsyncError", api.CommGetAsyncError);
  symbols.Find("ncclCommAbort", api.CommAbort);
  symbols.Find("ncclGroupStart", api.GroupStart);
  symbols.Find("ncclGroupEnd", api.GroupEnd);
  symbols.Find("ncclSend", api.Send);
  symbols.Find("ncclRecv", api.Recv);
  symbols.Find("ncclGetErrorString", api.GetErrorString);
  symbols.Find("ncclGetLastError", api.GetLastError);
  SymbolTable optional{handle};
  optional.Find("ncclBroadcast", api.Broadcast);
  optional.Find("ncclSetEncryption", api.SetEncryption);
  return symbols.missing;
}

}  // namespace

absl::StatusOr<Api> Load() {
  const std::lock_guard lock(LoaderMutex());
  Api api;
  void* handle = FindLoaded();
  if (handle == nullptr) {
    absl::StatusOr<void*> opened =
        OpenLibrary("libnccl", kLibraryVariable, kLibraryName);
    if (!opened.ok()) return opened.status();
    handle = *opened;
  }
  SymbolTable symbols{handle};
  symbols.Find("ncclGetVersion", api.GetVersion);
  if (symbols.missing != nullptr) {
    link_map* map = nullptr;
    dlinfo(handle, RTLD_DI_LINKMAP, &map);
    return absl::UnimplementedError(
        absl::StrCat(map->l_name, " has no ", symbols.missing));
  }
  api.library = FileOf(reinterpret_cast<const void*>(api.GetVersion));
  if (api.GetVersion(&api.version) != kSuccess) {
    return absl::UnimplementedError(
        absl::StrCat(api.library, ": ncclGetVersion fails"));
  }
  if (api.version < kOldestVersion) {
    return absl::UnimplementedError(
        absl::StrCat(api.library, ": NCCL ", VersionText(api.version), ", but ",
                     VersionText(kOldestVersion), " or later is needed"));
  }
  if (const char* missing = FindFunctions(handle, api)) {
    return absl::UnimplementedError(absl::StrCat(
        api.library, ": NCCL ", VersionText(api.version), " has no ", missing));
  }
  return api;
}

void WriteFields(const UniqueId& id, PayloadWriter& writer) {
  writer.Bytes({id.internal, sizeof(id.internal)});
}

void ReadFields(PayloadReader& reader, UniqueId& id) {
  const std::string_view bytes = reader.Bytes(sizeof(id.internal));
  std::copy(bytes.begin(), bytes.end(), id.internal);
}

std::string VersionText(int version) {
  // Up to 2.8 the major number stood in the thousands.
  const int major_unit = version < 10000 ? 1000 : 10000;
  return absl::StrCat(version / major_unit, ".", version % major_unit / 100,
                      ".", version % 100);
}

absl::Status StatusOf(const Api& api, Result result, const char* call,
                      Comm comm) {
  if (result == kSuccess || result == kInProgress) return absl::OkStatus();
  std::string text =
      absl::StrCat(call, ": NCCL error ", static_cast<int>(result), ", ",
                   api.GetErrorString(result));
  const char* last = comm != nullptr ? api.GetLastError(comm) : nullptr;
  if (last != nullptr && *last != '\0') absl::StrAppend(&text, ": ", last);
  const bool unavailable = result == kRemoteError || result == kSystemError;
  return unavailable ? absl::UnavailableError(text) : absl::InternalError(text);
}

}  // namespace refit::nccl
