// Reads DTensor placements as a job writes them.
#ifndef REFIT_COMPILER_JOB_PLACEMENT_H_
#define REFIT_COMPILER_JOB_PLACEMENT_H_

#include <optional>
#include <string_view>

#include "compiler/job/job.h"
#include "compiler/job/object_reader.h"

namespace refit {

// "Replicate", "Shard(d)" or "StridedShard(d, split_factor=k)". Reports what is
// none of them.
std::optional<Placement> ReadPlacement(const ValueReader& values,
                                       const JsonValue& value,
                                       std::string_view what);

}  // namespace refit

#endif  // REFIT_COMPILER_JOB_PLACEMENT_H_
