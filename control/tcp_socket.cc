#include "control/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "control/own_thread.h"
#include "control/waiting.h"

namespace refit::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// One try to reach one address: a host that is off does not answer at all.
constexpr seconds kConnectTime{5};
// A name has as long to be resolved, also where no time is left.
constexpr seconds kResolveTime{2};
// A silent peer is asked for a sign of life after the idle time, and given up
// after this many questions: 20 s in all. So is one that has had no room for
// more all that time.
constexpr int kKeepaliveIdleSeconds = 5;
constexpr int kKeepaliveIntervalSeconds = 5;
constexpr int kKeepaliveCount = 3;
constexpr int kUnacknowledgedMillisecondsMax = 20'000;

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { freeaddrinfo(addresses); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::Status ErrnoStatus(const char* call) {
  const absl::StatusCode code = errno == ECONNREFUSED
                                    ? absl::StatusCode::kNotFound
                                    : absl::StatusCode::kUnavailable;
  return absl::Status(code, absl::StrCat(call, ": ", std::strerror(errno)));
}

absl::StatusOr<Addresses> Resolve(const std::string& host, uint16_t port,
                                  int flags = 0) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", host, "\" has no address: ", gai_strerror(error),
                     "; wanted a name that this host resolves, or an address"));
  }
  return Addresses(found);
}

// The resolver has no deadline of its own: where DNS does not answer it takes
// half a minute. A thread that outlives the wait goes on alone.
absl::StatusOr<Addresses> ResolveUntil(const std::string& host, uint16_t port,
                                       Clock::time_point deadline) {
  absl::StatusOr<Addresses> numeric = Resolve(host, port, AI_NUMERICHOST);
  if (numeric.ok()) return numeric;
  struct Answer {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_there = false;
    absl::StatusOr<Addresses> addresses = absl::UnknownError("");
  };
  const auto answer = std::make_shared<Answer>();
  std::thread thread;
  const absl::Status started = StartThread(
      thread, "the thread that resolves a name", [answer, host, port] {
        absl::StatusOr<Addresses> addresses = Resolve(host, port);
        const std::lock_guard lock(answer->mutex);
        answer->addresses = std::move(addresses);
        answer->is_there = true;
        answer->changed.notify_all();
      });
  if (!started.ok()) return started;
  std::unique_lock lock(answer->mutex);
  const bool came = WaitUntil(
      answer->changed, lock, std::max(deadline, Clock::now() + kResolveTime),
      [&] { return answer->is_there; }, [](int64_t) {});
  lock.unlock();
  if (came) {
    thread.join();
    return std::move(answer->addresses);
  }
  thread.detach();
  absl::Status interrupted = InterruptionStatus();
  if (!interrupted.ok()) return interrupted;
  return absl::UnavailableError(absl::StrCat(
      "the name \"", host, "\" was not resolved before the deadline"));
}

// What the first address of `host` gives that gives a socket, or else the last
// one's error.
absl::StatusOr<Socket> FirstOf(
    const std::string& host, uint16_t port, Clock::time_point deadline,
    absl::FunctionRef<absl::StatusOr<Socket>(const addrinfo&)> open) {
  const absl::StatusOr<Addresses> addresses =
      ResolveUntil(host, port, deadline);
  if (!addresses.ok()) return addresses.status();
  absl::StatusOr<Socket> socket;
  for (const addrinfo* address = addresses->get();
       address != nullptr && !socket.ok(); address = address->ai_next) {
    socket = open(*address);
  }
  return socket;
}

void SetOption(const Socket& socket, int level, int option, int value) {
  // The connection works without any of them, only less well.
  setsockopt(socket.fd(), level, option, &value, sizeof(value));
}

void SetConnectionOptions(const Socket& socket) {
  SetOption(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleSeconds);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalSeconds);
  SetOption(socket, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveCount);
  SetOption(socket, IPPROTO_TCP, TCP_USER_TIMEOUT,
            kUnacknowledgedMillisecondsMax);
}

Socket NewSocket(int family) {
  return Socket(
      ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

absl::StatusOr<Socket> ListenAt(const addrinfo& address) {
  Socket socket = NewSocket(address.ai_family);
  if (socket.fd() < 0) return ErrnoStatus("socket");
  // A run may follow another at the same port at once.
  SetOption(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.ai_family == AF_INET6) {
    SetOption(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  }
  if (bind(socket.fd(), address.ai_addr, address.ai_addrlen) != 0) {
    return ErrnoStatus("bind");
  }
  if (listen(socket.fd(), SOMAXCONN) != 0) return ErrnoStatus("listen");
  return socket;
}

// A port that nobody listens at can be the one the kernel gives to the
// connecting socket, which is then connected with itself.
bool IsConnectedWithItself(const Socket& socket) {
  sockaddr_storage local{}, peer{};
  socklen_t local_size = sizeof(local), peer_size = sizeof(peer);
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&local), &local_size);
  getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &peer_size);
  return local_size == peer_size && std::memcmp(&local, &peer, local_size) == 0;
}

