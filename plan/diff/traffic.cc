#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "plan/diff/stages.h"
#include "plan/text/dealt.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

constexpr DifferenceClass kTraffic = DifferenceClass::kTraffic;
constexpr DifferenceClass kSchedule = DifferenceClass::kSchedule;

// More ways than these in which a tensor's senders change are summed up.
constexpr size_t kSenderChangesListed = 4;

using MessageSpan = absl::Span<const MessageFacts>;

std::string SendersText(absl::Span<const Delivery> deliveries) {
  std::vector<int32_t> senders;
  for (const Delivery& delivery : deliveries)
    senders.push_back(static_cast<int32_t>(delivery.src));
  return NumberSetText(senders);
}

std::string SenderChange(absl::Span<const Delivery> from_a,
                         absl::Span<const Delivery> from_b) {
  if (from_a.empty()) return "is now sent";
  if (from_b.empty()) return "is no longer sent";
  const std::string senders_a = SendersText(from_a);
  const std::string senders_b = SendersText(from_b);
  if (senders_a == senders_b)
    return absl::StrCat("from ", senders_a, ", each another part");
  return absl::StrCat("from ", senders_a, " -> from ", senders_b);
}

// The deliveries of the tensor that `all` begins with.
absl::Span<const Delivery> TakeTensor(absl::Span<const Delivery>& all) {
  size_t count = 0;
  while (count < all.size() && all[count].tensor == all[0].tensor) ++count;
  const absl::Span<const Delivery> taken = all.subspan(0, count);
  all.remove_prefix(count);
  return taken;
}

// The tensors of scratch that hold something else in each plan, of which the
// difference of the windows tells, and `contract_changed`; ascending.
std::vector<NameId> ChangedTensorsOf(
    const PlanFacts& a, const PlanFacts& b, uint32_t rank,
    const std::vector<NameId>& contract_changed) {
  const std::map<NameId, Residue> of_a = a.Scratch(rank);
  const std::map<NameId, Residue> of_b = b.Scratch(rank);
  std::vector<std::pair<NameId, Residue>> differing;
  std::set_symmetric_difference(of_a.begin(), of_a.end(), of_b.begin(),
                                of_b.end(), std::back_inserter(differing));
  std::vector<NameId> changed = contract_changed;
  for (const auto& [tensor, held] : differing) changed.push_back(tensor);
  std::sort(changed.begin(), changed.end());
  return changed;
}

// Who feeds each tensor of each rank.
class SenderComparison {
 public:
  SenderComparison(PlanFacts& a, PlanFacts& b, const NameTable& names)
      : a_(a), b_(b), names_(names) {}

  // Leaves out the tensors in `changed`, which ascend.
  void Compare(int32_t rank, const std::vector<NameId>& changed);
  // Reports what was found. Call once, after all ranks.
  void Finish(DiffReport& report) const;

 private:
  struct Change {
    int32_t rank = 0;
    NameId tensor = 0;
    std::string text;
  };

  PlanFacts& a_;
  PlanFacts& b_;
  const NameTable& names_;
  std::vector<Change> changes_;
  // The different texts of each pattern of names.
  std::map<uint32_t, std::set<std::string>> texts_;
};

void SenderComparison::Compare(int32_t rank,
                               const std::vector<NameId>& changed) {
  const std::vector<Delivery> all_a =
      a_.Deliveries(static_cast<uint32_t>(rank));
  const std::vector<Delivery> all_b =
      b_.Deliveries(static_cast<uint32_t>(rank));
  absl::Span<const Delivery> rest_a = all_a;
  absl::Span<const Delivery> rest_b = all_b;
  while (!rest_a.empty() || !rest_b.empty()) {
    const NameId tensor =
        std::min(rest_a.empty() ? ~NameId{0} : rest_a[0].tensor,
                 rest_b.empty() ? ~NameId{0} : rest_b[0].tensor);
    absl::Span<const Delivery> from_a;
    absl::Span<const Delivery> from_b;
    if (!rest_a.empty() && rest_a[0].tensor == tensor)
      from_a = TakeTensor(rest_a);
    if (!rest_b.empty() && rest_b[0].tensor == tensor)
      from_b = TakeTensor(rest_b);
    if (from_a == from_b ||
        std::binary_search(changed.begin(), changed.end(), tensor)) {
      continue;
    }
    changes_.push_back({rank, tensor, SenderChange(from_a, from_b)});
    texts_[names_.pattern(tensor)].insert(changes_.back().text);
  }
}

void SenderComparison::Finish(DiffReport& report) const {
  for (const Change& change : changes_) {
    const bool many =
        texts_.at(names_.pattern(change.tensor)).size() > kSenderChangesListed;
    report.AddBuffer(kTraffic, "SENDER_CHANGED", change.rank, change.tensor,
                     many ? "from other senders" : change.text);
  }
}

// How messages of a pair travel.
struct Way {
  fb::Route route = fb::Route::kUnspecified;
  fb::Mechanism mechanism = fb::Mechanism::kStaged;
  bool is_dealt = false;  // inside a host, in a round of the network
  bool is_broadcast = false;

