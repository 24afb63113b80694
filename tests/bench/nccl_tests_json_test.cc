#include "bench/nccl_tests_json.h"

#include <gtest/gtest.h>

namespace refit {
namespace {

// Two gigabytes in 1, 3, 1 and 3 seconds.
TEST(NcclTestsJsonTest, HasTheKeysAndUnitsOfNcclTests) {
  EXPECT_EQ(NcclTestsJson("refit-bench 1", 4,
                          {{.name = "refit",
                            .size_bytes = 2000000000,
                            .seconds = 1,
                            .iteration_seconds = {1, 3, 1, 3}},
                           {.name = "other",
                            .size_bytes = 1000000000,
                            .seconds = 0.25,
                            .wrong_elements = 3}}),
            R"({
  "version": "refit-bench 1",
  "config": {
    "iterations": 4,
    "aggregated_iterations": 1
  },
  "results": [
    {
      "size": 2000000000,
      "count": 2000000000,
      "type": "uint8",
      "redop": "none",
      "root": "-1",
      "actual_iterations": 4,
      "experiment_name": "refit",
      "out_of_place": {
        "time": 1000000.0,
        "alg_bw": 2.0,
        "bus_bw": 2.0,
        "nwrong": null
      },
      "out_of_place_per_iter": {
        "skipped_iterations": 0,
        "min_us": 1000000.0,
        "max_us": 3000000.0,
        "avg_us": 2000000.0,
        "p50_us": 3000000.0,
        "p95_us": 3000000.0,
        "p99_us": 3000000.0,
        "stdev_us": 1000000.0,
        "cv_pct": 50.0,
        "times_us": [1000000.0, 3000000.0, 1000000.0, 3000000.0]
      }
    },
    {
      "size": 1000000000,
      "count": 1000000000,
      "type": "uint8",
      "redop": "none",
      "root": "-1",
      "actual_iterations": 4,
      "experiment_name": "other",
      "out_of_place": {
        "time": 250000.0,
        "alg_bw": 4.0,
        "bus_bw": 4.0,
        "nwrong": 3
      }
    }
  ],
  "out_of_bounds": {
    "count": 3,
    "okay": false
  },
  "average_bus_bandwidth": {
    "bandwidth": 3.0,
    "okay": "unchecked"
  }
}
)");
}

}  // namespace
}  // namespace refit
