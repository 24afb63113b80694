// LocalTransport: ranks are threads of one process and share a LocalFabric.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_LOCAL_TRANSPORT_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_LOCAL_TRANSPORT_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "refit/transport.h"

namespace refit {

// The ranks of one process share it. Thread-safe.
//
// A send offers its bytes and returns when the receiver has copied them. The
// fabric is stricter than NCCL: a send that meets a receive of another round or
// size is an error on all ranks, not undefined behavior.
class LocalFabric {
 public:
  explicit LocalFabric(int32_t world_size);
  ~LocalFabric();
  LocalFabric(const LocalFabric&) = delete;
  LocalFabric& operator=(const LocalFabric&) = delete;

  // Returns the transport of `rank`. The fabric must outlive it. Errors:
  // kInvalidArgument (no such rank), kAlreadyExists (called before for it).
  absl::StatusOr<std::unique_ptr<Transport>> CreateTransport(int32_t rank);

 private:
  friend class LocalTransport;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_LOCAL_TRANSPORT_H_
