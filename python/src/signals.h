// Signals of the interpreter, in calls that run without its lock.
#ifndef REFIT_PYTHON_SRC_SIGNALS_H_
#define REFIT_PYTHON_SRC_SIGNALS_H_

#include <nanobind/nanobind.h>

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace refit::python {

// Keeps what a signal's handler raised until the call has returned.
class Signals {
 public:
  // Runs the handlers of pending signals: kCancelled if one raised. Call it
  // without the lock. On a thread that is not Python's main one none is ever
  // pending.
  absl::Status Poll() {
    const nanobind::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() == 0) return absl::OkStatus();
    raised_.emplace();
    return absl::CancelledError(absl::StrCat(
        "interrupted by ", nanobind::type_name(raised_->type()).c_str()));
  }

  // Throws what Poll has kept. Call it with the lock.
  void Rethrow() {
    if (raised_.has_value()) throw std::move(*raised_);
  }

 private:
  std::optional<nanobind::python_error> raised_;
};

}  // namespace refit::python

#endif  // REFIT_PYTHON_SRC_SIGNALS_H_
