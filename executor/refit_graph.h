// RefitGraph: a rank's rounds, recorded to be launched again.
#ifndef REFIT_EXECUTOR_REFIT_GRAPH_H_
#define REFIT_EXECUTOR_REFIT_GRAPH_H_

#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "refit/device.h"

namespace refit {

// Thread-safe: a transport drops the graph when it breaks off work, on a thread
// of its own.
class RefitGraph {
 public:
  void Set(std::unique_ptr<DeviceGraph> graph) {
    std::lock_guard lock(mutex_);
    graph_ = std::move(graph);
  }
  void Drop() { Set(nullptr); }
  bool IsSet() {
    std::lock_guard lock(mutex_);
    return graph_ != nullptr;
  }
  // Does nothing if the graph was dropped: the transport says why.
  absl::Status Launch(Stream stream) {
    std::lock_guard lock(mutex_);
    return graph_ == nullptr ? absl::OkStatus() : graph_->Launch(stream);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<DeviceGraph> graph_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_REFIT_GRAPH_H_
