// ScopedInterruption: ends what a thread waits in before its deadline.
//
//   const ScopedInterruption interruption([&] {
//     return stopping ? absl::CancelledError("the worker stops")
//                     : absl::OkStatus();
//   });
//   absl::Status status = executor->Run(stream, options);
#ifndef REFIT_CONTROL_INCLUDE_REFIT_INTERRUPTION_H_
#define REFIT_CONTROL_INCLUDE_REFIT_INTERRUPTION_H_

#include <chrono>
#include <functional>

#include "absl/status/status.h"

namespace refit {

// Why a wait must end before its deadline; OK as long as it may go on.
using Interruption = std::function<absl::Status()>;

// While it lives, every call of this library on its thread that waits for other
// ranks (ConnectTcp, the Executor's Connect, Bind, Run and Wait, the calls of
// ControlPlane and Transport) asks `interruption` about every 100 ms, with no
// lock held. The first error ends that wait and all later ones of the scope:
// the call fails with it, and the step fails on all ranks, which learn its
// message. Scopes of a thread nest; the innermost counts.
class ScopedInterruption {
 public:
  explicit ScopedInterruption(Interruption interruption);
  ~ScopedInterruption();
  ScopedInterruption(const ScopedInterruption&) = delete;
  ScopedInterruption& operator=(const ScopedInterruption&) = delete;

 private:
  friend absl::Status PollInterruption();
  friend absl::Status InterruptionStatus();

  const Interruption interruption_;
  ScopedInterruption* const outer_;
  std::chrono::steady_clock::time_point next_poll_;
  absl::Status status_;  // the first error
};

}  // namespace refit

#endif  // REFIT_CONTROL_INCLUDE_REFIT_INTERRUPTION_H_
