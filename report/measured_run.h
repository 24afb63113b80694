// What `refit-run --json` printed of a plan.
#ifndef REFIT_REPORT_MEASURED_RUN_H_
#define REFIT_REPORT_MEASURED_RUN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compiler/diagnostics.h"
#include "plan/plan_file.h"

namespace refit::report {

// Seconds of one refit. The phases are sums over all ranks.
struct MeasuredRefit {
  uint64_t number = 0;  // in its run, from 0
  double seconds = 0;
  double pack_seconds = 0;
  double wire_seconds = 0;
  double unpack_seconds = 0;
  // By round, of the slowest rank; empty unless the run had --time-rounds.
  std::vector<double> round_seconds;
};

struct MeasuredRun {
  std::string path;
  std::vector<MeasuredRefit> refits;  // dense ones, at least one
  // Refits that sent only what had changed. They are left out, because the
  // simulation beside them is of a dense refit.
  uint64_t delta_refits = 0;
};

// Reads the file at `path` ("-": standard input). Reports every mistake with
// its place, also when the run was of another plan; nullopt then.
std::optional<MeasuredRun> ReadMeasuredRun(const std::string& path,
                                           const PlanFile& plan,
                                           Diagnostics& diagnostics);

}  // namespace refit::report

#endif  // REFIT_REPORT_MEASURED_RUN_H_
