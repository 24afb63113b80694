#include "plan/proof/order_proof.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/proof/byte_map.h"
#include "plan/proof/step_clocks.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/scratch_windows.h"
#include "plan/vector_length.h"

namespace refit::proof {
namespace {

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

// Rounds [begin, end) of windows of scratch that share bytes with others.
using WindowRounds = std::pair<uint32_t, uint32_t>;

// Those that move if every rank can map every peer's tensors.
Movers PlannedMovers(const fb::Body& body) {
  return body.limits()->direct_pulls() ? Movers::kReceivers : Movers::kSenders;
}

class OrderProof {
 public:
  OrderProof(const PlanFile& plan, Movers movers,
             absl::FunctionRef<ListedSteps(int32_t)> list, Steps& steps,
             Violations& violations)
      : plan_(plan),
        body_(plan.body()),
        movers_(movers),
        list_(list),
        steps_(steps),
        violations_(violations) {
    for (const fb::Round* round : *body_.rounds()) {
      is_direct_.push_back(round->mechanism() == fb::Mechanism::kDirect);
    }
  }

  // `all`: also ranks without direct rounds, which do the same whichever ends
  // move.
  void Check(bool all) {
    const std::vector<uint32_t> programs = Programs();
    // Who has the same program, and peers with the same, has the same list; who
    // has the same list, and peers with the same, is accessed alike.
    kinds_ = Refine(programs);
    lists_.resize(programs.size());
    if (!TakeSteps()) return;
    const std::vector<uint32_t> alike = Refine(kinds_);
    absl::flat_hash_set<uint32_t> checked;
    for (uint32_t rank = 0; rank < alike.size(); ++rank) {
      if (steps_.AreUsedUp()) return;
      if (!all && !MovesDirectly(rank)) continue;
      if (checked.insert(alike[rank]).second) CheckRank(rank);
    }
  }

 private:
  bool MovesDirectly(uint32_t rank) const {
    const MessageVector& messages = plan_.messages().Of(rank);
    return std::any_of(messages.begin(), messages.end(),
                       [&](const fb::Message* message) {
                         return is_direct_[message->round()];
                       });
  }

  bool IsSource(uint32_t rank) const { return rank < body_.source_ranks(); }

  // Of the peers of `program`, without its shifts.
  static uint32_t Unshifted(const fb::Body& body,
                            const fb::RankProgram& program, uint32_t peer) {
    return peer - (peer < body.source_ranks() ? program.source_shift()
                                              : program.destination_shift());
  }

  // By rank: a number of its program.
  std::vector<uint32_t> Programs() const {
    using Key = std::tuple<const void*, const void*, const void*, const void*,
                           const void*, uint32_t, uint64_t, bool>;
    absl::flat_hash_map<Key, uint32_t> numbers;
    std::vector<uint32_t> of_rank;
    for (uint32_t rank = 0; rank < body_.programs()->size(); ++rank) {
      const fb::RankProgram& program = *body_.programs()->Get(rank);
      const Key key(MessagesKey(body_, program), program.buffers(),
                    program.quantizes(), program.scratch_windows(),
                    program.relays(), program.scratch_buffers(),
                    program.staging_bytes(), IsSource(rank));
      const auto next = static_cast<uint32_t>(numbers.size());
      of_rank.push_back(numbers.try_emplace(key, next).first->second);
    }
    return of_rank;
  }

  // A list compares all scratch of its rank. False: there is too much of it.
  bool TakeSteps() {
    absl::flat_hash_set<uint32_t> taken;
    for (uint32_t rank = 0; rank < kinds_.size(); ++rank) {
      if (!taken.insert(kinds_[rank]).second) continue;
      const uint64_t scratch = body_.programs()->Get(rank)->scratch_buffers();
      if (!steps_.Take(scratch * scratch)) return false;
    }
    return true;
  }

