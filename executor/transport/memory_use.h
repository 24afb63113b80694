// Who uses whose memory in direct rounds. A rank reaches its peers' memory by
// the addresses of a thread of the same process, or by a mapping. Either lets
// it store there after the peer has taken the memory for something else.
#ifndef REFIT_EXECUTOR_TRANSPORT_MEMORY_USE_H_
#define REFIT_EXECUTOR_TRANSPORT_MEMORY_USE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/device/shared_words.h"

namespace refit {

// One rank's part, from a Connect to the next. Begin, End and IsUsing may be
// called by any thread, the others by the rank's own. The words of a rank tell
// for each other one whether that uses its memory, and at last whether the rank
// has revoked it. A user holds its word, so that a killed one uses nothing.
class MemoryUse {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Error: kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<MemoryUse>> Create(int32_t rank,
                                                           int32_t world_size);
  ~MemoryUse() { End(); }

  // What the peers need.
  absl::StatusOr<std::string> Export() { return own_->Show(); }
  // Peers whose words it cannot open do not hear of this rank's use. The first
  // such error, SharedWords::Open's, names the peer.
  absl::Status Connect(absl::Span<const int32_t> peers,
                       absl::Span<const std::string> exported,
                       Deadline deadline);

  // From now on, until End, this rank may use the memory of its peers. A peer
  // that has revoked its memory: this rank must not.
  std::optional<int32_t> Begin();
  void End();
  // Whether this rank may use memory of others now.
  bool IsUsing();

  // From now on nobody can begin to use this rank's memory.
  void Revoke();
  // Returns when nobody uses it, or with those that do at the deadline, or 2 s
  // after the call began if the thread is interrupted.
  std::vector<int32_t> AwaitUnused(Deadline deadline);

 private:
  struct Peer {
    int32_t rank = 0;
    std::unique_ptr<SharedWords> words;
  };

  MemoryUse(int32_t rank, int32_t world_size, std::unique_ptr<SharedWords> own)
      : rank_(rank), world_size_(world_size), own_(std::move(own)) {}
  std::vector<int32_t> Users();

  const int32_t rank_;
  const int32_t world_size_;
  const std::unique_ptr<SharedWords> own_;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  bool is_using_ = false;  // guarded by mutex_
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_MEMORY_USE_H_
