#include "bench/window_api.h"

#include "absl/strings/str_cat.h"
#include "executor/transport/loaded_library.h"

namespace refit::nccl {

static_assert(offsetof(AwaitedSignals, peer) == 4);
static_assert(offsetof(AwaitedSignals, signal) == 8);
static_assert(offsetof(AwaitedSignals, context) == 12);
static_assert(sizeof(AwaitedSignals) == 16);

absl::StatusOr<WindowApi> LoadWindowApi(const Api& api) {
  WindowApi windows;
  SymbolTable symbols{OpenLoaded(api.library.c_str())};
  symbols.Find("ncclMemAlloc", windows.MemAlloc);
  symbols.Find("ncclMemFree", windows.MemFree);
  symbols.Find("ncclCommWindowRegister", windows.CommWindowRegister);
  symbols.Find("ncclCommWindowDeregister", windows.CommWindowDeregister);
  if (symbols.missing != nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("windows need NCCL 2.27 or later, and ", api.library, " (",
                     VersionText(api.version), ") has no ", symbols.missing,
                     "; REFIT_NCCL_LIBRARY may name another file"));
  }
  symbols.Find("ncclPutSignal", windows.PutSignal);
  symbols.Find("ncclSignal", windows.Signal);
  symbols.Find("ncclWaitSignal", windows.WaitSignal);
  return windows;
}

}  // namespace refit::nccl
