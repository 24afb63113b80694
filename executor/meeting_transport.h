// MeetingTransport: a transport of ranks that have not met yet.
#ifndef REFIT_EXECUTOR_MEETING_TRANSPORT_H_
#define REFIT_EXECUTOR_MEETING_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

// What carries the messages of ranks that meet.
enum class Wire { kNccl, kUcx };

// Connect first meets the other ranks at `rendezvous`, within its deadline; the
// errors of ConnectTcp are then Connect's. All else is NcclTransport's, for
// whose `device` and `hosts` see NcclOptions, or UcxTransport's.
std::unique_ptr<Transport> CreateMeetingTransport(TcpRendezvous rendezvous,
                                                  Wire wire, Device* device,
                                                  std::vector<uint32_t> hosts);

}  // namespace refit

#endif  // REFIT_EXECUTOR_MEETING_TRANSPORT_H_
