#include "refit/cuda_device.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "executor/device/cuda/apply_kernel.h"
#include "executor/device/cuda/bulk_copy_kernel.h"
#include "executor/device/cuda/copy_kernel.h"
#include "executor/device/cuda/cuda_copies.h"
#include "executor/device/cuda/cuda_fence.h"
#include "executor/device/cuda/cuda_graph.h"
#include "executor/device/cuda/cuda_marks.h"
#include "executor/device/cuda/cuda_memory_watch.h"
#include "executor/device/cuda/cuda_message_coder.h"
#include "executor/device/cuda/cuda_sharing.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/digest_kernel.h"
#include "executor/device/cuda/driver_function.h"
#include "executor/device/cuda/fence_kernel.h"
#include "executor/device/cuda/marking_cast_kernel.h"
#include "executor/device/cuda/message_code_kernel.h"
#include "executor/device/cuda/quantize_kernel.h"
#include "executor/device/cuda/scoped_device.h"
#include "executor/device/hardware_queues.h"
#include "executor/device/marking_cast.h"

namespace refit {
namespace {

// What copies beside an exchange take of a device: bulk copies on 8 of 132
// multiprocessors of an H200 move 400 GB/s, somewhat more than NVLink. More
// slow down NCCL's exchange (docs/benchmarks.md). Blackwell's NVLink is twice
// as fast; that has not been measured. Parts of a device:
constexpr int kLinkOfHopper = 16;
constexpr int kLinkOfBlackwell = 8;
constexpr int kBlackwell = 10;  // compute capability

class CudaMemory : public DeviceMemory {
 public:
  CudaMemory(int device, void* data, uint64_t size_bytes)
      : DeviceMemory(static_cast<std::byte*>(data), size_bytes),
        device_(device) {}
  ~CudaMemory() override {
    const ScopedDevice current(device_);
    cudaFree(data());
  }

 private:
  const int device_;
};

class CudaStream : public DeviceStream {
 public:
  CudaStream(int device, cudaStream_t stream)
      : device_(device), stream_(stream) {}
  ~CudaStream() override {
    const ScopedDevice current(device_);
    cudaStreamDestroy(stream_);
  }
  Stream get() const override { return stream_; }

 private:
  const int device_;
  const cudaStream_t stream_;
};

// A thread may then ask the driver about work while another one captures in the
// global mode, which is the default: neither call fails, nor is the capture
// lost.
class ScopedRelaxedCapture {
 public:
  ScopedRelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~ScopedRelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ScopedRelaxedCapture(const ScopedRelaxedCapture&) = delete;
  ScopedRelaxedCapture& operator=(const ScopedRelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaEvent : public DeviceEvent {
 public:
  CudaEvent(int device, cudaEvent_t event) : device_(device), event_(event) {}
  ~CudaEvent() override {
    const ScopedDevice current(device_);
    cudaEventDestroy(event_);
  }
  absl::Status Record(Stream stream) override {
    const ScopedDevice current(device_);
    return CudaStatus(
        cudaEventRecord(event_, static_cast<cudaStream_t>(stream)),
        "cudaEventRecord");
  }
  absl::Status Await(Stream stream) override {
    const ScopedDevice current(device_);
    return CudaStatus(
        cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0),
        "cudaStreamWaitEvent");
  }
  absl::StatusOr<bool> Reached() override {
    const ScopedDevice current(device_);
    const ScopedRelaxedCapture relaxed;
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    if (absl::Status s = CudaStatus(error, "cudaEventQuery"); !s.ok()) return s;
    return true;
  }

 private:
  const int device_;
  const cudaEvent_t event_;
};

// The stream stores its number of records to the host's memory too.
class CudaPolledEvent : public DeviceEvent {
 public:
  CudaPolledEvent(std::unique_ptr<DeviceEvent> event,
                  std::unique_ptr<DeviceProgress> progress)
      : event_(std::move(event)), progress_(std::move(progress)) {}
  absl::Status Record(Stream stream) override {
    absl::Status status = progress_->Mark(++records_, stream);
    status.Update(event_->Record(stream));
    return status;
  }
  absl::Status Await(Stream stream) override { return event_->Await(stream); }
  absl::StatusOr<bool> Reached() override {
    return progress_->reached() == records_;
  }
  absl::Status Failure() override { return event_->Reached().status(); }

 private:
  const std::unique_ptr<DeviceEvent> event_;
  const std::unique_ptr<DeviceProgress> progress_;
  std::atomic<uint32_t> records_ = 0;
};

class CudaDevice : public Device {
 public:
  CudaDevice(int ordinal, const CudaKernelLimits& limits)
      : ordinal_(ordinal), limits_(limits), sharing_(ordinal) {}

