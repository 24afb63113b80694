// Libraries that are reached at run time.
#ifndef REFIT_EXECUTOR_TRANSPORT_LOADED_LIBRARY_H_
#define REFIT_EXECUTOR_TRANSPORT_LOADED_LIBRARY_H_

#include <dlfcn.h>

#include <mutex>
#include <string>

#include "absl/status/statusor.h"

namespace refit {

// Ranks of a process look for libraries in turns, each with this lock: the
// loader's own, behind which its names of files change, is not there for them.
std::mutex& LoaderMutex();

// A file that this process has loaded already, which now stays. Null: it has
// not.
void* OpenLoaded(const char* file);

// Loads the file that the environment's `variable` names, else `file`. The
// library stays, and its symbols do not stand in for those of a copy that is
// loaded later. Error: kNotFound, "no WHAT: …"; `advice` is added where nobody
// chose the file.
absl::StatusOr<void*> OpenLibrary(const char* what, const char* variable,
                                  const char* file, const char* advice = "");

// The file that holds the function or variable at `address`, "" if none does.
std::string FileOf(const void* address);

// What functions are looked up in, and the first one that is not there.
struct SymbolTable {
  template <typename Function>
  void Find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (function == nullptr && missing == nullptr) missing = name;
  }

  void* handle = nullptr;
  const char* missing = nullptr;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_LOADED_LIBRARY_H_
