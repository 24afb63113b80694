#include "plan/proof/schedule_proof.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/broadcasts.h"
#include "plan/enum_text.h"
#include "plan/group_limit.h"
#include "plan/network_peers.h"

namespace refit::proof {
namespace {

bool IsDirect(const fb::Body& body, uint32_t round) {
  return body.rounds()->Get(round)->mechanism() == fb::Mechanism::kDirect;
}

std::string BroadcastText(uint32_t number) {
  return number == 0 ? "no broadcast" : absl::StrCat("broadcast ", number);
}

// A message that a rank sends. `position` is in the list of its source.
struct Sent {
  uint32_t source = 0;
  uint32_t round = 0;
  uint32_t position = 0;
};

bool operator<(const Sent& a, const Sent& b) {
  return std::tie(a.source, a.round, a.position) <
         std::tie(b.source, b.round, b.position);
}

// Finds the two ends of each message: the k-th send of a pair of ranks in a
// round meets their k-th receive.
class Matcher {
 public:
  Matcher(const MessageLists& messages, Violations& violations)
      : body_(messages.body()),
        violations_(violations),
        source_ranks_(body_.source_ranks()),
        ranks_(body_.programs()->size()),
        colocated_(body_.colocated()),
        rounds_(*body_.rounds()) {
    for (const fb::RankProgram* program : *body_.programs()) {
      messages_.push_back(&messages.Of(*program));
      hosts_.push_back(program->host());
    }
  }

  Partners Match() {
    Partners partners(ranks_);
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      partners[rank].assign(messages_[rank]->size(), -1);
    }
    ListSends();
    next_.resize(ranks_);
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      MatchInto(rank, partners);
    }
    return partners;
  }

 private:
  // Calls `visit` with the peer and the position of each message of `rank`.
  template <typename Visit>
  void ForEachMessage(uint32_t rank, const Visit& visit) const {
    const fb::RankProgram& program = *body_.programs()->Get(rank);
    const uint32_t source_shift = program.source_shift();
    const uint32_t destination_shift = program.destination_shift();
    const auto& messages = *messages_[rank];
    for (uint32_t i = 0; i < messages.size(); ++i) {
      const fb::Message& message = *messages.Get(i);
      visit(
          message,
          message.peer() + (message.peer() < source_ranks_ ? source_shift
                                                           : destination_shift),
          i);
    }
  }

  // Sources send, destination ranks receive and relay, to destination ranks.
  bool IsOnWrongSide(uint32_t rank, uint32_t peer, bool is_send) const {
    return (is_send ? peer : rank) < source_ranks_;
  }

  void ReportWrongSide(uint32_t rank, uint32_t peer,
                       const fb::Message& message) {
    violations_.Report({.rank = rank, .round = message.round()},
                       Invariant::kMatchedMessages, [&] {
                         const bool is_source = rank < source_ranks_;
                         const bool is_send =
                             message.kind() == fb::MessageKind::kSend;
                         return absl::StrFormat(
                             "a %s rank %s rank %d, a %s rank",
                             is_source ? "source" : "destination",
                             is_send ? "sends to" : "receives from", peer,
                             peer < source_ranks_ ? "source" : "destination");
                       });
  }

