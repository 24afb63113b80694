#include "executor/device/descriptor_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "control/own_thread.h"
#include "control/token.h"
#include "control/waiting.h"

namespace refit {
namespace {

using Deadline = std::chrono::steady_clock::time_point;

// A client that stops in the middle holds up the others for so long.
constexpr timeval kServerPatience = {.tv_sec = 2, .tv_usec = 0};
// How long a client waits before it looks at its deadline and interruption.
constexpr timeval kClientPatience = {.tv_sec = 0, .tv_usec = 100'000};

// An answer: a descriptor with this one byte, or the text of an error.
constexpr char kGranted = '\0';
constexpr size_t kAnswerBytesMax = 512;

struct AbstractAddress {
  sockaddr_un address;
  socklen_t size_bytes;
};

AbstractAddress AddressOf(const std::string& name) {
  AbstractAddress result = {};
  result.address.sun_family = AF_UNIX;
  // The name comes after a zero byte: it is none of a file.
  const size_t length =
      std::min(name.size(), sizeof(result.address.sun_path) - 1);
  std::memcpy(result.address.sun_path + 1, name.data(), length);
  result.size_bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return result;
}

absl::Status DescriptorStatus(const char* call) {
  return absl::InternalError(absl::StrCat(call, ": ", std::strerror(errno)));
}

// Messages keep their bounds.
FileDescriptor OpenSocket() {
  return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
}

void SetPatience(const FileDescriptor& socket, const timeval& patience) {
  setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(socket.fd(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
}

// A signal's handler interrupts calls on sockets with a patience, also where it
// was installed with SA_RESTART.
template <typename Call>
auto Uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// The same for a client, until it is out of time. An error other than that is
// in errno.
template <typename Call>
absl::Status Patiently(Deadline deadline, Call call) {
  while (call() < 0 && (errno == EINTR || errno == EAGAIN)) {
    if (absl::Status s = PollInterruption(); !s.ok()) return s;
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError("no answer before the deadline");
    }
  }
  return absl::OkStatus();
}

// The other end of a connected socket.
bool IsOfThisUser(const FileDescriptor& socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  return getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == geteuid();
}

// One message, with room for one descriptor beside it.
struct Message {
  Message(char* data, size_t size_bytes) : bytes{data, size_bytes} {
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
  }
  void AttachRoom() {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  void Attach(int fd) {
    AttachRoom();
    cmsghdr* const part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(fd));
    std::memcpy(CMSG_DATA(part), &fd, sizeof(fd));
  }
  FileDescriptor Attached() {
    const cmsghdr* const part = CMSG_FIRSTHDR(&header);
    int fd = -1;
    if (part != nullptr && part->cmsg_type == SCM_RIGHTS) {
      std::memcpy(&fd, CMSG_DATA(part), sizeof(fd));
    }
    return FileDescriptor(fd);
  }

  iovec bytes;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};
};

}  // namespace

absl::StatusOr<std::unique_ptr<DescriptorServer>> DescriptorServer::Start(
    Open open) {
  const Token token = NewToken();
  const std::string name =
      "refit-" + absl::BytesToHexString({token.data(), token.size()});
  const AbstractAddress at = AddressOf(name);
  Socket listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (listener.fd() < 0) return DescriptorStatus("socket");
  if (bind(listener.fd(), reinterpret_cast<const sockaddr*>(&at.address),
           at.size_bytes) != 0) {
    return DescriptorStatus("bind");
  }
  if (listen(listener.fd(), SOMAXCONN) != 0) return DescriptorStatus("listen");
  FileDescriptor stop(eventfd(0, EFD_CLOEXEC));
  if (stop.fd() < 0) return DescriptorStatus("eventfd");
  std::unique_ptr<DescriptorServer> server(new DescriptorServer(
      std::move(open), name, std::move(listener), std::move(stop)));
  absl::Status started =
      StartThread(server->thread_, "the thread that shares memory",
                  [made = server.get()] { made->Serve(); });
  if (!started.ok()) return started;
  return server;
}

DescriptorServer::DescriptorServer(Open open, std::string name, Socket listener,
                                   FileDescriptor stop)
    : open_(std::move(open)),
      name_(std::move(name)),
      listener_(std::move(listener)),
      stop_(std::move(stop)) {}

DescriptorServer::~DescriptorServer() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  (void)!write(stop_.fd(), &one, sizeof(one));
  thread_.join();
}

void DescriptorServer::Serve() {
  while (true) {
    pollfd waits[] = {{.fd = stop_.fd(), .events = POLLIN, .revents = 0},
                      {.fd = listener_.fd(), .events = POLLIN, .revents = 0}};
    if (poll(waits, 2, -1) < 0 && errno != EINTR) return;
    if (waits[0].revents != 0) return;
    if (waits[1].revents == 0) continue;
    const FileDescriptor client(
        accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (client.fd() >= 0) {
      Answer(client);
    } else if (errno == EMFILE || errno == ENFILE) {
      // The client stays in the queue until descriptors are free again.
      poll(waits, 1, 10);
    }
  }
}

void DescriptorServer::Answer(const FileDescriptor& client) {
  SetPatience(client, kServerPatience);
  char request[kRequestBytesMax];
  if (!IsOfThisUser(client)) return;
  const ssize_t size = Uninterrupted(
      [&] { return recv(client.fd(), request, sizeof(request), 0); });
  if (size <= 0) return;
  const absl::StatusOr<FileDescriptor> opened =
      open_({request, static_cast<size_t>(size)});
  std::string text(1, kGranted);
  if (!opened.ok()) {
    text = std::string(opened.status().message()).substr(0, kAnswerBytesMax);
  }
  Message answer(text.data(), text.size());
  if (opened.ok()) answer.Attach(opened->fd());
  (void)Uninterrupted(
      [&] { return sendmsg(client.fd(), &answer.header, MSG_NOSIGNAL); });
}

absl::StatusOr<FileDescriptor> FetchDescriptor(const std::string& name,
                                               std::string_view request,
                                               Deadline deadline) {
  const AbstractAddress at = AddressOf(name);
  const FileDescriptor server = OpenSocket();
  if (server.fd() < 0) return DescriptorStatus("socket");
  SetPatience(server, kClientPatience);
  int connected = -1;
  absl::Status status = Patiently(deadline, [&] {
    return connected = connect(server.fd(),
                               reinterpret_cast<const sockaddr*>(&at.address),
                               at.size_bytes);
  });
  const auto in_place = [&](const absl::Status& s) {
    return absl::Status(
        s.code(), absl::StrCat("the Unix socket @", name, ": ", s.message()));
  };
  if (!status.ok()) return in_place(status);
  if (connected != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the Unix socket @", name, " was not reached (",
                     std::strerror(errno), ")"));
  }
  // The name may be another's by now, whose memory is not to be written to.
  if (!IsOfThisUser(server)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the Unix socket @", name, " is another user's"));
  }
  char text[kAnswerBytesMax];
  Message answer(text, sizeof(text));
  answer.AttachRoom();
  if (Uninterrupted([&] {
        return send(server.fd(), request.data(), request.size(), MSG_NOSIGNAL);
      }) < 0) {
    return DescriptorStatus("send");
  }
  ssize_t size = -1;
  status = Patiently(deadline, [&] {
    return size = recvmsg(server.fd(), &answer.header, MSG_CMSG_CLOEXEC);
  });
  if (!status.ok()) return in_place(status);
  if (size <= 0) {
    return absl::UnavailableError(
        absl::StrCat("the Unix socket @", name, " gave no answer",
                     size < 0 ? absl::StrCat(" (", std::strerror(errno), ")")
                              : std::string("; is it of another user?")));
  }
  FileDescriptor descriptor = answer.Attached();
  if (descriptor.fd() >= 0) return descriptor;
  if (size == 1 && text[0] == kGranted) {
    return absl::ResourceExhaustedError(
        "this process can have no more file descriptors");
  }
  return absl::FailedPreconditionError(
      std::string(text, static_cast<size_t>(size)));
}

}  // namespace refit
