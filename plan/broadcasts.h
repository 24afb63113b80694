// Which ranks broadcast, and to whom.
#ifndef REFIT_PLAN_BROADCASTS_H_
#define REFIT_PLAN_BROADCASTS_H_

#include <bitset>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "plan/plan_file.h"

namespace refit {

// Tells, of a rank's messages in their order, which sends repeat another one of
// the round: a rank packs, and issues, what it broadcasts once.
class RepeatedSends {
 public:
  // Call it once for each message.
  bool Repeats(const fb::Message& message) {
    if (message.broadcast() == 0 || message.kind() != fb::MessageKind::kSend) {
      return false;
    }
    if (std::exchange(round_, message.round()) != message.round()) {
      sent_.reset();
    }
    const bool repeats = sent_[message.broadcast()];
    sent_.set(message.broadcast());
    return repeats;
  }

 private:
  std::optional<uint32_t> round_;
  std::bitset<256> sent_;  // by fb::Message.broadcast
};

// Of a plan that was proved: a rank broadcasts to the same ranks in all rounds.
class Broadcasts {
 public:
  explicit Broadcasts(const fb::Body& body);

  bool any() const { return !to_.empty(); }
  // To whom `root` broadcasts, ascending; empty: it does not.
  absl::Span<const uint32_t> To(uint32_t root) const {
    return any() ? to_[root] : absl::Span<const uint32_t>();
  }
  // From whom `receiver` has what `root` broadcasts: NCCL passes it on from
  // rank to rank. Here that is in the order of ranks; NCCL may choose another.
  uint32_t Before(uint32_t root, uint32_t receiver) const;
  // To whom `receiver` passes it on, if to anyone.
  std::optional<uint32_t> After(uint32_t root, uint32_t receiver) const;

 private:
  std::vector<std::vector<uint32_t>> to_;  // by root; empty if none broadcasts
};

}  // namespace refit

#endif  // REFIT_PLAN_BROADCASTS_H_
