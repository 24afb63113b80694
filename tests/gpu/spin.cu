#include <cstdint>

#include "tests/gpu/spin.h"

namespace refit {
namespace {

__device__ uint64_t Nanoseconds() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void SpinKernel(uint64_t nanoseconds) {
  const uint64_t start = Nanoseconds();
  while (Nanoseconds() - start < nanoseconds) __nanosleep(1000);
}

}  // namespace

cudaError_t LaunchSpin(std::chrono::nanoseconds time, cudaStream_t stream) {
  SpinKernel<<<1, 1, 0, stream>>>(static_cast<uint64_t>(time.count()));
  return cudaGetLastError();
}

}  // namespace refit
