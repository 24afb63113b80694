#include "bench/window_api.h"

#include "absl/strings/str_cat.h"
#include "executor/transport/loaded_library.h"

namespace refit::nccl {

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
  return windows;
}

}  // namespace refit::nccl
