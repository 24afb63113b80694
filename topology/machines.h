// Machines that a job may name as its topology's `machine`.
#ifndef REFIT_TOPOLOGY_MACHINES_H_
#define REFIT_TOPOLOGY_MACHINES_H_

#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace refit {

// A file of topology/machines, compiled in: the members of a job's `topology`
// as JSON, with the source of each figure in comments.
struct MachineFile {
  std::string_view name;  // "hgx-h200"
  std::string_view text;
};

// Ascending by name.
absl::Span<const MachineFile> MachineFiles();

// nullptr for an unknown name.
const MachineFile* FindMachine(std::string_view name);

std::vector<std::string_view> MachineNames();

}  // namespace refit

#endif  // REFIT_TOPOLOGY_MACHINES_H_
