// MeetingTransport: an NcclTransport of ranks that have not met yet.
#ifndef REFIT_EXECUTOR_MEETING_TRANSPORT_H_
#define REFIT_EXECUTOR_MEETING_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

// Connect first meets the other ranks at `rendezvous`, within its deadline; the
// errors of ConnectTcp are then Connect's. All else is NcclTransport's, for
// whose `device` and `hosts` see NcclOptions.
std::unique_ptr<Transport> CreateMeetingTransport(TcpRendezvous rendezvous,
                                                  Device* device,
                                                  std::vector<uint32_t> hosts);

}  // namespace refit

#endif  // REFIT_EXECUTOR_MEETING_TRANSPORT_H_
