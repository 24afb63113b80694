// The compiler as a library: a job in, a proved plan out.
#ifndef REFIT_COMPILER_COMPILE_H_
#define REFIT_COMPILER_COMPILE_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "plan/progress.h"

namespace refit {

struct CompileOptions {
  std::string print_after = "";  // a pass's name, "all", or ""
  bool time_passes = false;
  bool prove = true;  // false only to time the two apart, and to compare
  std::ostream* shown = nullptr;  // where print_after goes; not owned
  std::ostream* log = nullptr;    // where time_passes goes; not owned
  Progress progress = {};         // a part is a line of time_passes
  // Changes what becomes of the job's options: for tests of plans that no job
  // asks for.
  std::function<void(Limits&)> change_limits = {};
  // Called after each pass of each draft: for tests of what passes ensure.
  std::function<void(std::string_view pass, const Module& module)> passed = {};
};

// Compiles and proves `job`. The same job gives the same bytes.
//
// The user's mistakes go to `diagnostics` and give kInvalidArgument. So do
// warnings, which give nothing unless `diagnostics` counts them as errors.
// kInternal: the plan failed its own proof, which is a bug of the compiler; no
// bytes are returned.
absl::StatusOr<std::vector<uint8_t>> Compile(const Job& job,
                                             const CompileOptions& options,
                                             Diagnostics& diagnostics);

// Reads the job at `path` ("-": standard input) and compiles it.
absl::StatusOr<std::vector<uint8_t>> CompileFile(const std::string& path,
                                                 const CompileOptions& options,
                                                 Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_COMPILE_H_
