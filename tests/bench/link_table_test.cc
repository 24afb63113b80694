#include "bench/link_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace refit {
namespace {

// Two hosts of two ranks, 4 GB/s inside and 1 GB/s between, and one slow pair.
LinkTable TwoHosts() {
  return {.wire = "ucx",
          .hosts = {"a", "a", "b", "b"},
          .names = {"one", "one", "two", "two"},
          .bytes_per_second = {{0, 4e9, 1e9, 1e9},
                               {4e9, 0, 1e9, 2.5e8},
                               {1e9, 1e9, 0, 4e9},
                               {1e9, 0.0512e9, 4e9, 0}}};
}

TEST(LinkTableTest, PrintsTheTableOfNvbandwidth) {
  EXPECT_EQ(LinkText(TwoHosts()), R"(Running rank_to_rank_ucx.
memcpy ucx rank(row) -> rank(column) bandwidth (GB/s)
                   0         1         2         3
         0       N/A      4.00      1.00      1.00
         1      4.00       N/A      1.00      0.25
         2      1.00      1.00       N/A      4.00
         3      1.00   0.05120      4.00       N/A

SUM rank_to_rank_ucx 22.30

slow pair: rank 3 (two) to rank 1 (one), 0.0512 GB/s, 0.05 of the median between hosts
slow pair: rank 1 (one) to rank 3 (two), 0.25 GB/s, 0.25 of the median between hosts
for a job:
{
  "topology": {
    "gpus_per_host": 2,
    "peer_gigabytes_per_second": 4.0,
    "network_gigabytes_per_second": 1.0
  }
}
)");
}

TEST(LinkTableTest, HasTheKeysAndUnitsOfNvbandwidth) {
  LinkTable table = TwoHosts();
  table.bytes_per_second[1][3] = 1e9;
  EXPECT_EQ(LinkJson("refit-bench 1", table), R"json({
  "nvbandwidth": {
    "version": "refit-bench 1",
    "GPU Device list": [
      "0: rank 0: (one)",
      "1: rank 1: (one)",
      "2: rank 2: (two)",
      "3: rank 3: (two)"
    ],
    "warning": "slow pair: rank 3 (two) to rank 1 (one), 0.0512 GB/s, 0.05 of the median between hosts",
    "testcases": [
      {
        "name": "rank_to_rank_ucx",
        "status": "Passed",
        "bandwidth_description": "memcpy ucx rank(row) -> rank(column) bandwidth (GB/s)",
        "bandwidth_matrix": [
          ["N/A", "4", "1", "1"],
          ["4", "N/A", "1", "1"],
          ["1", "1", "N/A", "4"],
          ["1", "0.0512", "4", "N/A"]
        ],
        "sum": 23.0512
      }
    ]
  },
  "topology": {
    "gpus_per_host": 2,
    "peer_gigabytes_per_second": 4.0,
    "network_gigabytes_per_second": 1.0
  }
}
)json");
}

TEST(LinkTableTest, TopologyLeavesOutWhatWasNotMeasured) {
  EXPECT_EQ(LinkTopology({.wire = "local",
                          .hosts = {"a", "a"},
                          .names = {"one", "one"},
                          .bytes_per_second = {{0, 1.23456e9}, {2e9, 0}}}),
            R"({
  "topology": {
    "gpus_per_host": 2,
    "peer_gigabytes_per_second": 1.617
  }
}
)");
}

// Ranks of one host that do not follow each other.
TEST(LinkTableTest, TopologyNamesHostsThatAreNotFilledInOrder) {
  LinkTable table = TwoHosts();
  table.hosts = {"a", "b", "a", "b"};
  EXPECT_EQ(LinkTopology(table), R"({
  "topology": {
    "hosts": [0, 1, 0, 1],
    "peer_gigabytes_per_second": 0.625,
    "network_gigabytes_per_second": 2.5
  }
}
)");
}

TEST(LinkTableTest, NamesEightSlowPairsAndCountsTheOthers) {
  LinkTable table = {.wire = "local",
                     .hosts = std::vector<std::string>(7, "a"),
                     .names = std::vector<std::string>(7, "one"),
                     .bytes_per_second = {}};
  table.bytes_per_second.assign(7, std::vector<double>(7, 1e9));
  table.bytes_per_second[0].assign(7, 1e8);
  table.bytes_per_second[1].assign(7, 2e8);
  const std::vector<std::string> lines = SlowPairs(table);
  ASSERT_EQ(lines.size(), 9);
  EXPECT_EQ(lines[0],
            "slow pair: rank 0 (one) to rank 1 (one), 0.1 GB/s, 0.10 of the "
            "median inside a host");
  EXPECT_EQ(lines[8], "slow pairs: 4 more");
}

}  // namespace
}  // namespace refit
