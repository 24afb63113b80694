// Strided boxes of a rank's tensors.
#ifndef REFIT_PLAN_SCHEDULE_TENSOR_BOX_H_
#define REFIT_PLAN_SCHEDULE_TENSOR_BOX_H_

#include <cstdint>
#include <functional>

#include "absl/container/inlined_vector.h"
#include "plan/plan_file.h"
#include "plan/schedule/copy_batch.h"
#include "plan/schedule/tensor_table.h"

namespace refit {

struct BoxLoop {
  uint64_t extent = 1;
  CopyStride stride;
};

// Elements in a table of addresses, row-major over the loops, the last loop
// fastest.
struct TensorBox {
  CopyAddress first;
  absl::InlinedVector<BoxLoop, 6> loops;

  uint64_t Elements() const;
  uint64_t ElementBytes() const { return DTypeBytes(first.dtype); }
  // Whether the elements stand one behind the other.
  bool IsOneRun() const;
};

// What `copy` reads or writes on the rank of `tensors`, whose tensors begin at
// `first_entry` of the table of addresses.
TensorBox BoxOf(const fb::Body& body, const TensorTable& tensors,
                const fb::Copy& copy, uint64_t first_entry = 0);

// `elements` one behind the other.
TensorBox RunOf(const CopyAddress& first, uint64_t elements);

// Calls `visit` with boxes that hold the elements [begin, end) of `box`, as its
// loops visit them, in that order.
void ForEachPart(const TensorBox& box, uint64_t begin, uint64_t end,
                 const std::function<void(const TensorBox& part)>& visit);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_TENSOR_BOX_H_
