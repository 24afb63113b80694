// What a rank sends and receives.
#ifndef REFIT_PLAN_SCHEDULE_OPERATION_H_
#define REFIT_PLAN_SCHEDULE_OPERATION_H_

#include <cstddef>
#include <cstdint>

#include "plan_generated.h"

namespace refit {

// A peer that this rank sends to or receives from, and how messages travel.
struct Edge {
  int32_t peer = 0;
  fb::MessageKind kind = fb::MessageKind::kSend;
  fb::Route route = fb::Route::kUnspecified;
  fb::Mechanism mechanism = fb::Mechanism::kStaged;
};

// One send or receive of a staged round.
struct Operation {
  fb::MessageKind kind = fb::MessageKind::kSend;
  int32_t peer = 0;
  std::byte* data = nullptr;
  uint64_t size_bytes = 0;
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_OPERATION_H_
