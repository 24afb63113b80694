#include "bench/run_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "refit/host_device.h"
#include "runner/checked_run.h"
#include "runner/local_ranks.h"
#include "runner/rank_threads.h"

namespace refit {
absl::StatusOr<std::unique_ptr<MemcpyBench>> MemcpyBench::Create(
    uint64_t size_bytes) {
  HostDevice device;
  std::unique_ptr<MemcpyBench> made(new MemcpyBench);
  absl::StatusOr<std::unique_ptr<DeviceMemory>> from =
      device.Allocate(size_bytes);
  if (!from.ok()) return from.status();
  absl::StatusOr<std::unique_ptr<DeviceMemory>> to =
      device.Allocate(size_bytes);
  if (!to.ok()) return to.status();
  std::memset((*from)->data(), 1, size_bytes);
  std::memset((*to)->data(), 2, size_bytes);
  made->from_ = *std::move(from);
  made->to_ = *std::move(to);
  return made;
}

// Each core copies one range.
double MemcpyBench::Seconds() {
  using Clock = std::chrono::steady_clock;
  const uint64_t threads = std::max(1u, std::thread::hardware_concurrency());
  const uint64_t size_bytes = from_->size_bytes();
  const Clock::time_point start = Clock::now();
  ParallelFor(threads, [&](size_t i) {
    const uint64_t begin = size_bytes * i / threads;
    const uint64_t end = size_bytes * (i + 1) / threads;
    std::memcpy(to_->data() + begin, from_->data() + begin, end - begin);
  });
  return std::chrono::duration<double>(Clock::now() - start).count();
}

absl::StatusOr<RunMeasurement> MeasureRun(const PlanFile& plan,
                                          int64_t iterations) {
  HostDevice device;
  std::vector<std::vector<BoundTensor>> tensors;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    tensors.push_back(TensorsOfRank(plan, rank));
    absl::StatusOr<std::unique_ptr<DeviceMemory>> allocated =
        AllocateTensors(device, tensors.back());
    if (!allocated.ok()) return allocated.status();
    // Touched, so that no iteration pays for page faults.
    std::memset((*allocated)->data(), 1, (*allocated)->size_bytes());
    memory.push_back(*std::move(allocated));
  }
  absl::StatusOr<std::unique_ptr<LocalRanks>> ranks =
      LocalRanks::Create(plan, tensors, std::chrono::minutes(10));
  if (!ranks.ok()) return ranks.status();

  RunMeasurement measurement;
  measurement.moved_bytes = plan.body().stats()->moved_bytes();
  const absl::StatusOr<std::unique_ptr<MemcpyBench>> memcpy_bench =
      MemcpyBench::Create(measurement.moved_bytes);
  if (!memcpy_bench.ok()) return memcpy_bench.status();
  for (int64_t i = 0; i < iterations; ++i) {
    absl::StatusOr<RefitMeasurement> refit = (*ranks)->Refit();
    if (!refit.ok()) return refit.status();
    measurement.refit_seconds.push_back(refit->seconds);
    measurement.memcpy_seconds.push_back((*memcpy_bench)->Seconds());
  }
  return measurement;
}

double Median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t middle = samples.size() / 2;
  return samples.size() % 2 == 1 ? samples[middle]
                                 : (samples[middle - 1] + samples[middle]) / 2;
}

}  // namespace refit
