// The order of what touches one rank's memory.
#ifndef REFIT_PLAN_PROOF_RANK_ORDER_H_
#define REFIT_PLAN_PROOF_RANK_ORDER_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "plan/proof/byte_map.h"
#include "plan/proof/step_clocks.h"
#include "plan/proof/steps.h"
#include "plan/proof/violations.h"

namespace refit::proof {

// What a rank's step, or a peer's move, does to the rank's memory in a round:
// it begins at or behind the step `first` and is over at the end of `last`.
struct Access {
  uint32_t round = 0;
  bool arrives = false;  // it writes
  bool is_direct = false;
  uint32_t first = 0;
  uint32_t last = 0;
  std::optional<uint32_t> peer = std::nullopt;  // that moves
};

// Whether it is packed, or unpacked.
inline bool HasCopies(const fb::Body& body, const fb::Message& message) {
  return body.copy_lists()->Get(message.copies())->count() > 0;
}

class RankOrder {
 public:
  // `clocks`: of the rank's list. `when` ends each violation.
  RankOrder(const PlanFile& plan, uint32_t rank, const StepClocks& clocks,
            std::string when, Steps& steps, Violations& violations);

  // Whether the list begins and ends as it should, and is in the order of
  // rounds. Reports steps that do not come between the first and the last.
  bool CheckFrame();
  // Staging, relays and scratch. `accesses`: by round. `access_of`: by message,
  // its position among them.
  void Check(std::vector<Access> accesses, std::vector<uint32_t> access_of);

  void Report(int64_t round, absl::FunctionRef<std::string()> text,
              int64_t slot = -1);
  std::string NameOf(uint32_t step) const;

 private:
  // Bytes of staging that a step reads or writes.
  struct StagingUse {
    uint32_t step = 0;
    bool writes = false;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  // What is known of staging bytes.
  struct Owner {
    uint32_t writer = 0;
    Clock readers = {};  // since then, the last of each lane
  };
  // Rounds [begin, end) of windows of scratch.
  using WindowRounds = std::pair<uint32_t, uint32_t>;

  bool IsSource() const;

  // `step`: that where it begins, or that where it ends.
  std::string NameOf(const Access& access, uint32_t step) const;
  int64_t RoundOf(uint32_t step) const;

  // In the order of the list, because a step comes behind all that it waits
  // for. Ranges are aligned, so what is between two of them is nobody's.
  void CheckStaging();
  void UseStaging(const StagingUse& use, ByteMap<Owner>& owners);

  // The accesses in rounds [begin, end), in order of their rounds.
  absl::Span<const Access> In(uint32_t begin, uint32_t end) const;
  // What CheckRelays of the data proof takes for written is there.
  void CheckRelays();
  void AddEnd(const Access& access, Clock& ends) const;

  void ReportUnordered(const Access& later, const Access& earlier,
                       const std::string& why, int64_t slot = -1);
  WindowRounds RoundsOf(uint32_t slot) const;

  void CheckScratch();
  uint32_t SlotOf(uint32_t scratch) const;

  // A launch of operations of a window comes before what a source sends of it,
  // and behind what comes to a destination, which may pass it on meanwhile.
  void CheckLaunch(uint32_t launch, const WindowRounds& rounds, uint32_t slot);
  void CheckReuse(const WindowRounds& before,
                  const std::set<uint32_t>& launches_before,
                  const WindowRounds& after,
                  const std::set<uint32_t>& launches_after, uint32_t slot);

  const PlanFile& plan_;
  const fb::Body& body_;
  const uint32_t rank_;
  const fb::RankProgram& program_;
  const MessageVector& messages_;
  const StepClocks* of_;
  const std::string when_;
  Steps& steps_;
  Violations& violations_;
  std::vector<Access> accesses_;
  std::vector<uint32_t> access_of_;
};

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_RANK_ORDER_H_
