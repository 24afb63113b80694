#include "control/collective_steps.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"

namespace refit::control {
namespace {

using RankPairs = std::vector<std::pair<int32_t, int32_t>>;  // giver, taker

const char* Name(const Contribution& of) {
  return of.exchanges ? "exchange" : "comparison";
}

// "" if both ranks are in the same collective.
std::string CallDifference(const Contribution& a, int32_t rank_a,
                           const Contribution& b, int32_t rank_b) {
  if (a.exchanges == b.exchanges && a.what == b.what) return "";
  return absl::StrCat("ranks do not call the same: rank ", rank_a, " is in ",
                      Name(a), " \"", a.what, "\", rank ", rank_b, " in ",
                      Name(b), " \"", b.what, "\"");
}

// The first pair that is in `a` and not in `b`.
std::optional<std::pair<int32_t, int32_t>> FirstWithout(const RankPairs& a,
                                                        const RankPairs& b) {
  RankPairs without;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(),
                      std::back_inserter(without));
  if (without.empty()) return std::nullopt;
  return without.front();
}

void SortUnique(RankPairs& pairs) {
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
}

// "" if the ranks agree on who gives to whom.
std::string ExchangeDifference(
    const std::vector<std::optional<Contribution>>& contributions) {
  RankPairs given, expected;
  for (size_t i = 0; i < contributions.size(); ++i) {
    const auto rank = static_cast<int32_t>(i);
    for (int32_t peer : contributions[i]->to) given.emplace_back(rank, peer);
    for (int32_t peer : contributions[i]->from) {
      expected.emplace_back(peer, rank);
    }
  }
  SortUnique(given);
  SortUnique(expected);
  if (const auto pair = FirstWithout(given, expected)) {
    return absl::StrCat("rank ", pair->first, " gives to rank ", pair->second,
                        ", which does not expect it");
  }
  if (const auto pair = FirstWithout(expected, given)) {
    return absl::StrCat("rank ", pair->second, " expects from rank ",
                        pair->first, ", which does not give to it");
  }
  return "";
}

SharedBytes ResultFrame(const std::pair<uint64_t, uint64_t>& key,
                        const Results& results) {
  return EncodeShared(
      {FrameType::kResult, key.first, key.second, -1, ResultPayload(results)});
}

}  // namespace

bool CollectiveSteps::Begin(int32_t rank, uint64_t step, uint64_t purpose) {
  if (step <= steps_[rank] ||
      purpose > static_cast<uint64_t>(StepPurpose::kCheck)) {
    return false;
  }
  steps_[rank] = step;
  newest_step_ = std::max(newest_step_, step);
  const absl::Status status =
      purposes_.Add(rank, step, static_cast<StepPurpose>(purpose));
  if (!status.ok()) FailStep(step, {status});
  FailIfLeft(step);
  FailIfLeft(newest_step_ + 1);
  ForgetPastFailures();
  return true;
}

bool CollectiveSteps::Contribute(int32_t rank, uint64_t step, uint64_t sequence,
                                 Contribution contribution, TimePoint now) {
  if (step != steps_[rank] || !RanksExist(contribution.to) ||
      !RanksExist(contribution.from)) {
    return false;
  }
  // It came too late; the rank has been told of the failure.
  if (failures_.count(step) != 0) return true;
  const Key key(step, sequence);
  Collective& collective =
      collectives_.try_emplace(key, steps_.size()).first->second;
  if (collective.contributions[rank].has_value()) return false;
  if (collective.arrivals == 0) collective.first_rank = rank;
  const TimePoint deadline =
      now + std::chrono::milliseconds(
                std::min(contribution.remaining_ms, kRemainingMsMax));
  if (deadline < collective.deadline) {
    collective.deadline = deadline;
    collective.deadline_rank = rank;
  }
  collective.contributions[rank] = std::move(contribution);
  ++collective.arrivals;
  const std::string difference = CallDifference(
      *collective.contributions[collective.first_rank], collective.first_rank,
      *collective.contributions[rank], rank);
  if (!difference.empty()) {
    FailStep(step, {absl::InternalError(difference)});
  } else if (collective.arrivals == steps_.size()) {
    Finish(key, collective);
  } else {
    FailIfLeft(step);
  }
  return true;
}

