// Why a refit takes longer than its binding link takes for its bytes.
#ifndef REFIT_SIMULATOR_IDLE_TIME_H_
#define REFIT_SIMULATOR_IDLE_TIME_H_

#include <string>
#include <vector>

#include "plan/plan_file.h"
#include "simulator/simulation.h"

namespace refit::simulator {

// What the critical path does while the binding link is not full. In a moment
// the link may have a part of its speed. Then the rest counts.
struct IdleTime {
  // "starts of rounds", "dealt messages that wait for peer ingress" …
  std::string during;
  double seconds = 0;
  uint64_t parts = 0;   // parts of the critical path that have any of it
  std::string most_of;  // "rank 9", "all ranks": whose most of it is
};

// Longest first. With BusySeconds of the binding link they add up to
// Simulation.seconds, but for rounding. Empty if nothing moves.
std::vector<IdleTime> IdleTimes(const PlanFile& plan,
                                const Simulation& simulation);

// "55 parts, mostly rank 206", "1 part, rank 363", "1 part, all ranks".
std::string PartsText(const IdleTime& idle);

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_IDLE_TIME_H_
