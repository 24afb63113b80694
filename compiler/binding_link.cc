#include "compiler/binding_link.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/module_sites.h"
#include "simulator/links.h"
#include "simulator/simulation.h"

namespace refit {

BindingLink FindBindingLink(const Module& module) {
  const simulator::Options options = LinkOptionsOf(module);
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
