#include "simulator/delta_costs.h"

#include <algorithm>
#include <cstddef>

#include "absl/types/span.h"

namespace refit::simulator {
namespace {

struct Measured {
  double change_rate;
  StagedDeltaCosts costs;  // seconds of `bytes`
  double find_marks;       // likewise, instead of `find`, with bitmaps
};

// 4.29 GB of bf16 on an H200, cuda_device_test
// --gtest_filter='*MessageCodeSpeed*'.
constexpr double kGpuBytes = 4.294967296e9;
constexpr Measured kGpu[] = {
    {0, {2.3e-3, 0.12e-3, 0.13e-3, 0.09e-3}, 0.78e-3},
    {0.001, {2.3e-3, 0.46e-3, 0.33e-3, 0.44e-3}, 0.78e-3},
    {0.01, {2.3e-3, 0.99e-3, 1.5e-3, 2.1e-3}, 0.78e-3},
    {0.1, {2.3e-3, 3.7e-3, 10.4e-3, 13.2e-3}, 0.79e-3},
};

// 134 MB of bf16 on one core of an AMD EPYC (virtual), by the same program on
// the host's device.
constexpr double kCpuBytes = 1.34217728e8;
constexpr Measured kCpu[] = {
    {0, {15e-3, 1.5e-3, 1.3e-3, 1.2e-3}, 1.9e-3},
    {0.001, {17e-3, 6.2e-3, 2.1e-3, 9.2e-3}, 2.9e-3},
    {0.01, {48e-3, 24e-3, 13e-3, 22e-3}, 7.8e-3},
    {0.1, {243e-3, 81e-3, 50e-3, 46e-3}, 39e-3},
};

constexpr double kDigestBytesPerSecond = 3000e9;
// What 33.5 MB of which nothing changed took beside all else
// (bench/network_deltas.py).
constexpr double kCpuDigestBytesPerSecond = 1.5e9;

// A bit for each element of bf16, of a byte, is read to find and cleared at the
// end.
constexpr double kMarkBytes = 1.0 / 16;
constexpr double kClearedBytesPerSecond = 2800e9;
constexpr double kCpuClearedBytesPerSecond = 20e9;

double Between(double x, double x0, double x1, double y0, double y1) {
  return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

}  // namespace

StagedDeltaCosts StagedDeltaCostsAt(Executor executor, fb::DeltaChanges changes,
                                    double change_rate) {
  const bool cpu = executor == Executor::kCpu;
  const absl::Span<const Measured> measured =
      cpu ? absl::MakeConstSpan(kCpu) : absl::MakeConstSpan(kGpu);
  // Beyond the last, as between the last two.
  size_t next = 1;
  while (next + 1 < measured.size() &&
         measured[next].change_rate < change_rate) {
    ++next;
  }
  const Measured& a = measured[next - 1];
  const Measured& b = measured[next];
  const bool marks = changes == fb::DeltaChanges::kBitmap;
  const double bytes = cpu ? kCpuBytes : kGpuBytes;
  const auto between = [&](double at_a, double at_b) {
    return Between(change_rate, a.change_rate, b.change_rate, at_a, at_b) /
           bytes;
  };
  const auto at = [&](double StagedDeltaCosts::*cost) {
    return between(a.costs.*cost, b.costs.*cost);
  };
  const auto find_of = [&](const Measured& of) {
    return marks ? of.find_marks : of.costs.find;
  };
  // What finds more than that stores long runs of bits.
  const double find_max = find_of(measured.back()) / bytes;
  return {.find = std::min(between(find_of(a), find_of(b)), find_max),
          .encode = at(&StagedDeltaCosts::encode),
          .apply = at(&StagedDeltaCosts::apply),
          .keep = marks ? kMarkBytes / (cpu ? kCpuClearedBytesPerSecond
                                            : kClearedBytesPerSecond)
                        : at(&StagedDeltaCosts::keep)};
}

double CheckSecondsPerByte(Executor executor) {
  return 1 / (executor == Executor::kCpu ? kCpuDigestBytesPerSecond
                                         : kDigestBytesPerSecond);
}

}  // namespace refit::simulator
