// Structs that ranks tell each other, field by field.
#ifndef REFIT_CONTROL_COMPARED_STRUCTS_H_
#define REFIT_CONTROL_COMPARED_STRUCTS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "control/payload.h"
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

// `WriteFields(const Struct&, PayloadWriter&)` and `ReadFields(PayloadReader&,
// Struct&)` are beside the struct; the latter fails the reader where a value is
// none of the struct's.
template <typename Struct>
std::string StructBytes(const Struct& value) {
  PayloadWriter writer;
  WriteFields(value, writer);
  return writer.Take();
}

// What `rank` says for `what`. Error: kFailedPrecondition, no Struct.
template <typename Struct>
absl::StatusOr<Struct> ReadStruct(std::string_view bytes, int32_t rank,
                                  std::string_view what) {
  Struct value;
  PayloadReader reader(bytes);
  ReadFields(reader, value);
  if (reader.Complete()) return value;
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " runs another version of Refit: what it ",
                   "says for \"", std::string(what), "\" cannot be read"));
}

// ControlPlane::Compare of structs.
template <typename Struct>
absl::StatusOr<std::vector<OfRank<Struct>>> CompareStructs(
    ControlPlane& control, const Struct& mine, std::string_view what,
    ControlPlane::Deadline deadline) {
  const absl::StatusOr<std::vector<OfRank<std::string>>> told =
      control.Compare(StructBytes(mine), what, deadline);
  if (!told.ok()) return told.status();
  std::vector<OfRank<Struct>> values;
  for (const auto& [rank, bytes] : *told) {
    absl::StatusOr<Struct> value = ReadStruct<Struct>(bytes, rank, what);
    if (!value.ok()) return value.status();
    values.push_back({rank, *std::move(value)});
  }
  return values;
}

}  // namespace refit

#endif  // REFIT_CONTROL_COMPARED_STRUCTS_H_
