// TimeSum: how long parts of a refit took on their streams, added up.
//
// Parts may overlap, so a sum may exceed the time that passed. It is read when
// the refit is over: nobody waits for a point meanwhile.
#ifndef REFIT_EXECUTOR_TIME_SUM_H_
#define REFIT_EXECUTOR_TIME_SUM_H_

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "refit/device.h"

namespace refit {

class TimeSum {
 public:
  // Makes room for so many parts. Without it nothing is timed.
  absl::Status Reserve(size_t parts, Device& device) {
    timers_.clear();
    timed_ = 0;
    for (size_t i = 0; i < parts; ++i) {
      absl::StatusOr<std::unique_ptr<DeviceTimer>> timer = device.CreateTimer();
      if (!timer.ok()) return timer.status();
      timers_.push_back(*std::move(timer));
    }
    return absl::OkStatus();
  }

  // Forgets what was timed.
  void Restart() { timed_ = 0; }

  // Times what `enqueue` puts on `stream`, as one more part. Allocates nothing.
  template <typename Enqueue>
  absl::Status Time(Stream stream, const Enqueue& enqueue) {
    if (timed_ == timers_.size()) return enqueue();
    DeviceTimer& timer = *timers_[timed_++];
    absl::Status status = timer.Start(stream);
    if (status.ok()) status = enqueue();
    if (status.ok()) status = timer.Stop(stream);
    return status;
  }

  // What the parts took since Restart. They are done.
  absl::StatusOr<double> Seconds() const {
    double sum = 0;
    for (size_t i = 0; i < timed_; ++i) {
      const absl::StatusOr<double> seconds = timers_[i]->Seconds();
      if (!seconds.ok()) return seconds.status();
      sum += *seconds;
    }
    return sum;
  }

 private:
  std::vector<std::unique_ptr<DeviceTimer>> timers_;
  size_t timed_ = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TIME_SUM_H_
