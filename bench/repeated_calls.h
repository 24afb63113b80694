// What a method enqueues alike each time: call by call, or as one CUDA graph.
#ifndef REFIT_BENCH_REPEATED_CALLS_H_
#define REFIT_BENCH_REPEATED_CALLS_H_

#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "refit/device.h"

namespace refit {

// Goes before the communicators that its graph uses.
class RepeatedCalls {
 public:
  RepeatedCalls(Device& device, bool graph) : device_(device), graph_(graph) {}

  absl::Status Enqueue(Stream stream,
                       absl::FunctionRef<absl::Status(Stream)> calls) {
    if (!graph_) return calls(stream);
    if (recorded_ == nullptr) {
      // NCCL connects and allocates in the first run, which cannot be recorded.
      absl::Status status = calls(stream);
      status.Update(device_.Synchronize(stream));
      if (!status.ok()) return status;
      absl::StatusOr<std::unique_ptr<DeviceGraph>> recorded =
          device_.Record([&](Stream to) { return calls(to); });
      if (!recorded.ok()) return recorded.status();
      recorded_ = *std::move(recorded);
    }
    return recorded_->Launch(stream);
  }

  void DropGraph() { recorded_ = nullptr; }

 private:
  Device& device_;
  const bool graph_;
  std::unique_ptr<DeviceGraph> recorded_;
};

}  // namespace refit

#endif  // REFIT_BENCH_REPEATED_CALLS_H_
