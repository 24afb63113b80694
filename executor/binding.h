// Bind's check: the tensors of a worker against what the plan says of its rank.
#ifndef REFIT_EXECUTOR_BINDING_H_
#define REFIT_EXECUTOR_BINDING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/executor.h"

namespace refit {

// The tensors of a rank in plan order: all of its first stack, then all of its
// second, and so on. A place in this order is a tensor table entry.
class TensorTable {
 public:
  TensorTable(const PlanFile& plan, int32_t rank);

  uint64_t size() const { return begin_.back(); }
  size_t stacks() const { return begin_.size() - 1; }
  // Those of the worker: the stacks after them are scratch.
  size_t workers_stacks() const { return workers_stacks_; }
  // Entry of tensor 0 of the stack at `slot` of the rank's `buffers`.
  uint64_t begin(size_t slot) const { return begin_[slot]; }
  const fb::Buffer& buffer(size_t slot) const;
  std::string Name(size_t slot, uint64_t ordinal) const;

  // By entry: whether the refit neither reads nor writes the tensor and the
  // plan declares so. Such a tensor may be left out.
  std::vector<bool> Skipped() const;
  // By entry: whether the refit writes a part of the tensor, but not all of it.
  std::vector<bool> PartlySkipped() const;

  // What the plan asks for after it wrote the tensors, tensor by tensor; of one
  // tensor in the order in which it is to be done. Not of skipped tensors.
  void ForEachPostHook(
      absl::FunctionRef<void(size_t slot, uint64_t entry, const fb::PostHook&)>
          visit) const;

 private:
  // By entry: whether some part of the tensor is skipped, or is not.
  std::vector<bool> WithPart(bool skipped) const;

  const fb::Body& body_;
  const fb::RankProgram& program_;
  std::vector<uint64_t> begin_;  // one more than stacks
  size_t workers_stacks_ = 0;
};

// The address of each tensor table entry; null for those left out and for
// scratch. Unless
// `allows_unaligned`, an address that is no multiple of the element's size is a
// problem too. `other_problems` are told beside those of the tensors.
absl::StatusOr<std::vector<std::byte*>> BindTensors(
    const TensorTable& table, int32_t rank,
    absl::Span<const BoundTensor> tensors, bool allows_unaligned,
    absl::Span<const std::string> other_problems = {});

}  // namespace refit

#endif  // REFIT_EXECUTOR_BINDING_H_
