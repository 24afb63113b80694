// How far a long computation is, for whoever waits for it.
#ifndef REFIT_PLAN_PROGRESS_H_
#define REFIT_PLAN_PROGRESS_H_

#include <functional>
#include <string_view>

namespace refit {

// Called when `done` of `total` parts are over, `part` being the last of them.
// May be empty.
using Progress =
    std::function<void(std::string_view part, int done, int total)>;

}  // namespace refit

#endif  // REFIT_PLAN_PROGRESS_H_
