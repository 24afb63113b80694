// Which ranks of a plan do the same at the same time.
#ifndef REFIT_SIMULATOR_EQUAL_RANKS_H_
#define REFIT_SIMULATOR_EQUAL_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan_file.h"

namespace refit::simulator {

class Links;

// Those parts of a folded job (docs/architecture.md) that are alike have equal
// programs. Where their places are alike too, and no two parts share a link,
// one part shows what the others do. A slow rank or a dead NIC sets its part
// apart.
class EqualRanks {
 public:
  // All ranks differ.
  EqualRanks() = default;
  EqualRanks(const PlanFile& plan, const Links& links);

  // Whether some ranks stand for others.
  bool any() const { return !stand_ins_.empty(); }
  // The lowest rank that does the same; itself, if there is no other.
  int32_t StandInOf(int32_t rank) const {
    return any() ? stand_ins_[static_cast<size_t>(rank)] : rank;
  }
  // How many do what `rank` does, itself counted.
  uint32_t CountOf(int32_t rank) const {
    return any() ? counts_[static_cast<size_t>(rank)] : 1;
  }
  // What `rank` is to its part, this rank is to the part of `other`, which is
  // like it.
  int32_t Counterpart(int32_t rank, int32_t other) const {
    return any() ? parts_[part_[static_cast<size_t>(other)]]
                         [position_[static_cast<size_t>(rank)]]
                 : rank;
  }

 private:
  // Adds parts that are alike, ascending.
  void AddParts(std::vector<std::vector<int32_t>> parts, const Links& links);

  // Ranks, each at the same position as those of other parts that have its
  // program.
  std::vector<std::vector<int32_t>> parts_;
  std::vector<size_t> part_;        // by rank
  std::vector<size_t> position_;    // by rank, in its part
  std::vector<int32_t> stand_ins_;  // by rank; empty: all ranks differ
  std::vector<uint32_t> counts_;    // by rank
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_EQUAL_RANKS_H_
