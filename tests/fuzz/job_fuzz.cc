// libFuzzer target: a job file of any bytes gives a job or diagnostics, and a
// small job a proved plan or diagnostics.
#include <sys/mman.h>
#include <unistd.h>

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
#include "tests/fuzz/small_job.h"

namespace refit {
namespace {

void CompileBytes(const uint8_t* data, size_t size) {
  const int file = memfd_create("job", 0);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) return;
  Diagnostics diagnostics;
  const std::optional<Job> job =
      ReadJob("/proc/self/fd/" + std::to_string(file), diagnostics, "refitc");
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