  // Tells ranks of one number apart where peers of direct rounds have different
  // ones, or see the rank as another one of theirs.
  std::vector<uint32_t> Refine(const std::vector<uint32_t>& numbers) {
    absl::flat_hash_map<std::vector<uint32_t>, uint32_t> refined;
    std::vector<uint32_t> of_rank;
    std::vector<uint32_t> key;
    for (uint32_t rank = 0; rank < numbers.size(); ++rank) {
      const fb::RankProgram& program = *body_.programs()->Get(rank);
      const MessageVector& messages = plan_.messages().Of(program);
      steps_.Take(messages.size());
      key.assign(1, numbers[rank]);
      for (const fb::Message* message : messages) {
        if (!is_direct_[message->round()]) continue;
        const uint32_t peer = PeerOf(body_, program, *message);
        key.push_back(numbers[peer]);
        key.push_back(Unshifted(body_, *body_.programs()->Get(peer), rank));
      }
      const auto next = static_cast<uint32_t>(refined.size());
      of_rank.push_back(refined.try_emplace(key, next).first->second);
    }
    return of_rank;
  }

  const StepClocks& ListOf(uint32_t rank) {
    std::unique_ptr<StepClocks>& list = lists_[kinds_[rank]];
    if (list == nullptr) {
      const ListedSteps listed = list_(static_cast<int32_t>(rank));
      const fb::RankProgram& program = *body_.programs()->Get(rank);
      steps_.Take(listed.steps.size());
      list = std::make_unique<StepClocks>(
          listed.schedule, listed.steps, Length(program.quantizes()),
          [&](uint32_t peer) { return Unshifted(body_, program, peer); });
    }
    return *list;
  }

  void CheckRank(uint32_t rank) {
    rank_ = rank;
    program_ = body_.programs()->Get(rank);
    messages_ = &plan_.messages().Of(*program_);
    of_ = &ListOf(rank);
    if (!CheckFrame()) return;
    if (!ListAccesses()) return;
    CheckFences();
    CheckStaging();
    if (!IsSource(rank)) CheckRelays();
    if (program_->scratch_buffers() > 0) CheckScratch();
  }

  void Report(int64_t round, absl::FunctionRef<std::string()> text,
              int64_t slot = -1) {
    violations_.Report({.rank = rank_, .round = round, .buffer_slot = slot},
                       Invariant::kOrdered, [&] {
                         return absl::StrCat(
                             text(), movers_ == PlannedMovers(body_) ? ""
                                     : movers_ == Movers::kReceivers
                                         ? ", where receivers move the bytes"
                                         : ", where senders move the bytes");
                       });
  }

  std::string NameOf(uint32_t step) const {
    const uint32_t round = of_->RoundOf(step);
    return absl::StrCat(
        "step ", StepKindName(of_->KindOf(step)),
        round == kNoRound ? std::string() : absl::StrCat(" of round ", round));
  }
  // `step`: that where it begins, or that where it ends.
  std::string NameOf(const Access& access, uint32_t step) const {
    return access.peer.has_value()
               ? absl::StrFormat("rank %d's move of round %d", *access.peer,
                                 access.round)
               : NameOf(step);
  }
  int64_t RoundOf(uint32_t step) const {
    const uint32_t round = of_->RoundOf(step);
    return round == kNoRound ? Site::kBeforeRounds : int64_t{round};
  }

  // Whether all steps come between the first and the last, and their list is in
  // the order of rounds.
  bool CheckFrame() {
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
              "%s does not wait for %s, and both touch its tensors",
              NameOf(step), NameOf(0));
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

  bool HasCopies(const fb::Message& message) const {
    return body_.copy_lists()->Get(message.copies())->count() > 0;
  }

  // False: a step is missing, or a peer does not wait.
  bool ListAccesses() {
    accesses_.clear();
    access_of_.assign(messages_->size(), 0);
    targets_.clear();
    bool complete = true;
    for (uint32_t i = 0; i < messages_->size(); ++i) {
      const fb::Message& message = *messages_->Get(i);
      const std::optional<Access> access = AccessOf(message);
      if (!access.has_value()) {
        complete = false;
        continue;
      }
      if (accesses_.empty() || accesses_.back().round != access->round ||
          accesses_.back().arrives != access->arrives ||
          accesses_.back().peer != access->peer) {
        accesses_.push_back(*access);
      } else {
        // Of a staged round: that which packs, or unpacks, is the longest.
        Access& known = accesses_.back();
        known.first = std::min(known.first, access->first);
        known.last = std::max(known.last, access->last);
      }
      access_of_[i] = static_cast<uint32_t>(accesses_.size() - 1);
    }
    return complete;
  }