  absl::Status MakeCurrent() override {
    return CudaStatus(cudaSetDevice(ordinal_), "cudaSetDevice");
  }

  absl::Status WhileCurrent(absl::FunctionRef<absl::Status()> body) override {
    const ScopedDevice scope(ordinal_);
    // `body` may call what goes by the current device alone, such as NCCL.
    int current = -1;
    absl::Status status = CudaStatus(cudaGetDevice(&current), "cudaGetDevice");
    if (!status.ok()) return status;
    if (current != ordinal_) {
      return absl::InternalError(
          absl::StrCat("CUDA device ", ordinal_,
                       " cannot be made current; device ", current, " is"));
    }
    return body();
  }

  absl::Status MakeThreadOwn() override {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    absl::Status status = CudaStatus(cudaThreadExchangeStreamCaptureMode(&mode),
                                     "cudaThreadExchangeStreamCaptureMode");
    status.Update(MakeCurrent());
    return status;
  }

  std::string Identity() override {
    const auto get =
        FindDriverFunction<PFN_cuDeviceGetUuid_v11040>("cuDeviceGetUuid");
    CUuuid uuid = {};
    if (!get.ok() || (*get)(&uuid, ordinal_) != CUDA_SUCCESS) return "";
    const std::string hex =
        absl::BytesToHexString({uuid.bytes, sizeof(uuid.bytes)});
    return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-",
                        hex.substr(12, 4), "-", hex.substr(16, 4), "-",
                        hex.substr(20));
  }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
      uint64_t size_bytes) override {
    const ScopedDevice current(ordinal_);
    void* data = nullptr;
    if (size_bytes > 0) {
      absl::Status status =
          CudaStatus(cudaMalloc(&data, size_bytes), "cudaMalloc");
      if (!status.ok()) {
        return absl::Status(
            status.code(),
            absl::StrCat("no memory for ", size_bytes, " bytes on device ",
                         ordinal_, ": ", status.message()));
      }
    }
    return std::make_unique<CudaMemory>(ordinal_, data, size_bytes);
  }

  absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> table,
      absl::Span<const CopyBatch> batches) override {
    const ScopedDevice current(ordinal_);
    return PrepareCudaCopies(ordinal_, limits_, table, batches);
  }

