#include "bench/nccl_tests_json.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "plan/text/json_writer.h"

namespace refit {
namespace {

constexpr double kMicro = 1e6;

void WritePlacement(const TimedMethod& method, JsonWriter& json) {
  const double bandwidth =
      static_cast<double>(method.size_bytes) / method.seconds / 1e9;
  json.OpenObject("out_of_place");
  json.Real("time", method.seconds * kMicro);
  json.Real("alg_bw", bandwidth);
  json.Real("bus_bw", bandwidth);  // as nccl-tests counts send and receive
  if (method.wrong_elements.has_value()) {
    json.Number("nwrong", *method.wrong_elements);
  } else {
    json.Null("nwrong");
  }
  json.CloseObject();
}

// The least sample that so many percent of all do not exceed.
double Percentile(const std::vector<double>& sorted, size_t percent) {
  return sorted[(sorted.size() * percent + 99) / 100 - 1];
}

void WriteIterations(const TimedMethod& method, JsonWriter& json) {
  std::vector<double> times;
  for (const double seconds : method.iteration_seconds) {
    times.push_back(seconds * kMicro);
  }
  std::vector<double> sorted = times;
  std::sort(sorted.begin(), sorted.end());
  const auto count = static_cast<double>(times.size());
  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / count;
  double squares = 0;
  for (const double time : times) squares += (time - mean) * (time - mean);
  const double deviation = std::sqrt(squares / count);
  json.OpenObject("out_of_place_per_iter");
  json.Number("skipped_iterations", 0);
  json.Real("min_us", sorted.front());
  json.Real("max_us", sorted.back());
  json.Real("avg_us", mean);
  json.Real("p50_us", sorted[sorted.size() / 2]);
  json.Real("p95_us", Percentile(sorted, 95));
  json.Real("p99_us", Percentile(sorted, 99));
  json.Real("stdev_us", deviation);
  json.Real("cv_pct", mean > 0 ? 100 * deviation / mean : 0);
  json.Line("times_us", times);
  json.CloseObject();
}

}  // namespace

std::string NcclTestsJson(const std::string& producer, int64_t iterations,
                          absl::Span<const TimedMethod> methods) {
  JsonWriter json;
  json.OpenObject();
  json.Text("version", producer);
  json.OpenObject("config");
  json.Number("iterations", iterations);
  json.Number("aggregated_iterations", 1);
  json.CloseObject();
  json.OpenArray("results");
  uint64_t wrong = 0;
  double bandwidths = 0;
  for (const TimedMethod& method : methods) {
    json.OpenObject();
    json.Number("size", method.size_bytes);
    json.Number("count", method.size_bytes);
    json.Text("type", "uint8");
    json.Text("redop", "none");
    json.Text("root", "-1");
    json.Number("actual_iterations", iterations);
    json.Text("experiment_name", method.name);
    WritePlacement(method, json);
    if (!method.iteration_seconds.empty()) WriteIterations(method, json);
    json.CloseObject();
    wrong += method.wrong_elements.value_or(0);
    bandwidths += static_cast<double>(method.size_bytes) / method.seconds / 1e9;
  }
  json.CloseArray();
  json.OpenObject("out_of_bounds");
  json.Number("count", wrong);
  json.Bool("okay", wrong == 0);
  json.CloseObject();
  json.OpenObject("average_bus_bandwidth");
  json.Real(
      "bandwidth",
      methods.empty() ? 0 : bandwidths / static_cast<double>(methods.size()));
  json.Text("okay", "unchecked");
  json.CloseObject();
  json.CloseObject();
  return json.Take();
}

}  // namespace refit
