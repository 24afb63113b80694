// Socket: owns a socket that children after fork do not get.
#ifndef REFIT_CONTROL_SOCKET_H_
#define REFIT_CONTROL_SOCKET_H_

#include "control/file_descriptor.h"

namespace refit {

// A socket's descriptor. A child after fork has an empty socket in its place:
// the other end sees this process end, though its children go on.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : descriptor_(fd) { KeepFromChildren(); }
  Socket(Socket&&) noexcept = default;
  Socket& operator=(Socket&&) noexcept = default;
  ~Socket() { Close(); }

  int fd() const { return descriptor_.fd(); }
  void Close();

  // From now on a child after fork has this socket too, or not any more.
  void LeaveToChildren();
  void KeepFromChildren();

 private:
  FileDescriptor descriptor_;
};

}  // namespace refit

#endif  // REFIT_CONTROL_SOCKET_H_
