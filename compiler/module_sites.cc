#include "compiler/module_sites.h"

#include <cstdint>
#include <optional>

namespace refit {

simulator::Sites SitesOf(const Module& module) {
  const Topology& topology = module.topology;
  simulator::Sites sites = {
      .hosts = {topology.host.begin(), topology.host.end()},
      .source_ranks = module.source_ranks(),
      .colocated = topology.colocated};
  if (const std::optional<Fabric>& fabric = topology.fabric) {
    sites.hosts_per_domain =
        static_cast<uint32_t>(fabric->hosts_per_nvlink_domain);
    sites.gpus_per_nic = static_cast<uint32_t>(fabric->gpus_per_nic);
    sites.hosts_per_leaf = static_cast<uint32_t>(fabric->hosts_per_leaf);
    sites.rails = fabric->rails;
    sites.spine_oversubscription = fabric->spine_oversubscription;
  }
  return sites;
}

simulator::Options LinkOptionsOf(const Module& module) {
  const Topology& topology = module.topology;
  simulator::Options options;
  options.peer_bytes_per_second = topology.peer_bytes_per_second;
  options.network_bytes_per_second = topology.fabric.has_value()
                                         ? topology.fabric->nic_bytes_per_second
                                         : topology.network_bytes_per_second;
  options.local_bytes_per_second = topology.local_bytes_per_second;
  return options;
}

}  // namespace refit
