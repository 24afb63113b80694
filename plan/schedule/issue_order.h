// In which order the steps of a list are issued.
#ifndef REFIT_PLAN_SCHEDULE_ISSUE_ORDER_H_
#define REFIT_PLAN_SCHEDULE_ISSUE_ORDER_H_

#include <vector>

#include "plan/schedule/steps.h"

namespace refit {

// The same steps, with what each waits for, in an order in which the work of
// several lanes overlaps where one queue gives it to the device, as in a
// process with CUDA_DEVICE_MAX_CONNECTIONS=1: nothing passes there what waits,
// nor begins behind an exchange before that has ended.
//
//   pack 0, pack 1, exchange 0 │ pack 2, unpack 0, exchange 1 │ pack 3, unpack
//   1, exchange 2
//
// So a step is issued before an exchange beside which it can be done: each such
// group needs only what earlier ones did. Steps of one lane keep their order,
// and so do those that may wait for peers.
std::vector<Step> InIssueOrder(std::vector<Step> steps);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_ISSUE_ORDER_H_
