#include <algorithm>
#include <iterator>
#include <map>
#include <optional>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// A copy inside one H200 moves about 4.3 TB/s counting reads and writes.
constexpr double kLocalBytesPerSecond = 2e12;
constexpr double kGigabyte = 1e9;

// The host of every rank. Colocated destination ranks are on their source
// rank's; otherwise ranks fill hosts in order.
std::vector<int32_t> Hosts(const TopologySpec& spec, const Module& module) {
  if (spec.hosts.given) {
    return std::vector<int32_t>(spec.hosts.value.begin(),
                                spec.hosts.value.end());
  }
  std::vector<int32_t> hosts;
  for (int32_t rank = 0; rank < module.world_size(); ++rank) {
    const int32_t gpu =
        module.topology.colocated ? rank % module.source_ranks() : rank;
    hosts.push_back(spec.gpus_per_host.given
                        ? static_cast<int32_t>(gpu / spec.gpus_per_host.value)
                        : 0);
  }
  return hosts;
}

// Reports what keeps a destination rank from sharing its source rank's GPU.
void CheckColocated(const PassOptions& options, const Module& module) {
  const int32_t sources = module.source_ranks();
  const int32_t destinations = module.world_size() - sources;
  if (destinations > sources) {
    options.diagnostics.Error(
        options.job.colocated.place,
        absl::StrFormat("colocated: the destination has %d ranks and the "
                        "source %d; wanted a source rank for every "
                        "destination rank",
                        destinations, sources));
    return;
  }
  const std::vector<int32_t>& host = module.topology.host;
  for (int32_t rank = 0; rank < destinations; ++rank) {
    const size_t source = static_cast<size_t>(rank);
    const size_t destination = static_cast<size_t>(rank + sources);
    if (host[source] == host[destination]) continue;
    options.diagnostics.Error(
        options.job.topology.hosts.place,
        absl::StrFormat("topology.hosts puts rank %d on host %d and rank %d, "
                        "which shares its GPU, on host %d; wanted one host",
                        source, host[source], destination, host[destination]));
    return;
  }
}

// What joins the hosts, if the job says anything of it.
std::optional<Fabric> FabricOf(const TopologySpec& spec) {
  if (!spec.machine.given && !spec.hosts_per_nvlink_domain.given &&
      !spec.gpus_per_nic.given && !spec.hosts_per_leaf.given &&
      !spec.rails.given && !spec.spine_oversubscription.given) {
    return std::nullopt;
  }
  return Fabric{
      .machine = spec.machine.value,
      .hosts_per_nvlink_domain =
          static_cast<int32_t>(spec.hosts_per_nvlink_domain.value),
      .gpus_per_nic = static_cast<int32_t>(spec.gpus_per_nic.value),
      .hosts_per_leaf = static_cast<int32_t>(spec.hosts_per_leaf.value),
      .rails = spec.rails.value,
      .spine_oversubscription = spec.spine_oversubscription.value,
      .nic_bytes_per_second =
          spec.network_gigabytes_per_second.value * kGigabyte};
}

int32_t GpusPerNic(const Topology& topology, int32_t source_ranks) {
  if (!topology.fabric.has_value()) return 1;
  std::map<int32_t, int32_t> gpus;  // by host
  int32_t most = 1;                 // of a host
  for (int32_t rank = 0; rank < std::ssize(topology.host); ++rank) {
    // Destination ranks of a colocated job have no GPUs of their own.
    if (topology.colocated && rank >= source_ranks) break;
    most = std::max(most, ++gpus[topology.host[static_cast<size_t>(rank)]]);
  }
  return std::min(most, topology.fabric->gpus_per_nic);
}

}  // namespace

absl::Status PlaceRanks(const PassOptions& options, Module& module) {
  const TopologySpec& spec = options.job.topology;
  Topology& topology = module.topology;
  topology.colocated = options.job.colocated.value;
  topology.local_bytes_per_second = kLocalBytesPerSecond;
  topology.peer_bytes_per_second =
      spec.peer_gigabytes_per_second.value * kGigabyte;
  topology.fabric = FabricOf(spec);
  topology.host = Hosts(spec, module);
  topology.gpus_per_nic = GpusPerNic(topology, module.source_ranks());
  topology.network_bytes_per_second = spec.network_gigabytes_per_second.value *
                                      kGigabyte / topology.gpus_per_nic;
  if (topology.colocated) CheckColocated(options, module);
  return absl::OkStatus();
}

}  // namespace refit
