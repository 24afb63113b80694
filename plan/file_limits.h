// How much of a kind a plan's file may hold. No job needs as much; files that
// hold more are refused, so that no reader's time depends on them.
#ifndef REFIT_PLAN_FILE_LIMITS_H_
#define REFIT_PLAN_FILE_LIMITS_H_

#include <cstdint>

namespace refit {

inline constexpr uint32_t kDimsMax = 16;  // of a tensor
inline constexpr uint32_t kStackTensorsMax = 1 << 20;
// Rounds that a plan keeps apart in staging (Limits.slots): what walks messages
// within so many rounds stays linear in them.
inline constexpr uint32_t kSlotsMax = 8;

}  // namespace refit

#endif  // REFIT_PLAN_FILE_LIMITS_H_