absl::StatusOr<Socket> ConnectTo(const addrinfo& address,
                                 Clock::time_point deadline) {
  Socket socket = NewSocket(address.ai_family);
  if (socket.fd() < 0) return ErrnoStatus("socket");
  if (connect(socket.fd(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return ErrnoStatus("connect");
    if (!AwaitUnlessInterrupted(
            socket, POLLOUT, std::min(deadline, Clock::now() + kConnectTime))) {
      return absl::UnavailableError("connect: no answer");
    }
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      errno = error;
      return ErrnoStatus("connect");
    }
  }
  if (IsConnectedWithItself(socket)) {
    errno = ECONNREFUSED;
    return ErrnoStatus("connect");
  }
  SetConnectionOptions(socket);
  return socket;
}

}  // namespace

std::string AddressText(const std::string& host, uint16_t port) {
  const bool ipv6 = absl::StrContains(host, ':');
  return absl::StrCat(ipv6 ? "[" : "", host, ipv6 ? "]:" : ":", port);
}

bool NamesLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" ||
         (absl::StartsWith(host, "127.") &&
          inet_addr(host.c_str()) != INADDR_NONE);
}

Bound BoundTo(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  char host[INET6_ADDRSTRLEN] = "";
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (getsockname(socket.fd(), any, &size) != 0) return {};
  getnameinfo(any, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  // The port is at the same place in both families' addresses.
  return {host, ntohs(reinterpret_cast<sockaddr_in*>(any)->sin_port)};
}

absl::StatusOr<Socket> Listen(const std::string& host, uint16_t port,
                              Interfaces interfaces,
                              Clock::time_point deadline) {
  if (interfaces == Interfaces::kAll && !NamesLoopback(host)) {
    // The kernel may have no IPv6.
    absl::StatusOr<Socket> socket =
        Listen("::", port, Interfaces::kOfHost, deadline);
    if (socket.ok()) return socket;
    return Listen("0.0.0.0", port, Interfaces::kOfHost, deadline);
  }
  return FirstOf(host, port, deadline, ListenAt);
}

absl::StatusOr<Socket> Accept(const Socket& listener) {
  Socket socket(
      accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.fd() < 0) {
    const bool exhausted = errno == EMFILE || errno == ENFILE ||
                           errno == ENOBUFS || errno == ENOMEM;
    const absl::Status status = ErrnoStatus("accept");
    return exhausted ? absl::ResourceExhaustedError(status.message()) : status;
  }
  SetConnectionOptions(socket);
  return socket;
}

absl::StatusOr<Socket> Connect(const std::string& host, uint16_t port,
                               Clock::time_point deadline) {
  return FirstOf(host, port, deadline, [&](const addrinfo& address) {
    return ConnectTo(address, deadline);
  });
}

absl::Status CheckHasAddress(const std::string& host) {
  const absl::Status status = ResolveUntil(host, 0, Clock::now()).status();
  return absl::IsInvalidArgument(status) ? status : absl::OkStatus();
}

absl::StatusOr<std::pair<Socket, Socket>> ConnectedPair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) !=
      0) {
    return ErrnoStatus("socketpair");
  }
  return std::make_pair(Socket(fds[0]), Socket(fds[1]));
}

absl::Status AllowDescriptors(uint64_t count, uint64_t count_min) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::OkStatus();
  if (limit.rlim_max < count_min) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the meeting's server needs ", count_min,
                     " file descriptors, but its hard limit is ",
                     limit.rlim_max, " (ulimit -Hn)"));
  }
  if (limit.rlim_cur >= count) return absl::OkStatus();
  limit.rlim_cur = std::min<rlim_t>(count, limit.rlim_max);
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("setrlimit: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

int MillisecondsUntil(Clock::time_point deadline) {
  const Clock::time_point now = Clock::now();
  if (deadline <= now) return 0;
  const auto left = std::chrono::ceil<milliseconds>(
      std::min<Clock::duration>(deadline - now, std::chrono::minutes(1)));
  return static_cast<int>(left.count());
}

bool Await(const Socket& socket, short events, Clock::time_point deadline) {
  while (true) {
    pollfd waiting{socket.fd(), events, 0};
    const int ready = poll(&waiting, 1, MillisecondsUntil(deadline));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (Clock::now() >= deadline) return false;
  }
}

bool AwaitUnlessInterrupted(const Socket& socket, short events,
                            Clock::time_point deadline) {
  while (!Await(socket, events, NextPoll(deadline))) {
    if (!PollInterruption().ok() || Clock::now() >= deadline) return false;
  }
  return true;
}

}  // namespace refit::control
