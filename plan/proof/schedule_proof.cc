#include "plan/proof/schedule_proof.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"
#include "plan/enum_text.h"
#include "plan/group_limit.h"
#include "plan/network_peers.h"

namespace refit::proof {
namespace {

// One end of a message. `position` is in the owner's list.
struct End {
  uint32_t round = 0;
  uint32_t source = 0;
  uint32_t destination = 0;
  uint32_t position = 0;

  auto channel() const { return std::tie(destination, round, source); }
};

bool operator<(const End& a, const End& b) {
  return std::tie(a.destination, a.round, a.source, a.position) <
         std::tie(b.destination, b.round, b.source, b.position);
}

bool IsDirect(const fb::Body& body, uint32_t round) {
  return body.rounds()->Get(round)->mechanism() == fb::Mechanism::kDirect;
}

const fb::Message& MessageAt(const fb::Body& body, uint32_t rank,
                             uint32_t position) {
  return *body.programs()->Get(rank)->messages()->Get(position);
}

void ReportAlone(const fb::Body& body, const End& end, bool is_send,
                 Violations& violations) {
  const uint32_t rank = is_send ? end.source : end.destination;
  const uint32_t peer = is_send ? end.destination : end.source;
  violations.Report(
      {.rank = rank, .round = end.round}, Invariant::kMatchedMessages, [&] {
        return absl::StrFormat(
            "%s %d bytes %s rank %d, which does not %s them in this round",
            is_send ? "sends" : "receives",
            MessageAt(body, rank, end.position).size_bytes(),
            is_send ? "to" : "from", peer, is_send ? "receive" : "send");
      });
}

void CheckPair(const fb::Body& body, const End& send, const End& recv,
               Violations& violations) {
  const fb::Message& message = MessageAt(body, send.source, send.position);
  const uint64_t sent = message.size_bytes();
  const uint64_t received =
      MessageAt(body, recv.destination, recv.position).size_bytes();
  const Site site = {.rank = recv.destination, .round = recv.round};
  if (sent != received) {
    violations.Report(site, Invariant::kMatchedMessages, [&] {
      return absl::StrFormat("receives %d bytes from rank %d, which sends %d",
                             received, recv.source, sent);
    });
  }
  const fb::Route wanted = RouteBetween(body, recv.source, recv.destination);
  const fb::Route found = body.rounds()->Get(recv.round)->route();
  const bool is_dealt = wanted == fb::Route::kPeer &&
                        found == fb::Route::kNetwork &&
                        recv.source >= body.source_ranks();
  if (found != wanted && !is_dealt) {
    violations.Report(site, Invariant::kMatchedMessages, [&] {
      return absl::StrFormat(
          "the round's route is %s when it should be %s for the message from "
          "rank %d",
          EnumText(found), EnumText(wanted), recv.source);
    });
  }
  // refitc deals inside hosts alone, beside what the network brings; executors
  // were tried with no other.
  const bool is_held = send.source >= body.source_ranks() &&
                       IsHeld(body, message) && !IsDirect(body, recv.round);
  if (is_held && found == wanted) {
    violations.Report(site, Invariant::kMatchedMessages, [&] {
      return wanted == fb::Route::kNetwork
                 ? absl::StrFormat(
                       "is dealt to by rank %d, which is on host %d when it "
                       "should be on host %d",
                       recv.source, body.programs()->Get(recv.source)->host(),
                       body.programs()->Get(recv.destination)->host())
                 : absl::StrFormat(
                       "is dealt to by rank %d in a round of route %s when it "
                       "should be network",
                       recv.source, EnumText(found));
    });
  }
  if (wanted == fb::Route::kNetwork && IsDirect(body, recv.round)) {
    violations.Report(site, Invariant::kMatchedMessages, [&] {
      return absl::StrFormat(
          "rank %d stores directly into memory of another host", recv.source);
    });
  }
}

// Lists the ends of all messages; reports those on the wrong side: source ranks
// receive nothing.
void ListEnds(const fb::Body& body, std::vector<End>& sends,
              std::vector<End>& recvs, Violations& violations) {
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    const auto& messages = *program.messages();
    const bool is_source = rank < body.source_ranks();
    for (uint32_t i = 0; i < messages.size(); ++i) {
      const fb::Message& message = *messages.Get(i);
      const bool is_send = message.kind() == fb::MessageKind::kSend;
      const uint32_t peer = PeerOf(body, program, message);
      const bool peer_is_source = peer < body.source_ranks();
      if (is_send ? peer_is_source : is_source) {
        violations.Report({.rank = rank, .round = message.round()},
                          Invariant::kMatchedMessages, [&] {
                            return absl::StrFormat(
                                "a %s rank %s rank %d, a %s rank",
                                is_source ? "source" : "destination",
                                is_send ? "sends to" : "receives from", peer,
                                peer_is_source ? "source" : "destination");
                          });
        continue;
      }
      if (is_send) {
        sends.push_back({message.round(), rank, peer, i});
      } else {
        recvs.push_back({message.round(), peer, rank, i});
      }
    }
  }
  std::sort(sends.begin(), sends.end());
  std::sort(recvs.begin(), recvs.end());
}

}  // namespace

