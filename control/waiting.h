// How the calls that wait for other ranks wait: until a deadline, until
// interrupted (refit/interruption.h), and not without a word.
#ifndef REFIT_CONTROL_WAITING_H_
#define REFIT_CONTROL_WAITING_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// Asks this thread's interruption, if 100 ms have passed since the last time.
// It may run code of the caller's: hold no lock.
absl::Status PollInterruption();

// The error that ended this thread's waits, if one did. Asks nobody.
absl::Status InterruptionStatus();

// How long a wait until `deadline` may sleep before it polls.
std::chrono::steady_clock::time_point NextPoll(
    std::chrono::steady_clock::time_point deadline);

// How long a wait that polls a device may sleep, after it has waited so long:
// not at all in the first 2 ms, then a hundredth of that, 1 ms at most.
std::chrono::steady_clock::duration SleepAfter(
    std::chrono::steady_clock::duration waited);

// How long ago `start` was, in seconds.
double SecondsSince(std::chrono::steady_clock::time_point start);

// When a wait that goes on is reported: after 10 s, and again when it has
// lasted twice as long.
class WaitReminder {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit WaitReminder(TimePoint start) : start_(start) {}
  WaitReminder() : WaitReminder(std::chrono::steady_clock::now()) {}

  TimePoint next() const { return start_ + wait_; }
  // Whether the report is due; the next one is at the next() time after `now`.
  bool IsDue(TimePoint now);
  // Whole seconds since the start.
  int64_t Seconds(TimePoint now) const;

 private:
  TimePoint start_;
  std::chrono::seconds wait_{10};
};

// "rank 3", "ranks 3, 5", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more".
std::string RanksText(absl::Span<const int32_t> ranks);

// Logs "WHO: waiting for WHOM (SECONDS s)", and "; WHY" if there is a reason to
// be told.
void ReportWait(const std::string& who, const std::string& whom,
                int64_t seconds, const std::string& why = "");

// Waits on `changed` until `done()`. Returns what it says in the end: false at
// the deadline, and where InterruptionStatus() is an error. `report(seconds)`
// is called with the lock held, whenever the wait is to be reported.
template <typename Done, typename Report>
bool WaitUntil(std::condition_variable& changed,
               std::unique_lock<std::mutex>& lock,
               std::chrono::steady_clock::time_point deadline, Done done,
               Report report) {
  WaitReminder reminder;
  while (true) {
    const auto limit = std::min(deadline, reminder.next());
    if (changed.wait_until(lock, NextPoll(limit), done)) return true;
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    if (reminder.IsDue(now)) report(reminder.Seconds(now));
    lock.unlock();
    const absl::Status interrupted = PollInterruption();
    lock.lock();
    if (!interrupted.ok()) return done();
  }
}

}  // namespace refit

#endif  // REFIT_CONTROL_WAITING_H_
