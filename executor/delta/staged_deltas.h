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
// Elements of tensors that post-hooks rewrite in place, or that the receiver
// casts, are always sent: it does not hold what was sent. So are those of
// tensors without marks, where marks tell; only their sender knows, so they
// take room that is meant for what changed. Messages so small that it would
// gain nothing are always sent whole, and choose no rung.
//
// Direct rounds whose messages are sent in parts are no staged rounds: all of
// them travels, as where they are stored.
#ifndef REFIT_EXECUTOR_DELTA_STAGED_DELTAS_H_
#define REFIT_EXECUTOR_DELTA_STAGED_DELTAS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/rank_schedule.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

class StagedDeltas {
 public:
  // When one of so many changed, scattered elements cost about as much as all
  // (docs/delta.md).
  static constexpr uint64_t kElementsPerChangeToTakeAll = 32;

  // Of a plan with rungs. `schedule` must outlive it.
  StagedDeltas(const PlanFile& plan, int32_t rank,
               const RankSchedule& schedule);

  // Whether a rung sends less than the whole of an operation.
  bool IsCoded(size_t operation) const {
    return messages_[operation].message.element_bytes != 0;
  }
  // Whether it is sent whole on a rung, as its position in the plan's; all are
  // on any that the plan has not.
  bool IsWhole(size_t operation, size_t rung) const {
    return RoomOf(operation, rung) == 0;
  }
  // Bytes of an operation on a rung.
  uint64_t SizeBytes(size_t operation, size_t rung) const;
  // Whether all are. Looks at each; of rung(), TakesWhole knows.
  bool IsAllWhole(size_t rung) const;
  // What FirstRung is expected to come to if a share of all elements changed,
  // scattered evenly, where `senders` ranks send as many messages as this one.
  size_t ExpectedRung(double change_rate, int32_t senders) const;
  // For how many elements there is room for one that changed; 1: whole.
  uint32_t ElementsPerSlot(size_t rung) const {
    return rung < rungs_.size() ? uint32_t{1} << rungs_[rung] : 1;
  }
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
  size_t rungs() const { return rungs_.size(); }

  // What operations() are from now on: those of a rung, or the whole ones, on
  // any that the plan has not.
  void Take(size_t rung);
  // Whether none of them is shorter than in a dense refit.
  bool TakesWhole() const { return takes_whole_; }
  // For how many elements operations() have room for one that changed.
  uint32_t elements_per_slot() const {
    return TakesWhole() ? 1 : ElementsPerSlot(rung_);
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
    return changed_ <= elements_ / kElementsPerChangeToTakeAll;
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
  // Bytes [begin, end) of an operation, of which the receiver takes elements.
  struct ReceivedRange {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool always = false;  // sent whether they changed or not
  };

  static void SortCopies(MessageToCode& of);
  // 0: it is sent whole on that rung.
  uint64_t RoomOf(size_t operation, size_t rung) const;
  std::vector<uint64_t> RoomsOf(const CodedMessage& message) const;

  const RankSchedule& schedule_;
  std::vector<uint8_t> rungs_;
  uint64_t whole_below_bytes_;           // messages
  std::vector<MessageToCode> messages_;  // by operation; no elements: whole
  std::vector<std::vector<ReceivedRange>> received_;  // likewise; ascending
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
