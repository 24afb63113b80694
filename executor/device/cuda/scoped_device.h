// The current device of a thread, for the length of a scope.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_SCOPED_DEVICE_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_SCOPED_DEVICE_H_

#include <optional>

namespace refit {

// Makes `device` the calling thread's current one, until the end of scope. The
// thread then has what it had before, also none: a cudaSetDevice back would
// make a context on the first GPU for a thread that has called no CUDA, in 0.2
// s.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  bool is_pushed_ = false;
  std::optional<int> before_;  // where nothing can be pushed
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_SCOPED_DEVICE_H_
