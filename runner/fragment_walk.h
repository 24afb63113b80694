// Walks the elements of a fragment in the param and in the buffer at once.
#ifndef REFIT_RUNNER_FRAGMENT_WALK_H_
#define REFIT_RUNNER_FRAGMENT_WALK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

// An element of a stack: number of the tensor, and of the element in it.
struct StackElement {
  uint64_t tensor = 0;
  uint64_t element = 0;
};

// Elements at even strides inside one tensor of the param and one of the
// buffer.
struct WalkRow {
  StackElement param;
  StackElement buffer;
  uint64_t count = 1;
  uint64_t param_stride = 0;  // elements
  uint64_t buffer_stride = 0;
};

// A fragment, or a region of a buffer (whose param part means nothing).
class FragmentWalk {
 public:
  FragmentWalk(const fb::Fragment& fragment, const fb::Param& param,
               const fb::Buffer& buffer);
  FragmentWalk(const fb::Region& region, const fb::Buffer& buffer);

  uint64_t elements() const;
  // The walk falls into this many parts of about `elements_per_part` each.
  uint64_t Parts(uint64_t elements_per_part) const;
  // Visits the rows of part `part` of `parts`.
  void Visit(uint64_t part, uint64_t parts,
             const std::function<void(const WalkRow&)>& visit) const;

 private:
  // Offsets and strides are virtual: over all tensors of the stack.
  struct Loop {
    uint64_t extent = 1;
    uint64_t param_stride = 0;
    uint64_t buffer_stride = 0;
  };
  struct Position {
    uint64_t param = 0;
    uint64_t buffer = 0;
  };

  void AddLoop(const Loop& loop);
  void SplitOffRow();
  void VisitRow(const Position& first, uint64_t count,
                const std::function<void(const WalkRow&)>& visit) const;

  uint64_t param_elements_ = 1;   // of one tensor
  uint64_t buffer_elements_ = 1;  // of one tensor
  Position first_;
  std::vector<Loop> loops_;  // around the rows, outermost first
  Loop row_;                 // the innermost
  bool empty_ = false;
};

}  // namespace refit

#endif  // REFIT_RUNNER_FRAGMENT_WALK_H_
