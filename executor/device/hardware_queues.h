// How many queues of a GPU the process has.
#ifndef REFIT_EXECUTOR_DEVICE_HARDWARE_QUEUES_H_
#define REFIT_EXECUTOR_DEVICE_HARDWARE_QUEUES_H_

#include <cstdlib>
#include <string_view>

namespace refit {

// The streams of a process pass a GPU in the order of their calls then. With 2
// to 32 connections none of 20 streams held up another (H100). CUDA reads the
// variable when the process first uses a GPU.
inline bool HasOneHardwareQueue() {
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return connections != nullptr && std::string_view(connections) == "1";
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HARDWARE_QUEUES_H_
