// Why a refit takes longer than its busiest link takes for its bytes.
#ifndef REFIT_SIMULATOR_IDLE_TIME_H_
#define REFIT_SIMULATOR_IDLE_TIME_H_

#include <string>
#include <vector>

#include "plan/plan_file.h"
#include "simulator/simulation.h"

namespace refit::simulator {

// What the critical path does while the busiest link is not full. A moment in
// which the link has a part of its speed counts for the rest.
struct IdleTime {
  // "starts of rounds", "dealt messages that wait for peer ingress" …
  std::string during;
  double seconds = 0;
  uint64_t parts = 0;   // of the critical path, that have any of it
  std::string most_of;  // "rank 9": whose most of it is
};

// Longest first. Together they are what is left of Simulation.seconds after
// BusySeconds of the busiest link. Empty if nothing moves.
std::vector<IdleTime> IdleTimes(const PlanFile& plan,
                                const Simulation& simulation);

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_IDLE_TIME_H_
