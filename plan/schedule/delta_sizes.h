// The sizes of a rank's messages in refits that send only what changed, by the
// rung that all ranks agree on.
//
// Elements of tensors that post-hooks rewrite in place, or that the receiver
// casts, are always sent: it does not hold what was sent. Messages so small
// that it would gain nothing are always sent whole, and choose no rung.
//
// Direct rounds whose messages are sent in parts are no staged rounds: all of
// them travels, as where they are stored.
#ifndef REFIT_PLAN_SCHEDULE_DELTA_SIZES_H_
#define REFIT_PLAN_SCHEDULE_DELTA_SIZES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan_file.h"
#include "plan/schedule/coded_message.h"
#include "plan/schedule/rank_schedule.h"

namespace refit {

// An operation that some rung sends less of than the whole.
struct CodedOperation {
  CodedMessage message;  // of no elements: it always travels whole
  // By rung: for how many elements its code has room. 0: it travels whole.
  std::vector<uint64_t> rooms;
  // Bytes [begin, end) of it, of which the receiver takes elements; ascending.
  struct ReceivedRange {
    uint64_t begin = 0;
    uint64_t end = 0;
    bool always = false;  // sent whether they changed or not
  };
  std::vector<ReceivedRange> received;
};

class DeltaSizes {
 public:
  // When one of so many changed, scattered elements cost about as much as all
  // (docs/delta.md).
  static constexpr uint64_t kElementsPerChangeToTakeAll = 32;

  // Of a plan with rungs. `schedule` must outlive it.
  DeltaSizes(const PlanFile& plan, int32_t rank, const RankSchedule& schedule);

  size_t rungs() const { return rungs_.size(); }
  // For how many elements there is room for one that changed; 1: whole. A rung
  // is named by its position in the plan's; on any that the plan has not, all
  // is sent whole.
  uint32_t ElementsPerSlot(size_t rung) const {
    return rung < rungs_.size() ? uint32_t{1} << rungs_[rung] : 1;
  }
  // By operation of the schedule.
  const CodedOperation& of(size_t operation) const {
    return operations_[operation];
  }
  // Whether a rung sends less than the whole of an operation.
  bool IsCoded(size_t operation) const {
    return operations_[operation].message.element_bytes != 0;
  }
  // For how many elements its code has room; 0: it is sent whole.
  uint64_t RoomOf(size_t operation, size_t rung) const;
  bool IsWhole(size_t operation, size_t rung) const {
    return RoomOf(operation, rung) == 0;
  }
  uint64_t SizeBytes(size_t operation, size_t rung) const;
  // Whether all operations are sent whole.
  bool IsAllWhole(size_t rung) const;
  // The rung that is expected if a share of all elements changed, scattered
  // evenly, where `senders` ranks send as many messages as this one.
  size_t ExpectedRung(double change_rate, int32_t senders) const;
  // Of the sends: what may be left out.
  uint64_t elements() const { return elements_; }

 private:
  std::vector<uint64_t> RoomsOf(const CodedMessage& message) const;

  const RankSchedule& schedule_;
  std::vector<uint8_t> rungs_;
  uint64_t whole_below_bytes_;  // messages
  std::vector<CodedOperation> operations_;
  uint64_t elements_ = 0;
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_DELTA_SIZES_H_
