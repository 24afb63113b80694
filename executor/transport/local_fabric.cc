#include "executor/transport/local_fabric.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "executor/transport/handshake.h"

namespace refit {

LocalFabric::LocalFabric(int32_t world_size)
    : state_(std::make_unique<State>(world_size)) {}

LocalFabric::~LocalFabric() = default;

void LocalFabric::State::Abort(uint64_t step, int32_t rank,
                               const absl::Status& status) {
  {
    std::lock_guard lock(mutex);
    if (step <= aborted_step) return;
    MarkAborted(step, AbortedBy(rank, status));
  }
  WakeAll();
}

void LocalFabric::State::Begin(uint64_t step, int32_t rank,
                               StepPurpose purpose) {
  {
    std::lock_guard lock(mutex);
    const absl::Status status = purposes.Add(rank, step, purpose);
    if (status.ok() || step <= aborted_step) return;
    MarkAborted(step, status);
  }
  WakeAll();
}

// The caller holds `mutex`.
void LocalFabric::State::MarkAborted(uint64_t step, const absl::Status& status,
                                     bool in_handshake) {
  abort_status = status;
  arrived.assign(arrived.size(), false);
  arrivals = 0;
  aborted_step = step;
  aborted_in_handshake = in_handshake;
}

void LocalFabric::State::WakeAll() {
  changed.notify_all();
  for (local::Endpoint& endpoint : endpoints) {
    endpoint.fence.Abort(aborted_step);
    // Taken so that no rank is between its check and its wait.
    { std::lock_guard lock(endpoint.mutex); }
    endpoint.changed.notify_all();
  }
}

absl::Status LocalFabric::State::AbortStatus() {
  std::lock_guard lock(mutex);
  return abort_status;
}

int32_t LocalFabric::State::FirstArrived() const {
  const auto first = std::find(arrived.begin(), arrived.end(), true);
  return static_cast<int32_t>(first - arrived.begin());
}

// Who has yet to come to the gathering in progress.
std::vector<int32_t> LocalFabric::State::Missing() const {
  std::vector<int32_t> missing;
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    if (!arrived[rank]) missing.push_back(static_cast<int32_t>(rank));
  }
  return missing;
}

// Returns on all ranks when all have come, with the comparison of their
// records.
absl::Status LocalFabric::State::Gather(uint64_t step, int32_t rank,
                                        const HandshakeRecord& record,
                                        Deadline deadline,
                                        std::string_view what) {
  std::unique_lock lock(mutex);
  if (step <= aborted_step) return abort_status;
  records[rank] = {rank, record};
  arrived[rank] = true;
  if (++arrivals == static_cast<int32_t>(arrived.size())) {
    outcome = CompareRecords(records);
    arrived.assign(arrived.size(), false);
    arrivals = 0;
    ++gatherings;
    changed.notify_all();
    return outcome;
  }
  const bool in_handshake = what == kHandshake;
  const uint64_t gathering = gatherings;
  const bool in_time = WaitUntil(
      changed, lock, deadline,
      [&] { return gatherings != gathering || step <= aborted_step; },
      [&](int64_t seconds) {
        // One of those that wait speaks for all.
        if (FirstArrived() == rank) {
          ReportWait(std::string(what), RanksText(Missing()), seconds);
        }
      });
  if (gatherings != gathering) return outcome;
  if (in_time) return abort_status;
  if (const absl::Status status = InterruptionStatus(); !status.ok()) {
    MarkAborted(step, AbortedBy(rank, status), in_handshake);
    lock.unlock();
    WakeAll();
    return status;
  }
  const std::vector<int32_t> missing = Missing();
  absl::Status status = absl::DeadlineExceededError(absl::StrCat(
      std::string(what), ": ", missing.size(), " of ", arrived.size(),
      " ranks did not come before the deadline, "
      "the first is rank ",
      missing.front()));
  MarkAborted(step, AbortedBy(rank, status), in_handshake);
  lock.unlock();
  WakeAll();
  return status;
}

}  // namespace refit
