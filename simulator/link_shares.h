// How busy links are over the time of a refit.
#ifndef REFIT_SIMULATOR_LINK_SHARES_H_
#define REFIT_SIMULATOR_LINK_SHARES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simulator/simulation.h"

namespace refit::simulator {

// How much of a link's speed is in use in each of `bins` equal parts of a
// refit.
class LinkShares {
 public:
  // Requires Options::record_rates. `simulation` must outlive this.
  LinkShares(const Simulation& simulation, size_t bins);

  // The mean of each part; all 0 for a refit that takes no time.
  const std::vector<double>& operator[](uint32_t link) const;

 private:
  const TaskGraph& graph_;
  std::vector<std::vector<double>> shares_;  // by link that was simulated
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_LINK_SHARES_H_
