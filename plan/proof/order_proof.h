// Invariant 7: steps that touch the same bytes, one of them writing, are
// ordered, within a rank and across ranks, by the lists that executors run.
//
// The other proofs have shown which rounds touch which bytes, so nothing here
// looks at a copy:
//
//   staging   each range is packed, sent, received and unpacked in order, and
//             passed on before it is used again (byte by byte)
//   relays    what a relay sends waits for all rounds that DataProof takes as
//             awaited (AwaitedBy)
//   scratch   an operation comes before the sends of its window at a source,
//             behind the receives at a destination; windows of the same bytes
//             follow each other
//   tensors   everything, peers' stores and reads too, comes between the first
//             and the last step, which stand for what the worker does before
//             and after a refit
//
// A peer's access begins behind the grant that it awaited, and is over where
// this rank hears that it finished. Grants and finishes are the only edges
// between ranks: the two ends of a message have no memory in common.
#ifndef REFIT_PLAN_PROOF_ORDER_PROOF_H_
#define REFIT_PLAN_PROOF_ORDER_PROOF_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "plan/plan_file.h"
#include "plan/proof/steps.h"
#include "plan/proof/violations.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/steps.h"

namespace refit::proof {

// A relay reads when all is there that came in these rounds and before, by
// their mechanism; -1: it waits for none of them.
struct AwaitedRounds {
  int64_t staged = -1;
  int64_t direct = -1;
};

// What a send of a destination rank in `round` waits for. `fed_by`: as FedBy
// says.
AwaitedRounds AwaitedBy(const fb::Body& body, uint32_t round,
                        const fb::Message* fed_by);

// Which end of each pair of ranks moves the bytes of direct rounds.
enum class Movers : uint8_t { kSenders, kReceivers };

// What a rank does in a refit. `steps` point into `ends`, so it is moved only.
struct ListedSteps {
  ListedSteps(RankSchedule of_rank, std::vector<DirectEnds> of_rounds);
  ListedSteps(ListedSteps&&) = default;
  ListedSteps& operator=(ListedSteps&&) = default;

  RankSchedule schedule;
  std::vector<DirectEnds> ends;
  std::vector<Step> steps;
};

// The list of a dense refit that nobody checks, and that fuses nothing.
ListedSteps ListRankSteps(const PlanFile& plan, int32_t rank, Movers movers);

// Invariant 7, of a plan in which all others hold. Ranks that share their lists
// are looked at once, where their peers do too. `list` says what a rank does.
void CheckOrder(const PlanFile& plan, Movers movers,
                absl::FunctionRef<ListedSteps(int32_t rank)> list, Steps& steps,
                Violations& violations);

// The same of the lists of ListRankSteps: once where senders move the bytes of
// all direct rounds, and once where receivers do.
void CheckOrder(const PlanFile& plan, Steps& steps, Violations& violations);

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_ORDER_PROOF_H_
