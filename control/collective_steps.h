// What the ranks do in their steps, as rank 0 sees it: who has come to which
// collective, and which steps have failed. Decides each once for all ranks.
#ifndef REFIT_CONTROL_COLLECTIVE_STEPS_H_
#define REFIT_CONTROL_COLLECTIVE_STEPS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "control/frame.h"
#include "control/step_purposes.h"
#include "control/waiting.h"

namespace refit::control {

class CollectiveSteps {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Send = std::function<void(int32_t rank, SharedBytes bytes)>;

  CollectiveSteps(int32_t world_size, Send send)
      : send_(std::move(send)), steps_(world_size), has_left_(world_size) {}

  // These return false if no rank that keeps to the protocol sends that.
  bool Begin(int32_t rank, uint64_t step, uint64_t purpose);
  bool Contribute(int32_t rank, uint64_t step, uint64_t sequence,
                  Contribution contribution, TimePoint now);
  bool Abort(int32_t rank, uint64_t step, const absl::Status& status);

  // The rank will not come to anything more. If it has said so, steps fail that
  // others have begun and it has not; if it is `lost` for that reason, all do.
  void Leave(int32_t rank, const std::string& lost = "");
  uint64_t newest_step() const { return newest_step_; }
  // Fails the steps in which someone's deadline has passed.
  void Expire(TimePoint now);
  // Reports the ranks that others have been waiting for, when it is time to.
  void ReportMissing(TimePoint now);
  // When to call Expire, and ReportMissing, next; the end of time if there is
  // nothing to wait for.
  TimePoint NextDeadline() const;
  TimePoint NextReport() const;

 private:
  struct Collective {
    explicit Collective(size_t world_size) : contributions(world_size) {}

    std::vector<std::optional<Contribution>> contributions;  // by rank
    size_t arrivals = 0;
    int32_t first_rank = -1;  // to come
    TimePoint deadline = TimePoint::max();
    int32_t deadline_rank = -1;  // whose deadline it is
  };
  using Key = std::pair<uint64_t, uint64_t>;  // step, sequence

  // Why a step failed.
  struct Failure {
    absl::Status status;
    int32_t rank = -1;           // that failed it
    absl::Status for_rank = {};  // what that is told instead, unless OK
    // Whoever comes later was not called as the others were. Not so where ranks
    // waited in a handshake, or nobody had begun the step.
    bool can_be_missed = true;
  };

  // What some ranks wait in while others have not come to it: the newest step,
  // and its collective once there is one. nullopt: nobody waits.
  std::optional<Key> Waited() const;

  int32_t world_size() const { return static_cast<int32_t>(steps_.size()); }
  bool RanksExist(const std::vector<int32_t>& ranks) const;
  int32_t MissingFrom(const Collective& collective) const;
  void Finish(const Key& key, const Collective& collective);
  void FinishCompare(const Key& key, const Collective& collective);
  void FinishExchange(const Key& key, const Collective& collective);
  bool FailIfTooLarge(const Key& key, const Collective& collective,
                      const Results& results);
  void FailStep(uint64_t step, Failure failure);
  void FailIfLeft(uint64_t step);
  void SendFailure(int32_t rank, uint64_t step, const Failure& failure);
  void ForgetPastFailures();

  Send send_;
  std::vector<uint64_t> steps_;  // each rank's current one
  struct Departure {
    int32_t rank;
    bool is_lost;
    absl::Status why;
  };
  std::vector<Departure> left_;  // the first one first
  std::vector<bool> has_left_;   // by rank
  std::map<Key, Collective> collectives_;
  std::map<uint64_t, Failure> failures_;  // of steps some rank may yet enter
  StepPurposes purposes_;
  uint64_t newest_step_ = 0;        // that a rank has begun
  std::optional<Key> reminder_of_;  // what reminder_ is of
  WaitReminder reminder_;
};

}  // namespace refit::control

#endif  // REFIT_CONTROL_COLLECTIVE_STEPS_H_
