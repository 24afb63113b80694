#include "compiler/passes/relayed_rounds.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// A relay looks for room in so many of the last rounds. Earlier ones are full
// at one of its ends or the other, and to look at all of them for each message
// takes long in plans of many small ones.
constexpr int32_t kRelaysLookBack = 1024;

// Relays are few if they are less than this part of what is received. They are
// placed so many times faster than the rest.
constexpr double kFewRelays = 0.5;
constexpr double kRelaysAhead = 1.15;

// By their position among the messages of their pair: all receivers get their
// first message before any gets its second.
void SortByTurn(std::vector<Message*>& messages) {
  absl::flat_hash_map<std::pair<Rank, Rank>, int32_t> count;
  std::vector<std::pair<int32_t, Message*>> turns;
  turns.reserve(messages.size());
  for (Message* message : messages) {
    turns.push_back(
        {count[{message->source, message->destination}]++, message});
  }
  std::stable_sort(
      turns.begin(), turns.end(),
      [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < turns.size(); ++i) messages[i] = turns[i].second;
}

}  // namespace

void PlaceRelayed(Module& module, const std::vector<Message*>& messages,
                  Route route, std::optional<int64_t> most_each_way,
                  Scheduler& scheduler) {
  std::vector<bool> passed_on(module.messages.size());  // by message
  for (const Message* message : messages) {
    if (const Message* fed_by = FedBy(module, *message); fed_by != nullptr) {
      passed_on[static_cast<size_t>(fed_by - module.messages.data())] = true;
    }
  }
  std::vector<Message*> feeds, relays, others;
  int64_t largest = 0;  // of feeds and relays
  double received = 1;
  double relayed = 0;
  int64_t most = 1;
  for (Message* message : messages) {
    const bool is_relay = FedBy(module, *message) != nullptr;
    const int64_t staged = AlignStaging(message->size_bytes);
    if (is_relay ||
        passed_on[static_cast<size_t>(message - module.messages.data())]) {
      largest = std::max(largest, staged);
      (is_relay ? relays : feeds).push_back(message);
    } else {
      others.push_back(message);
    }
    received += static_cast<double>(message->size_bytes);
    if (is_relay) relayed += static_cast<double>(message->size_bytes);
    most = std::max(most, staged);
  }
  int64_t each_way = largest * StagedRoundOf(route).relayed_messages;
  // Few relays go beside what is not relayed, so much faster than that: their
  // rounds end before its.
  if (relayed < received * kFewRelays) {
    each_way = std::max(
        each_way,
        static_cast<int64_t>(static_cast<double>(scheduler.round_bytes_max()) /
                             (1 + relayed / received) * relayed / received *
                             kRelaysAhead));
  }
  scheduler.StartMessages(feeds, each_way);
  SortByTurn(feeds);
  for (Message* message : feeds) scheduler.Place(*message);
  scheduler.StartMessages(relays, each_way);
  std::stable_sort(relays.begin(), relays.end(),
                   [&](const Message* a, const Message* b) {
                     return FedBy(module, *a)->round < FedBy(module, *b)->round;
                   });
  for (Message* message : relays) {
    scheduler.Place(*message,
                    std::max(FedBy(module, *message)->round + kRelayRounds,
                             scheduler.round_count() - kRelaysLookBack));
  }
  // What is relayed is staged beside what is received.
  const double room = static_cast<double>(scheduler.round_bytes_max()) /
                      (1 + relayed / received);
  scheduler.StartMessages(
      others,
      std::max(most, most_each_way.value_or(
                         relayed > 0 ? static_cast<int64_t>(room)
                                     : std::numeric_limits<int64_t>::max())));
  for (Message* message : others) scheduler.Place(*message);
}

}  // namespace refit
