// How fast a plan runs on this machine's CPU, beside plain memcpy.
#ifndef REFIT_BENCH_RUN_BENCH_H_
#define REFIT_BENCH_RUN_BENCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "refit/host_device.h"

namespace refit {

struct RunMeasurement {
  uint64_t moved_bytes = 0;  // payload of one refit
  // Of each iteration, taken in turn: a refit, then a memcpy of as many bytes
  // between memory of the same size on a thread per core.
  std::vector<double> refit_seconds;
  std::vector<double> memcpy_seconds;
};

// Copies memory as fast as these cores can.
class MemcpyBench {
 public:
  static absl::StatusOr<std::unique_ptr<MemcpyBench>> Create(
      uint64_t size_bytes);
  // Of one copy, on a thread per core.
  double Seconds();

 private:
  MemcpyBench() = default;
  std::unique_ptr<DeviceMemory> from_;
  std::unique_ptr<DeviceMemory> to_;
};

// Memory: sources, destinations and staging of all ranks.
absl::StatusOr<RunMeasurement> MeasureRun(const PlanFile& plan,
                                          int64_t iterations);

// Of an odd or even number of samples; not empty.
double Median(std::vector<double> samples);

}  // namespace refit

#endif  // REFIT_BENCH_RUN_BENCH_H_
