// Warnings: jobs that compile, and may not be what the user means. Each names
// the key that settles the doubt. docs/jobs.md lists them.
#ifndef REFIT_COMPILER_JOB_WARNINGS_H_
#define REFIT_COMPILER_JOB_WARNINGS_H_

#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "compiler/model/model.h"

namespace refit {

// Of hosts, framework versions, parts that stay, quantized checkpoints and MoE
// backends.
void WarnOfJob(const Job& job, const Model& model, Diagnostics& diagnostics);

// Of options without effect, of what deltas cannot leave out, and of buckets
// far from what is fast. `module` has its messages.
void WarnOfMessages(const Job& job, const Module& module,
                    Diagnostics& diagnostics);

// Warns of deltas whose dense refits take much longer, because no rank relays.
// `with` and `without` them: the seconds that are predicted.
void WarnOfDelta(const OptionsSpec& options, double with, double without,
                 Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_WARNINGS_H_
