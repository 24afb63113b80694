// The kernels that find, encode and apply what changed in messages
// (executor/delta/message_code.h), and what they read.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_MESSAGE_CODE_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_MESSAGE_CODE_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace refit::cuda {

// A block takes this much of a message at a time: a tile.
inline constexpr uint32_t kCodeTileBytes = 16 << 10;

struct KernelMessage {
  std::byte* elements;
  const std::byte* before;  // null: of a receive
  std::byte* code;
  uint64_t size_bytes;
  uint64_t first_tile;
  uint32_t tiles;  // 0: it always travels whole
  uint32_t element_bytes;
  uint32_t ranges_end;
  uint32_t is_aligned;  // elements and before, to 16 bytes
};

// As ElementRange.
struct KernelRange {
  uint64_t begin_byte;
  uint64_t end_byte;
  uint32_t element_bytes;
  uint32_t always;
};

struct KernelCodeTile {
  uint32_t message;
  uint32_t first_range;  // that has a byte behind the tile's begin
};

// As ChangedElements, but without what is always sent.
struct KernelChanged {
  unsigned long long count;
  unsigned long long room;
};

// All pointers are of device memory.
struct KernelCodes {
  const KernelMessage* messages;
  const KernelRange* ranges;
  const KernelCodeTile* tiles;
  const uint64_t* rooms;  // by message and rung
  uint32_t rungs;
  KernelChanged* changed;       // by message
  uint64_t* totals;             // likewise: elements that are coded
  uint64_t* bases;              // by tile: how many are coded before it
  unsigned long long* failure;  // 0, or 1 + the message that failed first
};

// Which tiles and messages a launch is of.
struct CodeWork {
  uint64_t tiles_begin = 0;
  uint64_t tiles_count = 0;
  uint32_t messages_begin = 0;
  uint32_t messages_count = 0;
};

// As LoadCopyKernel.
cudaError_t LoadMessageCodeKernels();

// Each on `blocks_max` blocks at most.
cudaError_t LaunchCount(const KernelCodes& codes, const CodeWork& work,
                        uint32_t blocks_max, cudaStream_t stream);
cudaError_t LaunchEncode(const KernelCodes& codes, const CodeWork& work,
                         uint32_t rung, uint32_t blocks_max,
                         cudaStream_t stream);
cudaError_t LaunchApply(const KernelCodes& codes, const CodeWork& work,
                        uint32_t rung, uint32_t blocks_max,
                        cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_MESSAGE_CODE_KERNEL_H_
