// Structs that all ranks tell each other, field by field.
#ifndef REFIT_EXECUTOR_TRANSPORT_GATHERED_STRUCTS_H_
#define REFIT_EXECUTOR_TRANSPORT_GATHERED_STRUCTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "executor/payload.h"
#include "refit/control_plane.h"

namespace refit {

inline void WriteFields(uint32_t value, PayloadWriter& writer) {
  writer.U32(value);
}
inline void ReadFields(PayloadReader& reader, uint32_t& value) {
  value = reader.U32();
}
inline void WriteFields(int32_t value, PayloadWriter& writer) {
  writer.U32(static_cast<uint32_t>(value));
}
inline void ReadFields(PayloadReader& reader, int32_t& value) {
  value = static_cast<int32_t>(reader.U32());
}

// Every rank's `mine`, by rank. `WriteFields(const Struct&, PayloadWriter&)`
// and `ReadFields(PayloadReader&, Struct&)` are beside the struct; the latter
// fails the reader where a value is none of the struct's. Errors: the control
// plane's, and kFailedPrecondition, naming a rank whose bytes are no Struct.
template <typename Struct>
absl::StatusOr<std::vector<Struct>> GatherStructs(
    ControlPlane& control, const Struct& mine, std::string_view what,
    ControlPlane::Deadline deadline) {
  PayloadWriter writer;
  WriteFields(mine, writer);
  const absl::StatusOr<std::vector<std::string>> gathered =
      control.AllGather(writer.Take(), what, deadline);
  if (!gathered.ok()) return gathered.status();
  std::vector<Struct> values(gathered->size());
  for (size_t rank = 0; rank < values.size(); ++rank) {
    PayloadReader reader((*gathered)[rank]);
    ReadFields(reader, values[rank]);
    if (reader.Complete()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " runs another version of Refit: what it ",
                     "says for \"", std::string(what), "\" cannot be read"));
  }
  return values;
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_GATHERED_STRUCTS_H_
