#include "refit/unique_id.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "control/host_address.h"
#include "control/log.h"
#include "control/membership.h"
#include "control/payload.h"
#include "control/server.h"
#include "control/tcp_socket.h"
#include "control/token.h"
#include "control/unique_id_listener.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// An id is this, a checksum of what follows, {secret, port, whether the meeting
// is hosted, length of the host's name, host}, and zeros.
constexpr std::string_view kIdMagic = "REFITID3";
constexpr size_t kChecksumBytes = sizeof(uint64_t);
constexpr size_t kPayloadBytes =
    sizeof(UniqueId::bytes) - kIdMagic.size() - kChecksumBytes;
// What is left for it.
constexpr size_t kHostBytesMax =
    kPayloadBytes - sizeof(Token) - sizeof(uint16_t) - 2 * sizeof(uint8_t);

uint64_t Checksum(std::string_view bytes) {
  return DigestOf(
             {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()})
      .low();
}

// How many ids of this process listen while they have no meeting. Another one's
// port is free again until rank 0 comes: of ids that had meetings first.
constexpr size_t kListenersMax = 64;

// The ids that this process created; a socket is without a descriptor while a
// meeting has it, or when too many others came after it.
struct Created {
  std::mutex mutex;
  std::map<uint64_t, Socket> listeners;  // by the id's name
  std::deque<uint64_t> listening;        // names, the first to close first

  void Add(uint64_t name, Socket listener, bool had_meeting) {
    std::lock_guard lock(mutex);
    if (had_meeting && !listeners.contains(name)) return;
    listeners[name] = std::move(listener);
    listening.insert(had_meeting ? listening.begin() : listening.end(), name);
    if (listening.size() <= kListenersMax) return;
    listeners[listening.front()].Close();
    listening.pop_front();
  }
};
Created& TheCreated() {
  static Created& created =
      *new Created;  // a server's thread may outlive statics
  return created;
}

// What others reach this host by: `given`, or else what the environment says.
absl::StatusOr<std::string> HostOfId(std::string_view given) {
  std::string host(given);
  std::string named = "the host";
  if (host.empty()) {
    const char* const set = std::getenv("REFIT_HOST");
    if (set != nullptr) host = set;
    named = "REFIT_HOST";
  }
  if (host.size() > kHostBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(named, " has ", host.size(), " characters, it should ",
                     "have ", kHostBytesMax, " at most"));
  }
  if (!host.empty()) {
    // The ranks may know a name that this host does not.
    if (absl::Status s = control::CheckHasAddress(host); !s.ok()) {
      Log(LogLevel::kWarning,
          absl::StrCat(named, " of a unique id: ", s.message()));
    }
    return host;
  }
  const char* const interfaces = std::getenv("NCCL_SOCKET_IFNAME");
  return control::ReachableAddress(control::AddressesOfThisHost(),
                                   interfaces == nullptr ? "" : interfaces);
}

absl::StatusOr<uint16_t> PortOf(const Socket& listener) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address),
                  &size) != 0) {
    return absl::UnavailableError(
        absl::StrCat("getsockname: ", std::strerror(errno)));
  }
  // At the same place in both families' addresses.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

struct NewId {
  UniqueId id;
  Socket listener;
  Token secret = {};
};

absl::StatusOr<NewId> MakeId(std::string_view given_host, bool hosted) {
  const absl::StatusOr<std::string> found = HostOfId(given_host);
  if (!found.ok()) return found.status();
  const std::string& host = *found;
  absl::StatusOr<Socket> listener = control::Listen(
      host, 0, control::Interfaces::kAll, control::Clock::now());
  if (!listener.ok()) return listener.status();
  const absl::StatusOr<uint16_t> port = PortOf(*listener);
  if (!port.ok()) return port.status();
  NewId made = {.id = {}, .listener = *std::move(listener)};
  made.secret = NewToken();
  std::string payload = PayloadWriter()
                            .Bytes(TokenBytes(made.secret))
                            .U16(*port)
                            .Bool(hosted)
                            .U8(static_cast<uint8_t>(host.size()))
                            .Bytes(host)
                            .Take();
  payload.resize(kPayloadBytes);
  const std::string bytes =
      absl::StrCat(std::string(kIdMagic),
                   PayloadWriter().U64(Checksum(payload)).Take(), payload);
  std::copy(bytes.begin(), bytes.end(), made.id.bytes.begin());
  return made;
}

// The meetings that this process serves, the first made first.
class HostedMeetings {
 public:
  // Forgets those that are over, and ends the first that never succeeded where
  // they are too many.
  void Add(std::unique_ptr<control::ControlServer> added) {
    std::lock_guard lock(mutex_);
    std::erase_if(meetings_,
                  [](const auto& meeting) { return meeting->is_over(); });
    meetings_.push_back(std::move(added));
    size_t waiting = 0;
    for (auto of = meetings_.rbegin(); of != meetings_.rend(); ++of) {
      if (!(*of)->has_met() && ++waiting > kListenersMax) (*of)->Stop();
    }
  }

