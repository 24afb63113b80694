// What refit-diff compares: names that two plans share, and the facts of each
// plan in terms of them, free of table order and of how tensors are stacked.
#ifndef REFIT_PLAN_DIFF_FACTS_H_
#define REFIT_PLAN_DIFF_FACTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "plan/diff/diff.h"
#include "plan/diff/element_sum.h"
#include "plan/plan_file.h"
#include "plan/text/plan_view.h"

namespace refit {

// A tensor's or param's name, the same id in both plans.
using NameId = uint32_t;

class NameTable {
 public:
  // The ids of all tensors of a stack, by ordinal.
  std::vector<NameId> Intern(const fb::Param& param);
  std::vector<NameId> Intern(const fb::Buffer& buffer);

  size_t size() const { return entries_.size(); }
  Residue weight(NameId id) const { return entries_[id].weight; }
  // Stands for the pattern of the stack that brought the name.
  uint32_t pattern(NameId id) const { return entries_[id].pattern; }

  // Ascending `ids` by the pattern of the stack that brought each; patterns
  // sorted.
  std::map<std::string, std::vector<NameId>> ByPattern(
      absl::Span<const NameId> ids) const;
  // Ascending ids of one pattern: `"layers.{0}.weight" {0}=0..23`, a full name
  // when it is one, a full name "and N more" when they form no product.
  std::string Text(absl::Span<const NameId> ids) const;

 private:
  struct Entry {
    std::string name;
    Residue weight;
    uint32_t pattern = 0;
    std::vector<int32_t> numbers;
  };
  template <typename Stack>
  std::vector<NameId> InternStack(const Stack& stack);

  std::vector<Entry> entries_;
  std::vector<std::string> patterns_;
  absl::flat_hash_map<std::string, NameId> ids_;
  absl::flat_hash_map<std::string, uint32_t> pattern_ids_;
};

// A message as one of its two ranks sees it.
struct MessageFacts {
  uint32_t src = 0;
  uint32_t dst = 0;
  fb::MessageKind kind = fb::MessageKind::kSend;
  uint32_t round = 0;
  uint64_t size_bytes = 0;
  uint64_t payload_bytes = 0;  // of a send; 0 of a receive
  uint64_t staging_offset = 0;
  int64_t fed_by_round = -1;  // of a relay, in plans that say so
  uint32_t broadcast = 0;     // its number; 0: it is none
  Residue content;            // which elements of which tensors
  Residue packing;            // which of them at which byte
};

// What one sender brings to one tensor of a rank.
struct Delivery {
  NameId tensor = 0;
  uint32_t src = 0;
  uint64_t bytes = 0;
  Residue content;

  friend bool operator==(const Delivery&, const Delivery&) = default;
};

// One plan. Keeps a reference to it.
class PlanFacts {
 public:
  PlanFacts(const PlanFile& plan, NameTable& names);

  const PlanFile& plan() const { return plan_; }
  const fb::Body& body() const { return plan_.body(); }

  // By entry of Body.params and Body.buffers, then by ordinal.
  const std::vector<std::vector<NameId>>& params() const { return params_; }
  const std::vector<std::vector<NameId>>& buffers() const { return buffers_; }
  const std::vector<std::vector<Residue>>& layouts() const { return layouts_; }

  // All messages, by src, dst, kind, round.
  std::vector<MessageFacts> Messages();
  // What `rank` receives, by tensor and sender.
  std::vector<Delivery> Deliveries(uint32_t rank);
  // What each tensor of its scratch holds.
  std::map<NameId, Residue> Scratch(uint32_t rank) const;
  // Which elements `rank` zeroes.
  Residue Fills(uint32_t rank);

 private:
  // The parts of a copy list, whose buffers are those of `program`.
  const std::vector<CopyPart>& Parts(const fb::RankProgram& program,
                                     uint32_t list);
  MessageFacts FactsOf(uint32_t rank, uint32_t position);

  const PlanFile& plan_;
  const NameTable& names_;
  SendPayloads payloads_;
  std::vector<std::vector<NameId>> params_;
  std::vector<std::vector<NameId>> buffers_;
  std::vector<uint64_t> tensor_elements_;  // by buffer
  std::vector<std::vector<Residue>> layouts_;
  // Ranks that share a list nearly always hold tensors of the same sizes in
  // its slots; the second number stands for these sizes.
  absl::flat_hash_map<std::pair<uint32_t, uint64_t>, std::vector<CopyPart>>
      parts_;
};

}  // namespace refit

#endif  // REFIT_PLAN_DIFF_FACTS_H_
