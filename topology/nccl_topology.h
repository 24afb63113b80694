// NCCL's topology file: the bridges that a virtual machine's /sys does not
// show.
#ifndef REFIT_TOPOLOGY_NCCL_TOPOLOGY_H_
#define REFIT_TOPOLOGY_NCCL_TOPOLOGY_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace refit {

// By the bus id of a device, in small letters: the CPU that it is at, the
// bridges from there down, and the device.
using BridgesByBusId = std::map<std::string, std::vector<std::string>>;

// Of the text of such a file: XML whose elements `cpu` and `pci` hold each
// other. kInvalidArgument: it is none; the message names the line.
absl::StatusOr<BridgesByBusId> ParseNcclTopology(absl::string_view text);

}  // namespace refit

#endif  // REFIT_TOPOLOGY_NCCL_TOPOLOGY_H_