  std::optional<Access> AccessOf(const fb::Message& message) {
    const bool arrives = message.kind() == fb::MessageKind::kRecv;
    Access access = {.round = message.round(),
                     .arrives = arrives,
                     .is_direct = is_direct_[message.round()]};
    const RoundSteps* const round = of_->FindRound(message.round());
    if (!access.is_direct) {
      const bool copies = HasCopies(message);
      const auto find = [&](StepKind kind) {
        return StepIn(round, message.round(), kind);
      };
      const std::optional<uint32_t> exchange = find(StepKind::kExchange);
      const std::optional<uint32_t> other =
          !copies ? exchange
                  : find(arrives ? StepKind::kUnpack : StepKind::kPack);
      if (!exchange.has_value() || !other.has_value()) return std::nullopt;
      access.first = arrives ? *exchange : *other;
      access.last = arrives ? *other : *exchange;
      return access;
    }
    const bool moves = (movers_ == Movers::kReceivers) == arrives;
    if (moves) {
      const std::optional<uint32_t> move =
          StepIn(round, message.round(), StepKind::kMove);
      if (!move.has_value()) return std::nullopt;
      access.first = access.last = *move;
      return access;
    }
    access.peer = PeerOf(body_, *program_, message);
    return BetweenFences(access);
  }

  std::optional<uint32_t> StepIn(const RoundSteps* steps, uint32_t round,
                                 StepKind kind) {
    std::optional<uint32_t> step;
    if (steps != nullptr) step = steps->Find(kind);
    if (!step.has_value()) {
      Report(round, [&] {
        return absl::StrFormat("its list has no %s", StepKindName(kind));
      });
    }
    return step;
  }

  // A peer's move: behind the last grant that the peer awaits before it, and
  // before the first finish that it tells behind it.
  std::optional<Access> BetweenFences(Access access) {
    const uint32_t peer = *access.peer;
    targets_.insert(peer);
    const StepClocks& theirs = ListOf(peer);
    const RoundSteps* const round = theirs.FindRound(access.round);
    const std::optional<uint32_t> move =
        round == nullptr ? std::nullopt : round->Find(StepKind::kMove);
    if (!move.has_value()) {
      Report(access.round, [&] {
        return absl::StrFormat("rank %d's list has no move", peer);
      });
      return std::nullopt;
    }
    const FenceCalls& called = CallsOf(theirs, peer, rank_);
    const FenceCalls& mine = CallsOf(*of_, rank_, peer);
    size_t granted = 0;
    while (granted < called.await_grants.size() &&
           theirs.IsBefore(called.await_grants[granted], *move)) {
      ++granted;
    }
    if (granted == 0 || granted > mine.grants.size()) {
      Report(access.round, [&] {
        return absl::StrFormat(
            "rank %d's move waits for no grant of this rank: it touches "
            "tensors that %s touches too",
            peer, NameOf(0));
      });
      return std::nullopt;
    }
    size_t finish = 0;
    while (finish < called.finishes.size() &&
           !theirs.IsBefore(*move, called.finishes[finish])) {
      ++finish;
    }
    if (finish == called.finishes.size() ||
        finish >= mine.await_finishes.size()) {
      Report(access.round, [&] {
        return absl::StrFormat(
            "no step waits for the finish of rank %d's move: it touches "
            "tensors that %s touches too",
            peer, NameOf(static_cast<uint32_t>(of_->size() - 1)));
      });
      return std::nullopt;
    }
    access.first = mine.grants[granted - 1];
    access.last = mine.await_finishes[finish];
    return access;
  }

  // The calls of a rank that has `list` between it and `peer`.
  const FenceCalls& CallsOf(const StepClocks& list, uint32_t rank,
                            uint32_t peer) const {
    return list.CallsOf(Unshifted(body_, *body_.programs()->Get(rank), peer));
  }

