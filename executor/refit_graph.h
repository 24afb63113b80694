// RefitGraph: a rank's rounds, recorded to be launched again.
#ifndef REFIT_EXECUTOR_REFIT_GRAPH_H_
#define REFIT_EXECUTOR_REFIT_GRAPH_H_

#include <cstdint>
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
  // How often the graph was dropped: what a recording that begins now gives to
  // Set.
  uint64_t Drops() {
    std::lock_guard lock(mutex_);
    return drops_;
  }
  // Frees `graph` if Drop was called since: nobody would drop it again, and an
  // abort that is under way waits for it.
  void Set(std::unique_ptr<DeviceGraph> graph, uint64_t drops) {
    std::lock_guard lock(mutex_);
    if (drops == drops_) graph_ = std::move(graph);
  }
  void Drop() {
    std::lock_guard lock(mutex_);
    ++drops_;
    graph_ = nullptr;
  }
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
  uint64_t drops_ = 0;
  std::unique_ptr<DeviceGraph> graph_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_REFIT_GRAPH_H_
