// FileDescriptor: owns a file descriptor.
#ifndef REFIT_CONTROL_FILE_DESCRIPTOR_H_
#define REFIT_CONTROL_FILE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace refit {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  void Close() { FileDescriptor closed(std::move(*this)); }

 private:
  int fd_ = -1;
};

}  // namespace refit

#endif  // REFIT_CONTROL_FILE_DESCRIPTOR_H_
