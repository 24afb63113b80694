// What releases and backends of frameworks deserve a warning for.
#ifndef REFIT_COMPILER_LAYOUT_RELEASE_WARNINGS_H_
#define REFIT_COMPILER_LAYOUT_RELEASE_WARNINGS_H_

#include <cstdint>

#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/model/model.h"

namespace refit {

// GPUs of one host, as nearly all hosts with NVLink have them.
inline constexpr int64_t kUsualGpusPerHost = 8;

// Warns of releases newer than what is known, of what an engine of the
// destination would hold otherwise, and of what a release's own loader reads
// otherwise. Each warning names the key that settles the doubt.
void WarnOfFrameworks(const Job& job, const Model& model,
                      Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_RELEASE_WARNINGS_H_
