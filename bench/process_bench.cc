#include "bench/process_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/rank_processes.h"
#include "refit/control_plane.h"
#include "refit/host_device.h"
#include "runner/world_rank.h"

namespace refit {
namespace {

constexpr std::chrono::minutes kProcessTimeout(10);

// One rank's part; on rank 0 the result of all.
absl::StatusOr<RunMeasurement> MeasureRank(const PlanFile& plan,
                                           const TcpRendezvous& meeting,
                                           int64_t iterations) {
  absl::StatusOr<std::unique_ptr<ControlPlane>> control =
      ConnectTcp(meeting, std::chrono::steady_clock::now() + kProcessTimeout);
  if (!control.ok()) return control.status();
  absl::StatusOr<std::unique_ptr<WorldRank>> rank =
      WorldRank::Create(plan, *std::move(control),
                        std::make_shared<HostDevice>(), kProcessTimeout);
  if (!rank.ok()) return rank.status();
  // Touched, so that no iteration pays for page faults.
  absl::Status status = (*rank)->FillSources();
  if (status.ok()) status = (*rank)->PoisonDestinations();
  if (!status.ok()) return status;

  RunMeasurement measurement;
  measurement.moved_bytes = plan.body().stats()->moved_bytes();
  const bool first = meeting.rank == 0;
  std::unique_ptr<MemcpyBench> memcpy_bench;
  if (first) {
    absl::StatusOr<std::unique_ptr<MemcpyBench>> made =
        MemcpyBench::Create(measurement.moved_bytes);
    if (!made.ok()) return made.status();
    memcpy_bench = *std::move(made);
  }
  const int32_t zero = 0;
  const std::vector<int32_t> everyone =
      first ? AllRanks(plan) : std::vector<int32_t>{};
  for (int64_t i = 0; i < iterations; ++i) {
    const absl::StatusOr<RefitMeasurement> refit = (*rank)->Refit();
    if (!refit.ok()) return refit.status();
    std::string mine(sizeof(double), '\0');
    std::memcpy(mine.data(), &refit->seconds, sizeof(double));
    const absl::StatusOr<std::vector<std::string>> all =
        (*rank)->transport().ExchangeBytes(
            mine, {&zero, 1}, everyone,
            std::chrono::steady_clock::now() + kProcessTimeout);
    if (!all.ok()) return all.status();
    if (!first) continue;
    double slowest = 0;
    for (const std::string& bytes : *all) {
      double seconds = 0;
      if (bytes.size() != sizeof(seconds)) {
        return absl::InternalError("a rank sent a time that cannot be read");
      }
      std::memcpy(&seconds, bytes.data(), sizeof(seconds));
      slowest = std::max(slowest, seconds);
    }
    measurement.refit_seconds.push_back(slowest);
    // The others wait for this rank meanwhile.
    measurement.memcpy_seconds.push_back(memcpy_bench->Seconds());
  }
  return measurement;
}

}  // namespace

absl::StatusOr<RunMeasurement> MeasureProcesses(const PlanFile& plan,
                                                int64_t iterations) {
  absl::StatusOr<RunMeasurement> measurement;
  const absl::Status status =
      RunRankProcesses(plan.world_size(), [&](const TcpRendezvous& meeting) {
        measurement = MeasureRank(plan, meeting, iterations);
        return measurement.status();
      });
  if (!status.ok()) return status;
  return measurement;
}

absl::StatusOr<double> MeasureIperf() {
  if (std::system("command -v iperf3 > /dev/null") != 0) {
    return absl::NotFoundError("iperf3 is not installed");
  }
  const absl::StatusOr<TcpRendezvous> free = LoopbackRendezvous(1);
  if (!free.ok()) return free.status();
  // The server ends after one client.
  const std::string command = absl::StrCat(
      "iperf3 -s -1 -B 127.0.0.1 -p ", free->port,
      " > /dev/null 2>&1 & sleep 0.5; iperf3 -c 127.0.0.1 -t 2 -J -p ",
      free->port, " 2> /dev/null");
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return absl::UnavailableError("no shell");
  std::string text;
  char part[4096];
  for (size_t n = 0; (n = fread(part, 1, sizeof(part), pipe)) > 0;) {
    text.append(part, n);
  }
  pclose(pipe);
  const char kKey[] = "\"bits_per_second\":";
  const size_t received = text.find("\"sum_received\"");
  const size_t value =
      received == std::string::npos ? received : text.find(kKey, received);
  if (value == std::string::npos) {
    return absl::UnavailableError("iperf3 measured nothing");
  }
  return std::strtod(text.c_str() + value + sizeof(kKey) - 1, nullptr) / 8;
}

}  // namespace refit
