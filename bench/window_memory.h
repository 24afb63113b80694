// Memory that all ranks of a communicator register with NCCL.
#ifndef REFIT_BENCH_WINDOW_MEMORY_H_
#define REFIT_BENCH_WINDOW_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "bench/window_api.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/nccl_communicator.h"

namespace refit {

// Freed by scope; before that Deregister, then the communicator's end.
class WindowMemory {
 public:
  // Collective; all ranks give the same size. Error: kUnimplemented where NCCL
  // registers nothing. The other arguments must outlive the result.
  static absl::StatusOr<std::unique_ptr<WindowMemory>> Create(
      const nccl::Api& api, const nccl::WindowApi& windows,
      NcclCommunicator& communicator, uint64_t size_bytes);
  ~WindowMemory();

  std::byte* data() const { return data_; }
  nccl::Window window() const { return window_; }

  void Deregister(NcclCommunicator& communicator);

 private:
  explicit WindowMemory(const nccl::WindowApi& windows) : windows_(windows) {}

  const nccl::WindowApi& windows_;
  std::byte* data_ = nullptr;
  nccl::Window window_ = nullptr;
};

}  // namespace refit

#endif  // REFIT_BENCH_WINDOW_MEMORY_H_
