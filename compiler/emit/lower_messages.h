// Turns messages into what each rank sends and receives, in program order.
#ifndef REFIT_COMPILER_EMIT_LOWER_MESSAGES_H_
#define REFIT_COMPILER_EMIT_LOWER_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/emit/lower_copies.h"
#include "compiler/ir/module.h"
#include "plan_generated.h"

namespace refit {

// One rank's messages in program order.
struct RankMessages {
  struct End {
    fb::Message message;
    const Message* of;
  };
  std::vector<End> ends;
  int64_t staging_bytes = 0;
};

// All messages, lowered.
struct LoweredMessages {
  std::vector<RankMessages> ranks;
  std::vector<uint32_t> received_at;  // by Module::messages: in `ends`
};

// kInternal: as CopyLowering.
absl::StatusOr<LoweredMessages> LowerMessages(const Module& module,
                                              CopyLowering& lowering);

// What the sends of a destination rank pass on.
std::vector<fb::Relay> LowerRelays(const Module& module,
                                   const LoweredMessages& lowered, size_t rank);

}  // namespace refit

#endif  // REFIT_COMPILER_EMIT_LOWER_MESSAGES_H_