  // By destination, then in order. Reports messages on the wrong side.
  void ListSends() {
    begin_.assign(ranks_ + 1, 0);
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      ForEachMessage(
          rank, [&](const fb::Message& message, uint32_t peer, uint32_t) {
            const bool is_send = message.kind() == fb::MessageKind::kSend;
            if (IsOnWrongSide(rank, peer, is_send)) {
              ReportWrongSide(rank, peer, message);
            } else if (is_send) {
              ++begin_[peer + 1];
            }
          });
    }
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    sends_.resize(begin_.back());
    std::vector<size_t> next(begin_.begin(), begin_.end() - 1);
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      ForEachMessage(rank, [&](const fb::Message& message, uint32_t peer,
                               uint32_t position) {
        if (message.kind() != fb::MessageKind::kSend ||
            IsOnWrongSide(rank, peer, true)) {
          return;
        }
        sends_[next[peer]++] = {rank, message.round(), position};
      });
    }
  }

  // Whether another send of `source` to the rank whose sends end at `end` is
  // left.
  bool HasNext(uint32_t source, size_t begin, size_t end) const {
    return next_[source] >= begin && next_[source] < end &&
           sends_[next_[source]].source == source;
  }

  void MatchInto(uint32_t rank, Partners& partners) {
    const size_t begin = begin_[rank];
    const size_t end = begin_[rank + 1];
    const absl::Span<Sent> sends =
        absl::MakeSpan(sends_).subspan(begin, end - begin);
    // As a program in order leaves them.
    if (!std::is_sorted(sends.begin(), sends.end())) {
      std::sort(sends.begin(), sends.end());
    }
    for (size_t i = end; i-- > begin;) next_[sends_[i].source] = i;
    receives_.clear();
    ForEachMessage(rank, [&](const fb::Message& message, uint32_t peer,
                             uint32_t position) {
      if (message.kind() == fb::MessageKind::kSend ||
          IsOnWrongSide(rank, peer, false)) {
        return;
      }
      receives_.push_back({peer, message.round(), position});
    });
    const auto by_round = [](const Sent& a, const Sent& b) {
      return a.round < b.round;
    };
    if (!std::is_sorted(receives_.begin(), receives_.end(), by_round)) {
      std::stable_sort(receives_.begin(), receives_.end(), by_round);
    }
    for (const Sent& receive : receives_) {
      while (HasNext(receive.source, begin, end) &&
             sends_[next_[receive.source]].round < receive.round) {
        ReportAlone(sends_[next_[receive.source]++], rank, true);
      }
      if (!HasNext(receive.source, begin, end) ||
          sends_[next_[receive.source]].round != receive.round) {
        ReportAlone(receive, rank, false);
        continue;
      }
      const Sent& send = sends_[next_[receive.source]++];
      CheckPair(send, rank, receive.position);
      partners[send.source][send.position] =
          static_cast<int32_t>(receive.position);
      partners[rank][receive.position] = static_cast<int32_t>(send.position);
    }
    for (size_t i = begin; i < end; ++i) {
      if (i >= next_[sends_[i].source]) ReportAlone(sends_[i], rank, true);
    }
  }

  // `message`: of its source if `is_send`, else of `destination`.
  void ReportAlone(const Sent& message, uint32_t destination, bool is_send) {
    const uint32_t rank = is_send ? message.source : destination;
    const uint32_t peer = is_send ? destination : message.source;
    violations_.Report(
        {.rank = rank, .round = message.round}, Invariant::kMatchedMessages,
        [&] {
          return absl::StrFormat(
              "%s %d bytes %s rank %d, which does not %s them in this round",
              is_send ? "sends" : "receives",
              messages_[rank]->Get(message.position)->size_bytes(),
              is_send ? "to" : "from", peer, is_send ? "receive" : "send");
        });
  }

  fb::Route RouteBetween(uint32_t source, uint32_t destination) const {
    if (hosts_[source] != hosts_[destination] && !colocated_) {
      return fb::Route::kNetwork;
    }
    return refit::RouteBetween(body_, source, destination);
  }

  void CheckPair(const Sent& send, uint32_t destination, uint32_t position) {
    const fb::Message& message = *messages_[send.source]->Get(send.position);
    const uint64_t sent = message.size_bytes();
    const uint64_t received =
        messages_[destination]->Get(position)->size_bytes();
    const Site site = {.rank = destination, .round = send.round};
    if (sent != received) {
      violations_.Report(site, Invariant::kMatchedMessages, [&] {
        return absl::StrFormat("receives %d bytes from rank %d, which sends %d",
                               received, send.source, sent);
      });
    }
    const uint32_t broadcast =
        messages_[destination]->Get(position)->broadcast();
    if (broadcast != message.broadcast()) {
      violations_.Report(site, Invariant::kMatchedMessages, [&] {
        return absl::StrFormat(
            "receives from rank %d what is %s, and is %s where it is sent",
            send.source, BroadcastText(broadcast),
            BroadcastText(message.broadcast()));
      });
    }
    const fb::Round& round = *rounds_.Get(send.round);
    const bool is_direct = round.mechanism() == fb::Mechanism::kDirect;
    const fb::Route wanted = RouteBetween(send.source, destination);
    const fb::Route found = round.route();
    const bool is_dealt = wanted == fb::Route::kPeer &&
                          found == fb::Route::kNetwork && broadcast == 0;
    if (found != wanted && !is_dealt) {
      violations_.Report(site, Invariant::kMatchedMessages, [&] {
        return absl::StrFormat(
            "the round's route is %s when it should be %s for the message from "
            "rank %d",
            EnumText(found), EnumText(wanted), send.source);
      });
    }
    // refitc deals in rounds between hosts alone; executors were tried with no
    // other.
    const bool is_held =
        send.source >= source_ranks_ && IsHeld(body_, message) && !is_direct;
    if (is_held && found != fb::Route::kNetwork) {
      violations_.Report(site, Invariant::kMatchedMessages, [&] {
        return absl::StrFormat(
            "is dealt to by rank %d in a round of route %s when it should be "
            "network",
            send.source, EnumText(found));
      });
    }
    if (wanted == fb::Route::kNetwork && is_direct) {
      violations_.Report(site, Invariant::kMatchedMessages, [&] {
        return absl::StrFormat(
            "rank %d stores directly into memory of another host", send.source);
      });
    }
  }

  const fb::Body& body_;
  Violations& violations_;
  // Of the body: to find a field of it takes as long as to match a message.
  const uint32_t source_ranks_;
  const uint32_t ranks_;
  const bool colocated_;
  const flatbuffers::Vector<const fb::Round*>& rounds_;
  std::vector<const MessageVector*> messages_;
  std::vector<uint32_t> hosts_;

  std::vector<Sent> sends_;
  std::vector<size_t> begin_;   // of each destination's, in `sends_`
  std::vector<size_t> next_;    // by source: its next send to the rank at hand
  std::vector<Sent> receives_;  // of the rank at hand
};

}  // namespace

