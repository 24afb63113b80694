#include "executor/delta/merged_rounds.h"

#include <algorithm>
#include <map>
#include <utility>

#include "plan/group_limit.h"

namespace refit {

RoundMerger::RoundMerger(const PlanFile& plan, const RankSchedule& schedule)
    : schedule_(schedule) {
  const fb::Body& body = plan.body();
  const auto& rounds = *body.rounds();
  uint32_t longest = 0;
  for (uint32_t i = 0; i < rounds.size(); ++i) {
    const fb::Round& round = *rounds.Get(i);
    const bool is_staged = round.mechanism() == fb::Mechanism::kStaged;
    const bool goes_on = is_staged && i > 0 && is_staged_[i - 1] &&
                         rounds.Get(i - 1)->route() == round.route();
    is_staged_.push_back(is_staged);
    run_begins_.push_back(goes_on ? run_begins_[i - 1] : i);
    if (is_staged) longest = std::max(longest, i + 1 - run_begins_[i]);
  }
  while ((uint32_t{1} << most_) < longest) ++most_;
  part_bytes_ = schedule.round_staging_bytes() / kParts /
                kStagingAlignmentBytes * kStagingAlignmentBytes;
  operations_max_ =
      std::min(body.limits()->operations_per_round(), kGroupOperationsMax);
}

uint8_t RoundMerger::Most(const Sizes& sizes) const {
  for (uint8_t power = most_; power > 0; --power) {
    if (Lay(power, sizes).has_value()) return power;
  }
  return 0;
}

std::optional<MergedLayout> RoundMerger::Lay(uint8_t power,
                                             const Sizes& sizes) const {
  MergedLayout layout;
  // Parts of direct rounds stay where they are.
  for (const MessagePart& part : schedule_.parts()) {
    layout.staging_offsets.push_back(part.staging_offset);
  }
  const std::vector<RoundWork>& works = schedule_.rounds();
  for (size_t i = 0; i < works.size(); ++i) {
    if (!is_staged_[works[i].index]) continue;
    const uint32_t first = FirstOf(works[i].index, power);
    if (layout.rounds.empty() || layout.rounds.back().index != first) {
      MergedRound& merged = layout.rounds.emplace_back();
      merged.index = first;
      merged.begin = i;
      merged.operations_begin = works[i].operations_begin;
      merged.part = (layout.rounds.size() - 1) % kParts;
    }
    MergedRound& merged = layout.rounds.back();
    merged.end = i + 1;
    merged.operations_count += works[i].operations_count;
  }
  for (MergedRound& merged : layout.rounds) {
    if (!Place(sizes, layout, merged)) return std::nullopt;
  }
  return layout;
}

bool RoundMerger::Place(const Sizes& sizes, MergedLayout& layout,
                        MergedRound& merged) const {
  struct OfPair {
    std::vector<uint32_t> coded;
    std::vector<uint32_t> whole;
  };
  std::map<std::pair<fb::MessageKind, int32_t>, OfPair> pairs;
  for (uint32_t i = 0; i < merged.operations_count; ++i) {
    const uint32_t number = merged.operations_begin + i;
    const Operation& operation = schedule_.operations()[number];
    OfPair& of = pairs[{operation.kind, operation.peer}];
    (sizes.is_coded(number) ? of.coded : of.whole).push_back(number);
  }
  const uint64_t begin = merged.part * part_bytes_;
  uint64_t at = begin;
  const auto add = [&](uint32_t number, MergedTransfer& transfer) {
    at = AlignStaging(at);
    layout.staging_offsets[number] = at;
    at += sizes.bytes(number);
    transfer.size_bytes = at - transfer.staging_offset;
    transfer.dense_bytes += schedule_.operations()[number].size_bytes;
  };
  const auto begin_transfer = [&](uint32_t first,
                                  bool is_coded) -> MergedTransfer& {
    at = AlignStaging(at);
    return merged.transfers.emplace_back(MergedTransfer{
        .first_operation = first, .is_coded = is_coded, .staging_offset = at});
  };
  for (const auto& [pair, of] : pairs) {
    if (!of.coded.empty()) {
      MergedTransfer& transfer = begin_transfer(of.coded.front(), true);
      for (const uint32_t number : of.coded) add(number, transfer);
    }
    for (const uint32_t number : of.whole) {
      add(number, begin_transfer(number, false));
    }
  }
  return merged.transfers.size() <= operations_max_ &&
         at - begin <= part_bytes_;
}

}  // namespace refit
