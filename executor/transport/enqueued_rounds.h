// EnqueuedRounds: which staged rounds of a refit did not end yet.
#ifndef REFIT_EXECUTOR_TRANSPORT_ENQUEUED_ROUNDS_H_
#define REFIT_EXECUTOR_TRANSPORT_ENQUEUED_ROUNDS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

// Thread-compatible, but MarkEnd may go on beside the others. It allocates in
// the first refit only.
class EnqueuedRounds {
 public:
  // By its first operation. Requires: it has one.
  static std::string Text(const ExchangeRound& round);

  // Before anything else. Once is enough.
  absl::Status CreateProgress(Device& device);

  // A refit begins.
  void Restart();

  // Returns the round's number. Before it is issued, so that one that hangs
  // there is known.
  size_t Add(const ExchangeRound& round);
  // The round is over when `stream` comes to this point.
  absl::Status MarkEnd(size_t number, Stream stream) {
    return progress_->Mark(static_cast<uint32_t>(number) + 1, stream);
  }

  // The first that is not over, as text; none if all are.
  std::optional<std::string> Unfinished() const;

 private:
  struct Round {
    uint32_t index = 0;
    Operation first;
    size_t operations = 0;
  };
  std::vector<Round> rounds_;  // of the longest refit, in order
  size_t count_ = 0;           // of this one
  std::unique_ptr<DeviceProgress> progress_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_ENQUEUED_ROUNDS_H_
