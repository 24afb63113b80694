// The kernels that find, encode and apply what changed in messages
// (executor/delta/message_code.h), and what they read.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_MESSAGE_CODE_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_MESSAGE_CODE_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "executor/device/cuda/copy_kernel.h"

namespace refit::cuda {

// Elements of a message that a warp takes at a time: a tile.
inline constexpr uint32_t kCodeTileElements = 16 << 10;

struct KernelMessage {
  uint64_t size_bytes;
  uint64_t first_tile;
  uint64_t first_word;     // of a send, in KernelCodes::bits; a multiple of 4
  uint32_t tiles;          // 0: it always travels whole
  uint32_t element_bytes;  // 1 << element_shift
  uint32_t element_shift;
  uint32_t is_send;
};

// Of a message on a rung.
struct KernelRoom {
  std::byte* code;
  uint64_t elements;  // that the code has room for; 0: it travels whole
};

// What a KernelCopy holds of its message, where its `to` is.
struct KernelBox {
  uint64_t begin_byte;
  uint64_t end_byte;
  uint64_t always;  // not 0: sent though it did not change
};

struct KernelCodeTile {
  uint32_t message;
  // The copies that have a byte of the tile; boxes_end may be boxes_begin.
  uint32_t boxes_begin;
  uint32_t boxes_end;
};

// As ChangedElements.
struct KernelChanged {
  unsigned long long count;
  unsigned long long room;
};

// All pointers are of device memory.
struct KernelCodes {
  std::byte* const* table;
  uint64_t change_entries;  // to an entry's shadow, or to its marks
  const KernelCopy* copies;
  const KernelBox* boxes;  // by copy
  const KernelMessage* messages;
  const KernelCodeTile* tiles;
  uint64_t tiles_count;
  const KernelRoom* rooms;  // by message and rung
  uint32_t messages_count;
  uint32_t rungs;
  // One for each element of the sends: it changed. Each send begins a word that
  // is aligned to 16 bytes, and no bit is set behind its last.
  uint32_t* bits;
  KernelChanged* changed;       // by message
  uint64_t* totals;             // likewise: elements that are coded
  unsigned long long* bases;    // by tile: how many are coded before it
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

// Each for a device of so many multiprocessors. `changed` must be 0 before
// LaunchCount, which counts by marks or by shadows.
cudaError_t LaunchCount(const KernelCodes& codes, bool by_marks,
                        uint32_t multiprocessors, cudaStream_t stream);
cudaError_t LaunchEncode(const KernelCodes& codes, const CodeWork& work,
                         uint32_t rung, uint32_t multiprocessors,
                         cudaStream_t stream);
cudaError_t LaunchApply(const KernelCodes& codes, const CodeWork& work,
                        uint32_t rung, uint32_t multiprocessors,
                        cudaStream_t stream);
cudaError_t LaunchKeep(const KernelCodes& codes, uint32_t multiprocessors,
                       cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_MESSAGE_CODE_KERNEL_H_
