// UniqueId: names a meeting. Whoever starts the ranks hands it out, if no
// launcher's variables say where rank 0 is.
#ifndef REFIT_CONTROL_INCLUDE_REFIT_UNIQUE_ID_H_
#define REFIT_CONTROL_INCLUDE_REFIT_UNIQUE_ID_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "refit/control_plane.h"

namespace refit {

// As many bytes as NCCL's, so that it goes where such an id goes. It says where
// its creator listens, so it serves one meeting at a time. It holds the secret
// of the meeting, 128 bits: who has the id may join, so hand it out on a way
// that only the ranks can read.
struct UniqueId {
  std::array<char, 128> bytes = {};
};

// Made in the process that is to be rank 0, which listens from then on, at any
// free port, as long as it lives; of ids without a meeting, the 64 newest do.
// Others reach it at the name or address `host`, "" meaning that in REFIT_HOST,
// or else at the first address of a network interface that is up and that
// NCCL_SOCKET_IFNAME allows. A name without an address here is only warned of.
// Errors: kUnavailable, no port; kInvalidArgument, the host is too long, or no
// interface is allowed.
absl::StatusOr<UniqueId> CreateUniqueId(std::string_view host = {});

// The same for a meeting that this process serves, but is no rank of: all
// `world_size` ranks come from elsewhere, or are made here. So whichever rank
// is lost, those that are left can meet again, by another id. The process
// serves the meeting until its ranks have met and left: when it ends, they
// fail. If a meeting fails, they may try again. Of more than 64 that have yet
// to succeed the first are given up. Errors: those above; kInvalidArgument, the
// world size; kResourceExhausted, too few file descriptors. Thread-safe.
absl::StatusOr<UniqueId> HostMeeting(int32_t world_size,
                                     std::string_view host = {});

// Of a meeting that this process hosts: whether all ranks have met, and whether
// it is over, because they have left or somebody has ended it. One that this
// process does not host, or no longer, is over. Thread-safe.
struct HostedMeeting {
  bool has_met = false;
  bool is_over = true;
  // "waiting: rank 0; came and left: rank 2; missing: ranks 1, 3"
  std::string who_came = {};
};
HostedMeeting MeetingHostedHere(const UniqueId& id);

// The meeting of `id`, for ConnectTcp: rank 0's creates it, unless it is
// hosted, any number of times if meetings fail. Error: kInvalidArgument, bytes
// that are no id of Refit.
absl::StatusOr<TcpRendezvous> RendezvousFromUniqueId(const UniqueId& id,
                                                     int32_t rank,
                                                     int32_t world_size);

}  // namespace refit

#endif  // REFIT_CONTROL_INCLUDE_REFIT_UNIQUE_ID_H_
