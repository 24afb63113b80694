#include "executor/device/cuda/scoped_device.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "executor/device/cuda/driver_function.h"

namespace refit {
namespace {

// The driver's stack of a thread's contexts. Null functions: there is none.
class ContextStack {
 public:
  static ContextStack& Get() {
    static ContextStack& stack = *new ContextStack;
    return stack;
  }

  // Whether the primary context of `device`, which the runtime uses, is the
  // thread's current one now.
  bool Push(int device) {
    if (push_ == nullptr || pop_ == nullptr || retain_ == nullptr) return false;
    const CUcontext context = PrimaryContext(device);
    return context != nullptr && push_(context) == CUDA_SUCCESS;
  }

  void Pop() {
    CUcontext popped = nullptr;
    pop_(&popped);
  }

 private:
  ContextStack() = default;

  // Retained once, until the process ends.
  CUcontext PrimaryContext(int device) {
    const absl::MutexLock lock(&mutex_);
    CUcontext& context = contexts_[device];
    if (context == nullptr) retain_(&context, device);
    return context;
  }

  template <typename Function>
  static Function Find(const char* name) {
    return FindDriverFunction<Function>(name).value_or(nullptr);
  }

  const PFN_cuCtxPushCurrent_v4000 push_ =
      Find<PFN_cuCtxPushCurrent_v4000>("cuCtxPushCurrent");
  const PFN_cuCtxPopCurrent_v4000 pop_ =
      Find<PFN_cuCtxPopCurrent_v4000>("cuCtxPopCurrent");
  const PFN_cuDevicePrimaryCtxRetain_v7000 retain_ =
      Find<PFN_cuDevicePrimaryCtxRetain_v7000>("cuDevicePrimaryCtxRetain");
  absl::Mutex mutex_;
  std::map<int, CUcontext> contexts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

ScopedDevice::ScopedDevice(int device) {
  int current = device;
  if (cudaGetDevice(&current) == cudaSuccess && current == device) return;
  is_pushed_ = ContextStack::Get().Push(device);
  if (is_pushed_) return;
  before_ = current;
  cudaSetDevice(device);
}

ScopedDevice::~ScopedDevice() {
  if (is_pushed_) {
    ContextStack::Get().Pop();
  } else if (before_.has_value()) {
    cudaSetDevice(*before_);
  }
}

}  // namespace refit
