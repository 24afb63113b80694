#include "tools/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

using Interrupted = std::function<absl::Status()>;

constexpr int kLinksMax = 40;   // as the kernel's own limit
constexpr int kNamesMax = 100;  // of temporary files that are there already

absl::Status CannotWrite(const std::string& path, int error) {
  const std::string message =
      absl::StrCat(path, ": cannot write: ", std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(message);
  if (error == EACCES || error == EPERM || error == EROFS) {
    return absl::PermissionDeniedError(message);
  }
  return absl::UnavailableError(message);
}

absl::Status WriteAll(const std::string& path, int file,
                      absl::Span<const uint8_t> bytes,
                      const Interrupted& interrupted) {
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
      continue;
    }
    if (errno != EINTR) return CannotWrite(path, errno);
    if (interrupted == nullptr) continue;
    if (absl::Status s = interrupted(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status WriteInPlace(const std::string& path,
                          absl::Span<const uint8_t> bytes,
                          const Interrupted& interrupted) {
  int file = -1;
  // A pipe's opening waits for its reader.
  while ((file = open(path.c_str(), O_WRONLY | O_CLOEXEC)) < 0) {
    if (errno != EINTR) return CannotWrite(path, errno);
    if (interrupted == nullptr) continue;
    if (absl::Status s = interrupted(); !s.ok()) return s;
  }
  const absl::Status status = WriteAll(path, file, bytes, interrupted);
  if (close(file) != 0 && status.ok()) return CannotWrite(path, errno);
  return status;
}

// What `path` names once its symbolic links are followed, be it there or not.
std::string Resolved(const std::string& path) {
  std::filesystem::path resolved = path;
  for (int links = 0; links < kLinksMax; ++links) {
    std::error_code error;
    const std::filesystem::path target =
        std::filesystem::read_symlink(resolved, error);
    if (error) break;
    resolved = resolved.parent_path() / target;
  }
  return resolved.string();
}

// Makes a new file beside `target`. The system applies the umask: asking for it
// would change it for the process's other threads meanwhile. What replaces an
// older file is never more open than that file.
int MakeTemporary(const std::string& target,
                  const std::optional<struct stat>& older,
                  std::string& temporary) {
  static std::atomic<uint64_t> files_made = 0;
  const mode_t mode = older.has_value() ? older->st_mode & 0777 : 0666;
  for (int attempt = 0; attempt < kNamesMax; ++attempt) {
    temporary = absl::StrCat(target, ".", getpid(), "-", files_made++);
    const int file =
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (file >= 0 || errno != EEXIST) return file;
  }
  return -1;
}

int KeepMode(int file, const std::optional<struct stat>& older) {
  if (!older.has_value()) return 0;
  // Only root may give a file away: for others a new file is the writer's.
  (void)!fchown(file, older->st_uid, older->st_gid);
  return fchmod(file, older->st_mode & 0777);
}

}  // namespace

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::Span<const uint8_t> bytes,
                                 const Interrupted& interrupted) {
  std::optional<struct stat> older(std::in_place);
  if (stat(path.c_str(), &*older) != 0) {
    if (errno != ENOENT) return CannotWrite(path, errno);
    older.reset();
  } else if (S_ISDIR(older->st_mode)) {
    return CannotWrite(path, EISDIR);
  } else if (!S_ISREG(older->st_mode)) {
    return WriteInPlace(path, bytes, interrupted);
  }
  const std::string target = Resolved(path);
  std::string temporary;
  const int file = MakeTemporary(target, older, temporary);
  if (file < 0) return CannotWrite(path, errno);
  absl::Status status = WriteAll(path, file, bytes, interrupted);
  if (status.ok() && KeepMode(file, older) != 0) {
    status = CannotWrite(path, errno);
  }
  if (close(file) != 0 && status.ok()) status = CannotWrite(path, errno);
  if (status.ok() && std::rename(temporary.c_str(), target.c_str()) != 0) {
    status = CannotWrite(path, errno);
  }
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

std::string ReplacedInput(const std::string& output,
                          absl::Span<const InputFile> inputs) {
  struct stat written;
  if (output.empty() || output == "-" || stat(output.c_str(), &written) != 0 ||
      !S_ISREG(written.st_mode)) {
    return "";
  }
  for (const InputFile& input : inputs) {
    struct stat read;
    if (stat(input.path.c_str(), &read) == 0 && read.st_dev == written.st_dev &&
        read.st_ino == written.st_ino) {
      return absl::StrCat(output, ": output is ", input.is, " ", input.path,
                          "; wanted another file");
    }
  }
  return "";
}

}  // namespace refit
