#include "topology/machines.h"

#include "topology/machine_files.inc"  // kMachineFiles

namespace refit {

absl::Span<const MachineFile> MachineFiles() { return kMachineFiles; }

const MachineFile* FindMachine(std::string_view name) {
  for (const MachineFile& file : kMachineFiles) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

std::vector<std::string_view> MachineNames() {
  std::vector<std::string_view> names;
  for (const MachineFile& file : kMachineFiles) names.push_back(file.name);
  return names;
}

}  // namespace refit
