// Who uses whose memory where ranks are threads of one process. They reach it
// by its own addresses, so a rank must not free it while others use it, which
// neither a driver nor a mapping keeps it from.
#ifndef REFIT_EXECUTOR_TRANSPORT_MEMORY_USE_H_
#define REFIT_EXECUTOR_TRANSPORT_MEMORY_USE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "control/token.h"

namespace refit {

// The ranks that use one rank's memory. Thread-safe.
class MemoryUsers {
 public:
  // False: the rank has revoked its memory.
  bool Add(int32_t user);
  void Remove(int32_t user);
  // Nobody can be added any more.
  void Revoke();
  // Returns when there are none, or with those that are left at the deadline.
  std::vector<int32_t> AwaitNone(
      std::chrono::steady_clock::time_point deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::set<int32_t> users_;
  bool is_revoked_ = false;
};

// One rank's part, from a Connect to the next. Begin and End may be called by
// any thread, the others by the rank's own.
class MemoryUse {
 public:
  explicit MemoryUse(int32_t rank);
  ~MemoryUse();

  // What the peers need.
  std::string Export() const { return std::string(TokenBytes(token_)); }
  // Peers of other processes, which map the memory and so keep it, are left
  // out.
  void Connect(absl::Span<const int32_t> peers,
               absl::Span<const std::string> exported);

  // From now on, until End, this rank may use the memory of its peers. A peer
  // that has revoked its memory: this rank must not.
  std::optional<int32_t> Begin();
  void End();
  // Whether this rank may use memory of others now.
  bool IsUsing();

  // This rank's own memory, as in MemoryUsers.
  void Revoke() { own_->Revoke(); }
  std::vector<int32_t> AwaitUnused(
      std::chrono::steady_clock::time_point deadline) {
    return own_->AwaitNone(deadline);
  }

 private:
  struct Peer {
    int32_t rank = 0;
    std::shared_ptr<MemoryUsers> users;
  };

  const int32_t rank_;
  // A peer may hold this longer than the rank does.
  const std::shared_ptr<MemoryUsers> own_;
  const Token token_;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  bool is_using_ = false;  // guarded by mutex_
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_MEMORY_USE_H_
