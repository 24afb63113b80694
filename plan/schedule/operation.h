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
  bool broadcasts = false;  // of operations that are parts of broadcasts
};

// One send or receive of a staged round.
struct Operation {
  fb::MessageKind kind = fb::MessageKind::kSend;
  int32_t peer = 0;
  std::byte* data = nullptr;
  uint64_t size_bytes = 0;
  // n: a part of the n-th broadcast of its sender in the round, to all ranks to
  // which it has such a send, with the same data. A transport without
  // broadcasts may take it for a send or receive of its own. 0: of none.
  uint8_t broadcast = 0;
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_OPERATION_H_
