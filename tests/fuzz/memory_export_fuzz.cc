// libFuzzer target: whatever a peer says of its memory, an address comes out
// only for memory that is exported, with the sizes that are expected.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "control/payload.h"
#include "executor/device/memory_export.h"
#include "refit/host_device.h"

namespace {

using refit::MemoryExport;
using refit::MemoryKind;
using refit::PayloadReader;

void Require(bool holds) {
  if (!holds) std::abort();
}

struct Exported {
  std::array<std::byte, 64> memory = {};
  refit::HostDevice device;
  std::unique_ptr<refit::ExportedMemory> shown;
  std::unique_ptr<refit::DeviceFence> fence;
  std::string fence_bytes;

  Exported() {
    const std::vector<refit::MemoryRange> ranges = {{memory.data(), 64},
                                                    {memory.data() + 8, 16}};
    shown = *device.Export(ranges);
    fence = *device.CreateFence(0, 2, {});
    fence_bytes = *fence->Export();
  }
};

// `genuine` with bytes of it replaced, inserted and cut off: mutations of
// random bytes would not find a token.
std::string Forged(const std::string& genuine, PayloadReader& input) {
  std::string bytes = genuine;
  while (!input.rest().empty()) {
    const uint8_t how = input.U8() % 4;
    const size_t at = input.U16() % (bytes.size() + 1);
    if (how == 0 && at < bytes.size())
      bytes[at] = static_cast<char>(input.U8());
    if (how == 1) bytes.insert(at, std::string(input.Bytes(8)));
    if (how == 2) bytes.erase(at, input.U8());
    if (how == 3) bytes.resize(at);
  }
  return bytes;
}

void ExpectPromises(std::string_view bytes, MemoryKind kind,
                    const std::vector<uint64_t>& sizes) {
  const absl::StatusOr<MemoryExport> read =
      refit::ReadMemoryExport(bytes, kind, sizes);
  if (!read.ok()) return;
  Require(read->ranges.size() == sizes.size());
  uint64_t total = 0;
  for (const refit::ExportedAllocation& allocation : read->allocations) {
    Require(allocation.size_bytes > 0);
    Require(!__builtin_add_overflow(total, allocation.size_bytes, &total));
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const refit::ExportedRange& range = read->ranges[i];
    Require(range.size_bytes == sizes[i]);
    if (range.allocation == refit::ExportedRange::kNoAllocation) continue;
    Require(range.offset < read->allocations[range.allocation].size_bytes);
  }
  Require(refit::WriteMemoryExport(*read) == bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* const exported = new Exported;
  PayloadReader input({reinterpret_cast<const char*>(data), size});
  const bool as_it_is = input.U8() % 4 == 0;
  std::vector<uint64_t> sizes = {64, 16};
  sizes.resize(input.U8() % 4, input.U8());
  PayloadReader for_fence = input;
  const std::string bytes = as_it_is ? std::string(input.rest())
                                     : Forged(exported->shown->bytes(), input);
  ExpectPromises(bytes, MemoryKind::kHost, sizes);
  ExpectPromises(bytes, MemoryKind::kCuda, sizes);
  const auto mapped = exported->device.Import(
      bytes, sizes, std::chrono::steady_clock::time_point::max());
  if (mapped.ok()) {
    Require(sizes == std::vector<uint64_t>({64, 16}));
    Require((*mapped)->addresses()[0] == exported->memory.data());
    Require((*mapped)->addresses()[1] == exported->memory.data() + 8);
  }
  const std::string of_fence =
      as_it_is ? bytes : Forged(exported->fence_bytes, for_fence);
  const bool connected =
      exported->fence
          ->Connect({1}, {of_fence},
                    std::chrono::steady_clock::time_point::max())
          .ok();
  Require(!connected || of_fence.size() == exported->fence_bytes.size());
  return 0;
}
