// What Device::Export says of memory, as bytes, and what an Import may believe
// of it: nothing that a peer says becomes an address.
#ifndef REFIT_EXECUTOR_DEVICE_MEMORY_EXPORT_H_
#define REFIT_EXECUTOR_DEVICE_MEMORY_EXPORT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "control/token.h"
#include "executor/device/process_identity.h"
#include "refit/device.h"

namespace refit {

enum class MemoryKind : uint8_t { kHost = 1, kCuda = 2 };

// How another process reaches an allocation of a GPU.
enum class SharedBy : uint8_t {
  kNothing = 0,     // it cannot
  kIpc,             // memory of cudaMalloc: by the handle
  kPage,            // memory of cuMemMap whose maker asked for no handle
  kDescriptorPage,  // the same, by a descriptor of the owner's server
  kFabricPage,      // the same, by the handle
};

struct ExportedAllocation {
  static constexpr size_t kHandleBytes = 64;

  SharedBy by = SharedBy::kNothing;
  bool continues = false;  // the one before it, without a gap
  uint64_t size_bytes = 0;
  std::array<char, kHandleBytes> handle = {};
};

struct ExportedRange {
  static constexpr uint64_t kNoAllocation = ~uint64_t{0};

  uint64_t size_bytes = 0;
  // The one that holds its first byte, and where; kNoAllocation of host memory
  // and of an empty range.
  uint64_t allocation = kNoAllocation;
  uint64_t offset = 0;
};

// As bytes: each field little-endian, lists after their length.
struct MemoryExport {
  MemoryKind kind = MemoryKind::kHost;
  ProcessIdentity process;
  Token token = {};    // in LentMemories() of that process
  std::string server;  // descriptors are had from; "" if there are none
  std::vector<ExportedAllocation> allocations;
  std::vector<ExportedRange> ranges;
};

std::string WriteMemoryExport(const MemoryExport& exported);

// Error: kInvalidArgument, the bytes are no export of `kind`, or its ranges do
// not have `sizes_bytes`. In what is returned a range begins inside its
// allocation, but may end outside of it; sums of sizes do not overflow.
absl::StatusOr<MemoryExport> ReadMemoryExport(
    std::string_view bytes, MemoryKind kind,
    absl::Span<const uint64_t> sizes_bytes);

// Memory that this process has exported, as its own ranks reach it.
struct LentMemory {
  MemoryKind kind = MemoryKind::kHost;
  int device = 0;
  std::vector<MemoryRange> ranges;
  // By allocation; without a byte if it is none of cuMemMap.
  std::vector<MemoryRange> pages;
  // What holds the ranges; null: its owner keeps it while others use it.
  std::shared_ptr<const void> memory;
};

// By token; never destroyed.
TokenTable<const LentMemory>& LentMemories();

// Lends `memory`, of which `exported` tells the peers all but the process and
// the token, until the end of scope.
std::unique_ptr<ExportedMemory> Lend(LentMemory memory, MemoryExport exported);

// The memory behind an export of this process, null if it is of another.
// Errors: kNotFound, it is lent no longer; kInvalidArgument, it is not what the
// export says.
absl::StatusOr<std::shared_ptr<const LentMemory>> FindLent(
    const MemoryExport& exported);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_MEMORY_EXPORT_H_
