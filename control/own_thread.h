// How Refit starts threads of its own inside somebody else's process.
#ifndef REFIT_CONTROL_OWN_THREAD_H_
#define REFIT_CONTROL_OWN_THREAD_H_

#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace refit {

// Starts `thread`, to which the process's signals are not delivered: handlers
// run on the process's own threads, and calls of this one are not interrupted.
// Error: kResourceExhausted, "cannot start WHAT: ...".
absl::Status StartThread(std::thread& thread, const char* what,
                         std::function<void()> body);

}  // namespace refit

#endif  // REFIT_CONTROL_OWN_THREAD_H_