  absl::StatusOr<std::unique_ptr<MessageCoder>> PrepareCodes(
      absl::Span<std::byte* const> table, const ChangeEntries& changes,
      std::vector<MessageToCode> messages) override {
    const ScopedDevice current(ordinal_);
    return MakeCudaMessageCoder(ordinal_, limits_.multiprocessors, table,
                                changes, messages);
  }

  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    const ScopedDevice current(ordinal_);
    cudaStream_t stream = nullptr;
    absl::Status status =
        CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                   "cudaStreamCreateWithFlags");
    if (!status.ok()) return status;
    return std::make_unique<CudaStream>(ordinal_, stream);
  }

  absl::StatusOr<bool> IsCapturing(Stream stream) override {
    const ScopedDevice current(ordinal_);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    absl::Status status = CudaStatus(
        cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture),
        "cudaStreamIsCapturing");
    if (!status.ok()) return status;
    return capture != cudaStreamCaptureStatusNone;
  }

  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    const ScopedDevice current(ordinal_);
    cudaEvent_t event = nullptr;
    absl::Status status =
        CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                   "cudaEventCreateWithFlags");
    if (!status.ok()) return status;
    return std::make_unique<CudaEvent>(ordinal_, event);
  }

  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreatePolledEvent() override {
    absl::StatusOr<std::unique_ptr<DeviceEvent>> event = CreateEvent();
    if (!event.ok()) return event.status();
    absl::StatusOr<std::unique_ptr<DeviceProgress>> progress = CreateProgress();
    if (!progress.ok()) return progress.status();
    return std::make_unique<CudaPolledEvent>(*std::move(event),
                                             *std::move(progress));
  }

  absl::StatusOr<std::unique_ptr<DeviceTimer>> CreateTimer() override {
    const ScopedDevice current(ordinal_);
    return CreateCudaTimer(ordinal_);
  }

  absl::StatusOr<std::unique_ptr<DeviceProgress>> CreateProgress() override {
    const ScopedDevice current(ordinal_);
    return CreateCudaProgress(ordinal_);
  }

  absl::StatusOr<std::unique_ptr<DeviceGraph>> Record(
      const std::function<absl::Status(Stream)>& enqueue) override {
    absl::StatusOr<std::unique_ptr<DeviceStream>> stream = CreateStream();
    if (!stream.ok()) return stream.status();
    const ScopedDevice current(ordinal_);
    return RecordCudaGraph(ordinal_, (*stream)->get(), enqueue);
  }

  absl::StatusOr<std::unique_ptr<MemoryWatch>> Watch(
      absl::Span<const MemoryRange> ranges) override {
    const ScopedDevice current(ordinal_);
    return WatchCudaMemory(ranges);
  }

  bool CopiesUnaligned() const override { return false; }

  bool CopiesInBulk() const override { return limits_.has_bulk_copies; }

  bool OverlapsStreams() const override { return !HasOneHardwareQueue(); }

  absl::Status Copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                    Stream stream) override {
    const ScopedDevice current(ordinal_);
    return CudaStatus(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault,
                                      static_cast<cudaStream_t>(stream)),
                      "cudaMemcpyAsync");
  }

  absl::Status CastAndMark(const MarkingCast& cast, Stream stream) override {
    const absl::Status status = CheckMarkingCast(cast);
    if (!status.ok()) return status;
    const ScopedDevice current(ordinal_);
    return CudaStatus(
        cuda::LaunchMarkingCast(cast, static_cast<cudaStream_t>(stream)),
        "a cast that marks changes");
  }

  absl::Status Synchronize(Stream stream) override {
    const ScopedDevice current(ordinal_);
    const ScopedRelaxedCapture relaxed;
    return CudaStatus(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)),
                      "cudaStreamSynchronize");
  }

  absl::StatusOr<std::unique_ptr<ExportedMemory>> Export(
      absl::Span<const MemoryRange> ranges) override {
    return sharing_.Export(ranges);
  }

  absl::StatusOr<std::unique_ptr<MappedMemory>> Import(
      std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
      std::chrono::steady_clock::time_point deadline) override {
    return sharing_.Import(exported, sizes_bytes, deadline);
  }

  absl::StatusOr<std::unique_ptr<DeviceFence>> CreateFence(
      int32_t rank, int32_t world_size,
      absl::Span<const int32_t> sharing) override {
    return CudaFence::Create(*this, sharing_, ordinal_, rank, world_size,
                             sharing);
  }

 private:
  const int ordinal_;
  const CudaKernelLimits limits_;
  CudaSharing sharing_;
};

}  // namespace

int CudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int ordinal) {
  int count = 0;
  absl::Status status =
      CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (!status.ok() || count == 0) {
    return absl::NotFoundError("no CUDA device here");
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(absl::StrCat(
        "CUDA device ", ordinal, " is not one of the ", count, " here"));
  }
  int multiprocessors = 0;
  status =
      CudaStatus(cudaDeviceGetAttribute(
                     &multiprocessors, cudaDevAttrMultiProcessorCount, ordinal),
                 "cudaDeviceGetAttribute");
  int capability = 0;
  status.Update(
      CudaStatus(cudaDeviceGetAttribute(
                     &capability, cudaDevAttrComputeCapabilityMajor, ordinal),
                 "cudaDeviceGetAttribute"));
  const ScopedDevice current(ordinal);
  status.Update(CudaStatus(cuda::LoadCopyKernel(), "loading the copy kernel"));
  const auto link = static_cast<uint32_t>(
      multiprocessors /
      (capability >= kBlackwell ? kLinkOfBlackwell : kLinkOfHopper));
  CudaKernelLimits limits = {
      .multiprocessors = static_cast<uint32_t>(multiprocessors),
      .has_bulk_copies = false,
      .link_multiprocessors = std::max(link, 1u)};
  status.Update(
      CudaStatus(cuda::LoadBulkCopyKernel(ordinal, limits.has_bulk_copies),
                 "loading the bulk copy kernel"));
  status.Update(CudaStatus(cuda::LoadQuantizeKernel(),
                           "loading the quantization kernel"));
  status.Update(
      CudaStatus(cuda::LoadDigestKernel(), "loading the digest kernel"));
  status.Update(CudaStatus(cuda::LoadMarkingCastKernels(),
                           "loading the casts that mark changes"));
  status.Update(
      CudaStatus(cuda::LoadApplyKernel(), "loading the post-hook kernel"));
  status.Update(CudaStatus(cuda::LoadMessageCodeKernels(),
                           "loading the kernels of coded messages"));
  status.Update(
      CudaStatus(cuda::LoadFenceKernels(), "loading the fence kernels"));
  if (!status.ok()) return status;
  return std::make_unique<CudaDevice>(ordinal, limits);
}

}  // namespace refit
