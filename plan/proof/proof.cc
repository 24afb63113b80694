// Which check holds which invariant:
//
//   1 written once     BufferFacts::gap (no element without a part),
//                      DataProof::CheckWrites (each part tiled exactly),
//                      CheckDeclarations (nothing is filled on sources)
//   2 right element    DataProof::Pack, ::Compare, ::CompareDTypes,
//                      ::CheckDirect (a receiver's copy is one of the
//                      sender's), ::CheckRelays (what a destination rank sends
//                      was written in earlier rounds; so, by induction over
//                      them, it is what the file says that the rank holds),
//                      ::Quantize (whole blocks of the right param, and their
//                      values and scales at the right positions)
//   3 in bounds        the loader (every range), CheckStaging (no staging byte
//                      with two owners), DataProof::Pack (none packed twice),
//                      CheckWindows (no byte of scratch with two owners),
//                      DataProof::CheckWindow and ::CheckOneWindow (scratch is
//                      addressed in its rounds only)
//   4 matched messages MatchMessages, CheckLimits (order), CheckBroadcasts.
//                      Rounds are issued in order, one group or one set of
//                      direct stores each, and then the broadcasts of the
//                      round by root: an order that all ranks have in common.
//                      What a relay sends is there before the round, so that
//                      it waits for earlier rounds alone: nothing closes a
//                      cycle.
//   5 round limits     CheckLimits
//   6 well formed      the loader (digests, dtypes), CheckDeclarations,
//                      CheckNames, CheckSourceDTypes, BufferFacts::flaw
//                      (parts disjoint)
//   7 ordered          CheckOrder, of what the others have shown: that every
//                      step of a rank's list waits for those that touch the
//                      same bytes before it
//
// Soundness rests on affine.h alone: a copy is either placed in the lattice of
// one fragment, with every coordinate in range, or refused.
#include "plan/proof/proof.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "plan/add_up_to.h"
#include "plan/dtype.h"
#include "plan/proof/affine.h"
#include "plan/proof/buffer_facts.h"
#include "plan/proof/data_proof.h"
#include "plan/proof/dtype_proof.h"
#include "plan/proof/name_proof.h"
#include "plan/proof/order_proof.h"
#include "plan/proof/schedule_proof.h"
#include "plan/proof/steps.h"
#include "plan/proof/violations.h"
#include "plan/scratch_windows.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

using proof::BufferFacts;
using proof::BufferFlaw;
using proof::Site;
using proof::Steps;
using proof::Violations;

// Steps that a proof may take: of any plan, and for each byte of a larger one.
constexpr uint64_t kMostSteps = uint64_t{1} << 30;
constexpr uint64_t kMostStepsPerByte = 200;

void CheckDeclarations(const fb::Body& body, Violations& violations) {
  const uint32_t casts = Length(body.casts());
  for (uint32_t i = 0; i < casts; ++i) {
    const fb::Cast& cast = *body.casts()->Get(i);
    if (IsSupportedCast(cast.from(), cast.to())) continue;
    violations.Report({}, Invariant::kWellFormedInputs,
                      "declares a cast from %s to %s, which does not "
                      "exist",
                      DTypeName(cast.from()), DTypeName(cast.to()));
  }
  const uint32_t sources = body.source_ranks();
  for (uint32_t rank = 0; rank < sources; ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (body.copy_lists()->Get(program.fills())->count() != 0) {
      violations.Report({.rank = rank}, Invariant::kWrittenOnce,
                        "a source rank has fills");
    }
    const uint32_t partner = sources + rank;
    if (body.colocated() && partner < body.programs()->size() &&
        body.programs()->Get(partner)->host() != program.host()) {
      violations.Report({.rank = partner}, Invariant::kWellFormedInputs,
                        "shares a GPU with rank %d but is on host %d, not %d",
                        rank, body.programs()->Get(partner)->host(),
                        program.host());
    }
  }
}

