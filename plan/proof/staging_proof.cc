// Invariant 3 of staging: which message owns which bytes, and for how long.
#include <algorithm>
#include <iterator>
#include <tuple>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "plan/broadcasts.h"
#include "plan/plan_file.h"
#include "plan/proof/schedule_proof.h"

namespace refit::proof {
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
      violations.Report({.rank = rank, .round = message->round()},
                        Invariant::kInBounds,
                        "staging offset %d is not a multiple of %d",
                        message->staging_offset(), kStagingAlignmentBytes);
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
        {.rank = rank, .round = message->round()}, Invariant::kInBounds,
        "staging bytes [%d, %d) of the message with rank %d overlap "
        "those of the message with rank %d in round %d, which are still "
        "owed",
        begin, end, PeerOf(body, rank, *message), PeerOf(body, rank, *other),
        other->round());
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
      violations.Report(
          site, Invariant::kInBounds,
          "the message to rank %d packs nothing, and no staged message feeds "
          "it",
          PeerOf(body, program, held));
      continue;
    }
    const uint64_t begin = held.staging_offset();
    const uint64_t end = begin + held.size_bytes();
    if (begin < fed_by->staging_offset() ||
        end > fed_by->staging_offset() + fed_by->size_bytes()) {
      violations.Report(
          site, Invariant::kInBounds,
          "the message to rank %d deals out staging bytes [%d, %d), which "
          "are not those of the message from rank %d that feeds it, [%d, %d)",
          PeerOf(body, program, held), begin, end,
          PeerOf(body, program, *fed_by), fed_by->staging_offset(),
          fed_by->staging_offset() + fed_by->size_bytes());
      continue;
    }
    if (held.round() > fed_by->round() + slots + 1) {
      violations.Report(
          site, Invariant::kInBounds,
          "the message to rank %d deals out what came in round %d; wanted "
          "at most %d rounds before",
          PeerOf(body, program, held), fed_by->round(), slots + 1);
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
          {.rank = rank, .round = other.round()}, Invariant::kInBounds,
          "staging bytes [%d, %d) of the message with rank %d overlap "
          "those that are dealt to rank %d in round %d",
          other.staging_offset(), other.staging_offset() + other.size_bytes(),
          PeerOf(body, program, other), PeerOf(body, program, held),
          held.round());
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
