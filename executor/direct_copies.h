// Copies from a sender's tensors straight into a receiver's.
#ifndef REFIT_EXECUTOR_DIRECT_COPIES_H_
#define REFIT_EXECUTOR_DIRECT_COPIES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "executor/binding.h"
#include "plan/plan_file.h"
#include "refit/device.h"

namespace refit {

// One end of a message: the rank's tensors and where they begin in the table of
// addresses that copies are prepared over.
struct MessageEnd {
  const fb::RankProgram& program;
  const TensorTable& tensors;
  uint64_t table_begin = 0;
  const fb::Message& message;
};

// Appends to `batch` what moves the elements of a direct message: every copy of
// the receiver joined with the sender's copy of the same bytes. Error:
// kUnimplemented, copies whose bytes or loops do not fit together; refit-verify
// refuses such a plan.
absl::Status AppendDirectCopies(const fb::Body& body, const MessageEnd& send,
                                const MessageEnd& recv, uint32_t lane,
                                CopyBatch& batch);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DIRECT_COPIES_H_
