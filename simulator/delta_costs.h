// What a refit that sends only what changed costs beside its bytes on links
// (README.md). Changes are scattered evenly.
#ifndef REFIT_SIMULATOR_DELTA_COSTS_H_
#define REFIT_SIMULATOR_DELTA_COSTS_H_

#include <cstdint>

#include "plan_generated.h"
#include "simulator/simulation.h"

namespace refit::simulator {

// Of messages in staged rounds: seconds for each byte that a dense refit sends.
struct StagedDeltaCosts {
  double find = 0;
  double encode = 0;
  double apply = 0;
  double keep = 0;
};
// As measured with bf16, between rates that were measured in proportion.
// Bitmaps are found without a snapshot, and cleared instead of keeping.
StagedDeltaCosts StagedDeltaCostsAt(Executor executor, fb::DeltaChanges changes,
                                    double change_rate);

// Before a refit all ranks tell rank 0 their versions, and then what they
// counted: each takes so long between two ranks.
inline constexpr double kAgreeSeconds = 1.2e-3;

// Of the digests that close a refit, for each byte that a rank digests.
double CheckSecondsPerByte(Executor executor);

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_DELTA_COSTS_H_
