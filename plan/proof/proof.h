// The proof: from the file alone, that a plan writes the right thing.
//
// Shares nothing with the compiler. The file says which box of which param
// each buffer of each rank holds; the proof executes all programs
// symbolically, with boxes instead of elements, and follows every byte.
#ifndef REFIT_PLAN_PROOF_PROOF_H_
#define REFIT_PLAN_PROOF_PROOF_H_

#include <cstdint>
#include <string>

#include "plan/plan_file.h"
#include "plan/progress.h"

namespace refit {

// What must hold for every plan.
enum class Invariant : uint8_t {
  kWrittenOnce = 1,  // every destination element: data, fill or declared skip,
                     // exactly once
  kRightElement =
      2,  // what is written is the logical element that belongs there
  kInBounds =
      3,  // reads and writes in range; no staging byte overwritten while owed
  kMatchedMessages =
      4,  // both ends of a channel see the same operations in the same order
  kRoundLimits = 5,       // operations per round and staging within the limits
  kWellFormedInputs = 6,  // digests, declared casts, disjoint fragments, one
                          // dtype of each source tensor: what the rest rests on
  kOrdered = 7,  // steps that touch the same bytes, one of them writing, are
                 // ordered, within a rank and across ranks
};

struct ProofResult {
  bool valid = false;
  // Of the first violation, in order of rank, round, buffer, index.
  Invariant invariant = Invariant::kWrittenOnce;
  std::string violation;  // names rank, round, buffer and index where they
                          // apply; "" when valid

  // What was proved, for a summary line.
  int64_t messages = 0;
  int64_t destination_elements = 0;
  int64_t skipped_elements = 0;  // of these, not written: declared as skipped
  int64_t moved_bytes = 0;
};

// Thread-compatible. Cost: O(copies log copies), never elements. `progress`
// hears of each rank whose program was followed, after one part for all else.
ProofResult Prove(const PlanFile& plan, const Progress& progress = {});

}  // namespace refit

#endif  // REFIT_PLAN_PROOF_PROOF_H_
