// Which ranks broadcast, and to whom.
#ifndef REFIT_PLAN_BROADCASTS_H_
#define REFIT_PLAN_BROADCASTS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "plan/plan_file.h"

namespace refit {

// Of a plan that was proved: a rank broadcasts to the same ranks in all rounds.
class Broadcasts {
 public:
  explicit Broadcasts(const fb::Body& body);

  bool any() const { return !to_.empty(); }
  // To whom `root` broadcasts, ascending; empty: it does not.
  absl::Span<const uint32_t> To(uint32_t root) const {
    return any() ? to_[root] : absl::Span<const uint32_t>();
  }
  // From whom `receiver` has what `root` broadcasts: NCCL passes it on from
  // rank to rank. Here that is in the order of ranks; NCCL may choose another.
  uint32_t Before(uint32_t root, uint32_t receiver) const;
  // To whom `receiver` passes it on, if to anyone.
  std::optional<uint32_t> After(uint32_t root, uint32_t receiver) const;

 private:
  std::vector<std::vector<uint32_t>> to_;  // by root; empty if none broadcasts
};

}  // namespace refit

#endif  // REFIT_PLAN_BROADCASTS_H_
