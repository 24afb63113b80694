// What ranks say to each other before any byte moves.
#ifndef REFIT_EXECUTOR_TRANSPORT_HANDSHAKE_H_
#define REFIT_EXECUTOR_TRANSPORT_HANDSHAKE_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/payload.h"
#include "refit/transport.h"

namespace refit {

// What all transports call the collective in which ranks compare records.
inline constexpr std::string_view kHandshake = "handshake";

// As bytes for the other ranks (gathered_structs.h).
void WriteFields(const HandshakeRecord& record, PayloadWriter& writer);
void ReadFields(PayloadReader& reader, HandshakeRecord& record);

// OK when all `records` (by rank) are ready and equal. Errors: kAborted, the
// rank that is not ready; kFailedPrecondition, the first field that differs,
// with two ranks and both values.
absl::Status CompareRecords(absl::Span<const HandshakeRecord> records);

// "round 3: send of 64 bytes to rank 5".
std::string OperationText(uint32_t round, const Operation& operation);

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_HANDSHAKE_H_