Partners MatchMessages(const MessageLists& messages, Violations& violations) {
  return Matcher(messages, violations).Match();
}

void CheckNetworkPeers(const fb::Body& body, Violations& violations) {
  const uint32_t limit = body.limits()->network_peers();
  if (limit == 0) return;
  const std::vector<uint32_t> peers = NetworkPeers(body);
  for (uint32_t rank = 0; rank < peers.size(); ++rank) {
    if (peers[rank] <= limit) continue;
    violations.Report({.rank = rank}, Invariant::kRoundLimits, [&] {
      return absl::StrFormat(
          "exchanges with %d ranks of other hosts when the limit is %d",
          peers[rank], limit);
    });
  }
}

void CheckBroadcasts(const MessageLists& messages, Violations& violations) {
  const fb::Body& body = messages.body();
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (ArePacked(program)) continue;  // these have none
    // By round and number: the sends of a broadcast.
    absl::btree_map<std::pair<uint32_t, uint32_t>,
                    std::vector<const fb::Message*>>
        broadcasts;
    for (const fb::Message* message : messages.Of(program)) {
      if (message->broadcast() == 0 ||
          message->kind() != fb::MessageKind::kSend) {
        continue;
      }
      broadcasts[{message->round(), message->broadcast()}].push_back(message);
    }
    std::vector<uint32_t> to;  // of the first
    for (const auto& [key, sends] : broadcasts) {
      const Site site = {.rank = rank, .round = key.first};
      const fb::Message& first = *sends.front();
      std::vector<uint32_t> peers;
      for (const fb::Message* send : sends) {
        peers.push_back(PeerOf(body, program, *send));
        if (send->copies() == first.copies() &&
            send->staging_offset() == first.staging_offset() &&
            send->size_bytes() == first.size_bytes()) {
          continue;
        }
        violations.Report(site, Invariant::kMatchedMessages, [&] {
          return absl::StrFormat(
              "broadcasts %d bytes at %d of copies %d to rank %d and %d bytes "
              "at %d of copies %d to rank %d",
              first.size_bytes(), first.staging_offset(), first.copies(),
              PeerOf(body, program, first), send->size_bytes(),
              send->staging_offset(), send->copies(), peers.back());
        });
      }
      std::sort(peers.begin(), peers.end());
      if (to.empty()) to = peers;
      const auto twice = std::adjacent_find(peers.begin(), peers.end());
      if (twice != peers.end()) {
        violations.Report(site, Invariant::kMatchedMessages, [&] {
          return absl::StrFormat("broadcasts a message twice to rank %d",
                                 *twice);
        });
      } else if (peers != to) {
        violations.Report(site, Invariant::kMatchedMessages, [&] {
          std::vector<uint32_t> differ;
          std::set_symmetric_difference(peers.begin(), peers.end(), to.begin(),
                                        to.end(), std::back_inserter(differ));
          const bool more =
              std::binary_search(peers.begin(), peers.end(), differ.front());
          return absl::StrCat(
              more ? "broadcasts to rank " : "broadcasts, but not to rank ",
              differ.front(),
              more ? " too, unlike in its first broadcast"
                   : " as in its first broadcast");
        });
      }
    }
  }
}

