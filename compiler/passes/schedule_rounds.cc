#include <algorithm>
#include <array>
#include <tuple>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// What one rank has in one round so far.
struct RankRound {
  int64_t staging_bytes = 0;
  int32_t operations = 0;
};

// First-fit of messages into rounds.
class Scheduler {
 public:
  Scheduler(const Limits& limits, int32_t world_size)
      : limits_(limits),
        slot_bytes_max_(limits.staging_bytes / limits.slots /
                        kStagingAlignmentBytes * kStagingAlignmentBytes),
        ranks_(static_cast<size_t>(world_size)) {}

  // Messages placed from now on get rounds after all rounds so far.
  void StartRoute() {
    first_round_ = round_count_;
    for (RankState& rank : ranks_) rank.first_open = first_round_;
  }

  void Place(Message& message);
  int32_t round_count() const { return round_count_; }

  // Turns offsets within a slot into offsets within the rank's arena.
  void AssignSlots(std::vector<Message>& messages) const;

 private:
  struct RankState {
    std::vector<RankRound> rounds;
    int32_t first_open = 0;  // rounds before it are full
    int64_t slot_bytes = 0;  // the most staging of one round
  };

  RankRound& At(RankState& rank, int32_t round) {
    const size_t index = static_cast<size_t>(round);
    if (rank.rounds.size() <= index) rank.rounds.resize(index + 1);
    return rank.rounds[index];
  }
  bool Fits(const RankRound& at, int64_t size_bytes) const {
    return at.operations < limits_.operations_per_round &&
           at.staging_bytes + size_bytes <= slot_bytes_max_;
  }
  int64_t Take(RankState& rank, int32_t round, int64_t size_bytes);

  const Limits& limits_;
  int64_t slot_bytes_max_;
  std::vector<RankState> ranks_;
  int32_t first_round_ = 0;
  int32_t round_count_ = 0;
};

int64_t Scheduler::Take(RankState& rank, int32_t round, int64_t size_bytes) {
  RankRound& at = At(rank, round);
  const int64_t offset = at.staging_bytes;
  at.staging_bytes += AlignStaging(size_bytes);
  at.operations += 1;
  rank.slot_bytes = std::max(rank.slot_bytes, at.staging_bytes);
  while (rank.first_open < static_cast<int32_t>(rank.rounds.size()) &&
         !Fits(rank.rounds[static_cast<size_t>(rank.first_open)], 1)) {
    ++rank.first_open;
  }
  return offset;
}

void Scheduler::Place(Message& message) {
  RankState& source = ranks_[IndexOf(message.source)];
  RankState& destination = ranks_[IndexOf(message.destination)];
  int32_t round = std::max(source.first_open, destination.first_open);
  while (!Fits(At(source, round), message.size_bytes) ||
         !Fits(At(destination, round), message.size_bytes)) {
    ++round;
  }
  message.round = round;
  message.source_staging_offset = Take(source, round, message.size_bytes);
  message.destination_staging_offset =
      Take(destination, round, message.size_bytes);
  round_count_ = std::max(round_count_, round + 1);
}

void Scheduler::AssignSlots(std::vector<Message>& messages) const {
  for (Message& message : messages) {
    const int64_t slot = message.round % limits_.slots;
    message.source_staging_offset +=
        slot * ranks_[IndexOf(message.source)].slot_bytes;
    message.destination_staging_offset +=
        slot * ranks_[IndexOf(message.destination)].slot_bytes;
  }
}

// In shifts: at each step every source talks to a different destination, so
// that a round loads all links alike instead of queueing at one receiver.
void SortByShift(const Module& module, std::vector<Message*>& messages) {
  const int64_t sources = module.source_ranks();
  const int64_t destinations = module.world_size() - sources;
  const int64_t cycle = std::max(sources, destinations);
  const auto key = [&](const Message* message) {
    const int64_t source = static_cast<int64_t>(message->source);
    const int64_t destination =
        static_cast<int64_t>(message->destination) - sources;
    return std::tuple((destination - source % cycle + cycle) % cycle, source);
  };
  std::stable_sort(
      messages.begin(), messages.end(),
      [&](const Message* a, const Message* b) { return key(a) < key(b); });
}

}  // namespace

absl::Status ScheduleRounds(const PassOptions&, Module& module) {
  Scheduler scheduler(module.limits, module.world_size());
  // One route after the other: a round is one group on one communicator, and
  // only one communicator is in use at a time.
  for (Route route : {Route::kLocal, Route::kPeer, Route::kNetwork}) {
    std::vector<Message*> messages;
    for (Message& message : module.messages) {
      if (message.route == route) messages.push_back(&message);
    }
    SortByShift(module, messages);
    scheduler.StartRoute();
    for (Message* message : messages) scheduler.Place(*message);
    module.rounds.resize(static_cast<size_t>(scheduler.round_count()), route);
  }
  scheduler.AssignSlots(module.messages);
  return absl::OkStatus();
}

}  // namespace refit
