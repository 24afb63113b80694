#include "executor/transport/enqueued_rounds.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "executor/transport/handshake.h"

namespace refit {
namespace {

std::string RoundText(uint32_t index, const Operation& first,
                      size_t operations) {
  std::string text = OperationText(index, first);
  if (operations > 1) {
    absl::StrAppend(&text, " and ", operations - 1, " more operations");
  }
  return text;
}

}  // namespace

std::string EnqueuedRounds::Text(const ExchangeRound& round) {
  return RoundText(round.index, round.operations.front(),
                   round.operations.size());
}

absl::Status EnqueuedRounds::CreateProgress(Device& device) {
  absl::StatusOr<std::unique_ptr<DeviceProgress>> progress =
      device.CreateProgress();
  if (progress.ok()) progress_ = *std::move(progress);
  return progress.status();
}

void EnqueuedRounds::Restart() {
  count_ = 0;
  progress_->Reset();
}

size_t EnqueuedRounds::Add(const ExchangeRound& round) {
  if (count_ == rounds_.size()) rounds_.emplace_back();
  rounds_[count_] = {.index = round.index,
                     .first = round.operations.front(),
                     .operations = round.operations.size()};
  return count_++;
}

std::optional<std::string> EnqueuedRounds::Unfinished() const {
  const size_t over = progress_->reached();
  if (over >= count_) return std::nullopt;
  const Round& round = rounds_[over];
  return RoundText(round.index, round.first, round.operations);
}

}  // namespace refit
