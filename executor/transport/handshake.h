// What ranks say to each other before any byte moves.
#ifndef REFIT_EXECUTOR_TRANSPORT_HANDSHAKE_H_
#define REFIT_EXECUTOR_TRANSPORT_HANDSHAKE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "control/payload.h"
#include "control/step_purposes.h"
#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

// What all transports call the collective in which ranks compare records. No
// handshake before a checked refit: who left that out has missed a refit
// (Transport::TakeMissedStep).
inline std::string_view NameOf(HandshakeStage stage) {
  return stage == HandshakeStage::kCheck ? "check" : kHandshake;
}

// As bytes for the other ranks (compared_structs.h).
void WriteFields(const HandshakeRecord& record, PayloadWriter& writer);
void ReadFields(PayloadReader& reader, HandshakeRecord& record);

// What a handshake in `stage` begins a step for.
inline StepPurpose PurposeOf(HandshakeStage stage) {
  return stage == HandshakeStage::kCheck ? StepPurpose::kCheck
                                         : StepPurpose::kOther;
}

// OK when all `records` are ready and equal: those of all ranks, or the first
// that differ, by rank. Errors: kAborted, the rank that is not ready;
// kFailedPrecondition, the first field that differs, with two ranks and both
// values.
absl::Status CompareRecords(absl::Span<const OfRank<HandshakeRecord>> records);

// "round 3: send of 64 bytes to rank 5".
std::string OperationText(uint32_t round, const Operation& operation);

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_HANDSHAKE_H_
