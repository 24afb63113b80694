// The measured speed of every pair of ranks, as text, as JSON and as the
// topology of a job.
#ifndef REFIT_BENCH_LINK_TABLE_H_
#define REFIT_BENCH_LINK_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace refit {

struct LinkTable {
  std::string wire;                // "local", "ucx" or "nccl"
  std::vector<std::string> hosts;  // what tells each rank's host from others
  std::vector<std::string> names;  // of each rank's host, for readers
  // bytes_per_second[from][to], one pair at a time; 0 from a rank to itself.
  std::vector<std::vector<double>> bytes_per_second = {};
};

// `{"topology": {…}}`, for a job: where the ranks are, and the median speeds of
// pairs inside a host and between hosts, of which a table may have none.
std::string LinkTopology(const LinkTable& table);

// The pairs below 0.8 times the median of their kind, the slowest first: at
// most eight, then how many more there are.
std::vector<std::string> SlowPairs(const LinkTable& table);

// In the shape that nvbandwidth prints, then the slow pairs and the topology.
std::string LinkText(const LinkTable& table);

// In that of its option --json, with the topology beside it. `producer`:
// "refit-bench 0.1.0".
std::string LinkJson(const std::string& producer, const LinkTable& table);

}  // namespace refit

#endif  // REFIT_BENCH_LINK_TABLE_H_