  HostedMeeting Find(uint64_t id_name) {
    std::lock_guard lock(mutex_);
    for (const auto& meeting : meetings_) {
      if (meeting->id_name() != id_name) continue;
      // In this order: what ends after it has met has met.
      const bool is_over = meeting->is_over();
      return {.has_met = meeting->has_met(),
              .is_over = is_over,
              .who_came = meeting->WhoCame()};
    }
    return {};
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<control::ControlServer>> meetings_;
};
HostedMeetings& TheHosted() {
  static HostedMeetings& hosted = *new HostedMeetings;  // never destroyed
  return hosted;
}

}  // namespace

absl::StatusOr<UniqueId> CreateUniqueId(std::string_view host) {
  absl::StatusOr<NewId> made = MakeId(host, /*hosted=*/false);
  if (!made.ok()) return made.status();
  // Rank 0 may be a child.
  made->listener.LeaveToChildren();
  TheCreated().Add(control::PublicName(TokenBytes(made->secret)),
                   std::move(made->listener), /*had_meeting=*/false);
  return made->id;
}

absl::StatusOr<UniqueId> HostMeeting(int32_t world_size,
                                     std::string_view host) {
  constexpr int32_t kMax = TcpRendezvous::kWorldSizeMax;
  if (world_size < 1 || world_size > kMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "world size ", world_size, " is not between 1 and ", kMax));
  }
  absl::StatusOr<NewId> made = MakeId(host, /*hosted=*/true);
  if (!made.ok()) return made.status();
  const absl::StatusOr<TcpRendezvous> rendezvous =
      RendezvousFromUniqueId(made->id, 0, world_size);
  if (!rendezvous.ok()) return rendezvous.status();
  absl::StatusOr<std::unique_ptr<control::ControlServer>> server =
      control::ControlServer::Start(*rendezvous, std::move(made->listener), {});
  if (!server.ok()) return server.status();
  (*server)->Detach();  // nobody may ever come to join it
  TheHosted().Add(*std::move(server));
  return made->id;
}

HostedMeeting MeetingHostedHere(const UniqueId& id) {
  const absl::StatusOr<TcpRendezvous> place = RendezvousFromUniqueId(id, 0, 1);
  return place.ok() ? TheHosted().Find(place->id_name) : HostedMeeting();
}

absl::StatusOr<TcpRendezvous> RendezvousFromUniqueId(const UniqueId& id,
                                                     int32_t rank,
                                                     int32_t world_size) {
  std::string_view bytes(id.bytes.data(), id.bytes.size());
  if (!bytes.starts_with(kIdMagic)) {
    return absl::InvalidArgumentError(
        "not a unique id of Refit, which CreateUniqueId or "
        "refit_unique_id_create makes; one of NCCL does not serve");
  }
  bytes.remove_prefix(kIdMagic.size());
  const uint64_t checksum =
      PayloadReader(bytes.substr(0, kChecksumBytes)).U64();
  bytes.remove_prefix(kChecksumBytes);
  PayloadReader payload(bytes);
  TcpRendezvous rendezvous;
  rendezvous.rank = rank;
  rendezvous.world_size = world_size;
  rendezvous.secret = std::string(payload.Bytes(sizeof(Token)));
  rendezvous.port = payload.U16();
  rendezvous.hosted = payload.Bool();
  rendezvous.host = std::string(payload.Bytes(payload.U8()));
  rendezvous.id_name = control::PublicName(rendezvous.secret);
  if (!payload.ok() || Checksum(bytes) != checksum) {
    return absl::InvalidArgumentError(
        "a unique id of Refit that was damaged: all 128 bytes must reach "
        "every rank");
  }
  return rendezvous;
}

namespace control {

absl::StatusOr<Socket> UniqueIdListener(const TcpRendezvous& rendezvous) {
  Created& created = TheCreated();
  std::lock_guard lock(created.mutex);
  const auto found = created.listeners.find(rendezvous.id_name);
  if (found == created.listeners.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the unique id of ", AddressText(rendezvous.host, rendezvous.port),
        " was not created in this process (", ProcessText(),
        "): rank 0 must be where it was"));
  }
  std::erase(created.listening, rendezvous.id_name);
  // A child of the creator may have an empty socket.
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (found->second.fd() < 0 ||
      getsockopt(found->second.fd(), SOL_SOCKET, SO_ACCEPTCONN, &listens,
                 &size) != 0 ||
      listens == 0) {
    return Listen(rendezvous.host, rendezvous.port, Interfaces::kAll,
                  Clock::now());
  }
  found->second.KeepFromChildren();
  return std::move(found->second);
}

void ReturnUniqueIdListener(uint64_t id_name, Socket listener) {
  if (listener.fd() < 0) return;
  TheCreated().Add(id_name, std::move(listener), /*had_meeting=*/true);
}

}  // namespace control
}  // namespace refit