void CheckLimits(const MessageLists& messages, Violations& violations) {
  const fb::Body& body = messages.body();
  const fb::Limits& limits = *body.limits();
  CheckNetworkPeers(body, violations);
  // A plan may hold itself to less than NCCL bears, not to more.
  const uint64_t operations_max =
      std::min(limits.operations_per_round(), kGroupOperationsMax);
  if (limits.slots() == 0) {
    violations.Report({}, Invariant::kRoundLimits,
                      [] { return "slots is 0 when it should be at least 1"; });
  }
  absl::flat_hash_set<const void*> checked;  // lists of messages
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (program.staging_bytes() > limits.staging_bytes()) {
      violations.Report({.rank = rank}, Invariant::kRoundLimits, [&] {
        return absl::StrFormat(
            "stages %d bytes when the limit is %d bytes of staging",
            program.staging_bytes(), limits.staging_bytes());
      });
    }
    // A shift keeps the order of peers: the loader holds it to their side.
    const MessageVector& of_program = messages.Of(program);
    if (!checked.insert(&of_program).second) continue;
    const fb::Message* last = nullptr;
    uint64_t operations = 0;
    RepeatedSends sends;
    for (const fb::Message* message : of_program) {
      const Site site = {.rank = rank, .round = message->round()};
      const auto order = [&](const fb::Message& m) {
        return std::tuple(m.round(), m.kind() == fb::MessageKind::kSend,
                          PeerOf(body, program, m));
      };
      if (last != nullptr && order(*message) < order(*last)) {
        violations.Report(site, Invariant::kMatchedMessages, [&] {
          return absl::StrFormat(
              "the message with rank %d is not in order after that with rank "
              "%d in round %d",
              PeerOf(body, program, *message), PeerOf(body, program, *last),
              last->round());
        });
      }
      if (last == nullptr || last->round() != message->round()) operations = 0;
      if (!sends.Repeats(*message)) ++operations;
      const bool direct = IsDirect(body, message->round());
      if (!direct && operations > operations_max) {
        violations.Report(site, Invariant::kRoundLimits, [&] {
          return absl::StrFormat("more than %d messages in one round",
                                 operations_max);
        });
      }
      if (!direct && message->size_bytes() > limits.bucket_bytes()) {
        violations.Report(site, Invariant::kRoundLimits, [&] {
          return absl::StrFormat(
              "a message with rank %d has %d bytes when the limit is %d",
              PeerOf(body, program, *message), message->size_bytes(),
              limits.bucket_bytes());
        });
      }
      last = message;
    }
  }
}

