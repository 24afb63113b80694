#include "compiler/job/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/utf8.h"

namespace refit {
namespace {

constexpr size_t kReadBytes = size_t{1} << 20;

// Closes what it opened, and nothing else.
class OpenFile {
 public:
  explicit OpenFile(const std::string& path)
      : owned_(path != "-"),
        descriptor_(owned_ ? open(path.c_str(), O_RDONLY | O_CLOEXEC)
                           : STDIN_FILENO) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (owned_ && descriptor_ >= 0) close(descriptor_);
  }
  int descriptor() const { return descriptor_; }

 private:
  const bool owned_;
  const int descriptor_;
};

absl::Status SystemError(std::string_view what, int error) {
  return absl::UnavailableError(
      absl::StrFormat("%s: %s", what, std::strerror(error)));
}

absl::Status TooLarge(std::string_view found, int64_t size_bytes_max) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "file has %s bytes; wanted at most %d", found, size_bytes_max));
}

absl::StatusOr<std::string> ReadAll(int descriptor, int64_t size_bytes_max) {
  std::string text;
  while (true) {
    const size_t used = text.size();
    text.resize(used + kReadBytes);
    ssize_t count;
    do {
      count = read(descriptor, text.data() + used, kReadBytes);
    } while (count < 0 && errno == EINTR);
    if (count < 0) return SystemError("cannot be read", errno);
    text.resize(used + static_cast<size_t>(count));
    if (static_cast<int64_t>(text.size()) > size_bytes_max) {
      return TooLarge(absl::StrCat("more than ", size_bytes_max),
                      size_bytes_max);
    }
    if (count == 0) return text;
  }
}

}  // namespace

absl::Status CheckText(std::string_view text) {
  const size_t bad = std::min(FirstNotUtf8(text), text.find('\0'));
  if (bad >= text.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("not UTF-8 text: byte 0x%02x at offset %d",
                      static_cast<unsigned char>(text[bad]), bad));
}

absl::StatusOr<std::shared_ptr<const SourceFile>> ReadTextFile(
    const std::string& path, int64_t size_bytes_max) {
  const OpenFile file(path);
  if (file.descriptor() < 0) return SystemError("cannot be opened", errno);
  struct stat info;
  if (fstat(file.descriptor(), &info) != 0) {
    return SystemError("cannot be read", errno);
  }
  if (S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError("is a directory; wanted a file");
  }
  if (S_ISREG(info.st_mode) && info.st_size > size_bytes_max) {
    return TooLarge(absl::StrCat(info.st_size), size_bytes_max);
  }
  absl::StatusOr<std::string> text = ReadAll(file.descriptor(), size_bytes_max);
  if (!text.ok()) return text.status();
  if (absl::Status status = CheckText(*text); !status.ok()) return status;
  return std::make_shared<const SourceFile>(SourceFile{
      .path = path == "-" ? "<stdin>" : path, .text = *std::move(text)});
}

Place WholeFile(const std::string& path) {
  return {.file = std::make_shared<const SourceFile>(
              SourceFile{.path = path == "-" ? "<stdin>" : path, .text = ""})};
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return "";
  return path.substr(0, slash == 0 ? 1 : slash);
}

std::string ResolvePath(const std::string& directory, const std::string& path) {
  if (directory.empty() || path.starts_with('/')) return path;
  return absl::StrCat(directory, directory.ends_with('/') ? "" : "/", path);
}

}  // namespace refit
