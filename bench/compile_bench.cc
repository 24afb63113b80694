#include "bench/compile_bench.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "absl/strings/str_cat.h"
#include "compiler/compile.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"

namespace refit {
namespace {

template <typename Step>
double SecondsOf(const Step& step) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  step();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A worker's way in: from a file, memory-mapped, everything checked. The file
// has no name, so that nothing is left of it when a signal ends the process.
double OpenSeconds(const std::vector<uint8_t>& bytes) {
  const int file = memfd_create("refit-bench", MFD_CLOEXEC);
  if (file < 0) return std::numeric_limits<double>::quiet_NaN();
  const std::string path = absl::StrCat("/proc/self/fd/", file);
  const bool written = write(file, bytes.data(), bytes.size()) ==
                       static_cast<ssize_t>(bytes.size());
  bool opened = false;
  const double seconds = SecondsOf([&] { opened = PlanFile::Open(path).ok(); });
  close(file);
  return written && opened ? seconds : std::numeric_limits<double>::quiet_NaN();
}

// Compiles and proves once, in this process. False after an error, reported.
bool MeasureOnce(const Job& job, CompileMeasurement& measurement) {
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes;
  const double compile_seconds =
      SecondsOf([&] { bytes = Compile(job, {.prove = false}, diagnostics); });
  if (!bytes.ok()) {
    std::fprintf(stderr, "%s%s\n", diagnostics.Render().c_str(),
                 std::string(bytes.status().message()).c_str());
    return false;
  }
  measurement.plan_bytes = static_cast<int64_t>(bytes->size());
  measurement.open_seconds = OpenSeconds(*bytes);
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(*std::move(bytes));
  if (!plan.ok()) return false;
  bool valid = false;
  const double prove_seconds = SecondsOf([&] { valid = Prove(*plan).valid; });
  if (!valid) return false;
  measurement.compile_seconds = compile_seconds;
  measurement.prove_seconds = prove_seconds;
  measurement.ranks = plan->world_size();
  measurement.copies = plan->body().copies()->size();
  measurement.messages = 0;
  for (const fb::RankProgram* program : *plan->body().programs()) {
    measurement.messages += MessageCount(plan->body(), *program);
  }
  return true;
}

// Runs MeasureOnce in a child and adds the child's peak.
absl::StatusOr<CompileMeasurement> MeasureInChild(const Job& job) {
  int channel[2];
  if (pipe(channel) != 0) return absl::UnavailableError("pipe failed");
  const pid_t child = fork();
  if (child < 0) return absl::UnavailableError("fork failed");
  if (child == 0) {
    close(channel[0]);
    CompileMeasurement measurement;
    const bool measured = MeasureOnce(job, measurement);
    const ssize_t written =
        measured ? write(channel[1], &measurement, sizeof(measurement)) : 0;
    std::_Exit(written == sizeof(measurement) ? 0 : 1);
  }
  close(channel[1]);
  CompileMeasurement measurement;
  const ssize_t received = read(channel[0], &measurement, sizeof(measurement));
  close(channel[0]);
  int status = 0;
  rusage usage = {};
  wait4(child, &status, 0, &usage);
  if (received != sizeof(measurement) || status != 0) {
    return absl::InvalidArgumentError("the job does not compile");
  }
  measurement.peak_bytes = int64_t{usage.ru_maxrss} * 1024;
  return measurement;
}

}  // namespace

absl::StatusOr<CompileMeasurement> MeasureCompile(const Job& job,
                                                  int repetitions) {
  absl::StatusOr<CompileMeasurement> best = MeasureInChild(job);
  for (int i = 1; i < repetitions && best.ok(); ++i) {
    absl::StatusOr<CompileMeasurement> next = MeasureInChild(job);
    if (!next.ok()) return next;
    best->compile_seconds =
        std::min(best->compile_seconds, next->compile_seconds);
    best->prove_seconds = std::min(best->prove_seconds, next->prove_seconds);
    best->open_seconds = std::min(best->open_seconds, next->open_seconds);
    best->peak_bytes = std::min(best->peak_bytes, next->peak_bytes);
  }
  return best;
}

std::vector<Job> GrowJob(const Job& job, int64_t factor_max,
                         Diagnostics& diagnostics) {
  std::vector<Job> jobs;
  for (const SideSpec* side : {&job.source, &job.destination}) {
    if (factor_max == 1 || side->layout.value != LayoutKind::kGeneric) continue;
    diagnostics.Error(side->layout.place,
                      absl::StrCat(side->key,
                                   ".layout is \"generic\", whose meshes do "
                                   "not grow; wanted a layout with sizes, or "
                                   "no --growth"));
    return jobs;
  }
  for (int64_t factor = 1; factor <= factor_max; factor *= 2) {
    Job grown = job;
    grown.source.data_parallel.value *= factor;
    grown.destination.replicas.value *= factor;
    jobs.push_back(std::move(grown));
  }
  return jobs;
}

double GrowthExponent(const std::vector<CompileMeasurement>& measurements,
                      double CompileMeasurement::*quantity) {
  double n = 0;
  double sum_x = 0;
  double sum_y = 0;
  double sum_xx = 0;
  double sum_xy = 0;
  for (const CompileMeasurement& measurement : measurements) {
    const double x = std::log(static_cast<double>(measurement.ranks));
    const double y = std::log(measurement.*quantity);
    n += 1;
    sum_x += x;
    sum_y += y;
    sum_xx += x * x;
    sum_xy += x * y;
  }
  return (n * sum_xy - sum_x * sum_y) / (n * sum_xx - sum_x * sum_x);
}

}  // namespace refit
