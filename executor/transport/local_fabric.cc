#include "executor/transport/local_fabric.h"

#include <memory>

#include "absl/strings/str_cat.h"
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
    MarkAborted(step, rank, status);
  }
  WakeAll();
}

// The caller holds `mutex`.
void LocalFabric::State::MarkAborted(uint64_t step, int32_t rank,
                                     const absl::Status& status) {
  const bool late = status.code() == absl::StatusCode::kDeadlineExceeded;
  abort_status = absl::Status(
      late ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kAborted,
      absl::StrCat("aborted by rank ", rank, ": ", status.message()));
  arrived.assign(arrived.size(), false);
  arrivals = 0;
  aborted_step = step;
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

// Returns on all ranks when all have come, with the comparison of their
// records.
absl::Status LocalFabric::State::Gather(uint64_t step, int32_t rank,
                                        const HandshakeRecord& record,
                                        Deadline deadline, const char* what) {
  std::unique_lock lock(mutex);
  if (step <= aborted_step) return abort_status;
  records[rank] = record;
  arrived[rank] = true;
  if (++arrivals == static_cast<int32_t>(arrived.size())) {
    outcome = CompareRecords(records);
    arrived.assign(arrived.size(), false);
    arrivals = 0;
    ++gatherings;
    changed.notify_all();
    return outcome;
  }
  const uint64_t gathering = gatherings;
  const bool in_time = changed.wait_until(lock, deadline, [&] {
    return gatherings != gathering || step <= aborted_step;
  });
  if (gatherings != gathering) return outcome;
  if (in_time) return abort_status;
  size_t missing = 0;
  while (arrived[missing]) ++missing;
  absl::Status status = absl::DeadlineExceededError(absl::StrCat(
      what, ": ", arrived.size() - arrivals, " of ", arrived.size(),
      " ranks did not come before the deadline, "
      "the first is rank ",
      missing));
  MarkAborted(step, rank, status);
  lock.unlock();
  WakeAll();
  return status;
}

}  // namespace refit
