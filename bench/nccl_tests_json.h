// Measurements in the JSON of nccl-tests (its option -J), so that what reads
// theirs reads ours: their analyze_perf_json.py shows statistics and spikes.
#ifndef REFIT_BENCH_NCCL_TESTS_JSON_H_
#define REFIT_BENCH_NCCL_TESTS_JSON_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace refit {

// One way to move bytes.
struct TimedMethod {
  std::string name;
  uint64_t size_bytes = 0;  // of one refit; the bandwidth is of these
  double seconds = 0;       // of one refit
  // Of each iteration; empty if only all together were timed.
  std::vector<double> iteration_seconds = {};
  // Without a value nothing was checked.
  std::optional<uint64_t> wrong_elements = std::nullopt;
};

// `producer`: "refit-bench 0.1.0".
std::string NcclTestsJson(const std::string& producer, int64_t iterations,
                          absl::Span<const TimedMethod> methods);

}  // namespace refit

#endif  // REFIT_BENCH_NCCL_TESTS_JSON_H_
