// How fast a plan runs between processes of this machine over UCX, beside
// memcpy and what TCP carries on the loopback interface.
#ifndef REFIT_BENCH_PROCESS_BENCH_H_
#define REFIT_BENCH_PROCESS_BENCH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "bench/run_bench.h"
#include "plan/plan_file.h"

namespace refit {

// As MeasureRun, with a process for each rank: this one is rank 0 and forks the
// others. Requires: this process has one thread.
absl::StatusOr<RunMeasurement> MeasureProcesses(const PlanFile& plan,
                                                int64_t iterations);

// Bytes per second that iperf3 moves over TCP on the loopback interface, in two
// seconds. Error: kNotFound, iperf3 is not installed; kUnavailable, it fails.
absl::StatusOr<double> MeasureIperf();

}  // namespace refit

#endif  // REFIT_BENCH_PROCESS_BENCH_H_
