#include "plan/proof/rank_order.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/proof/order_proof.h"
#include "plan/scratch_windows.h"
#include "plan/vector_length.h"

namespace refit::proof {

RankOrder::RankOrder(const PlanFile& plan, uint32_t rank,
                     const StepClocks& clocks, std::string when, Steps& steps,
                     Violations& violations)
    : plan_(plan),
      body_(plan.body()),
      rank_(rank),
      program_(*body_.programs()->Get(rank)),
      messages_(plan.messages().Of(program_)),
      of_(&clocks),
      when_(std::move(when)),
      steps_(steps),
      violations_(violations) {}

void RankOrder::Check(std::vector<Access> accesses,
                      std::vector<uint32_t> access_of) {
  accesses_ = std::move(accesses);
  access_of_ = std::move(access_of);
  CheckStaging();
  if (!IsSource()) CheckRelays();
  if (program_.scratch_buffers() > 0) CheckScratch();
}

void RankOrder::Report(int64_t round, absl::FunctionRef<std::string()> text,
                       int64_t slot) {
  violations_.Report({.rank = rank_, .round = round, .buffer_slot = slot},
                     Invariant::kOrdered,
                     [&] { return absl::StrCat(text(), when_); });
}

std::string RankOrder::NameOf(uint32_t step) const {
  const uint32_t round = of_->RoundOf(step);
  return absl::StrCat(
      "step ", StepKindName(of_->KindOf(step)),
      round == kNoRound ? std::string() : absl::StrCat(" of round ", round));
}

bool RankOrder::CheckFrame() {
  const auto count = static_cast<uint32_t>(of_->size());
  if (count < 2 || of_->KindOf(0) != StepKind::kZero ||
      of_->KindOf(count - 1) != StepKind::kHooks) {
    Report(Site::kBeforeRounds, [] {
      return std::string(
          "its list does not begin with zero and end with hooks");
    });
    return false;
  }
  for (uint32_t step = 1; step < count; ++step) {
    if (!of_->IsBefore(0, step)) {
      Report(RoundOf(step), [&] {
        return absl::StrFormat(
            "%s does not wait for %s, and both touch its tensors", NameOf(step),
            NameOf(0));
      });
    }
    if (!of_->IsBefore(step, count - 1)) {
      Report(Site::kAfterRounds, [&] {
        return absl::StrFormat(
            "%s does not wait for %s, and both touch its tensors",
            NameOf(count - 1), NameOf(step));
      });
    }
  }
  if (const std::optional<uint32_t> step = of_->OutOfRound()) {
    Report(RoundOf(*step), [&] {
      return absl::StrFormat("%s comes behind steps of later rounds",
                             NameOf(*step));
    });
    return false;
  }
  return true;
}

bool RankOrder::IsSource() const { return rank_ < body_.source_ranks(); }

std::string RankOrder::NameOf(const Access& access, uint32_t step) const {
  return access.peer.has_value() ? absl::StrFormat("rank %d's move of round %d",
                                                   *access.peer, access.round)
                                 : NameOf(step);
}

int64_t RankOrder::RoundOf(uint32_t step) const {
  const uint32_t round = of_->RoundOf(step);
  return round == kNoRound ? Site::kBeforeRounds : int64_t{round};
}

void RankOrder::CheckStaging() {
  std::vector<StagingUse> uses;
  for (uint32_t i = 0; i < messages_.size(); ++i) {
    const fb::Message& message = *messages_.Get(i);
    if (accesses_[access_of_[i]].is_direct || message.size_bytes() == 0) {
      continue;
    }
    const RoundSteps& round = *of_->FindRound(message.round());
    const bool arrives = message.kind() == fb::MessageKind::kRecv;
    StagingUse use = {.step = *round.Find(StepKind::kExchange),
                      .writes = arrives,
                      .begin = message.staging_offset()};
    use.end = use.begin + static_cast<uint64_t>(AlignStaging(
                              static_cast<int64_t>(message.size_bytes())));
    uses.push_back(use);
    if (!HasCopies(body_, message)) continue;
    use.step = *round.Find(arrives ? StepKind::kUnpack : StepKind::kPack);
    use.writes = !arrives;
    uses.push_back(use);
  }
  steps_.Take(uses.size());
  std::sort(uses.begin(), uses.end(),
            [](const StagingUse& a, const StagingUse& b) {
              return std::tie(a.step, a.writes, a.begin) <
                     std::tie(b.step, b.writes, b.begin);
            });
  ByteMap<Owner> owners;
  for (size_t i = 0; i < uses.size();) {
    StagingUse use = uses[i];
    for (++i; i < uses.size() && uses[i].step == use.step &&
              uses[i].writes == use.writes && uses[i].begin <= use.end;
         ++i) {
      use.end = std::max(use.end, uses[i].end);
    }
    UseStaging(use, owners);
  }
}

void RankOrder::UseStaging(const StagingUse& use, ByteMap<Owner>& owners) {
  const auto check = [&](uint32_t earlier) {
    if (of_->IsBefore(earlier, use.step)) return;
    Report(RoundOf(use.step), [&] {
      return absl::StrFormat(
          "%s does not wait for %s, and both touch staging bytes in [%d, %d)",
          NameOf(use.step), NameOf(earlier), use.begin, use.end);
    });
  };
  const auto lane = static_cast<size_t>(of_->LaneOf(use.step));
  owners.ForEach(use.begin, use.end, [&](Owner& owner) {
    check(owner.writer);
    if (!use.writes) {
      owner.readers[lane] = use.step + 1;
      return;
    }
    for (const uint32_t reader : owner.readers) {
      if (reader > 0) check(reader - 1);
    }
  });
  if (use.writes) owners.Assign(use.begin, use.end, {.writer = use.step});
}

absl::Span<const Access> RankOrder::In(uint32_t begin, uint32_t end) const {
  const auto at = [&](uint32_t round) {
    return std::partition_point(
        accesses_.begin(), accesses_.end(),
        [&](const Access& access) { return access.round < round; });
  };
  const auto first = at(begin);
  return absl::MakeConstSpan(accesses_).subspan(
      static_cast<size_t>(first - accesses_.begin()),
      static_cast<size_t>(at(end) - first));
}

void RankOrder::CheckRelays() {
  // By round, the accesses up to it that bring something, of each mechanism:
  // their ends, a step of each lane that follows all before it there.
  struct Arrived {
    uint32_t round = 0;
    Clock ends = {};
  };
  std::array<std::vector<Arrived>, 2> arrived;
  for (const Access& access : accesses_) {
    if (!access.arrives) continue;
    std::vector<Arrived>& of = arrived[access.is_direct ? 1 : 0];
    if (of.empty() || of.back().round != access.round) {
      of.push_back(of.empty() ? Arrived{} : of.back());
      of.back().round = access.round;
    }
    AddEnd(access, of.back().ends);
  }
  for (uint32_t i = 0; i < messages_.size(); ++i) {
    const fb::Message& message = *messages_.Get(i);
    if (message.kind() != fb::MessageKind::kSend || IsHeld(body_, message)) {
      continue;
    }
    const Access& relay = accesses_[access_of_[i]];
    const AwaitedRounds awaited =
        AwaitedBy(body_, message.round(), FedBy(plan_.messages(), program_, i));
    for (const bool is_direct : {false, true}) {
      const std::vector<Arrived>& of = arrived[is_direct ? 1 : 0];
      const int64_t last = is_direct ? awaited.direct : awaited.staged;
      const auto after = std::partition_point(
          of.begin(), of.end(),
          [&](const Arrived& at) { return at.round <= last; });
      if (after == of.begin()) continue;
      if (of_->AreBefore(std::prev(after)->ends, relay.first)) continue;
      for (const Access& access : accesses_) {
        if (!access.arrives || access.is_direct != is_direct ||
            access.round > last || of_->IsBefore(access.last, relay.first)) {
          continue;
        }
        ReportUnordered(relay, access,
                        absl::StrFormat("which may bring what the message to "
                                        "rank %d relays",
                                        PeerOf(body_, program_, message)));
        break;
      }
    }
  }
}

void RankOrder::AddEnd(const Access& access, Clock& ends) const {
  uint32_t& end = ends[static_cast<size_t>(of_->LaneOf(access.last))];
  end = std::max(end, access.last + 1);
}

void RankOrder::ReportUnordered(const Access& later, const Access& earlier,
                                const std::string& why, int64_t slot) {
  Report(
      later.peer.has_value() ? int64_t{later.round} : RoundOf(later.first),
      [&] {
        return absl::StrFormat("%s does not wait for %s, %s",
                               NameOf(later, later.first),
                               NameOf(earlier, earlier.last), why);
      },
      slot);
}

RankOrder::WindowRounds RankOrder::RoundsOf(uint32_t slot) const {
  const fb::ScratchWindow* const window = WindowOf(program_, slot);
  return window == nullptr ? WindowRounds(0, body_.rounds()->size())
                           : WindowRounds(window->begin(), window->end());
}

void RankOrder::CheckScratch() {
  // By window: the launches of its operations, and a slot of it.
  std::map<WindowRounds, std::set<uint32_t>> launches;
  for (uint32_t i = 0; i < Length(program_.quantizes()); ++i) {
    const fb::Quantize& op = *program_.quantizes()->Get(i);
    const uint32_t slot = IsSource() ? op.output_slot() : op.input_slot();
    const std::optional<uint32_t> launch = of_->LaunchOf(i);
    if (!launch.has_value()) {
      Report(
          Site::kBeforeRounds,
          [] {
            return absl::StrFormat("its list has no %s",
                                   StepKindName(StepKind::kQuantize));
          },
          slot);
      return;
    }
    const WindowRounds rounds = RoundsOf(slot);
    if (!launches[rounds].insert(*launch).second) continue;
    CheckLaunch(*launch, rounds, slot);
  }
  const std::vector<ScratchRange> ranges = ScratchRanges(body_, program_);
  std::vector<uint32_t> by_begin(ranges.size());
  for (uint32_t i = 0; i < ranges.size(); ++i) by_begin[i] = i;
  std::stable_sort(by_begin.begin(), by_begin.end(),
                   [&](uint32_t a, uint32_t b) {
                     return ranges[a].begin < ranges[b].begin;
                   });
  std::set<std::pair<WindowRounds, WindowRounds>> checked;
  ByteMap<WindowRounds> windows;
  for (const uint32_t i : by_begin) {
    const ScratchRange& range = ranges[i];
    const WindowRounds rounds(range.begin, range.end);
    windows.ForEach(range.begin_byte, range.end_byte,
                    [&](const WindowRounds& before) {
                      if (checked.emplace(before, rounds).second) {
                        CheckReuse(before, launches[before], rounds,
                                   launches[rounds], SlotOf(i));
                      }
                    });
    windows.Assign(range.begin_byte, range.end_byte, rounds);
  }
}

uint32_t RankOrder::SlotOf(uint32_t scratch) const {
  return program_.buffers()->size() - program_.scratch_buffers() + scratch;
}

void RankOrder::CheckLaunch(uint32_t launch, const WindowRounds& rounds,
                            uint32_t slot) {
  const Access of_launch = {.first = launch, .last = launch};
  const bool arrives = !IsSource();
  const absl::Span<const Access> accesses = In(rounds.first, rounds.second);
  if (!steps_.Take(accesses.size())) return;
  for (const Access& access : accesses) {
    if (access.arrives != arrives) continue;
    const Access& earlier = arrives ? access : of_launch;
    const Access& later = arrives ? of_launch : access;
    if (of_->IsBefore(earlier.last, later.first)) continue;
    ReportUnordered(later, earlier, "and both touch this scratch", slot);
    return;
  }
}

void RankOrder::CheckReuse(const WindowRounds& before,
                           const std::set<uint32_t>& launches_before,
                           const WindowRounds& after,
                           const std::set<uint32_t>& launches_after,
                           uint32_t slot) {
  const auto all = [&](const WindowRounds& rounds,
                       const std::set<uint32_t>& launches) {
    const absl::Span<const Access> in = In(rounds.first, rounds.second);
    std::vector<Access> accesses(in.begin(), in.end());
    for (const uint32_t launch : launches) {
      accesses.push_back({.first = launch, .last = launch});
    }
    steps_.Take(accesses.size());
    return accesses;
  };
  const std::vector<Access> earlier = all(before, launches_before);
  Clock ends = {};
  for (const Access& access : earlier) AddEnd(access, ends);
  for (const Access& later : all(after, launches_after)) {
    if (of_->AreBefore(ends, later.first)) continue;
    for (const Access& access : earlier) {
      if (of_->IsBefore(access.last, later.first)) continue;
      ReportUnordered(later, access, "whose scratch shares bytes with this one",
                      slot);
      return;
    }
  }
}

}  // namespace refit::proof
