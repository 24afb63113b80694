#include "compiler/binding_link.h"

#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "simulator/links.h"
#include "simulator/simulation.h"

namespace refit {
namespace {

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

}  // namespace

BindingLink FindBindingLink(const Module& module) {
  const Topology& topology = module.topology;
  simulator::Options options;
  options.peer_bytes_per_second = topology.peer_bytes_per_second;
  options.network_bytes_per_second = topology.fabric.has_value()
                                         ? topology.fabric->nic_bytes_per_second
                                         : topology.network_bytes_per_second;
  options.local_bytes_per_second = topology.local_bytes_per_second;
  simulator::Sites sites = SitesOf(module);
  // Parts of a folded job share nothing but leaves.
  const int32_t parts = sites.HasLeaves() ? module.parts() : 1;
  simulator::Links links(std::move(sites), options);
  for (int32_t part = 0; part < parts; ++part) {
    for (size_t i = 0; i < module.messages.size(); ++i) {
      const Message& message = module.messages[i];
      const AlikeParts alike = module.AlikePartsOf(message.source);
      if (part >= alike.count) continue;
      const auto moved = [&](Rank rank) {
        return static_cast<int32_t>(rank) +
               part * (module.IsRelay(rank) ? alike.destination_shift
                                            : alike.source_shift);
      };
      links.Cross(message.route, moved(module.SentBy(i)),
                  moved(message.destination),
                  static_cast<uint64_t>(message.size_bytes));
    }
  }
  const uint32_t binding = simulator::BindingLink(links.all());
  if (binding == simulator::kNone) return {};
  const simulator::Link& link = links[binding];
  return {.text = absl::StrFormat("%s, %.3f s for %d bytes",
                                  simulator::LinkText(link), link.BusySeconds(),
                                  link.bytes),
          .seconds = link.BusySeconds()};
}

}  // namespace refit
