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

// The rounds in which a pair of ranks has the same mover.
struct Span {
  bool holder_at_rest = false;
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
  // Peers by round: holders, whose tensors this rank uses, and movers.
  std::vector<std::set<int32_t>> holders(rounds.size());
  std::vector<std::set<int32_t>> movers(rounds.size());
  Spans held, moved;  // by holders, by movers
  const bool at_rest = IsAtRest(plan, rank);
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (const int32_t receiver : rounds[i].receivers) {
      (peers.pulled_by.contains(receiver) ? movers : holders)[i].insert(
          receiver);
    }
    for (const int32_t sender : rounds[i].senders) {
      (peers.pulled_from.contains(sender) ? holders : movers)[i].insert(sender);
    }
    for (const int32_t holder : holders[i]) Extend(held, holder, i);
    for (const int32_t mover : movers[i]) {
      Extend(moved, mover, i).holder_at_rest = at_rest;
    }
  }
  for (auto& [holder, span] : held)
    span.holder_at_rest = IsAtRest(plan, holder);
  std::vector<DirectEnds> ends(rounds.size());
  for (size_t i = 0; i < rounds.size(); ++i) {
    ends[i].moves = !holders[i].empty();
    for (const int32_t holder : holders[i]) {
      const Span& span = held.at(holder);
      const bool once = span.holder_at_rest;
      if (!once || i == span.first) ends[i].await_grants.push_back(holder);
      if (!once || i == span.last) ends[i].finish.push_back(holder);
    }
    for (const int32_t mover : movers[i]) {
      const Span& span = moved.at(mover);
      const bool once = span.holder_at_rest;
      if (!once || i == span.first) ends[i].grant.push_back(mover);
      if (!once || i == span.last) ends[i].await_finishes.push_back(mover);
    }
  }
  return ends;
}

}  // namespace refit
