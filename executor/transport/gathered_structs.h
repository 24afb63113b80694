// Structs that all ranks tell each other, byte by byte.
#ifndef REFIT_EXECUTOR_TRANSPORT_GATHERED_STRUCTS_H_
#define REFIT_EXECUTOR_TRANSPORT_GATHERED_STRUCTS_H_

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "refit/control_plane.h"

namespace refit {

// Every rank's `mine`, by rank. Errors: the control plane's, and
// kFailedPrecondition, naming a rank whose struct has another size.
template <typename Struct>
absl::StatusOr<std::vector<Struct>> GatherStructs(
    ControlPlane& control, const Struct& mine, const char* what,
    ControlPlane::Deadline deadline) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  const absl::StatusOr<std::vector<std::string>> gathered = control.AllGather(
      {reinterpret_cast<const char*>(&mine), sizeof(mine)}, what, deadline);
  if (!gathered.ok()) return gathered.status();
  std::vector<Struct> values(gathered->size());
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if ((*gathered)[rank].size() != sizeof(Struct)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, " runs another version of Refit: it says ",
          (*gathered)[rank].size(), " bytes when it should say ",
          sizeof(Struct)));
    }
    std::memcpy(&values[rank], (*gathered)[rank].data(), sizeof(Struct));
  }
  return values;
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_GATHERED_STRUCTS_H_
