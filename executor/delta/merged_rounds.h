// Staged rounds of a rank that travel as one in a delta refit.
//
// On a low rung a message has few of its dense bytes, so what is staged for one
// round has room for the messages of many. Consecutive rounds are merged: one
// batch of kernels encodes all their messages, a pair of ranks exchanges them
// as one, and one batch applies them. A round costs 0.1 to 0.3 ms whatever it
// holds.
//
//   rounds of the plan   0 1 2 3 4 5 | 6 | 7 8       6 is direct
//   merged by four       0 . . . 4 .       7 .
//
// Both ends of a message must merge alike, so all ranks take the same number of
// rounds: a power of two, of which smaller ones divide the larger. What fits
// with one fits with all smaller ones, so the least of all ranks' is right for
// all of them.
//
// Of a merged round, a pair's coded messages lie one behind the other in
// staging, in the order of rounds, then of the schedule; they are one transfer.
// Those that travel whole follow it, each for itself: it may be sent from a
// tensor.
//
//   staging   | part 0 | part 1 | ... | part 7 |     merged rounds take turns
#ifndef REFIT_EXECUTOR_DELTA_MERGED_ROUNDS_H_
#define REFIT_EXECUTOR_DELTA_MERGED_ROUNDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "executor/rank_schedule.h"
#include "plan/plan_file.h"
#include "refit/transport.h"

namespace refit {

// What is sent or received as one.
struct MergedTransfer {
  uint32_t first_operation = 0;  // of the schedule
  bool is_coded = false;         // else that operation alone, whole
  uint64_t staging_offset = 0;
  uint64_t size_bytes = 0;
  uint64_t dense_bytes = 0;  // of the messages that it has
};

struct MergedRound {
  uint32_t index = 0;  // the first of its rounds, also where the rank has none
  // Works of the schedule, and operations.
  size_t begin = 0;
  size_t end = 0;
  uint32_t operations_begin = 0;
  uint32_t operations_count = 0;
  size_t part = 0;  // of staging
  std::vector<MergedTransfer> transfers;
};

// All merged rounds of a rank on one rung.
struct MergedLayout {
  std::vector<MergedRound> rounds;
  std::vector<uint64_t> staging_offsets;  // by operation of the schedule
};

class RoundMerger {
 public:
  // Parts of staging that merged rounds use in turn: several are encoded, on
  // the wire and applied at the same time, and a long refit has as many at
  // least.
  static constexpr size_t kParts = 8;

  // Both must outlive it.
  RoundMerger(const PlanFile& plan, const RankSchedule& schedule);

  struct Sizes {
    absl::FunctionRef<uint64_t(size_t operation)> bytes;
    absl::FunctionRef<bool(size_t operation)> is_coded;
  };
  // How many rounds this rank can merge at most, as a power of two; 0: none.
  uint8_t Most(const Sizes& sizes) const;
  // 1 << `power` rounds each. Nullopt: too much for staging, or for a group of
  // the transport's.
  std::optional<MergedLayout> Lay(uint8_t power, const Sizes& sizes) const;

 private:
  // The first of the merged round that a round of the plan is of.
  uint32_t FirstOf(uint32_t round, uint8_t power) const {
    const uint32_t begin = run_begins_[round];
    return begin + ((round - begin) >> power << power);
  }
  bool Place(const Sizes& sizes, MergedLayout& layout,
             MergedRound& merged) const;

  const RankSchedule& schedule_;
  // By round of the plan: the first of the staged rounds of one route that
  // follow each other up to it.
  std::vector<uint32_t> run_begins_;
  std::vector<bool> is_staged_;  // likewise
  uint8_t most_ = 0;             // makes one of the longest of these
  uint64_t part_bytes_ = 0;
  uint64_t operations_max_ = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_MERGED_ROUNDS_H_
