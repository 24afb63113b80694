// Copying and then quantizing, as one step that needs no scratch.
#ifndef REFIT_PLAN_SCHEDULE_PULLED_QUANTIZES_H_
#define REFIT_PLAN_SCHEDULE_PULLED_QUANTIZES_H_

#include <cstdint>
#include <vector>

#include "plan/schedule/copy_batch.h"

namespace refit {

struct PulledQuantizes {
  CopyBatch batch;              // of kind kQuantize; what is done instead
  std::vector<bool> is_pulled;  // by operation
};

// Operations of a rank, and all the copies that fill what they read, over one
// table of addresses. An operation is pulled if copies fill each of its rows
// whole and once, and cast nothing: it then reads where these do. Its copies
// are not needed any more.
PulledQuantizes PullQuantizes(const CopyBatch& quantizes,
                              const CopyBatch& copies);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_PULLED_QUANTIZES_H_