  // Every wait meets a call of its round or of an earlier one. With CheckFrame
  // it follows that steps never wait for each other in a circle.
  void CheckFences() {
    for (const uint32_t peer : targets_) {
      const StepClocks& theirs = ListOf(peer);
      const FenceCalls& called = CallsOf(theirs, peer, rank_);
      const FenceCalls& mine = CallsOf(*of_, rank_, peer);
      const auto check = [&](const Calls& calls, const StepClocks& of_calls,
                             const Calls& waits, const StepClocks& of_waits,
                             uint32_t caller, uint32_t waiter,
                             const char* what) {
        for (size_t i = 0; i < waits.size(); ++i) {
          if (i < calls.size() &&
              of_calls.RoundOf(calls[i]) <= of_waits.RoundOf(waits[i])) {
            continue;
          }
          Report(of_waits.RoundOf(waits[i]), [&] {
            return absl::StrFormat(
                "rank %d waits for a %s of rank %d that does not come in this "
                "round or before",
                waiter, what, caller);
          });
          return;
        }
      };
      check(mine.grants, *of_, called.await_grants, theirs, rank_, peer,
            "grant");
      check(called.finishes, theirs, mine.await_finishes, *of_, peer, rank_,
            "finish");
    }
  }

  // In the order of the list, because a step comes behind all that it waits
  // for. Ranges are aligned, so what is between two of them is nobody's.
  void CheckStaging() {
    std::vector<StagingUse> uses;
    for (const fb::Message* message : *messages_) {
      if (is_direct_[message->round()] || message->size_bytes() == 0) continue;
      const RoundSteps& round = *of_->FindRound(message->round());
      const bool arrives = message->kind() == fb::MessageKind::kRecv;
      StagingUse use = {.step = *round.Find(StepKind::kExchange),
                        .writes = arrives,
                        .begin = message->staging_offset()};
      use.end = use.begin + static_cast<uint64_t>(AlignStaging(
                                static_cast<int64_t>(message->size_bytes())));
      uses.push_back(use);
      if (!HasCopies(*message)) continue;
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

  void UseStaging(const StagingUse& use, ByteMap<Owner>& owners) {
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

  // Of the accesses in rounds [begin, end); they are in order of their rounds.
  absl::Span<const Access> In(uint32_t begin, uint32_t end) const {
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

  // What CheckRelays of the data proof takes for written is there.
  void CheckRelays() {
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
    for (uint32_t i = 0; i < messages_->size(); ++i) {
      const fb::Message& message = *messages_->Get(i);
      if (message.kind() != fb::MessageKind::kSend || IsHeld(body_, message)) {
        continue;
      }
      const Access& relay = accesses_[access_of_[i]];
      const AwaitedRounds awaited = AwaitedBy(
          body_, message.round(), FedBy(plan_.messages(), *program_, i));
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
                                          PeerOf(body_, *program_, message)));
          break;
        }
      }
    }
  }

  void AddEnd(const Access& access, Clock& ends) const {
    uint32_t& end = ends[static_cast<size_t>(of_->LaneOf(access.last))];
    end = std::max(end, access.last + 1);
  }

  void ReportUnordered(const Access& later, const Access& earlier,
                       const std::string& why, int64_t slot = -1) {
    Report(
        later.peer.has_value() ? int64_t{later.round} : RoundOf(later.first),
        [&] {
          return absl::StrFormat("%s does not wait for %s, %s",
                                 NameOf(later, later.first),
                                 NameOf(earlier, earlier.last), why);
        },
        slot);
  }

  WindowRounds RoundsOf(uint32_t slot) const {
    const fb::ScratchWindow* const window = WindowOf(*program_, slot);
    return window == nullptr ? WindowRounds(0, body_.rounds()->size())
                             : WindowRounds(window->begin(), window->end());
  }

