// Work that keeps a stream busy.
#ifndef REFIT_TESTS_GPU_SPIN_H_
#define REFIT_TESTS_GPU_SPIN_H_

#include <cuda_runtime_api.h>

#include <chrono>

namespace refit {

cudaError_t LaunchSpin(std::chrono::nanoseconds time, cudaStream_t stream);

}  // namespace refit

#endif  // REFIT_TESTS_GPU_SPIN_H_
