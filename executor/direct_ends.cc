#include "executor/direct_ends.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>

namespace refit {
namespace {

// Whether the tensors of `rank` are written once in a refit, and read by nobody
// before its end.
bool IsAtRest(const PlanFile& plan, int32_t rank) {
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  if (program.quantizes() != nullptr && program.quantizes()->size() > 0) {
    return false;
  }
  if (plan.side(rank) == fb::Side::kSource) return true;
  const auto& messages = *program.messages();
  return std::none_of(messages.begin(), messages.end(),
                      [](const fb::Message* message) {
                        return message->kind() == fb::MessageKind::kSend;
                      });
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

}  // namespace

std::vector<DirectEnds> ListDirectEnds(const PlanFile& plan, int32_t rank,
                                       const RankSchedule& schedule,
                                       const PeerTensors& peers) {
  const std::vector<RoundWork>& rounds = schedule.rounds();
  // Peers by round: targets, whose tensors this rank uses, and origins.
  std::vector<std::set<int32_t>> targets(rounds.size());
  std::vector<std::set<int32_t>> origins(rounds.size());
  Spans of_targets, of_origins;  // by targets, by origins
  const bool at_rest = IsAtRest(plan, rank);
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (const int32_t receiver : rounds[i].receivers) {
      const bool moves = peers.Moves(fb::MessageKind::kSend, receiver);
      (moves ? targets : origins)[i].insert(receiver);
    }
    for (const int32_t sender : rounds[i].senders) {
      const bool moves = peers.Moves(fb::MessageKind::kRecv, sender);
      (moves ? targets : origins)[i].insert(sender);
    }
    for (const int32_t target : targets[i]) Extend(of_targets, target, i);
    for (const int32_t origin : origins[i]) {
      Extend(of_origins, origin, i).target_at_rest = at_rest;
    }
  }
  for (auto& [target, span] : of_targets)
    span.target_at_rest = IsAtRest(plan, target);
  std::vector<DirectEnds> ends(rounds.size());
  for (size_t i = 0; i < rounds.size(); ++i) {
    ends[i].moves = !targets[i].empty();
    for (const int32_t target : targets[i]) {
      const Span& span = of_targets.at(target);
      const bool once = span.target_at_rest;
      if (!once || i == span.first) ends[i].await_grants.push_back(target);
      if (!once || i == span.last) ends[i].finish.push_back(target);
    }
    for (const int32_t origin : origins[i]) {
      const Span& span = of_origins.at(origin);
      const bool once = span.target_at_rest;
      if (!once || i == span.first) ends[i].grant.push_back(origin);
      if (!once || i == span.last) ends[i].await_finishes.push_back(origin);
    }
  }
  return ends;
}

}  // namespace refit
