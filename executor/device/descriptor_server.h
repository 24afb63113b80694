// DescriptorServer: gives file descriptors to other processes of its host.
#ifndef REFIT_EXECUTOR_DEVICE_DESCRIPTOR_SERVER_H_
#define REFIT_EXECUTOR_DEVICE_DESCRIPTOR_SERVER_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/file_descriptor.h"
#include "control/socket.h"

namespace refit {

// Each request opens a descriptor, which is closed once it is on its way: this
// process holds one at a time, however many are asked for.
//
// They pass through an abstract Unix socket, as NCCL's do: processes need a
// network namespace and a user in common, but no right to trace each other,
// which duplicating another process's descriptor (pidfd_getfd) would take.
class DescriptorServer {
 public:
  // Called on the server's thread with what a client asked for: any bytes, at
  // most kRequestBytesMax.
  using Open =
      std::function<absl::StatusOr<FileDescriptor>(std::string_view request)>;
  static constexpr size_t kRequestBytesMax = 64;

  // Error: kResourceExhausted, no thread; kInternal, no socket.
  static absl::StatusOr<std::unique_ptr<DescriptorServer>> Start(Open open);
  // Returns when no request is under way.
  ~DescriptorServer();

  // What FetchDescriptor reaches it by; at most kNameBytesMax.
  const std::string& name() const { return name_; }
  static constexpr size_t kNameBytesMax = 47;

 private:
  DescriptorServer(Open open, std::string name, Socket listener,
                   FileDescriptor stop);
  void Serve();
  void Answer(const FileDescriptor& client);

  const Open open_;
  const std::string name_;
  // A child's copy would have clients wait for a process that is gone.
  const Socket listener_;
  const FileDescriptor stop_;  // readable: the thread is to end
  std::thread thread_;
};

// What the server `name` opens for `request`. Errors: the server's own;
// kFailedPrecondition, it cannot be reached; kUnavailable, it has closed;
// kDeadlineExceeded; those of this thread's interruption.
absl::StatusOr<FileDescriptor> FetchDescriptor(
    const std::string& name, std::string_view request,
    std::chrono::steady_clock::time_point deadline);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_DESCRIPTOR_SERVER_H_
