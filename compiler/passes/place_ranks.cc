#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// A copy inside one H200 moves about 4.3 TB/s counting reads and writes.
constexpr double kLocalBytesPerSecond = 2e12;
constexpr double kGigabyte = 1e9;

// The hosts of the ranks that have a GPU of their own.
std::vector<int32_t> Hosts(const PassOptions& options, int32_t gpus) {
  const TopologySpec& spec = options.job.topology;
  if (spec.hosts.given) {
    const std::vector<int64_t>& hosts = spec.hosts.value;
    if (static_cast<int64_t>(hosts.size()) != gpus) {
      options.diagnostics.Error(
          spec.hosts.place,
          absl::StrFormat("topology.hosts has %d entries; wanted one for each "
                          "of the %d GPUs",
                          hosts.size(), gpus));
      return std::vector<int32_t>(static_cast<size_t>(gpus), 0);
    }
    return std::vector<int32_t>(hosts.begin(), hosts.end());
  }
  std::vector<int32_t> hosts;
  for (int32_t gpu = 0; gpu < gpus; ++gpu) {
    hosts.push_back(spec.gpus_per_host.given
                        ? static_cast<int32_t>(gpu / spec.gpus_per_host.value)
                        : 0);
  }
  return hosts;
}

}  // namespace

absl::Status PlaceRanks(const PassOptions& options, Module& module) {
  const int32_t sources = module.source_ranks();
  const int32_t destinations = module.world_size() - sources;
  const Job& job = options.job;
  Topology& topology = module.topology;
  topology.colocated = job.colocated.value;
  topology.local_bytes_per_second = kLocalBytesPerSecond;
  topology.peer_bytes_per_second =
      job.topology.peer_gigabytes_per_second.value * kGigabyte;
  topology.network_bytes_per_second =
      job.topology.network_gigabytes_per_second.value * kGigabyte;
  if (!topology.colocated) {
    topology.host = Hosts(options, module.world_size());
    return absl::OkStatus();
  }
  if (destinations > sources) {
    options.diagnostics.Error(
        job.colocated.place,
        absl::StrFormat("colocated: the destination has %d ranks and the "
                        "source %d; wanted a source rank for every "
                        "destination rank",
                        destinations, sources));
    return absl::OkStatus();
  }
  topology.host = Hosts(options, sources);
  for (int32_t rank = 0; rank < destinations; ++rank) {
    topology.host.push_back(topology.host[static_cast<size_t>(rank)]);
  }
  return absl::OkStatus();
}

}  // namespace refit
