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

        "%s %d bytes %s rank %d, which does not %s them in this round",
        is_send ? "sends" : "receives",
        messages_[rank]->Get(message.position)->size_bytes(),
        is_send ? "to" : "from", peer, is_send ? "receive" : "send");
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
      violations_.Report(site, Invariant::kMatchedMessages,
                         "receives %d bytes from rank %d, which sends %d",
                         received, send.source, sent);
    }
    const uint32_t broadcast =
        messages_[destination]->Get(position)->broadcast();
    if (broadcast != message.broadcast()) {
      violations_.Report(
          site, Invariant::kMatchedMessages,
          "receives from rank %d what is %s, and is %s where it is sent",
          send.source, BroadcastText(broadcast),
          BroadcastText(message.broadcast()));
    }
    const fb::Round& round = *rounds_.Get(send.round);
    const bool is_direct = round.mechanism() == fb::Mechanism::kDirect;
    const fb::Route wanted = RouteBetween(send.source, destination);
    const fb::Route found = round.route();
    const bool is_dealt = wanted == fb::Route::kPeer &&
                          found == fb::Route::kNetwork && broadcast == 0;
    if (found != wanted && !is_dealt) {
      violations_.Report(
          site, Invariant::kMatchedMessages,
          "the round's route is %s when it should be %s for the message from "
          "rank %d",
          EnumText(found), EnumText(wanted), send.source);
    }
    // refitc deals in rounds between hosts alone; executors were tried with no
    // other.
    const bool is_held =
        send.source >= source_ranks_ && IsHeld(body_, message) && !is_direct;
    if (is_held && found != fb::Route::kNetwork) {
      violations_.Report(
          site, Invariant::kMatchedMessages,
          "is dealt to by rank %d in a round of route %s when it should be "
          "network",
          send.source, EnumText(found));
    }
    if (wanted == fb::Route::kNetwork && is_direct) {
      violations_.Report(site, Invariant::kMatchedMessages,
                         "rank %d stores directly into memory of another host",
                         send.source);
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
    violations.Report(
        {.rank = rank}, Invariant::kRoundLimits,
        "exchanges with %d ranks of other hosts when the limit is %d",
        peers[rank], limit);
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
        violations.Report(
            site, Invariant::kMatchedMessages,
            "broadcasts %d bytes at %d of copies %d to rank %d and %d bytes "
            "at %d of copies %d to rank %d",
            first.size_bytes(), first.staging_offset(), first.copies(),
            PeerOf(body, program, first), send->size_bytes(),
            send->staging_offset(), send->copies(), peers.back());
      }
      std::sort(peers.begin(), peers.end());
      if (to.empty()) to = peers;
      const auto twice = std::adjacent_find(peers.begin(), peers.end());
      if (twice != peers.end()) {
        violations.Report(site, Invariant::kMatchedMessages,
                          "broadcasts a message twice to rank %d", *twice);
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
                      "slots is 0 when it should be at least 1");
  }
  absl::flat_hash_set<const void*> checked;  // lists of messages
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (program.staging_bytes() > limits.staging_bytes()) {
      violations.Report({.rank = rank}, Invariant::kRoundLimits,
                        "stages %d bytes when the limit is %d bytes of staging",
                        program.staging_bytes(), limits.staging_bytes());
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
        violations.Report(
            site, Invariant::kMatchedMessages,
            "the message with rank %d is not in order after that with rank "
            "%d in round %d",
            PeerOf(body, program, *message), PeerOf(body, program, *last),
            last->round());
      }
      if (last == nullptr || last->round() != message->round()) operations = 0;
      if (!sends.Repeats(*message)) ++operations;
      const bool direct = IsDirect(body, message->round());
      if (!direct && operations > operations_max) {
        violations.Report(site, Invariant::kRoundLimits,
                          "more than %d messages in one round", operations_max);
      }
      if (!direct && message->size_bytes() > limits.bucket_bytes()) {
        violations.Report(
            site, Invariant::kRoundLimits,
            "a message with rank %d has %d bytes when the limit is %d",
            PeerOf(body, program, *message), message->size_bytes(),
            limits.bucket_bytes());
      }
      last = message;
    }
  }
}

}  // namespace refit::proof
