#include "compiler/simulated_seconds.h"

#include "simulator/simulation.h"

namespace refit {

absl::StatusOr<double> SimulatedSeconds(const PlanFile& plan,
                                        const Topology& topology) {
  simulator::Options options = simulator::OptionsOf(simulator::Executor::kGpu);
  options.peer_bytes_per_second = topology.peer_bytes_per_second;
  options.network_bytes_per_second = topology.network_bytes_per_second;
  // A plan of a fabric says more than that.
  simulator::UseSpeedsOf(plan, options);
  options.folds_equal_ranks = true;
  const absl::StatusOr<simulator::Simulation> simulation =
      simulator::Simulate(plan, options);
  if (!simulation.ok()) return simulation.status();
  return simulation->seconds;
}

}  // namespace refit
