#include "tools/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

absl::Status WriteAll(int file, absl::Span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return absl::UnavailableError(std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status CannotWrite(const std::string& path, absl::string_view reason) {
  return absl::UnavailableError(absl::StrCat(path, ": cannot write: ", reason));
}

// Devices and pipes are written to, not replaced.
absl::Status WriteInPlace(const std::string& path,
                          absl::Span<const uint8_t> bytes) {
  const int file = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (file < 0) return CannotWrite(path, std::strerror(errno));
  const absl::Status status = WriteAll(file, bytes);
  close(file);
  return status.ok() ? status : CannotWrite(path, status.message());
}

// What `path` names once its symbolic links are followed.
std::string Resolved(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  if (real == nullptr) return path;
  std::string resolved = real;
  std::free(real);
  return resolved;
}

}  // namespace

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::Span<const uint8_t> bytes) {
  struct stat existing;
  const bool exists = stat(path.c_str(), &existing) == 0;
  if (exists && !S_ISREG(existing.st_mode) && !S_ISDIR(existing.st_mode)) {
    return WriteInPlace(path, bytes);
  }
  const std::string target = exists ? Resolved(path) : path;
  std::string temporary = target + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  if (file < 0) return CannotWrite(path, std::strerror(errno));
  // mkstemp makes files for the owner alone; a plan is read by other users'
  // workers.
  const mode_t mask = umask(0);
  umask(mask);
  absl::Status status = WriteAll(file, bytes);
  if (status.ok() && fchmod(file, 0666 & ~mask) != 0) {
    status = absl::UnavailableError(std::strerror(errno));
  }
  if (close(file) != 0 && status.ok()) {
    status = absl::UnavailableError(std::strerror(errno));
  }
  if (status.ok() && std::rename(temporary.c_str(), target.c_str()) != 0) {
    status = absl::UnavailableError(std::strerror(errno));
  }
  if (status.ok()) return status;
  unlink(temporary.c_str());
  return CannotWrite(path, status.message());
}

}  // namespace refit
