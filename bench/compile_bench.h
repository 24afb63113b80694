// How long compiling, proving and opening a plan take, and how that grows.
#ifndef REFIT_BENCH_COMPILE_BENCH_H_
#define REFIT_BENCH_COMPILE_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"

namespace refit {

// Of one job. Times are wall-clock, the least of the repetitions; everything
// runs on one thread.
struct CompileMeasurement {
  int64_t ranks = 0;
  double compile_seconds =
      0;  // read the model, all passes, emit; without the proof
  double prove_seconds = 0;  // from the bytes
  double open_seconds = 0;   // open the file and check it, as one worker does
  int64_t plan_bytes = 0;
  int64_t messages = 0;
  int64_t copies = 0;
  int64_t peak_bytes =
      0;  // resident, of a process that compiles and proves once
};

// Measures in child processes, so that peaks are the job's own.
absl::StatusOr<CompileMeasurement> MeasureCompile(const Job& job,
                                                  int repetitions);

// The job at 1, 2, 4 … `factor_max` times its source.data_parallel and
// destination.replicas. Reports a layout that has no such size and returns {}.
std::vector<Job> GrowJob(const Job& job, int64_t factor_max,
                         Diagnostics& diagnostics);

// The e of y ~ ranks^e, by least squares over the logarithms.
double GrowthExponent(const std::vector<CompileMeasurement>& measurements,
                      double CompileMeasurement::*quantity);

}  // namespace refit

#endif  // REFIT_BENCH_COMPILE_BENCH_H_
