// Writing a file so that a reader sees all of it or none.
#ifndef REFIT_FILES_ATOMIC_FILE_H_
#define REFIT_FILES_ATOMIC_FILE_H_

#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace refit {

// A file that is written piece by piece, beside `path`, and then renamed into
// place. For one thread at a time.
class AtomicFile {
 public:
  using Interrupted = std::function<absl::Status()>;

  // Makes the temporary file. As WriteFileAtomically, whose errors all calls
  // give. A device or a pipe is opened and written to.
  static absl::StatusOr<AtomicFile> Create(const std::string& path,
                                           Interrupted interrupted = nullptr);
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  // What is not committed is removed, and an older file stays. The same holds
  // where a signal ends the process (files/partial_files.h).
  ~AtomicFile();

  absl::Status Write(absl::Span<const uint8_t> bytes);
  // Nothing can be written after it.
  absl::Status Commit();

 private:
  AtomicFile() = default;

  std::string path_;       // as the caller names it
  std::string target_;     // what is replaced; empty: written in place
  std::string temporary_;  // not renamed yet
  std::optional<struct stat> older_;
  int file_ = -1;
  Interrupted interrupted_;
};

// Writes `bytes` to a temporary file beside `path` and renames it into place.
// An older file's mode and, where the system allows it, its owner are kept; a
// new file is as the umask says. A symbolic link stays, and what it names is
// replaced or made. A device or a pipe is written to and never replaced; a
// socket is an error. Thread-safe.
//
// On an error nothing is left behind and an older file stays. The message names
// the file and the system's reason; the code is kNotFound (no such directory),
// kPermissionDenied or kUnavailable. A signal that interrupts a write to a pipe
// asks `interrupted`, whose error ends the write.
absl::Status WriteFileAtomically(
    const std::string& path, absl::Span<const uint8_t> bytes,
    const std::function<absl::Status()>& interrupted = nullptr);

// A file that a program reads. `is` names it to the user: "the job file".
struct InputFile {
  std::string is;
  std::string path;
};

// Says that an output would replace an input, under whatever name; "" if it
// replaces none.
std::string ReplacedInput(const std::string& output,
                          absl::Span<const InputFile> inputs);

}  // namespace refit

#endif  // REFIT_FILES_ATOMIC_FILE_H_
