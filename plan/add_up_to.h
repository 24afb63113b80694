// Sums over a hostile file's numbers end at the largest number instead of
// wrapping around.
#ifndef REFIT_PLAN_ADD_UP_TO_H_
#define REFIT_PLAN_ADD_UP_TO_H_

#include <limits>

namespace refit {

// Adds `value` to a sum over ranks, messages or copies. The loader bounds each
// of these, but not their sum.
template <typename Number>
void AddUpTo(Number value, Number& sum) {
  if (__builtin_add_overflow(sum, value, &sum)) {
    sum = std::numeric_limits<Number>::max();
  }
}

}  // namespace refit

#endif  // REFIT_PLAN_ADD_UP_TO_H_
