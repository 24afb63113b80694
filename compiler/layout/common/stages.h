// Which layers each pipeline stage owns.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_STAGES_H_
#define REFIT_COMPILER_LAYOUT_COMMON_STAGES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/layout/common/shard.h"

namespace refit {

// The owner table: split[stage][chunk] are global layer numbers. Chunk 0 of
// all stages comes first in the model, then chunk 1 … (virtual stages).
using PipelineSplit = std::vector<std::vector<Range>>;

// Megatron: even, with an uneven first or last stage, with virtual stages, or
// as `layers_per_stage` says. Reports layers that cannot be shared so.
std::optional<PipelineSplit> SplitMegatronLayers(const SideSpec& side,
                                                 int64_t layers,
                                                 Diagnostics& diagnostics);

// Serving engines: as `layers_per_stage` says, or layers / stages each; of the
// remainder one more to each stage leftwards from the one that
// `remainder_ends_before` others follow. In vLLM the last stage, which has the
// head, gets none of it.
std::optional<PipelineSplit> SplitServingLayers(const SideSpec& side,
                                                int64_t layers,
                                                int64_t remainder_ends_before,
                                                Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_STAGES_H_
