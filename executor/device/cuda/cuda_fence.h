// The fence of ranks on GPUs: words in device memory that peers map.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_FENCE_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_FENCE_H_

#include <memory>
#include <string>
#include <vector>

#include "executor/device/cuda/fence_kernel.h"
#include "refit/device.h"

namespace refit {

class CudaFence : public DeviceFence {
 public:
  // `owner` exports and maps the words; it must outlive the fence.
  static absl::StatusOr<std::unique_ptr<CudaFence>> Create(Device& owner,
                                                           int device,
                                                           int32_t rank,
                                                           int32_t world_size,
                                                           bool shares_device);
  ~CudaFence() override;

  absl::StatusOr<std::string> Export() override;
  absl::Status Connect(absl::Span<const int32_t> peers,
                       absl::Span<const std::string> exported) override;
  // Two ranks take turns: a grant one way, then what the other way reports. One
  // counter for each direction tells all.
  absl::Status Grant(absl::Span<const int32_t> origins, void* stream) override {
    return Signal(origins, stream);
  }
  absl::Status AwaitGrants(absl::Span<const int32_t> targets,
                           void* stream) override {
    return Await(targets, stream);
  }
  absl::Status Progress(absl::Span<const int32_t> targets,
                        void* stream) override {
    return Signal(targets, stream);
  }
  absl::Status Finish(absl::Span<const int32_t> targets,
                      void* stream) override {
    return Signal(targets, stream);
  }
  absl::Status AwaitFinishes(absl::Span<const int32_t> origins,
                             void* stream) override {
    return Await(origins, stream);
  }
  // Targets wait for words, not for this rank.
  void Withdraw() override {}
  const uint32_t* aborted() const override { return words_.aborted; }
  void Abort() override;
  std::vector<int32_t> Waiting() const override;

 private:
  CudaFence(Device& owner, int device, int32_t world_size)
      : owner_(owner), device_(device), world_size_(world_size) {}
  absl::Status Allocate(int32_t rank);
  absl::Status Signal(absl::Span<const int32_t> peers, void* stream);
  absl::Status Await(absl::Span<const int32_t> peers, void* stream);
  absl::Status PrepareAbort();
  absl::Status PrepareMemoryOperations();
  // Whether `stream` is captured.
  absl::StatusOr<bool> NoteCapture(void* stream);
  absl::Status Store(void* stream, uint64_t* word, uint64_t value);
  absl::Status SignalByStores(absl::Span<const int32_t> peers, void* stream);
  absl::Status AwaitWords(absl::Span<const int32_t> peers, void* stream);

  using Launch = cudaError_t (*)(const cuda::FenceWords&,
                                 const cuda::FencePeers&, cudaStream_t);
  absl::Status LaunchAll(Launch launch, absl::Span<const int32_t> peers,
                         void* stream, const char* what);

  Device& owner_;
  const int device_;
  const int32_t world_size_;
  cuda::FenceWords words_;  // device addresses
  // Counters (arrived, sent, taken), the word `aborted` and the peers'
  // addresses.
  std::unique_ptr<DeviceMemory> memory_;
  uint32_t* host_words_ = nullptr;            // waiting by rank, then abort
  std::unique_ptr<ExportedMemory> exported_;  // of `memory_`
  std::vector<std::unique_ptr<MappedMemory>> mapped_;

  // Where ranks share the device, operations of the stream on memory do what
  // the kernels do. A kernel would cost the process a turn on the device, 0.3
  // ms or more; these cost none. A graph needs the kernels: the counts of its
  // replays are known to the device alone. From the first capture on the
  // kernels signal, and come after each wait, which then may end too early.
  // Null: kernels alone.
  using MemoryOperation = int (*)(void* stream, uint64_t address,
                                  uint64_t value, unsigned int flags);
  MemoryOperation wait_value_ = nullptr;
  MemoryOperation write_value_ = nullptr;
  bool was_captured_ = false;
  std::vector<uint64_t> awaits_;      // by peer: awaits enqueued, not captured
  std::vector<uint64_t> signals_;     // by peer, likewise
  std::vector<uint64_t*> addresses_;  // by peer: its `arrived`, as mapped here
  // What an abort copies over the counters, so that waits of streams end, and
  // over `aborted`: as many large numbers as ranks, and one more.
  uint64_t* host_released_ = nullptr;
  std::unique_ptr<DeviceStream> abort_stream_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_FENCE_H_