void ReportFlaw(const BufferFlaw& flaw, uint32_t rank, uint32_t slot,
                Violations& violations) {
  violations.Report({.rank = rank, .buffer_slot = slot, .offset = flaw.offset},
                    flaw.invariant, [&] { return flaw.text; });
}

// Returns the facts of all buffers; reports flaws for the ranks that hold them.
std::vector<BufferFacts> CheckBuffers(const fb::Body& body, Steps& steps,
                                      Violations& violations) {
  std::vector<BufferFacts> facts;
  facts.reserve(body.buffers()->size());
  for (const fb::Buffer* buffer : *body.buffers()) {
    facts.emplace_back(body, *buffer, steps);
  }
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const auto& buffers = *body.programs()->Get(rank)->buffers();
    for (uint32_t slot = 0; slot < buffers.size(); ++slot) {
      const BufferFacts& of_slot = facts[buffers.Get(slot)];
      if (of_slot.flaw().has_value()) {
        ReportFlaw(*of_slot.flaw(), rank, slot, violations);
      } else if (of_slot.gap().has_value() && rank >= body.source_ranks() &&
                 !IsScratch(*body.programs()->Get(rank), slot)) {
        ReportFlaw(*of_slot.gap(), rank, slot, violations);
      }
    }
  }
  return facts;
}

}  // namespace

ProofResult Prove(const PlanFile& plan, const Progress& progress) {
  const fb::Body& body = plan.body();
  Steps steps(std::max(kMostSteps, kMostStepsPerByte * plan.bytes().size()));
  Violations violations(body, &steps);
  CheckDeclarations(body, violations);
  proof::CheckNames(body, violations);
  proof::CheckSourceDTypes(body, steps, violations);
  proof::CheckBroadcasts(plan.messages(), violations);
  proof::CheckLimits(plan.messages(), violations);
  proof::CheckStaging(plan.messages(), violations);
  proof::CheckWindows(body, violations);
  const proof::Partners partners =
      proof::MatchMessages(plan.messages(), violations);
  const std::vector<BufferFacts> facts = CheckBuffers(body, steps, violations);

  const int ranks =
      static_cast<int>(body.programs()->size() - body.source_ranks());
  int done = 0;
  const auto passed = [&](std::string_view part) {
    ++done;
    if (progress) progress(part, done, ranks + 1);
  };
  passed("schedule");

  ProofResult result;
  proof::DataProof data(plan.messages(), facts, partners, steps, violations);
  for (uint32_t rank = 0; rank < body.source_ranks(); ++rank) {
    data.FollowQuantization(rank);
  }
  for (uint32_t rank = body.source_ranks(); rank < body.programs()->size();
       ++rank) {
    data.FollowInto(rank);
    const fb::RankProgram& program = *body.programs()->Get(rank);
    const MessageVector& messages = plan.messages().Of(program);
    result.messages += std::count_if(
        messages.begin(), messages.end(), [](const fb::Message* message) {
          return message->kind() == fb::MessageKind::kRecv;
        });
    for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
      if (IsScratch(program, slot)) continue;
      const BufferFacts& of_slot = facts[program.buffers()->Get(slot)];
      AddUpTo(of_slot.elements(), result.destination_elements);
      AddUpTo(of_slot.skipped_elements(), result.skipped_elements);
    }
    passed("data");
  }
  result.moved_bytes = data.moved_bytes();
  // What executors do is listed of plans in which all else holds.
  if (violations.empty() && !steps.AreUsedUp()) {
    proof::CheckOrder(plan, steps, violations);
  }
  result.valid = violations.empty();
  if (!violations.empty()) {
    result.invariant = violations.invariant();
    result.violation = violations.text();
  }
  if (result.valid && steps.AreUsedUp()) {
    result.valid = false;
    result.invariant = Invariant::kWellFormedInputs;
    result.violation = absl::StrFormat(
        "cannot be proved in %d steps; wanted parts and messages that share "
        "fewer copies, or boxes that planes separate",
        steps.most());
  }
  return result;
}

}  // namespace refit
