#include "executor/executor_calls.h"

namespace refit {

absl::Status OutOfOrder(int32_t rank, const std::string& call,
                        ExecutorState state) {
  const auto first = [&]() -> std::string {
    switch (state) {
      case ExecutorState::kLoaded:
        return call == "Bind" ? "connect first" : "connect and bind first";
      case ExecutorState::kConnected:
        return "bind first";
      case ExecutorState::kBound:
      case ExecutorState::kTorn:
        return "run first";
      case ExecutorState::kRunning:
        return "wait first";
      case ExecutorState::kClosed:
        return "make a new executor";
    }
    return "";
  };
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, ": ", call, " while ",
                   std::string(ExecutorStateName(state)), ": ", first()));
}

}  // namespace refit
