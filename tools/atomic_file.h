// Writing a file so that a reader sees all of it or none.
#ifndef REFIT_TOOLS_ATOMIC_FILE_H_
#define REFIT_TOOLS_ATOMIC_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// Writes `bytes` to a temporary file beside `path` and renames it into place;
// a symbolic link is followed, a device or pipe is written to as it is.
// On an error nothing is left behind and an older file stays. The message
// names the file and the system's reason.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::Span<const uint8_t> bytes);

}  // namespace refit

#endif  // REFIT_TOOLS_ATOMIC_FILE_H_
