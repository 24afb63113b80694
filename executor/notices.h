// What a rank tells its user that it does otherwise than expected.
#ifndef REFIT_EXECUTOR_NOTICES_H_
#define REFIT_EXECUTOR_NOTICES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "executor/peer_tensors.h"
#include "plan/plan_file.h"
#include "plan/schedule/rank_schedule.h"
#include "refit/executor.h"

namespace refit {

// Replaces those of `kind` in `notices`, which are by kind.
void SetNotices(NoticeKind kind, const std::vector<std::string>& texts,
                std::vector<Notice>& notices);

// Of kPull: which pairs have another end than the plan's that moves their
// bytes.
std::vector<std::string> TextsOfMixedEnds(const PlanFile& plan, int32_t rank,
                                          const RankSchedule& schedule,
                                          const PeerTensors& peers);
// Of kUnwatched. `memory` may be null; its ranges are those of `tensors`.
std::vector<std::string> TextsOfUnwatched(
    const MemoryWatch* memory, absl::Span<const BoundTensor> tensors);

}  // namespace refit

#endif  // REFIT_EXECUTOR_NOTICES_H_
