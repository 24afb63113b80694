// The tensors of a rank in plan order, and where the plan's offsets are in
// them.
#ifndef REFIT_PLAN_SCHEDULE_TENSOR_TABLE_H_
#define REFIT_PLAN_SCHEDULE_TENSOR_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "plan/plan_file.h"
#include "plan/schedule/copy_batch.h"

namespace refit {

// The tensors of a rank in plan order: all of its first stack, then all of its
// second, and so on. A position in this order is a tensor table entry. A slot
// is a position in the rank's list of stacks, RankProgram.buffers.
class TensorTable {
 public:
  TensorTable(const PlanFile& plan, int32_t rank);

  uint64_t size() const { return begin_.back(); }
  size_t stacks() const { return begin_.size() - 1; }
  // Those of the worker: the stacks after them are scratch.
  size_t workers_stacks() const { return workers_stacks_; }
  // Entry of tensor 0 of the stack at `slot`.
  uint64_t begin(size_t slot) const { return begin_[slot]; }
  const fb::Buffer& buffer(size_t slot) const;
  std::string Name(size_t slot, uint64_t ordinal) const;

  // Where virtual offset `offset` of the stack at `slot` is. Not of a stack of
  // empty tensors.
  CopyAddress AddressOf(size_t slot, uint64_t offset) const;
  // How far `stride` virtual elements of the stack move an address: from tensor
  // to tensor or inside one. The loader has checked that loops of copies do not
  // cross tensors in any other way.
  CopyStride StrideOf(size_t slot, uint64_t stride) const;

  // By entry: whether the refit neither reads nor writes the tensor and the
  // plan declares so. Such a tensor may be left out.
  std::vector<bool> Skipped() const;
  // By entry: whether the refit writes a part of the tensor, but not all of it.
  std::vector<bool> PartlySkipped() const;
  // By entry: whether the tensor has elements that the worker needs and the
  // refit leaves as they are: excluded or frozen ones.
  std::vector<bool> LeftAlone() const;

  // What the plan asks for after it wrote the tensors, tensor by tensor; of one
  // tensor in the order in which it is to be done. Not of skipped tensors.
  void ForEachPostHook(
      absl::FunctionRef<void(size_t slot, uint64_t entry, const fb::PostHook&)>
          visit) const;

  // The names of all post-hooks of the plan, of whatever rank, ascending.
  std::set<std::string> PostHookNames() const;

 private:
  // By entry: whether `of_reason` is true for some part of the tensor. A part
  // that is not skipped has the reason kUnspecified.
  std::vector<bool> WithPart(
      absl::FunctionRef<bool(fb::SkipReason)> of_reason) const;

  const fb::Body& body_;
  const fb::RankProgram& program_;
  std::vector<uint64_t> begin_;  // one more than stacks
  size_t workers_stacks_ = 0;
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_TENSOR_TABLE_H_
