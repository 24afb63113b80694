// libFuzzer target: a job file of any bytes gives a job or diagnostics.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/model/model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int file = memfd_create("job", 0);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) {
    return 0;
  }
  refit::Diagnostics diagnostics;
  const std::optional<refit::Job> job =
      refit::ReadJob("/proc/self/fd/" + std::to_string(file), diagnostics);
  if (job.has_value()) refit::ReadModel(*job, diagnostics);
  close(file);
  diagnostics.Render();
  return 0;
}
