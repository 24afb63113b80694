#ifndef REFIT_COMPILER_PASSES_RAILS_H_
#define REFIT_COMPILER_PASSES_RAILS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "compiler/ir/module.h"

namespace refit {

// Which ranks of the first part stand on one rail: the n-th source of a host,
// and the n-th destination of every host.
class Rails {
 public:
  explicit Rails(const Module& module) {
    const int32_t sources = module.source_ranks();
    std::map<int32_t, size_t> sources_of_host;
    places_.resize(static_cast<size_t>(sources), 0);
    for (int32_t i = 0; i < module.world_size(); ++i) {
      if (module.PartOf(Rank{i}) != 0) continue;
      const int32_t host = module.topology.host[static_cast<size_t>(i)];
      if (i < sources) {
        places_[static_cast<size_t>(i)] = sources_of_host[host]++;
      } else {
        members_[host].push_back(Rank{i});
      }
    }
  }

  // The destinations of a host that has any.
  const std::vector<Rank>& Members(int32_t host) const {
    return members_.at(host);
  }
  // The place of a source among those of its host.
  size_t PlaceOf(Rank source) const { return places_[IndexOf(source)]; }
  // The destination of `host` on the source's rail.
  Rank Opposite(Rank source, int32_t host) const {
    const std::vector<Rank>& members = Members(host);
    return members[PlaceOf(source) % members.size()];
  }

 private:
  std::vector<size_t> places_;                    // by source
  std::map<int32_t, std::vector<Rank>> members_;  // by host
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_RAILS_H_
