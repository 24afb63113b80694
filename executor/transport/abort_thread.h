// AbortThread: aborts a communicator beside whoever may not wait for it.
#ifndef REFIT_EXECUTOR_TRANSPORT_ABORT_THREAD_H_
#define REFIT_EXECUTOR_TRANSPORT_ABORT_THREAD_H_

#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "executor/transport/nccl_communicator.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

// Made while nothing has failed: who aborts may be unable to make threads. An
// abort that does not return keeps the thread and the communicator, and nobody
// else.
class AbortThread {
 public:
  static absl::StatusOr<std::unique_ptr<AbortThread>> Start(Device& device);
  ~AbortThread();

  void Begin(std::shared_ptr<NcclCommunicator> communicator);
  // Returns when what was begun is over; false: not before the deadline.
  bool Await(Deadline deadline);

 private:
  struct State;
  AbortThread();

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_ABORT_THREAD_H_