bool CollectiveSteps::Abort(int32_t rank, uint64_t step,
                            const absl::Status& status) {
  // Of an earlier step: the rank went on while it was on its way.
  if (step > steps_[rank]) return false;
  FailStep(step, {AbortedBy(rank, status), rank});
  return true;
}

void CollectiveSteps::Leave(int32_t rank, const std::string& lost) {
  has_left_[rank] = true;
  left_.push_back(
      {rank, !lost.empty(),
       absl::UnavailableError(
           lost.empty()
               ? absl::StrCat("rank ", rank, " has closed its control plane")
               : absl::StrCat("rank ", rank, " is gone: ", lost))});
  std::set<uint64_t> steps(steps_.begin(), steps_.end());
  for (const auto& [key, collective] : collectives_) steps.insert(key.first);
  // So that the others know before they begin the next.
  steps.insert(newest_step_ + 1);
  for (const uint64_t step : steps) FailIfLeft(step);
}

void CollectiveSteps::Expire(TimePoint now) {
  while (true) {
    const auto late = std::find_if(
        collectives_.begin(), collectives_.end(),
        [&](const auto& entry) { return entry.second.deadline <= now; });
    if (late == collectives_.end()) return;
    const auto& [key, collective] = *late;
    const int32_t rank = collective.deadline_rank;
    const absl::Status status = absl::DeadlineExceededError(absl::StrCat(
        collective.contributions[rank]->what, ": ",
        steps_.size() - collective.arrivals, " of ", steps_.size(),
        " ranks did not come before the deadline, the first is rank ",
        MissingFrom(collective)));
    FailStep(key.first, {AbortedBy(rank, status), rank, status});
  }
}

std::optional<CollectiveSteps::Key> CollectiveSteps::Waited() const {
  if (failures_.count(newest_step_) != 0) return std::nullopt;
  if (!collectives_.empty()) return collectives_.rbegin()->first;
  const bool all_here =
      std::all_of(steps_.begin(), steps_.end(),
                  [&](uint64_t step) { return step == newest_step_; });
  if (all_here) return std::nullopt;
  return Key(newest_step_, 0);
}

void CollectiveSteps::ReportMissing(TimePoint now) {
  const std::optional<Key> waited = Waited();
  if (waited != reminder_of_) {
    reminder_of_ = waited;
    reminder_ = WaitReminder(now);
  }
  if (!waited.has_value() || !reminder_.IsDue(now)) return;
  const auto open = collectives_.find(*waited);
  std::vector<int32_t> missing;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    const bool came = open != collectives_.end()
                          ? open->second.contributions[rank].has_value()
                          : steps_[rank] == newest_step_;
    if (!came) missing.push_back(rank);
  }
  const std::string what =
      open == collectives_.end()
          ? "run"
          : open->second.contributions[open->second.first_rank]->what;
  ReportWait(what, RanksText(missing), reminder_.Seconds(now));
}

CollectiveSteps::TimePoint CollectiveSteps::NextReport() const {
  return reminder_of_.has_value() ? reminder_.next() : TimePoint::max();
}

CollectiveSteps::TimePoint CollectiveSteps::NextDeadline() const {
  TimePoint next = TimePoint::max();
  for (const auto& [key, collective] : collectives_) {
    next = std::min(next, collective.deadline);
  }
  return next;
}

bool CollectiveSteps::RanksExist(const std::vector<int32_t>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [&](int32_t rank) {
    return rank >= 0 && rank < world_size();
  });
}

// The first rank that has not come; there is one.
int32_t CollectiveSteps::MissingFrom(const Collective& collective) const {
  int32_t rank = 0;
  while (collective.contributions[rank].has_value()) ++rank;
  return rank;
}

void CollectiveSteps::Finish(const Key& key, const Collective& collective) {
  if (collective.contributions[0]->exchanges) {
    FinishExchange(key, collective);
  } else {
    FinishCompare(key, collective);
  }
  collectives_.erase(key);
}

