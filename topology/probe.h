// What a host's GPUs and NICs are, as the host itself says it.
#ifndef REFIT_TOPOLOGY_PROBE_H_
#define REFIT_TOPOLOGY_PROBE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "topology/nccl_topology.h"

namespace refit {

// A GPU as NVIDIA's driver knows it.
struct GpuFacts {
  std::string name;            // "NVIDIA H200"
  uint32_t nvlinks = 0;        // that are up
  std::string nvlink_version;  // of those: "4.0"; empty: none or not known
};

// The facts of all GPUs, from the driver's library. kUnavailable: there is no
// such library here, or it does not work; the message says which.
absl::StatusOr<std::vector<GpuFacts>> ReadNvml();

struct ProbedNic {
  std::string name;  // "mlx5_0"
  double gigabits_per_second = 0;
  uint32_t gpus = 0;  // that are nearest to it
};

struct ProbedHost {
  uint32_t gpus = 0;
  std::vector<ProbedNic> nics;  // that are nearest to a GPU, by name
  std::vector<GpuFacts> facts;  // empty: not known
};

// Reads GPUs and NICs with an active port from `sys`, "/sys" on a real host. A
// GPU is nearest to the NIC with which it shares the most bridges; of equal
// ones GPUs take different ones. Of devices in `nccl` the bridges are those.
// kNotFound: there is no GPU.
absl::StatusOr<ProbedHost> ProbeHost(const std::string& sys,
                                     std::vector<GpuFacts> facts,
                                     const BridgesByBusId& nccl = {});

// The `topology` of a job on hosts like this one, as JSON with comments that
// say what is not known.
std::string TopologyJson(const ProbedHost& host);

}  // namespace refit

#endif  // REFIT_TOPOLOGY_PROBE_H_
