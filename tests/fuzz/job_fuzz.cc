// libFuzzer target: a job file of any bytes gives a job or diagnostics, and a
// small job a proved plan or diagnostics.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/model/model.h"

namespace refit {
namespace {

// What compiles in a moment.
constexpr double kRanksMax = 24;
constexpr double kBucketsMax = 500;

double RanksOf(const SideSpec& side) {
  double ranks = 1;
  for (const Located<int64_t>& size :
       {side.tensor_parallel, side.pipeline_parallel, side.data_parallel,
        side.context_parallel, side.replicas}) {
    ranks *= static_cast<double>(size.value);
  }
  for (const MeshSpec& mesh : side.generic.meshes) {
    ranks = std::max(ranks, static_cast<double>(mesh.ranks.size()));
  }
  return ranks;
}

bool IsSmall(const Job& job, const Model& model) {
  constexpr double kElementBytesMax = 8;
  double bytes = 0;
  for (const Param& param : model.params) {
    double of_param = kElementBytesMax;
    for (const IndexDim& dim : param.index) {
      of_param *= static_cast<double>(dim.extent());
    }
    for (const int64_t extent : param.shape) {
      of_param *= static_cast<double>(extent);
    }
    bytes += of_param;
  }
  return RanksOf(job.source) <= kRanksMax &&
         RanksOf(job.destination) <= kRanksMax &&
         bytes <=
             kBucketsMax * static_cast<double>(job.options.bucket_bytes.value);
}

void CompileBytes(const uint8_t* data, size_t size) {
  const int file = memfd_create("job", 0);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) return;
  Diagnostics diagnostics;
  const std::optional<Job> job =
      ReadJob("/proc/self/fd/" + std::to_string(file), diagnostics);
  std::optional<Model> model;
  if (job.has_value()) model = ReadModel(*job, diagnostics);
  close(file);
  diagnostics.Render();
  if (!model.has_value() || !IsSmall(*job, *model)) return;
  const absl::StatusOr<std::vector<uint8_t>> plan =
      Compile(*job, {}, diagnostics);
  diagnostics.Render();
  if (plan.ok() || !diagnostics.ok()) return;
  std::cerr << plan.status() << "\n";  // the plan failed its own proof
  std::abort();
}

}  // namespace
}  // namespace refit

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  refit::CompileBytes(data, size);
  return 0;
}
