#include "plan/proof/order_proof.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/proof/rank_order.h"
#include "plan/proof/step_clocks.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/vector_length.h"

namespace refit::proof {
namespace {

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

  // How `program` numbers a peer, without its shifts.
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
      if (!steps_.Take(messages.size())) return numbers;
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
      const fb::RankProgram& program = *body_.programs()->Get(rank);
      steps_.Take(plan_.messages().Of(program).size());
      const ListedSteps listed = list_(static_cast<int32_t>(rank));
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
    const char* const when = movers_ == PlannedMovers(body_) ? ""
                             : movers_ == Movers::kReceivers
                                 ? ", where receivers move the bytes"
                                 : ", where senders move the bytes";
    at_.emplace(plan_, rank, *of_, when, steps_, violations_);
    if (!at_->CheckFrame() || !ListAccesses()) return;
    CheckFences();
    at_->Check(std::move(accesses_), std::move(access_of_));
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
        // In a staged round the access that packs, or unpacks, is the longest.
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
      const bool copies = HasCopies(body_, message);
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
      if (access.first <= access.last) return access;
      at_->Report(message.round(), [&] {
        return absl::StrFormat("%s comes before %s", at_->NameOf(access.last),
                               at_->NameOf(access.first));
      });
      return std::nullopt;
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
      at_->Report(round, [&] {
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
      at_->Report(access.round, [&] {
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
      at_->Report(access.round, [&] {
        return absl::StrFormat(
            "rank %d's move waits for no grant of this rank: it touches "
            "tensors that %s touches too",
            peer, at_->NameOf(0));
      });
      return std::nullopt;
    }
    size_t finish = 0;
    while (finish < called.finishes.size() &&
           !theirs.IsBefore(*move, called.finishes[finish])) {
      ++finish;
    }
    steps_.Take(granted + finish + 1);
    if (finish == called.finishes.size() ||
        finish >= mine.await_finishes.size()) {
      at_->Report(access.round, [&] {
        return absl::StrFormat(
            "no step waits for the finish of rank %d's move: it touches "
            "tensors that %s touches too",
            peer, at_->NameOf(static_cast<uint32_t>(of_->size() - 1)));
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
          at_->Report(of_waits.RoundOf(waits[i]), [&] {
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

  const PlanFile& plan_;
  const fb::Body& body_;
  const Movers movers_;
  const absl::FunctionRef<ListedSteps(int32_t)> list_;
  Steps& steps_;
  Violations& violations_;
  std::vector<bool> is_direct_;                     // by round
  std::vector<uint32_t> kinds_;                     // of lists, by rank
  std::vector<std::unique_ptr<StepClocks>> lists_;  // by kind

  // These are of the rank at hand.
  uint32_t rank_ = 0;
  const fb::RankProgram* program_ = nullptr;
  const MessageVector* messages_ = nullptr;
  const StepClocks* of_ = nullptr;
  std::optional<RankOrder> at_;
  std::vector<Access> accesses_;     // by round
  std::vector<uint32_t> access_of_;  // by message
  std::set<uint32_t> targets_;       // peers that move what is this rank's
};

}  // namespace

AwaitedRounds AwaitedBy(const fb::Body& body, uint32_t round,
                        const fb::Message* fed_by) {
  const int64_t before = int64_t{round} - 1;
  if (fed_by == nullptr) return {.staged = before, .direct = before};
  const int64_t last = fed_by->round();
  return IsDirect(body, fed_by->round()) ? AwaitedRounds{.direct = last}
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