namespace {

// A message's staging range while it is owed.
struct Owner {
  uint64_t end = 0;
  const fb::Message* message = nullptr;
};

// Whether no two of the messages, which are sorted by round, own the same
// staging byte while both rounds may be under way. What refitc writes is shown
// so: ranges of a round are disjoint, and rounds that are less than `slots`
// apart lie apart as a whole. Other plans may be right too.
bool AreApart(absl::Span<const fb::Message* const> messages, uint64_t slots) {
  constexpr size_t kMostRounds = 16;  // that a round is compared with
  struct Range {
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  struct RoundRange {
    uint64_t round = 0;
    Range range;
  };
  std::vector<RoundRange> before;  // whose ranges are still owed
  std::vector<Range> ranges;
  for (size_t i = 0; i < messages.size();) {
    const uint64_t round = messages[i]->round();
    ranges.clear();
    for (; i < messages.size() && messages[i]->round() == round; ++i) {
      const uint64_t begin = messages[i]->staging_offset();
      ranges.push_back({begin, begin + messages[i]->size_bytes()});
    }
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (size_t j = 1; j < ranges.size(); ++j) {
      if (ranges[j].begin < ranges[j - 1].end) return false;
    }
    const Range all = {ranges.front().begin, ranges.back().end};
    std::erase_if(before, [&](const RoundRange& other) {
      return round - other.round >= slots;
    });
    if (before.size() >= kMostRounds) return false;
    for (const RoundRange& other : before) {
      if (all.begin < other.range.end && other.range.begin < all.end) {
        return false;
      }
    }
    before.push_back({round, all});
  }
  return true;
}

// The messages of a rank that own what they have in staging, by round. Reports
// ranges that are not aligned.
std::vector<const fb::Message*> OwnersOf(const fb::Body& body, uint32_t rank,
                                         const MessageVector& of_rank,
                                         Violations& violations) {
  std::vector<const fb::Message*> messages;
  RepeatedSends sends;
  for (const fb::Message* message : of_rank) {
    if (IsDirect(body, message->round())) continue;
    const bool repeats = sends.Repeats(*message);
    if (message->staging_offset() % kStagingAlignmentBytes != 0) {
      violations.Report(
          {.rank = rank, .round = message->round()}, Invariant::kInBounds, [&] {
            return absl::StrFormat("staging offset %d is not a multiple of %d",
                                   message->staging_offset(),
                                   kStagingAlignmentBytes);
          });
    }
    const bool is_held = rank >= body.source_ranks() &&
                         message->kind() == fb::MessageKind::kSend &&
                         IsHeld(body, *message);
    if (message->size_bytes() > 0 && !is_held && !repeats) {
      messages.push_back(message);
    }
  }
  const auto by_round = [](const fb::Message* a, const fb::Message* b) {
    return a->round() < b->round();
  };
  if (!std::is_sorted(messages.begin(), messages.end(), by_round)) {
    std::stable_sort(messages.begin(), messages.end(), by_round);
  }
  return messages;
}

// Rounds r and r' may both be under way when they are less than `slots` apart.
// Walks the messages by round; `owned` holds the ranges still owed.
void CheckOwners(const fb::Body& body, uint32_t rank,
                 absl::Span<const fb::Message* const> messages,
                 Violations& violations) {
  const uint64_t slots = std::max<uint64_t>(1, body.limits()->slots());
  if (AreApart(messages, slots)) return;
  absl::btree_map<uint64_t, Owner> owned;  // by first byte; disjoint
  size_t released = 0;
  for (const fb::Message* message : messages) {
    while (message->round() - messages[released]->round() >= slots) {
      const auto done = owned.find(messages[released]->staging_offset());
      if (done != owned.end() && done->second.message == messages[released]) {
        owned.erase(done);
      }
      ++released;
    }
    const uint64_t begin = message->staging_offset();
    const uint64_t end = begin + message->size_bytes();
    const auto after = owned.lower_bound(begin);
    const fb::Message* other = nullptr;
    if (after != owned.end() && after->first < end) {
      other = after->second.message;
    } else if (after != owned.begin() && std::prev(after)->second.end > begin) {
      other = std::prev(after)->second.message;
    }
    if (other == nullptr) {
      owned.emplace(begin, Owner{end, message});
      continue;
    }
    violations.Report(
        {.rank = rank, .round = message->round()}, Invariant::kInBounds, [&] {
          return absl::StrFormat(
              "staging bytes [%d, %d) of the message with rank %d overlap "
              "those of the message with rank %d in round %d, which are still "
              "owed",
              begin, end, PeerOf(body, rank, *message),
              PeerOf(body, rank, *other), other->round());
        });
  }
}

// What a rank deals out has to lie where it came until it is sent on: in the
// range of the receive that feeds it. Until then nothing else may come there.
// A later receive may then, because a rank has one exchange after the other;
// what is packed meanwhile may not, within `slots` rounds. `owners` are those
// of a few rounds then, and a round has few: the loader bounds both.
void CheckHeldOf(const MessageLists& lists, uint32_t rank,
                 absl::Span<const fb::Message* const> owners,
                 Violations& violations) {
  const fb::Body& body = lists.body();
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const MessageVector& messages = lists.Of(program);
  const uint64_t slots = std::max<uint64_t>(1, body.limits()->slots());
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message& held = *messages.Get(i);
    if (held.kind() != fb::MessageKind::kSend || !IsHeld(body, held)) continue;
    const Site site = {.rank = rank, .round = held.round()};
    const fb::Message* fed_by = FedBy(lists, program, i);
    if (IsDirect(body, held.round()) || fed_by == nullptr ||
        IsDirect(body, fed_by->round())) {
      violations.Report(site, Invariant::kInBounds, [&] {
        return absl::StrFormat(
            "the message to rank %d packs nothing, and no staged message feeds "
            "it",
            PeerOf(body, program, held));
      });
      continue;
    }
    const uint64_t begin = held.staging_offset();
    const uint64_t end = begin + held.size_bytes();
    if (begin < fed_by->staging_offset() ||
        end > fed_by->staging_offset() + fed_by->size_bytes()) {
      violations.Report(site, Invariant::kInBounds, [&] {
        return absl::StrFormat(
            "the message to rank %d deals out staging bytes [%d, %d), which "
            "are not those of the message from rank %d that feeds it, [%d, %d)",
            PeerOf(body, program, held), begin, end,
            PeerOf(body, program, *fed_by), fed_by->staging_offset(),
            fed_by->staging_offset() + fed_by->size_bytes());
      });
      continue;
    }
    if (held.round() > fed_by->round() + slots + 1) {
      violations.Report(site, Invariant::kInBounds, [&] {
        return absl::StrFormat(
            "the message to rank %d deals out what came in round %d; wanted "
            "at most %d rounds before",
            PeerOf(body, program, held), fed_by->round(), slots + 1);
      });
      continue;
    }
    const auto first = std::partition_point(
        owners.begin(), owners.end(), [&](const fb::Message* message) {
          return message->round() <= fed_by->round();
        });
    for (auto it = first; it != owners.end(); ++it) {
      const fb::Message& other = **it;
      if (other.round() >= held.round() + slots) break;
      const bool packs = other.kind() == fb::MessageKind::kSend;
      if ((!packs && other.round() > held.round()) ||
          other.staging_offset() >= end ||
          other.staging_offset() + other.size_bytes() <= begin) {
        continue;
      }
      violations.Report(
          {.rank = rank, .round = other.round()}, Invariant::kInBounds, [&] {
            return absl::StrFormat(
                "staging bytes [%d, %d) of the message with rank %d overlap "
                "those that are dealt to rank %d in round %d",
                other.staging_offset(),
                other.staging_offset() + other.size_bytes(),
                PeerOf(body, program, other), PeerOf(body, program, held),
                held.round());
          });
    }
  }
}

}  // namespace

void CheckStaging(const MessageLists& messages, Violations& violations) {
  const fb::Body& body = messages.body();
  // Lists of messages, and of relays. Sources deal out nothing: the same list
  // says something else on the other side.
  absl::flat_hash_set<std::tuple<const void*, const void*, bool>> checked;
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    const bool may_deal = rank >= body.source_ranks();
    const MessageVector& of_rank = messages.Of(program);
    if (!checked.emplace(&of_rank, program.relays(), may_deal).second) {
      continue;
    }
    const std::vector<const fb::Message*> owners =
        OwnersOf(body, rank, of_rank, violations);
    CheckOwners(body, rank, owners, violations);
    if (may_deal) CheckHeldOf(messages, rank, owners, violations);
  }
}

}  // namespace refit::proof
