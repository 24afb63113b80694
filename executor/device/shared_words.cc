#include "executor/device/shared_words.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/payload.h"

namespace refit {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status SharedWordsStatus(const char* call) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "words that processes share: ", call, ": ", std::strerror(errno)));
}

size_t WholePages(size_t count) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = count * sizeof(uint64_t);
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

// The kernel drops the lock of a process that ends, however it does.
struct flock ByteOf(size_t index) {
  struct flock byte = {};
  byte.l_type = F_WRLCK;
  byte.l_whence = SEEK_SET;
  byte.l_start = static_cast<off_t>(index);
  byte.l_len = 1;
  return byte;
}

}  // namespace

SharedWords::SharedWords(FileDescriptor file, size_t count)
    : file_(std::move(file)), size_bytes_(WholePages(count)) {}

SharedWords::~SharedWords() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

absl::Status SharedWords::Map() {
  void* const data = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE,
                          MAP_SHARED, file_.fd(), 0);
  if (data == MAP_FAILED) return SharedWordsStatus("mmap");
  data_ = static_cast<uint64_t*>(data);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SharedWords>> SharedWords::Create(size_t count) {
  FileDescriptor file(
      memfd_create("refit-words", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd() < 0) return SharedWordsStatus("memfd_create");
  const auto size_bytes = static_cast<off_t>(WholePages(count));
  if (ftruncate(file.fd(), size_bytes) != 0)
    return SharedWordsStatus("ftruncate");
  if (fcntl(file.fd(), F_ADD_SEALS, kSeals) != 0)
    return SharedWordsStatus("fcntl");
  std::unique_ptr<SharedWords> words(new SharedWords(std::move(file), count));
  if (absl::Status s = words->Map(); !s.ok()) return s;
  return words;
}

absl::StatusOr<std::unique_ptr<SharedWords>> SharedWords::Open(
    std::string_view shown, size_t count,
    std::chrono::steady_clock::time_point deadline) {
  PayloadReader reader(shown);
  const std::string server = reader.String();
  const std::string_view token = reader.Bytes(sizeof(Token));
  if (!reader.Complete() || server.size() > DescriptorServer::kNameBytesMax) {
    return absl::InvalidArgumentError("no words that a process shows");
  }
  absl::StatusOr<FileDescriptor> file =
      FetchDescriptor(server, token, deadline);
  if (!file.ok()) return file.status();
  struct stat about = {};
  const bool is_sealed =
      (fcntl(file->fd(), F_GET_SEALS) & F_SEAL_SHRINK) == F_SEAL_SHRINK;
  if (!is_sealed || fstat(file->fd(), &about) != 0 ||
      about.st_size != static_cast<off_t>(WholePages(count))) {
    return absl::InvalidArgumentError(
        absl::StrCat("what a process shows is not ", count, " words"));
  }
  std::unique_ptr<SharedWords> words(new SharedWords(*std::move(file), count));
  if (absl::Status s = words->Map(); !s.ok()) return s;
  return words;
}

absl::Status SharedWords::Hold(size_t index) {
  // The lock is of what is opened here, and a mapping would keep that open in a
  // child after fork.
  held_ = Socket(open(absl::StrCat("/proc/self/fd/", file_.fd()).c_str(),
                      O_RDWR | O_CLOEXEC));
  if (held_.fd() < 0) return SharedWordsStatus("open");
  struct flock byte = ByteOf(index);
  if (fcntl(held_.fd(), F_OFD_SETLK, &byte) != 0) {
    return SharedWordsStatus("F_OFD_SETLK");
  }
  return absl::OkStatus();
}

bool SharedWords::IsHeld(size_t index) const {
  struct flock byte = ByteOf(index);
  return fcntl(file_.fd(), F_OFD_GETLK, &byte) == 0 && byte.l_type != F_UNLCK;
}

absl::StatusOr<std::string> SharedWords::Show() {
  if (server_ == nullptr) {
    absl::StatusOr<std::unique_ptr<DescriptorServer>> server =
        DescriptorServer::Start(
            [this](std::string_view request) -> absl::StatusOr<FileDescriptor> {
              if (request != TokenBytes(token_)) {
                return absl::NotFoundError("its owner shows no such words");
              }
              FileDescriptor copy(fcntl(file_.fd(), F_DUPFD_CLOEXEC, 0));
              if (copy.fd() < 0) return SharedWordsStatus("fcntl");
              return copy;
            });
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
  }
  return PayloadWriter()
      .String(server_->name())
      .Bytes(TokenBytes(token_))
      .Take();
}

}  // namespace refit
