// Statuses as Python exceptions: refit.errors says which class each code is.
#ifndef REFIT_PYTHON_SRC_STATUS_H_
#define REFIT_PYTHON_SRC_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace refit::python {

// Thrown to the caller in Python, with or without the interpreter's lock.
struct StatusError {
  absl::Status status;
};

inline void Check(const absl::Status& status) {
  if (!status.ok()) throw StatusError{status};
}

template <typename T>
T Check(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}

}  // namespace refit::python

#endif  // REFIT_PYTHON_SRC_STATUS_H_