// Few values differ, whatever the number of ranks, and all ranks get one frame.
void CollectiveSteps::FinishCompare(const Key& key,
                                    const Collective& collective) {
  Results values;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    if (values.size() == ControlPlane::kValuesMax) break;
    const std::string& theirs = collective.contributions[rank]->bytes;
    const bool is_known =
        std::any_of(values.begin(), values.end(),
                    [&](const auto& known) { return known.value == theirs; });
    if (!is_known) values.push_back({rank, theirs});
  }
  if (FailIfTooLarge(key, collective, values)) return;
  const SharedBytes bytes = ResultFrame(key, values);
  for (int32_t rank = 0; rank < world_size(); ++rank) send_(rank, bytes);
}

void CollectiveSteps::FinishExchange(const Key& key,
                                     const Collective& collective) {
  const auto& contributions = collective.contributions;
  const std::string difference = ExchangeDifference(contributions);
  if (!difference.empty()) {
    return FailStep(key.first, {absl::InternalError(absl::StrCat(
                                   contributions[0]->what, ": ", difference))});
  }
  const auto results = [&](int32_t rank) {
    Results of_peers;
    for (const int32_t peer : contributions[rank]->from) {
      of_peers.push_back({peer, contributions[peer]->bytes});
    }
    return of_peers;
  };
  // All sizes are looked at first: nobody may have a result of a step that
  // fails.
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    if (FailIfTooLarge(key, collective, results(rank))) return;
  }
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    send_(rank, ResultFrame(key, results(rank)));
  }
}

// Fails the step, which erases `collective`, if `results` are too large for a
// frame. Whether they are.
bool CollectiveSteps::FailIfTooLarge(const Key& key,
                                     const Collective& collective,
                                     const Results& results) {
  const uint64_t size = ResultBytes(results);
  if (size <= kPayloadBytesMax) return false;
  // What the server found wrong itself: all ranks are told the same.
  FailStep(key.first,
           {absl::ResourceExhaustedError(absl::StrCat(
               collective.contributions[0]->what, ": a result of ", size,
               " bytes exceeds the limit of ", kPayloadBytesMax))});
  return true;
}

// The first failure of a step counts, and is told to all ranks at once: one
// that is yet to begin the step is not to use memory in it that others free
// because it has failed. Erases the step's collectives.
void CollectiveSteps::FailStep(uint64_t step, Failure failure) {
  for (auto open = collectives_.lower_bound({step, 0});
       open != collectives_.end() && open->first.first == step; ++open) {
    const Collective& collective = open->second;
    failure.can_be_missed &=
        collective.contributions[collective.first_rank]->what != kHandshake;
  }
  const auto [entry, first] = failures_.emplace(step, std::move(failure));
  if (!first) return;
  collectives_.erase(
      collectives_.lower_bound({step, 0}),
      collectives_.upper_bound({step, std::numeric_limits<uint64_t>::max()}));
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    if (steps_[rank] <= step && !has_left_[rank]) {
      SendFailure(rank, step, entry->second);
    }
  }
  ForgetPastFailures();
}

// Its collectives would only say so in the end: work of the others that waits
// for the rank on a device should not wait until then.
void CollectiveSteps::FailIfLeft(uint64_t step) {
  for (const auto& [rank, is_lost, why] : left_) {
    bool is_missing = is_lost || steps_[rank] < step;
    for (auto open = collectives_.lower_bound({step, 0});
         open != collectives_.end() && open->first.first == step; ++open) {
      is_missing |= !open->second.contributions[rank].has_value();
    }
    if (!is_missing) continue;
    return FailStep(step, {.status = why,
                           .rank = rank,
                           .can_be_missed = !is_lost && step <= newest_step_});
  }
}

void CollectiveSteps::SendFailure(int32_t rank, uint64_t step,
                                  const Failure& failure) {
  const bool own = rank == failure.rank && !failure.for_rank.ok();
  const bool missed = steps_[rank] < step && failure.can_be_missed;
  send_(rank,
        EncodeShared({FrameType::kAborted, step, missed ? kMissed : 0,
                      failure.rank,
                      StatusPayload(own ? failure.for_rank : failure.status)}));
}

void CollectiveSteps::ForgetPastFailures() {
  if (failures_.empty()) return;
  uint64_t first = std::numeric_limits<uint64_t>::max();
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    if (!has_left_[rank]) first = std::min(first, steps_[rank]);
  }
  failures_.erase(failures_.begin(), failures_.lower_bound(first));
}

}  // namespace refit::control
