#include "simulator/link_shares.h"

#include <algorithm>

#include "simulator/all_ranks.h"

namespace refit::simulator {
namespace {

// Adds a share that holds from `begin` until `end`.
void AddShare(double share, double begin, double end, double width,
              std::vector<double>& bins) {
  if (share == 0) return;
  for (size_t bin =
           std::min(bins.size() - 1, static_cast<size_t>(begin / width));
       begin < end; ++bin) {
    const double until =
        bin + 1 == bins.size()
            ? end
            : std::min(end, static_cast<double>(bin + 1) * width);
    if (until <= begin) continue;  // the quotient above was rounded down
    bins[bin] += share * (until - begin) / width;
    begin = until;
  }
}

}  // namespace

LinkShares::LinkShares(const Simulation& simulation, size_t bins)
    : graph_(simulation.graph), shares_(graph_.links.size()) {
  struct State {
    double since = 0;
    double share = 0;
  };
  for (uint32_t link = 0; link < shares_.size(); ++link) {
    if (SimulatedLink(graph_, link) == link) shares_[link].assign(bins, 0);
  }
  std::vector<State> states(shares_.size());
  const double width = simulation.seconds / static_cast<double>(bins);
  if (!(width > 0)) return;
  for (const RateChange& change : simulation.rates) {
    State& state = states[change.link];
    AddShare(state.share, state.since, change.seconds, width,
             shares_[change.link]);
    state = {.since = change.seconds, .share = change.share};
  }
  for (size_t i = 0; i < states.size(); ++i) {
    AddShare(states[i].share, states[i].since, simulation.seconds, width,
             shares_[i]);
  }
}

const std::vector<double>& LinkShares::operator[](uint32_t link) const {
  return shares_[SimulatedLink(graph_, link)];
}

}  // namespace refit::simulator
