// Whether what all ranks did succeeded.
#ifndef REFIT_TESTS_EXECUTOR_ALL_OK_H_
#define REFIT_TESTS_EXECUTOR_ALL_OK_H_

#include <gtest/gtest.h>

#include <vector>

#include "absl/status/status.h"

namespace refit {

// `statuses`: by rank. A failure names the first rank that failed, and why.
inline testing::AssertionResult AllOk(
    const std::vector<absl::Status>& statuses) {
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    if (statuses[rank].ok()) continue;
    return testing::AssertionFailure()
           << "rank " << rank << ": " << statuses[rank];
  }
  return testing::AssertionSuccess();
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_ALL_OK_H_
