#include "plan/schedule/direct_ends.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>

#include "plan/vector_length.h"

namespace refit {
namespace {

using Slots = std::set<uint32_t>;

// Whether the tensors of `rank` are written once in a refit, and read by nobody
// before its end. `pulled`: its scratch that is not used.
bool IsAtRest(const PlanFile& plan, int32_t rank, const Slots& pulled) {
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  for (uint32_t i = 0; i < Length(program.quantizes()); ++i) {
    if (!pulled.contains(program.quantizes()->Get(i)->input_slot())) {
      return false;
    }
  }
  return !PassesOn(plan, rank);
}

// The rounds in which `receiver` still gets something from `sender`.
std::set<uint32_t> RoundsLeft(const PlanFile& plan, int32_t sender,
                              int32_t receiver, const Slots& pulled) {
  const fb::Body& body = plan.body();
  const fb::RankProgram& program = *body.programs()->Get(receiver);
  std::set<uint32_t> rounds;
  for (const fb::Message* message : plan.messages().Of(program)) {
    if (message->kind() != fb::MessageKind::kRecv ||
        PeerOf(body, program, *message) != static_cast<uint32_t>(sender)) {
      continue;
    }
    for (const fb::Copy& copy : CopiesOf(body, message->copies())) {
      if (pulled.contains(copy.buffer_slot())) continue;
      rounds.insert(message->round());
      break;
    }
  }
  return rounds;
}

// The rounds in which a pair of ranks has the same origin.
struct Span {
  bool target_at_rest = false;
  size_t first = 0;
  size_t last = 0;
};
using Spans = std::map<int32_t, Span>;  // by peer

// The span of `peer` that has `round` as well.
Span& Extend(Spans& spans, int32_t peer, size_t round) {
  Span& span = spans.try_emplace(peer, Span{.first = round}).first->second;
  span.last = round;
  return span;
}

// Sets `beside`. Who reads what a rank stored hears of it from one stream.
void PutBeside(const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
               const DirectPairs& peers, std::vector<DirectEnds>& ends) {
  const std::vector<RoundWork>& rounds = schedule.rounds();
  if (schedule.Stages() || !schedule.quantizes().empty() ||
      PassesOn(plan, rank) || !peers.pulled_slots.empty()) {
    return;
  }
  uint64_t here = 0;
  uint64_t elsewhere = 0;
  for (size_t i = 0; i < rounds.size(); ++i) {
    if (!ends[i].grant.empty() || !ends[i].await_finishes.empty()) return;
    for (uint32_t o = 0; o < rounds[i].operations_count; ++o) {
      (rounds[i].route == fb::Route::kLocal ? here : elsewhere) +=
          schedule.operations()[rounds[i].operations_begin + o].size_bytes;
    }
  }
  if (here > elsewhere) return;
  for (size_t i = 0; i < rounds.size(); ++i) {
    ends[i].beside = rounds[i].route == fb::Route::kLocal && ends[i].moves;
  }
}

}  // namespace

bool PassesOn(const PlanFile& plan, int32_t rank) {
  if (plan.side(rank) == fb::Side::kSource) return false;
  const MessageVector& messages =
      plan.messages().Of(static_cast<uint32_t>(rank));
  return std::any_of(messages.begin(), messages.end(),
                     [](const fb::Message* message) {
                       return message->kind() == fb::MessageKind::kSend;
                     });
}

std::vector<DirectEnds> ListDirectEnds(const PlanFile& plan, int32_t rank,
                                       const RankSchedule& schedule,
                                       const DirectPairs& peers, bool pulls) {
  const std::vector<RoundWork>& rounds = schedule.rounds();
  // Peers by round: targets, whose tensors this rank uses, and origins.
  std::vector<std::set<int32_t>> targets(rounds.size());
  std::vector<std::set<int32_t>> origins(rounds.size());
  Spans of_targets, of_origins;  // by targets, by origins
  const Slots none;
  const auto pulled_of = [&](int32_t of) -> const Slots& {
    const auto found = peers.pulled_slots.find(of);
    return pulls && found != peers.pulled_slots.end() ? found->second : none;
  };
  const Slots& mine = pulled_of(rank);
  const bool at_rest = IsAtRest(plan, rank, mine);
  std::map<int32_t, std::set<uint32_t>> left;  // rounds, by peer
  const auto is_left = [&](size_t round, int32_t sender, int32_t receiver,
                           int32_t peer, const Slots& pulled) {
    if (pulled.empty()) return true;
    const auto [of, is_new] = left.try_emplace(peer);
    if (is_new) of->second = RoundsLeft(plan, sender, receiver, pulled);
    return of->second.contains(rounds[round].index);
  };
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (const int32_t receiver : rounds[i].receivers) {
      if (!is_left(i, rank, receiver, receiver, pulled_of(receiver))) continue;
      const bool moves = peers.Moves(fb::MessageKind::kSend, receiver);
      (moves ? targets : origins)[i].insert(receiver);
    }
    for (const int32_t sender : rounds[i].senders) {
      if (!is_left(i, sender, rank, sender, mine)) continue;
      const bool moves = peers.Moves(fb::MessageKind::kRecv, sender);
      (moves ? targets : origins)[i].insert(sender);
    }
    for (const int32_t target : targets[i]) Extend(of_targets, target, i);
    for (const int32_t origin : origins[i]) Extend(of_origins, origin, i);
  }
  for (auto& [target, span] : of_targets)
    span.target_at_rest = IsAtRest(plan, target, pulled_of(target));
  std::vector<DirectEnds> ends(rounds.size());
  bool granted = false;
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (const int32_t target : targets[i]) {
      const Span& span = of_targets.at(target);
      const bool once = span.target_at_rest;
      if (!once || i == span.first) ends[i].await_grants.push_back(target);
      if (!once || i == span.last) ends[i].finish.push_back(target);
    }
    bool hears_all = !origins[i].empty();
    for (const int32_t origin : origins[i]) {
      const Span& span = of_origins.at(origin);
      if (!at_rest || i == span.last) ends[i].await_finishes.push_back(origin);
      hears_all &= !at_rest || span.first == span.last;
    }
    ends[i].moves = !targets[i].empty();
    ends[i].is_timed = ends[i].moves || hears_all;
    if (!at_rest) {
      ends[i].grant.assign(origins[i].begin(), origins[i].end());
    } else if (!granted && !origins[i].empty()) {
      granted = true;
      for (const auto& [origin, span] : of_origins) {
        ends[i].grant.push_back(origin);
      }
    }
  }
  PutBeside(plan, rank, schedule, peers, ends);
  return ends;
}

}  // namespace refit
