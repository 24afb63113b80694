// The staged rounds of a rank in refits that send only what changed.
//
// The sender compares its tensors with the snapshot where they lie, or reads
// its worker's marks, and sends what changed (message_code.h). The receiver
// stores that where it belongs. The copies of the dense refit tell both where
// each element of a message lies.
//
// The device finds all changes before the rounds, and codes in order with the
// batches of copies. The host waits for the counts alone, because the ranks
// agree on a rung by them.
//
// Elements of tensors without marks are always sent, where marks tell; only
// their sender knows, so they take room that is meant for what changed. What
// else is always sent or always whole is DeltaSizes' to say.
#ifndef REFIT_EXECUTOR_DELTA_STAGED_DELTAS_H_
#define REFIT_EXECUTOR_DELTA_STAGED_DELTAS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "plan/schedule/delta_sizes.h"
#include "plan/schedule/operation.h"
#include "plan/schedule/rank_schedule.h"
#include "refit/device.h"

namespace refit {

class StagedDeltas {
 public:
  // Of a plan with rungs. `schedule` must outlive it.
  StagedDeltas(const PlanFile& plan, int32_t rank,
               const RankSchedule& schedule);

  const DeltaSizes& sizes() const { return sizes_; }
  // Where elements of an operation that is coded lie: `from` in tensors of the
  // table, `to` as MessageToCode says. `is_known`: something tells which of
  // them changed; false: they are sent always. Before Bind. What nobody
  // receives is left out.
  void AddCopy(size_t operation, const StridedCopy& copy,
               absl::Span<const CopyLoop> loops, bool is_known);
  // `whole`: what a dense refit sends and receives, by operation of the
  // schedule. `staging`: as many bytes as it stages; codes take the places of
  // messages. Error: kUnimplemented, of a plan that refit-verify refuses.
  absl::Status Bind(absl::Span<const Operation> whole, std::byte* staging,
                    absl::Span<std::byte* const> table,
                    const ChangeEntries& changes, Device& device);

  // Before the ranks agree on a rung: what was counted is forgotten, and what
  // changed in all sends is found.
  absl::Status RestartCounts(Stream stream);
  absl::Status EnqueueCount(Stream stream);
  // The first rung, as its position in the plan's, that has room for what was
  // counted; their number if none has. Requires: `stream` has come to the end
  // of it.
  absl::StatusOr<size_t> FirstRung(Stream stream);
  size_t rungs() const { return sizes_.rungs(); }

  // What operations() are from now on: those of a rung, or the whole ones, on
  // any that the plan has not.
  void Take(size_t rung);
  // Whether none of them is shorter than in a dense refit.
  bool TakesWhole() const { return takes_whole_; }
  // For how many elements operations() have room for one that changed.
  uint32_t elements_per_slot() const {
    return TakesWhole() ? 1 : sizes_.ElementsPerSlot(rung_);
  }
  const std::vector<Operation>& operations() const { return operations_; }
  size_t rung() const { return rung_; }
  // Before sending: operations [begin, begin + count).
  absl::Status EnqueueEncode(uint32_t begin, uint32_t count, Stream stream);
  // Behind receiving. Error: CheckCoding's, where the device works on the
  // calling thread.
  absl::Status EnqueueApply(uint32_t begin, uint32_t count, Stream stream);
  // Whether so little was counted that EnqueueKeep is shorter work than to take
  // all anew.
  bool ChangedLittle() const {
    return changed_ <= elements_ / DeltaSizes::kElementsPerChangeToTakeAll;
  }
  // Behind the rounds: the snapshot, if there is one, takes what was counted.
  absl::Status EnqueueKeep(Stream stream);
  // Of what was applied since RestartCounts. Waits for `stream`. Error:
  // kDataLoss, what was received is not encoded as it should be.
  absl::Status CheckCoding(Stream stream);

  // Of the sends: what may be left out, and what was counted last.
  uint64_t elements() const { return elements_; }
  uint64_t changed_elements() const { return changed_; }

 private:
  static void SortCopies(MessageToCode& of);

  const RankSchedule& schedule_;
  const DeltaSizes sizes_;
  std::vector<MessageToCode> messages_;  // by operation; no elements: whole
  std::vector<Operation> whole_;
  std::unique_ptr<MessageCoder> coder_;
  bool codes_at_once_ = false;  // on the calling thread
  std::vector<Operation> operations_;
  size_t rung_ = 0;
  bool takes_whole_ = true;
  uint64_t elements_ = 0;
  uint64_t changed_ = 0;
};

// What `operations`, those of the schedule, send in staged rounds.
uint64_t StagedSendBytes(const RankSchedule& schedule,
                         absl::Span<const Operation> operations);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_STAGED_DELTAS_H_
