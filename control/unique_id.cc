#include "refit/unique_id.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
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

// How many ids of this process listen while they have no meeting, and how many
// meetings that it hosts have yet to succeed.
constexpr size_t kListenersMax = 64;

// An id that this process made.
struct Made {
  uint64_t name = 0;
  // Rank 0's, without a descriptor while a meeting has it, or when too many
  // others came after it: its port is free then until rank 0 comes.
  Socket listener = {};
  std::unique_ptr<control::ControlServer> server = nullptr;  // of a host
};

// All of them, the first made first. Hosts that are over are forgotten.
struct AllMade {
  std::mutex mutex;
  std::vector<Made> ids;

  // The caller holds the mutex of these.
  Made* Find(uint64_t name) {
    const auto found =
        std::find_if(ids.begin(), ids.end(),
                     [&](const Made& id) { return id.name == name; });
    return found == ids.end() ? nullptr : &*found;
  }
  void CloseTheFirst() {
    size_t listening = 0, waiting = 0;
    for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
      if (id->listener.fd() >= 0 && ++listening > kListenersMax) {
        id->listener.Close();
      }
      if (id->server != nullptr && !id->server->has_met() &&
          ++waiting > kListenersMax) {
        id->server->Stop();
      }
    }
  }

  void Add(Made id) {
    std::lock_guard lock(mutex);
    std::erase_if(ids, [](const Made& old) {
      return old.server != nullptr && old.server->is_over();
    });
    ids.push_back(std::move(id));
    CloseTheFirst();
  }
};
AllMade& TheMade() {
  static AllMade& made = *new AllMade;  // a server's thread may outlive statics
  return made;
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
  const uint16_t port = control::BoundTo(*listener).port;
  NewId made = {.id = {}, .listener = *std::move(listener)};
  made.secret = NewToken();
  std::string payload = PayloadWriter()
                            .Bytes(TokenBytes(made.secret))
                            .U16(port)
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

}  // namespace

absl::StatusOr<UniqueId> CreateUniqueId(std::string_view host) {
  absl::StatusOr<NewId> made = MakeId(host, /*hosted=*/false);
  if (!made.ok()) return made.status();
  // Rank 0 may be a child.
  made->listener.LeaveToChildren();
  TheMade().Add({.name = control::PublicName(TokenBytes(made->secret)),
                 .listener = std::move(made->listener)});
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
  TheMade().Add({.name = rendezvous->id_name, .server = *std::move(server)});
  return made->id;
}

HostedMeeting MeetingHostedHere(const UniqueId& id) {
  const absl::StatusOr<TcpRendezvous> place = RendezvousFromUniqueId(id, 0, 1);
  AllMade& all = TheMade();
  std::lock_guard lock(all.mutex);
  const Made* const made = place.ok() ? all.Find(place->id_name) : nullptr;
  if (made == nullptr || made->server == nullptr) return {};
  // In this order: what ends after it has met has met.
  const bool is_over = made->server->is_over();
  return {.has_met = made->server->has_met(),
          .is_over = is_over,
          .who_came = made->server->WhoCame()};
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
  AllMade& all = TheMade();
  std::lock_guard lock(all.mutex);
  Made* const made = all.Find(rendezvous.id_name);
  if (made == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the unique id of ", AddressText(rendezvous.host, rendezvous.port),
        " was not created in this process (", ProcessText(),
        "): rank 0 must be where it was"));
  }
  // A child of the creator may have an empty socket.
  int listens = 0;
  socklen_t size = sizeof(listens);
  getsockopt(made->listener.fd(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &size);
  if (listens == 0) {
    return Listen(rendezvous.host, rendezvous.port, Interfaces::kAll,
                  Clock::now());
  }
  made->listener.KeepFromChildren();
  return std::move(made->listener);
}

void ReturnUniqueIdListener(uint64_t id_name, Socket listener) {
  // Not of a server that has none, or has returned it: the process's own is
  // there.
  if (listener.fd() < 0) return;
  AllMade& all = TheMade();
  std::lock_guard lock(all.mutex);
  Made* const made = all.Find(id_name);
  if (made == nullptr || made->server != nullptr) return;
  made->listener = std::move(listener);
  all.CloseTheFirst();
}

}  // namespace control
}  // namespace refit