  friend auto operator<=>(const Way&, const Way&) = default;
};

// What a pair's messages are together.
struct PairTotals {
  uint64_t payload_bytes = 0;
  uint64_t sends = 0;
  uint64_t largest_bytes = 0;
  std::set<Way> ways;
  Residue received;  // content of receives
};

PairTotals TotalsOf(const fb::Body& body, MessageSpan messages) {
  PairTotals totals;
  for (const MessageFacts& message : messages) {
    const fb::Round& round = *body.rounds()->Get(message.round);
    const bool is_dealt =
        IsDealt(body, message.round, message.src, message.dst);
    totals.ways.insert({is_dealt ? fb::Route::kPeer : round.route(),
                        round.mechanism(), is_dealt, message.broadcast != 0});
    totals.payload_bytes += message.payload_bytes;
    if (message.kind == fb::MessageKind::kSend) {
      totals.sends += 1;
      totals.largest_bytes = std::max(totals.largest_bytes, message.size_bytes);
    } else {
      totals.received += message.content;
    }
  }
  return totals;
}

std::string WaysText(const std::set<Way>& ways) {
  std::string text;
  for (const Way& way : ways) {
    absl::StrAppend(
        &text, text.empty() ? "" : "+", RouteText(way.route, way.mechanism),
        way.is_dealt ? " dealt" : "", way.is_broadcast ? " broadcast" : "");
  }
  return text;
}

std::string BucketsText(uint64_t messages, uint64_t largest_bytes) {
  return absl::StrCat(messages, messages == 1 ? " message" : " messages",
                      " of at most ", largest_bytes, " bytes");
}

// One value per message, as a multiset.
template <typename Value>
std::vector<Value> Sorted(MessageSpan messages,
                          Value (*value_of)(const MessageFacts&)) {
  std::vector<Value> values;
  for (const MessageFacts& message : messages)
    values.push_back(value_of(message));
  std::sort(values.begin(), values.end());
  return values;
}

using Bucket = std::tuple<fb::MessageKind, Residue, uint64_t>;
using Packed = std::pair<Bucket, Residue>;
// With its round, and its number among the broadcasts of its sender in it.
using Timed = std::pair<Bucket, std::pair<uint32_t, uint32_t>>;
using Fed = std::pair<Timed, int64_t>;
using Placed = std::pair<Timed, uint64_t>;

Bucket BucketOf(const MessageFacts& message) {
  return {message.kind, message.content, message.size_bytes};
}
Packed PackedOf(const MessageFacts& message) {
  return {BucketOf(message), message.packing};
}
Timed TimedOf(const MessageFacts& message) {
  return {BucketOf(message), {message.round, message.broadcast}};
}
Fed FedOf(const MessageFacts& message) {
  return {TimedOf(message), message.fed_by_round};
}
Placed PlacedOf(const MessageFacts& message) {
  return {TimedOf(message), message.staging_offset};
}

class PairComparison {
 public:
  PairComparison(const PlanFacts& a, const PlanFacts& b, DiffReport& report)
      : a_(a), b_(b), report_(report) {}

  // The messages of one pair in each plan, not both empty.
  void Compare(RankPair pair, MessageSpan a, MessageSpan b);
  // Reports what is told of many pairs at once. Call once, after all pairs.
  void Finish();
  // Ranks of which messages stand elsewhere in staging, and differ in nothing
  // else.
  const std::set<int32_t>& moved_staging() const { return moved_staging_; }

 private:
  // Of all pairs whose numbers of messages change alike.
  struct BucketChange {
    std::vector<RankPair> pairs;
    uint64_t largest_bytes_a = 0;
    uint64_t largest_bytes_b = 0;
  };
  void CompareSchedules(RankPair pair, MessageSpan a, MessageSpan b);

  const PlanFacts& a_;
  const PlanFacts& b_;
  DiffReport& report_;
  // By the number of messages in each plan.
  std::map<std::pair<uint64_t, uint64_t>, BucketChange> bucket_changes_;
  std::set<int32_t> moved_staging_;
};

void PairComparison::Finish() {
  for (const auto& [messages, change] : bucket_changes_) {
    const std::string buckets_a =
        BucketsText(messages.first, change.largest_bytes_a);
    const std::string buckets_b =
        BucketsText(messages.second, change.largest_bytes_b);
    for (const RankPair& pair : change.pairs) {
      report_.AddPair(kSchedule, "BUCKETS_CHANGED", pair,
                      buckets_a == buckets_b
                          ? absl::StrCat(buckets_a, ", other contents in each")
                          : absl::StrCat(buckets_a, " -> ", buckets_b));
    }
  }
}