  void CheckScratch() {
    // By window: the launches of its operations, and a slot of it.
    std::map<WindowRounds, std::set<uint32_t>> launches;
    for (uint32_t i = 0; i < Length(program_->quantizes()); ++i) {
      const fb::Quantize& op = *program_->quantizes()->Get(i);
      const uint32_t slot =
          IsSource(rank_) ? op.output_slot() : op.input_slot();
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
    const std::vector<ScratchRange> ranges = ScratchRanges(body_, *program_);
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

  uint32_t SlotOf(uint32_t scratch) const {
    return program_->buffers()->size() - program_->scratch_buffers() + scratch;
  }

  // A launch of operations of a window comes before what a source sends of it,
  // and behind what comes to a destination, which may pass it on meanwhile.
  void CheckLaunch(uint32_t launch, const WindowRounds& rounds, uint32_t slot) {
    const Access of_launch = {.first = launch, .last = launch};
    const bool arrives = !IsSource(rank_);
    for (const Access& access : In(rounds.first, rounds.second)) {
      if (access.arrives != arrives) continue;
      const Access& earlier = arrives ? access : of_launch;
      const Access& later = arrives ? of_launch : access;
      if (of_->IsBefore(earlier.last, later.first)) continue;
      ReportUnordered(later, earlier, "and both touch this scratch", slot);
      return;
    }
  }

  void CheckReuse(const WindowRounds& before,
                  const std::set<uint32_t>& launches_before,
                  const WindowRounds& after,
                  const std::set<uint32_t>& launches_after, uint32_t slot) {
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
        ReportUnordered(later, access,
                        "whose scratch shares bytes with this one", slot);
        return;
      }
    }
  }

  const PlanFile& plan_;
  const fb::Body& body_;
  const Movers movers_;
  const absl::FunctionRef<ListedSteps(int32_t)> list_;
  Steps& steps_;
  Violations& violations_;
  std::vector<bool> is_direct_;                     // by round
  std::vector<uint32_t> kinds_;                     // of lists, by rank
  std::vector<std::unique_ptr<StepClocks>> lists_;  // by kind

  // Of the rank at hand.
  uint32_t rank_ = 0;
  const fb::RankProgram* program_ = nullptr;
  const MessageVector* messages_ = nullptr;
  const StepClocks* of_ = nullptr;
  std::vector<Access> accesses_;     // by round
  std::vector<uint32_t> access_of_;  // by message
  std::set<uint32_t> targets_;       // peers that move what is this rank's
};

}  // namespace

AwaitedRounds AwaitedBy(const fb::Body& body, uint32_t round,
                        const fb::Message* fed_by) {
  const int64_t before = int64_t{round} - 1;
  if (fed_by == nullptr) return {.staged = before, .direct = before};
  const bool is_direct = body.rounds()->Get(fed_by->round())->mechanism() ==
                         fb::Mechanism::kDirect;
  const int64_t last = fed_by->round();
  return is_direct ? AwaitedRounds{.direct = last}
                   : AwaitedRounds{.staged = last};
}

ListedSteps::ListedSteps(RankSchedule of_rank,
                         std::vector<DirectEnds> of_rounds)
    : schedule(std::move(of_rank)),
      ends(std::move(of_rounds)),
      steps(ListSteps(schedule, ends, {.moves_beside = true})) {}

ListedSteps ListRankSteps(const PlanFile& plan, int32_t rank, Movers movers) {
  RankSchedule schedule(plan, rank);
  DirectPairs pairs;
  if (movers == Movers::kReceivers) {
    const std::vector<int32_t> senders = schedule.DirectSenders();
    const std::vector<int32_t> receivers = schedule.DirectReceivers();
    pairs.pulled_from = {senders.begin(), senders.end()};
    pairs.pulled_by = {receivers.begin(), receivers.end()};
  }
  std::vector<DirectEnds> ends = ListDirectEnds(plan, rank, schedule, pairs);
  return {std::move(schedule), std::move(ends)};
}

void CheckOrder(const PlanFile& plan, Movers movers,
                absl::FunctionRef<ListedSteps(int32_t rank)> list, Steps& steps,
                Violations& violations) {
  OrderProof(plan, movers, list, steps, violations).Check(/*all=*/true);
}

void CheckOrder(const PlanFile& plan, Steps& steps, Violations& violations) {
  const auto check = [&](Movers movers, bool all) {
    const auto list = [&](int32_t rank) {
      return ListRankSteps(plan, rank, movers);
    };
    OrderProof(plan, movers, list, steps, violations).Check(all);
  };
  const Movers planned = PlannedMovers(plan.body());
  check(planned, /*all=*/true);
  if (!HasDirectRounds(plan)) return;
  check(planned == Movers::kSenders ? Movers::kReceivers : Movers::kSenders,
        /*all=*/false);
}

}  // namespace refit::proof
