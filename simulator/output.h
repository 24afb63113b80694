// What a simulation says: to a reader, to a program, and to Perfetto. All are
// deterministic.
#ifndef REFIT_SIMULATOR_OUTPUT_H_
#define REFIT_SIMULATOR_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan_file.h"
#include "plan/text/text_sink.h"
#include "plan/text/trace_events.h"
#include "simulator/simulation.h"

namespace refit::simulator {

// The stacks of tensors that the message carries parts of, as the rank that
// packs them names them; most elements first.
std::vector<std::string> TensorsOf(const PlanFile& plan,
                                   const Message& message);

// A page for a reader. `rounds`: with a table of all rounds.
std::string SimulationText(const PlanFile& plan, const Simulation& simulation,
                           bool rounds);

// The same facts, all rounds, all links and the whole critical path, as JSON.
std::string SimulationJson(const PlanFile& plan, const Simulation& simulation);

// In the JSON of Chrome's trace events, which Perfetto opens: a process for
// each rank with a track for each of its streams, arrows from sends to
// receives, and a counter for each link. Requires Options::record_rates. It
// grows with all ranks, a few gigabytes for some thousand: so it goes to
// `sink`.
void WriteTrace(const PlanFile& plan, const Simulation& simulation,
                const TextSink& sink);

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_OUTPUT_H_
