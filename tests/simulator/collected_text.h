// Text that the product never has whole.
#ifndef REFIT_TESTS_SIMULATOR_COLLECTED_TEXT_H_
#define REFIT_TESTS_SIMULATOR_COLLECTED_TEXT_H_

#include <string>
#include <string_view>

#include "simulator/output.h"

namespace refit::simulator {

inline std::string TraceOf(const PlanFile& plan, const Simulation& simulation) {
  std::string text;
  WriteTrace(plan, simulation, [&](std::string_view piece) { text += piece; });
  return text;
}

}  // namespace refit::simulator

#endif  // REFIT_TESTS_SIMULATOR_COLLECTED_TEXT_H_
