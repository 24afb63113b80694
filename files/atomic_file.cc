#include "files/atomic_file.h"

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
#include <utility>

#include "absl/strings/str_cat.h"
#include "files/partial_files.h"

namespace refit {
namespace {

using Interrupted = AtomicFile::Interrupted;

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

// Waits for the reader of a pipe.
absl::StatusOr<int> OpenInPlace(const std::string& path,
                                const Interrupted& interrupted) {
  int file = -1;
  while ((file = open(path.c_str(), O_WRONLY | O_CLOEXEC)) < 0) {
    if (errno != EINTR) return CannotWrite(path, errno);
    if (interrupted == nullptr) continue;
    if (absl::Status s = interrupted(); !s.ok()) return s;
  }
  return file;
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
  PartialFiles& partial_files = PartialFiles::OfThisProcess();
  const mode_t mode = older.has_value() ? older->st_mode & 0777 : 0666;
  for (int attempt = 0; attempt < kNamesMax; ++attempt) {
    temporary = absl::StrCat(target, ".", getpid(), "-", files_made++);
    // A signal that ends the process comes before the file is made, or finds
    // it in the list.
    const auto held = partial_files.Hold();
    const int file =
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (file >= 0) partial_files.Add(temporary);
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

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path,
                                              Interrupted interrupted) {
  AtomicFile made;
  made.path_ = path;
  made.interrupted_ = std::move(interrupted);
  made.older_.emplace();
  if (stat(path.c_str(), &*made.older_) != 0) {
    if (errno != ENOENT) return CannotWrite(path, errno);
    made.older_.reset();
  } else if (S_ISDIR(made.older_->st_mode)) {
    return CannotWrite(path, EISDIR);
  } else if (!S_ISREG(made.older_->st_mode)) {
    const absl::StatusOr<int> file = OpenInPlace(path, made.interrupted_);
    if (!file.ok()) return file.status();
    made.file_ = *file;
    return made;
  }
  made.target_ = Resolved(path);
  made.file_ = MakeTemporary(made.target_, made.older_, made.temporary_);
  if (made.file_ < 0) {
    const int error = errno;
    made.temporary_.clear();
    return CannotWrite(path, error);
  }
  return made;
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, "")),
      older_(other.older_),
      file_(std::exchange(other.file_, -1)),
      interrupted_(std::move(other.interrupted_)) {}

AtomicFile::~AtomicFile() {
  if (file_ >= 0) close(file_);
  if (temporary_.empty()) return;
  unlink(temporary_.c_str());
  PartialFiles::OfThisProcess().Remove(temporary_);
}

absl::Status AtomicFile::Write(absl::Span<const uint8_t> bytes) {
  return WriteAll(path_, file_, bytes, interrupted_);
}

absl::Status AtomicFile::Commit() {
  absl::Status status;
  if (!target_.empty() && KeepMode(file_, older_) != 0) {
    status = CannotWrite(path_, errno);
  }
  if (close(std::exchange(file_, -1)) != 0 && status.ok()) {
    status = CannotWrite(path_, errno);
  }
  if (target_.empty() || !status.ok()) return status;
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) {
    return CannotWrite(path_, errno);
  }
  PartialFiles::OfThisProcess().Remove(temporary_);
  temporary_.clear();
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::Span<const uint8_t> bytes,
                                 const Interrupted& interrupted) {
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(path, interrupted);
  if (!file.ok()) return file.status();
  const absl::Status status = file->Write(bytes);
  return status.ok() ? file->Commit() : status;
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
