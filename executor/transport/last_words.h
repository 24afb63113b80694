// What the transports say and how long they listen when a refit has failed.
#ifndef REFIT_EXECUTOR_TRANSPORT_LAST_WORDS_H_
#define REFIT_EXECUTOR_TRANSPORT_LAST_WORDS_H_

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "refit/transport.h"

namespace refit {

// A rank that is done waits for the others for so long after the deadline: the
// word of one that hangs, which says where, is on its way then.
inline constexpr std::chrono::milliseconds kLastWords(250);

inline Deadline Later(Deadline deadline, std::chrono::milliseconds by) {
  return deadline > Deadline::max() - by ? Deadline::max() : deadline + by;
}

// `status`, with where it happened if it does not say so itself.
inline absl::Status InPlace(const absl::Status& status,
                            const std::string& where) {
  if (absl::StartsWith(status.message(), where)) return status;
  return absl::Status(status.code(),
                      absl::StrCat(where, ": ", status.message()));
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_LAST_WORDS_H_
