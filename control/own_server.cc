#include "control/own_server.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "control/log.h"
#include "control/unique_id_listener.h"
#include "control/waiting.h"

namespace refit::control {
namespace {

// Rank 0 without a secret lets everybody in, so it says that, but once.
void SayThatAnybodyMayJoin(const std::string& address) {
  static std::atomic<bool> said = false;
  if (said.exchange(true)) return;
  Log(LogLevel::kWarning,
      absl::StrCat("rank 0 listens at ", address,
                   " and lets in whoever reaches it, since neither "
                   "REFIT_SECRET nor REFIT_SECRET_FILE is set"));
}

absl::StatusOr<Socket> ListenForRanks(const TcpRendezvous& rendezvous,
                                      ControlPlane::Deadline deadline) {
  const bool open = rendezvous.secret.empty();
  absl::StatusOr<Socket> listener =
      rendezvous.id_name != 0
          ? UniqueIdListener(rendezvous)
          : Listen(rendezvous.host, rendezvous.port,
                   open ? Interfaces::kOfHost : Interfaces::kAll, deadline);
  if (!listener.ok()) {
    if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
    const bool elsewhere =
        open && absl::StrContains(listener.status().message(),
                                  std::strerror(EADDRNOTAVAIL));
    return absl::Status(
        listener.status().code(),
        absl::StrCat(
            "connect: rank 0 cannot listen at port ", rendezvous.port, ": ",
            listener.status().message(),
            elsewhere ? absl::StrCat("; \"", rendezvous.host,
                                     "\" is no address of this host, and only "
                                     "with a secret (REFIT_SECRET) does rank 0 "
                                     "listen at others")
                      : ""));
  }
  if (open) SayThatAnybodyMayJoin(BoundText(*listener));
  return listener;
}

}  // namespace

absl::StatusOr<OwnServer> StartServer(const TcpRendezvous& rendezvous,
                                      ControlPlane::Deadline deadline) {
  Socket listener;
  if (rendezvous.world_size > 1) {
    absl::StatusOr<Socket> listening = ListenForRanks(rendezvous, deadline);
    if (!listening.ok()) return listening.status();
    listener = *std::move(listening);
  }
  absl::StatusOr<std::pair<Socket, Socket>> ends = ConnectedPair();
  if (!ends.ok()) return ends.status();
  absl::StatusOr<std::unique_ptr<ControlServer>> server = ControlServer::Start(
      rendezvous, std::move(listener), std::move(ends->second));
  if (!server.ok()) return server.status();
  return OwnServer{*std::move(server), Link{std::move(ends->first)}};
}

}  // namespace refit::control
