#include "control/own_thread.h"

#include <signal.h>

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

// A new thread begins with the signals blocked that its maker has blocked.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // The thread's own faults: blocked, they would end the process without its
    // handlers, which may have something to report.
    for (const int fault :
         {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP}) {
      sigdelset(&all, fault);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

absl::Status StartThread(std::thread& thread, const char* what,
                         std::function<void()> body) {
  const SignalsBlocked blocked;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start ", what, ": ", error.what()));
  }
  return absl::OkStatus();
}

}  // namespace refit
