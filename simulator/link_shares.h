// How busy links are over the time of a refit.
#ifndef REFIT_SIMULATOR_LINK_SHARES_H_
#define REFIT_SIMULATOR_LINK_SHARES_H_

#include <cstddef>
#include <vector>

#include "simulator/simulation.h"

namespace refit::simulator {

// By link, the mean share of its speed in each of `bins` equal parts of the
// refit; all 0 for a refit that takes no time. Requires Options::record_rates.
std::vector<std::vector<double>> LinkShares(const Simulation& simulation,
                                            size_t bins);

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_LINK_SHARES_H_