void PairComparison::Compare(RankPair pair, MessageSpan a, MessageSpan b) {
  const PairTotals totals_a = TotalsOf(a_.body(), a);
  const PairTotals totals_b = TotalsOf(b_.body(), b);
  if (totals_a.payload_bytes != totals_b.payload_bytes) {
    report_.AddPair(kTraffic, "BYTES_CHANGED", pair,
                    absl::StrCat(totals_a.payload_bytes, " -> ",
                                 totals_b.payload_bytes, " bytes"));
  }
  if (!a.empty() && !b.empty() && totals_a.ways != totals_b.ways) {
    report_.AddPair(
        kTraffic, "ROUTE_CHANGED", pair,
        absl::StrCat(WaysText(totals_a.ways), " -> ", WaysText(totals_b.ways)));
  }
  // With other content, other messages go without saying.
  if (totals_a.payload_bytes != totals_b.payload_bytes ||
      totals_a.received != totals_b.received) {
    return;
  }
  if (Sorted(a, BucketOf) != Sorted(b, BucketOf)) {
    BucketChange& change = bucket_changes_[{totals_a.sends, totals_b.sends}];
    change.pairs.push_back(pair);
    change.largest_bytes_a =
        std::max(change.largest_bytes_a, totals_a.largest_bytes);
    change.largest_bytes_b =
        std::max(change.largest_bytes_b, totals_b.largest_bytes);
    return;
  }
  CompareSchedules(pair, a, b);
}

void PairComparison::CompareSchedules(RankPair pair, MessageSpan a,
                                      MessageSpan b) {
  if (Sorted(a, PackedOf) != Sorted(b, PackedOf)) {
    report_.AddPair(kSchedule, "PACKING_CHANGED", pair,
                    "other order inside the messages");
  }
  if (Sorted(a, TimedOf) != Sorted(b, TimedOf)) {
    report_.AddPair(kSchedule, "ROUNDS_CHANGED", pair,
                    "the same messages in other rounds");
    return;
  }
  if (Sorted(a, FedOf) != Sorted(b, FedOf)) {
    report_.AddPair(kSchedule, "RELAYS_CHANGED", pair,
                    "relays wait for messages of other rounds");
  }
  for (const fb::MessageKind kind :
       {fb::MessageKind::kSend, fb::MessageKind::kRecv}) {
    const auto of_kind = [kind](MessageSpan messages) {
      std::vector<MessageFacts> kept;
      std::copy_if(
          messages.begin(), messages.end(), std::back_inserter(kept),
          [kind](const MessageFacts& message) { return message.kind == kind; });
      return Sorted(kept, PlacedOf);
    };
    if (of_kind(a) != of_kind(b)) {
      moved_staging_.insert(kind == fb::MessageKind::kSend ? pair.first
                                                           : pair.second);
    }
  }
}

// The messages of the pair that `all` begins with.
MessageSpan TakePair(MessageSpan& all) {
  size_t count = 0;
  while (count < all.size() && all[count].src == all[0].src &&
         all[count].dst == all[0].dst) {
    ++count;
  }
  const MessageSpan taken = all.subspan(0, count);
  all.remove_prefix(count);
  return taken;
}

RankPair PairOf(const MessageFacts& message) {
  return {static_cast<int32_t>(message.src), static_cast<int32_t>(message.dst)};
}

}  // namespace

void CompareTraffic(PlanFacts& a, PlanFacts& b, const NameTable& names,
                    int32_t common_ranks, const ChangedTensors& changed,
                    DiffReport& report) {
  SenderComparison senders(a, b, names);
  for (int32_t rank = 0; rank < common_ranks; ++rank) {
    const std::vector<NameId>& contract_changed =
        changed[static_cast<size_t>(rank)];
    senders.Compare(rank, ChangedTensorsOf(a, b, static_cast<uint32_t>(rank),
                                           contract_changed));
    if (contract_changed.empty() && a.Fills(static_cast<uint32_t>(rank)) !=
                                        b.Fills(static_cast<uint32_t>(rank))) {
      report.AddRank(kTraffic, "FILLS_CHANGED", rank,
                     "other elements are zeroed");
    }
  }
  senders.Finish(report);
  PairComparison pairs(a, b, report);
  const std::vector<MessageFacts> all_a = a.Messages();
  const std::vector<MessageFacts> all_b = b.Messages();
  MessageSpan rest_a = all_a;
  MessageSpan rest_b = all_b;
  while (!rest_a.empty() || !rest_b.empty()) {
    RankPair pair = PairOf(rest_a.empty() ? rest_b[0] : rest_a[0]);
    if (!rest_b.empty()) pair = std::min(pair, PairOf(rest_b[0]));
    MessageSpan of_a;
    MessageSpan of_b;
    if (!rest_a.empty() && PairOf(rest_a[0]) == pair) of_a = TakePair(rest_a);
    if (!rest_b.empty() && PairOf(rest_b[0]) == pair) of_b = TakePair(rest_b);
    if (std::max(pair.first, pair.second) < common_ranks)
      pairs.Compare(pair, of_a, of_b);
  }
  pairs.Finish();
  CompareStaging(a.plan(), b.plan(), common_ranks, pairs.moved_staging(),
                 report);
  CompareLimits(a.body(), b.body(), report);
}

}  // namespace refit
