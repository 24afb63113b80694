// Whether all that touches the same bytes in a refit is ordered, within a rank
// and across ranks, by the steps of the ranks' lists (plan/schedule/steps.h)
// alone.
//
// An oracle: it knows nothing of rounds, windows or slots. It takes the copies
// that executors issue, at made-up addresses, and what the lists say. The first
// and the last step of a rank stand for what its worker does before and after
// the refit: they write all of its memory.
#ifndef REFIT_TESTS_EXECUTOR_REFIT_ORDER_H_
#define REFIT_TESTS_EXECUTOR_REFIT_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan_file.h"
#include "plan/proof/order_proof.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/steps.h"

namespace refit {

// Changes the list of a rank.
using EditSteps = std::function<void(int32_t rank, std::vector<Step>& steps)>;

struct RefitOrderOptions {
  DirectRounds direct = DirectRounds::kStored;
  // Sources quantize where they store, and destinations from what they read.
  bool fuses = false;
  // Where nothing is fused; none: as the plan says.
  std::optional<proof::Movers> movers = std::nullopt;
  EditSteps edit = {};
};

class RefitOrder {
 public:
  // Of a plan that is proved, with few bytes. Every rank can map every other.
  RefitOrder(const PlanFile& plan, const RefitOrderOptions& options);

  // The number of waits of steps for steps of other lanes. One of them, by its
  // number, can be left out below.
  size_t waits() const { return waits_.size(); }
  static constexpr size_t kNone = static_cast<size_t>(-1);
  // Which entry of Step::after it is, in which list.
  struct Wait {
    int32_t rank = 0;
    uint32_t step = 0;
    uint32_t entry = 0;
  };
  const Wait& WaitAt(size_t wait) const { return wait_entries_[wait]; }
  // "pack after exchange".
  std::string KindOfWait(size_t wait) const;

  // Two steps that touch a byte, one of them writing, with no order between
  // them; or steps that wait for each other in a circle. Empty: there are none.
  std::string FirstRace(size_t without_wait = kNone) const;

 private:
  // A step has two nodes: 2 * step where it begins, 2 * step + 1 where it ends.
  using Node = uint32_t;
  struct Arrow {
    Node from = 0;
    Node to = 0;
  };
  // Bytes [begin, end).
  struct Access {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint32_t step = 0;
    bool writes = false;
  };
  class Lister;

  // By node, a bit for each node that comes before it; empty: a circle.
  std::vector<std::vector<uint64_t>> NodesBefore(size_t without_wait) const;

  std::vector<std::string> names_;  // by step of all ranks
  std::vector<const char*> kinds_;  // likewise
  std::vector<Arrow> arrows_;       // those that cannot be left out
  std::vector<Arrow> waits_;
  std::vector<Wait> wait_entries_;  // by wait
  std::vector<Access> accesses_;    // by their begin
};

// Of the lists of a plan with one wait fewer, or one fence fewer: the call and
// what waits for it.
struct OrderMutations {
  size_t tried = 0;
  size_t noticed = 0;  // by the order proof
  // The first that makes two steps race although the proof sees no violation;
  // or a race in the lists as they are, or a violation.
  std::string missed;
};

OrderMutations MutateOrder(const PlanFile& plan, proof::Movers movers);

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_REFIT_ORDER_H_
