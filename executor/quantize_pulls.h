// Which destinations quantize straight from the tensors of their sources.
#ifndef REFIT_EXECUTOR_QUANTIZE_PULLS_H_
#define REFIT_EXECUTOR_QUANTIZE_PULLS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "executor/peer_tensors.h"
#include "plan/plan_file.h"
#include "plan/schedule/rank_schedule.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

// Where sources would store into scratch that a destination quantizes from, the
// destination reads their tensors instead, if it can map them:
//
//   sources        show their tensors                 to such receivers
//   destinations   map these, and say what they pull  to all their sources
//
// Fills `readable` and `pulled_slots` of `peers`, after MapPeerTensors and with
// its arguments. Takes two calls of ExchangeBytes on all ranks of the plan, or
// none. A destination that cannot map something is no error: it is stored into
// as the plan says. Nor does one pull that receives from a destination.
absl::Status AgreeOnPulls(const PlanFile& plan, int32_t rank,
                          const RankSchedule& schedule,
                          absl::Span<std::byte* const> addresses,
                          PeerMemory& memory, Transport& transport,
                          Deadline deadline, PeerTensors& peers);

}  // namespace refit

#endif  // REFIT_EXECUTOR_QUANTIZE_PULLS_H_
