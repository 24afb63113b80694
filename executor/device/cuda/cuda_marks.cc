#include "executor/device/cuda/cuda_marks.h"

#include <cuda_runtime_api.h>

#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/driver_function.h"
#include "executor/device/cuda/fence_kernel.h"
#include "executor/device/cuda/scoped_device.h"

namespace refit {
namespace {

class CudaTimer : public DeviceTimer {
 public:
  explicit CudaTimer(int device) : device_(device) {}
  ~CudaTimer() override {
    const ScopedDevice current(device_);
    if (start_ != nullptr) cudaEventDestroy(start_);
    if (stop_ != nullptr) cudaEventDestroy(stop_);
  }
  absl::Status Create() {
    absl::Status status =
        CudaStatus(cudaEventCreate(&start_), "cudaEventCreate");
    status.Update(CudaStatus(cudaEventCreate(&stop_), "cudaEventCreate"));
    return status;
  }
  absl::Status Start(Stream stream) override { return Record(start_, stream); }
  absl::Status Stop(Stream stream) override { return Record(stop_, stream); }
  absl::StatusOr<double> Seconds() override { return Between(start_, stop_); }
  absl::StatusOr<double> SecondsAfter(const DeviceTimer& origin) override {
    return Between(static_cast<const CudaTimer&>(origin).start_, start_);
  }

 private:
  absl::StatusOr<double> Between(cudaEvent_t from, cudaEvent_t to) const {
    const ScopedDevice current(device_);
    float milliseconds = 0;
    absl::Status status = CudaStatus(
        cudaEventElapsedTime(&milliseconds, from, to), "cudaEventElapsedTime");
    if (!status.ok()) return status;
    return static_cast<double>(milliseconds) / 1000;
  }
  absl::Status Record(cudaEvent_t event, Stream stream) {
    const ScopedDevice current(device_);
    return CudaStatus(cudaEventRecord(event, static_cast<cudaStream_t>(stream)),
                      "cudaEventRecord");
  }

  const int device_;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};

// A word of host memory that the device writes: unlike an event it also tells
// how far a graph has come that is launched again.
class CudaProgress : public DeviceProgress {
 public:
  explicit CudaProgress(int device) : device_(device) {}
  ~CudaProgress() override {
    const ScopedDevice current(device_);
    cudaFreeHost(word_);
  }
  absl::Status Create() {
    void* host = nullptr;
    absl::Status status =
        CudaStatus(cudaHostAlloc(&host, sizeof(*word_),
                                 cudaHostAllocMapped | cudaHostAllocPortable),
                   "cudaHostAlloc");
    if (!status.ok()) return status;
    word_ = static_cast<uint32_t*>(host);
    Reset();
    void* mapped = nullptr;
    status = CudaStatus(cudaHostGetDevicePointer(&mapped, host, 0),
                        "cudaHostGetDevicePointer");
    mapped_ = static_cast<uint32_t*>(mapped);
    write_word_ =
        FindDriverFunction<decltype(write_word_)>("cuStreamWriteValue32")
            .value_or(nullptr);
    return status;
  }
  absl::Status Mark(uint32_t value, Stream stream) override {
    const ScopedDevice current(device_);
    // Costs no turn on a device that processes share, unlike a kernel. A graph
    // takes the kernel.
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    absl::Status status = CudaStatus(
        cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture),
        "cudaStreamIsCapturing");
    if (!status.ok()) return status;
    if (capture == cudaStreamCaptureStatusNone && write_word_ != nullptr &&
        write_word_(stream, reinterpret_cast<uint64_t>(mapped_), value,
                    /*CU_STREAM_WRITE_VALUE_DEFAULT=*/0) == 0) {
      return absl::OkStatus();
    }
    return CudaStatus(
        cuda::LaunchMark(mapped_, value, static_cast<cudaStream_t>(stream)),
        "launch of the mark kernel");
  }
  void Reset() override { __atomic_store_n(word_, 0, __ATOMIC_SEQ_CST); }
  uint32_t reached() const override {
    return __atomic_load_n(word_, __ATOMIC_SEQ_CST);
  }

 private:
  const int device_;
  uint32_t* word_ = nullptr;
  uint32_t* mapped_ = nullptr;  // as the device reaches it
  int (*write_word_)(void*, uint64_t, uint32_t, unsigned int) = nullptr;
};

template <typename Made>
absl::StatusOr<std::unique_ptr<Made>> Make(int device) {
  auto made = std::make_unique<Made>(device);
  if (absl::Status s = made->Create(); !s.ok()) return s;
  return made;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceTimer>> CreateCudaTimer(int device) {
  return Make<CudaTimer>(device);
}

absl::StatusOr<std::unique_ptr<DeviceProgress>> CreateCudaProgress(int device) {
  return Make<CudaProgress>(device);
}

}  // namespace refit
