#include "executor/digest/arrivals.h"

#include <algorithm>
#include <map>
#include <utility>

#include "plan/schedule/direct_ends.h"
#include "plan/schedule/direct_steps.h"
#include "plan/schedule/tensor_box.h"
#include "plan/schedule/tensor_table.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

class ArrivalList {
 public:
  ArrivalList(const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
              const DirectPairs& peers)
      : plan_(plan),
        body_(plan.body()),
        rank_(rank),
        program_(*body_.programs()->Get(static_cast<uint32_t>(rank))),
        schedule_(schedule),
        peers_(peers),
        has_steps_(HasDirectSteps(plan)),
        ends_(ListDirectEnds(plan, rank, schedule, peers)),
        tensors_(plan, rank) {
    list_.reports.resize(schedule.rounds().size());
    list_.digested_after.resize(tensors_.size());
    list_.count = schedule.rounds().size() * kDirectSteps;
  }

  Arrivals List() {
    for (size_t i = 0; i < schedule_.rounds().size(); ++i) {
      const RoundWork& work = schedule_.rounds()[i];
      if (work.mechanism == fb::Mechanism::kDirect) ListReports(i);
      for (uint32_t m = 0; m < work.operations_count; ++m) {
        const fb::Message& message = *plan_.messages().Of(program_).Get(
            schedule_.parts()[work.operations_begin + m].message);
        if (message.kind() == fb::MessageKind::kRecv) {
          AddReceive(i, message);
        }
      }
    }
    if (plan_.side(rank_) == fb::Side::kDestination &&
        Length(program_.quantizes()) > 0) {
      // What it quantizes comes from scratch, after rounds.
      std::fill(list_.digested_after.begin(), list_.digested_after.end(),
                list_.count);
    }
    return std::move(list_);
  }

 private:
  // A rank that passes on what it receives waits for no step: its own moves
  // would wait as well.
  void ListReports(size_t round) {
    if (!has_steps_) return;
    const RoundWork& work = schedule_.rounds()[round];
    StepReports& reports = list_.reports[round];
    for (const int32_t receiver : work.receivers) {
      if (!peers_.Moves(fb::MessageKind::kSend, receiver) ||
          PassesOn(plan_, receiver) ||
          !DirectSteps(plan_, rank_, receiver, work.index).AreLong()) {
        continue;
      }
      reports.moves = true;
      reports.targets.push_back(receiver);
    }
    for (const int32_t sender : work.senders) {
      const DirectSteps& steps = StepsOf(round, sender);
      if (!steps.AreLong()) continue;
      if (peers_.Moves(fb::MessageKind::kRecv, sender)) {
        reports.moves = true;
      } else if (!PassesOn(plan_, rank_)) {
        reports.origins.push_back(sender);
      }
    }
  }

  const DirectSteps& StepsOf(size_t round, int32_t sender) {
    const auto found = steps_.find({round, sender});
    if (found != steps_.end()) return found->second;
    return steps_
        .emplace(
            std::pair(round, sender),
            DirectSteps(plan_, sender, rank_, schedule_.rounds()[round].index))
        .first->second;
  }

  void AddReceive(size_t round, const fb::Message& message) {
    const auto sender = static_cast<int32_t>(PeerOf(body_, program_, message));
    const StepReports& reports = list_.reports[round];
    const bool is_direct =
        schedule_.rounds()[round].mechanism == fb::Mechanism::kDirect;
    const bool moves =
        is_direct && peers_.Moves(fb::MessageKind::kRecv, sender);
    const bool by_steps = (moves && reports.moves) ||
                          std::binary_search(reports.origins.begin(),
                                             reports.origins.end(), sender);
    size_t known = round;
    if (is_direct && !moves && !by_steps) known = FinishAfter(round, sender);
    for (const fb::Copy& copy : CopiesOf(body_, message.copies())) {
      const TensorBox box = BoxOf(body_, tensors_, copy);
      uint64_t last = box.first.entry;
      for (const BoxLoop& loop : box.loops) {
        last += (loop.extent - 1) * loop.stride.entries;
      }
      for (uint64_t entry = box.first.entry; entry <= last; ++entry) {
        size_t& after = list_.digested_after[entry];
        after = std::max(
            after, by_steps ? ArrivalsUntil(
                                  round, StepsOf(round, sender).StepOf(entry))
                            : ArrivalsUntil(known));
      }
    }
  }

  // The round in which this rank hears that `sender` has stored what it stores
  // in `round`.
  size_t FinishAfter(size_t round, int32_t sender) const {
    while (!std::binary_search(ends_[round].await_finishes.begin(),
                               ends_[round].await_finishes.end(), sender)) {
      ++round;
    }
    return round;
  }

  const PlanFile& plan_;
  const fb::Body& body_;
  const int32_t rank_;
  const fb::RankProgram& program_;
  const RankSchedule& schedule_;
  const DirectPairs& peers_;
  const bool has_steps_;
  const std::vector<DirectEnds> ends_;
  const TensorTable tensors_;
  // Of what comes: by round of the schedule and sender.
  std::map<std::pair<size_t, int32_t>, DirectSteps> steps_;
  Arrivals list_;
};

}  // namespace

Arrivals ListArrivals(const PlanFile& plan, int32_t rank,
                      const RankSchedule& schedule, const DirectPairs& peers) {
  return ArrivalList(plan, rank, schedule, peers).List();
}

}  // namespace refit