Partners MatchMessages(const fb::Body& body, Violations& violations) {
  Partners partners(body.programs()->size());
  for (uint32_t rank = 0; rank < partners.size(); ++rank) {
    partners[rank].assign(body.programs()->Get(rank)->messages()->size(), -1);
  }
  std::vector<End> sends;
  std::vector<End> recvs;
  ListEnds(body, sends, recvs, violations);
  // Both lists are in the order of channels, and inside one in that of the
  // programs: the k-th send of a channel meets its k-th receive.
  size_t s = 0;
  size_t r = 0;
  while (s < sends.size() || r < recvs.size()) {
    if (r == recvs.size() ||
        (s < sends.size() && sends[s].channel() < recvs[r].channel())) {
      ReportAlone(body, sends[s++], true, violations);
    } else if (s == sends.size() || recvs[r].channel() < sends[s].channel()) {
      ReportAlone(body, recvs[r++], false, violations);
    } else {
      const End& send = sends[s++];
      const End& recv = recvs[r++];
      CheckPair(body, send, recv, violations);
      partners[send.source][send.position] =
          static_cast<int32_t>(recv.position);
      partners[recv.destination][recv.position] =
          static_cast<int32_t>(send.position);
    }
  }
  return partners;
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

void CheckLimits(const fb::Body& body, Violations& violations) {
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
    if (!checked.insert(program.messages()).second) continue;
    const fb::Message* last = nullptr;
    uint64_t operations = 0;
    for (const fb::Message* message : *program.messages()) {
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
      operations = last != nullptr && last->round() == message->round()
                       ? operations + 1
                       : 1;
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

void CheckStagingOf(const fb::Body& body, uint32_t rank,
                    Violations& violations) {
  // Rounds r and r' may both be under way when they are less than `slots`
  // apart. Walks the messages by round; `owned` holds the ranges still owed.
  std::vector<const fb::Message*> messages;
  for (const fb::Message* message : *body.programs()->Get(rank)->messages()) {
    if (IsDirect(body, message->round())) continue;
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
    if (message->size_bytes() > 0 && !is_held) messages.push_back(message);
  }
  std::stable_sort(messages.begin(), messages.end(),
                   [](const fb::Message* a, const fb::Message* b) {
                     return a->round() < b->round();
                   });
  std::map<uint64_t, Owner> owned;  // by first byte; disjoint
  size_t released = 0;
  for (const fb::Message* message : messages) {
    while (message->round() - messages[released]->round() >=
           std::max<uint64_t>(1, body.limits()->slots())) {
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
// what is packed meanwhile may not, within `slots` rounds.
void CheckHeldOf(const fb::Body& body, uint32_t rank, Violations& violations) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const auto& messages = *program.messages();
  const uint64_t slots = std::max<uint64_t>(1, body.limits()->slots());
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message& held = *messages.Get(i);
    if (held.kind() != fb::MessageKind::kSend || !IsHeld(body, held)) continue;
    const Site site = {.rank = rank, .round = held.round()};
    const fb::Message* fed_by = FedBy(program, i);
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
        messages.begin(), messages.end(), [&](const fb::Message* message) {
          return message->round() <= fed_by->round();
        });
    for (auto it = first; it != messages.end(); ++it) {
      const fb::Message& other = **it;
      if (other.round() >= held.round() + slots) break;
      const bool packs = other.kind() == fb::MessageKind::kSend;
      if (IsDirect(body, other.round()) || other.size_bytes() == 0 ||
          (packs && IsHeld(body, other)) ||
          (!packs && other.round() > held.round()) ||
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

void CheckStaging(const fb::Body& body, Violations& violations) {
  // Lists of messages, and of relays.
  absl::flat_hash_set<std::pair<const void*, const void*>> checked;
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    if (!checked.emplace(program.messages(), program.relays()).second) continue;
    CheckStagingOf(body, rank, violations);
    if (rank >= body.source_ranks()) CheckHeldOf(body, rank, violations);
  }
}

}  // namespace refit::proof
