// Sums over what a file says, which may be more than a number holds.
#ifndef REFIT_PLAN_ADD_UP_TO_H_
#define REFIT_PLAN_ADD_UP_TO_H_

#include <limits>

namespace refit {

// Adds to a sum over ranks, messages or copies, which says the largest number
// where a plan has more: each has less, not all together.
template <typename Number>
void AddUpTo(Number value, Number& sum) {
  if (__builtin_add_overflow(sum, value, &sum)) {
    sum = std::numeric_limits<Number>::max();
  }
}

}  // namespace refit

#endif  // REFIT_PLAN_ADD_UP_TO_H_
