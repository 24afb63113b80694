#include "executor/transport/loaded_library.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace refit {

std::mutex& LoaderMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

void* OpenLoaded(const char* file) {
  return dlopen(file, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

absl::StatusOr<void*> OpenLibrary(const char* what, const char* variable,
                                  const char* file, const char* advice) {
  const char* chosen = std::getenv(variable);
  const bool is_chosen = chosen != nullptr && *chosen != '\0';
  if (void* handle = dlopen(is_chosen ? chosen : file,
                            RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) {
    return handle;
  }
  const std::string why = dlerror();
  return absl::NotFoundError(
      is_chosen
          ? absl::StrCat("no ", what,
                         ": none is loaded in this process, and "
                         "the file that ",
                         variable, " names cannot be: ", why)
          : absl::StrCat("no ", what, ": none is loaded in this process, ",
                         variable, " is not set, and the loader says: ", why,
                         advice));
}

std::string FileOf(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "";
  return info.dli_fname;
}

}  // namespace refit
