#include "executor/device/host_copy.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>

#include "absl/container/inlined_vector.h"

namespace refit {
namespace {

constexpr uint64_t kLineBytes = 64;

// How far ahead of the copy the tensor's and the staging's lines are asked for.
// Rows of a strided box defeat the CPU's own prefetching; a write whose line is
// on its way costs half of one that waits for it.
constexpr uint64_t kPrefetchBytes = 1024;

// Elements that a strided cast gathers or scatters at a time.
constexpr size_t kCastBlockElements = 512;

// Rows in the order of the copy, a fixed number of bytes ahead of it.
class TensorPrefetch {
 public:
  TensorPrefetch(std::byte* tensor, const HostRows& rows)
      : rows_(rows),
        row_(tensor +
             kPrefetchBytes / rows.tensor_run_bytes * rows.stride_bytes),
        offset_(kPrefetchBytes % rows.tensor_run_bytes) {}

  // Asks for the next line. Past the last row it asks in vain, which is cheaper
  // than to find out.
  template <CopyKind kind>
  void Next() {
    __builtin_prefetch(row_ + offset_, kind == CopyKind::kUnpack, 3);
    offset_ += kLineBytes;
    if (offset_ >= rows_.tensor_run_bytes) {
      offset_ = 0;
      row_ += rows_.stride_bytes;
    }
  }

 private:
  const HostRows& rows_;
  std::byte* row_;
  uint64_t offset_;
};

template <CopyKind kind>
void CopyRuns(std::byte* tensor, std::byte* staging, const HostRows& rows) {
  const uint64_t run_bytes = rows.tensor_run_bytes;
  for (uint64_t i = 0; i < rows.rows; ++i) {
    if constexpr (kind == CopyKind::kPack) {
      std::memcpy(staging, tensor, run_bytes);
    } else {
      std::memcpy(tensor, staging, run_bytes);
    }
    tensor += rows.stride_bytes;
    staging += run_bytes;
  }
}

// The same for runs of a line or more.
template <CopyKind kind>
void CopyLongRuns(std::byte* tensor, std::byte* staging, const HostRows& rows) {
  const uint64_t run_bytes = rows.tensor_run_bytes;
  const uint64_t lines_end = run_bytes - run_bytes % kLineBytes;
  TensorPrefetch prefetch(tensor, rows);
  for (uint64_t i = 0; i < rows.rows; ++i) {
    std::byte* const from = kind == CopyKind::kPack ? tensor : staging;
    std::byte* const to = kind == CopyKind::kPack ? staging : tensor;
    for (uint64_t at = 0; at < lines_end; at += kLineBytes) {
      prefetch.Next<kind>();
      __builtin_prefetch(staging + at + kPrefetchBytes, kind == CopyKind::kPack,
                         3);
      std::memcpy(to + at, from + at, kLineBytes);
    }
    std::memcpy(to + lines_end, from + lines_end, run_bytes - lines_end);
    tensor += rows.stride_bytes;
    staging += run_bytes;
  }
}

template <CopyKind kind>
HostRowsFunction RunFunction(const HostRows& rows) {
  return rows.tensor_run_bytes >= kLineBytes ? CopyLongRuns<kind>
                                             : CopyRuns<kind>;
}

void ZeroRuns(std::byte* tensor, std::byte*, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    std::memset(tensor, 0, rows.tensor_run_bytes);
    tensor += rows.stride_bytes;
  }
}

template <size_t element_bytes>
void PackElements(std::byte* tensor, std::byte* staging, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    std::memcpy(staging + i * element_bytes, tensor + i * rows.stride_bytes,
                element_bytes);
  }
}

template <size_t element_bytes>
void UnpackElements(std::byte* tensor, std::byte* staging,
                    const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    std::memcpy(tensor + i * rows.stride_bytes, staging + i * element_bytes,
                element_bytes);
  }
}

template <CopyKind kind>
HostRowsFunction ElementFunction(uint64_t element_bytes) {
  constexpr bool pack = kind == CopyKind::kPack;
  switch (element_bytes) {
    case 1:
      return pack ? PackElements<1> : UnpackElements<1>;
    case 2:
      return pack ? PackElements<2> : UnpackElements<2>;
    case 4:
      return pack ? PackElements<4> : UnpackElements<4>;
    default:
      assert(element_bytes == 8);
      return pack ? PackElements<8> : UnpackElements<8>;
  }
}

void PackCastRuns(std::byte* tensor, std::byte* staging, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    rows.cast(staging, tensor, rows.run_elements);
    tensor += rows.stride_bytes;
    staging += rows.staging_run_bytes;
  }
}

void UnpackCastRuns(std::byte* tensor, std::byte* staging,
                    const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    rows.cast(tensor, staging, rows.run_elements);
    tensor += rows.stride_bytes;
    staging += rows.staging_run_bytes;
  }
}

// Runs of one element that cast: gathered in blocks, so that the cast itself
// works on contiguous elements.
void PackCastElements(std::byte* tensor, std::byte* staging,
                      const HostRows& rows) {
  std::array<std::byte, kCastBlockElements * 4> block;
  const HostRowsFunction gather =
      ElementFunction<CopyKind::kPack>(rows.tensor_element_bytes);
  HostRows part = rows;
  for (uint64_t done = 0; done < rows.rows; done += part.rows) {
    part.rows = std::min<uint64_t>(kCastBlockElements, rows.rows - done);
    gather(tensor + done * rows.stride_bytes, block.data(), part);
    rows.cast(staging + done * rows.staging_run_bytes, block.data(), part.rows);
  }
}

void UnpackCastElements(std::byte* tensor, std::byte* staging,
                        const HostRows& rows) {
  std::array<std::byte, kCastBlockElements * 4> block;
  const HostRowsFunction scatter =
      ElementFunction<CopyKind::kUnpack>(rows.tensor_element_bytes);
  HostRows part = rows;
  for (uint64_t done = 0; done < rows.rows; done += part.rows) {
    part.rows = std::min<uint64_t>(kCastBlockElements, rows.rows - done);
    rows.cast(block.data(), staging + done * rows.staging_run_bytes, part.rows);
    scatter(tensor + done * rows.stride_bytes, block.data(), part);
  }
}

HostRowsFunction ChooseFunction(CopyKind kind, const HostRows& rows) {
  const bool elements = rows.run_elements == 1 && rows.rows > 1;
  switch (kind) {
    case CopyKind::kZero:
      return ZeroRuns;
    case CopyKind::kPack:
      if (rows.cast != nullptr) {
        return elements ? PackCastElements : PackCastRuns;
      }
      return elements
                 ? ElementFunction<CopyKind::kPack>(rows.tensor_element_bytes)
                 : RunFunction<CopyKind::kPack>(rows);
    case CopyKind::kUnpack:
      if (rows.cast != nullptr) {
        return elements ? UnpackCastElements : UnpackCastRuns;
      }
      if (elements) {
        return ElementFunction<CopyKind::kUnpack>(rows.tensor_element_bytes);
      }
      return RunFunction<CopyKind::kUnpack>(rows);
  }
  return nullptr;
}

// One loop for each maximal group of loops that continue each other.
std::vector<CopyLoop> MergedLoops(absl::Span<const CopyLoop> loops) {
  std::vector<CopyLoop> merged;
  for (const CopyLoop& loop : loops) {
    if (loop.extent == 1) continue;
    if (!merged.empty()) {
      CopyLoop& outer = merged.back();
      if (outer.tensor_step == loop.tensor_step * loop.extent &&
          outer.byte_step == loop.byte_step * loop.extent) {
        outer = {.extent = outer.extent * loop.extent,
                 .tensor_step = loop.tensor_step,
                 .byte_step = loop.byte_step};
        continue;
      }
    }
    merged.push_back(loop);
  }
  return merged;
}

}  // namespace

HostCopy MakeHostCopy(CopyKind kind, const StridedCopy& copy,
                      absl::Span<const CopyLoop> loops) {
  HostCopy host;
  host.first_tensor = copy.first_tensor;
  host.byte_offset = copy.byte_offset;
  host.staging = copy.staging;
  host.loops = MergedLoops(loops);
  HostRows& rows = host.rows;
  rows.tensor_element_bytes = DTypeBytes(copy.tensor_dtype);
  if (!host.loops.empty() && host.loops.back().tensor_step == 0 &&
      host.loops.back().byte_step == rows.tensor_element_bytes) {
    rows.run_elements = host.loops.back().extent;
    host.loops.pop_back();
  }
  if (!host.loops.empty() && host.loops.back().tensor_step == 0) {
    rows.rows = host.loops.back().extent;
    rows.stride_bytes = host.loops.back().byte_step;
    host.loops.pop_back();
  }
  rows.tensor_run_bytes = rows.run_elements * rows.tensor_element_bytes;
  if (kind != CopyKind::kZero) {
    rows.staging_run_bytes = rows.run_elements * DTypeBytes(copy.staging_dtype);
    if (copy.tensor_dtype != copy.staging_dtype) {
      rows.cast = kind == CopyKind::kPack
                      ? FindCast(copy.tensor_dtype, copy.staging_dtype)
                      : FindCast(copy.staging_dtype, copy.tensor_dtype);
    }
  }
  host.copy_rows = ChooseFunction(kind, rows);
  return host;
}

void CopyContiguous(std::byte* to, const std::byte* from,
                    uint64_t size_bytes) {
  const uint64_t lines_end = size_bytes - size_bytes % kLineBytes;
  for (uint64_t at = 0; at < lines_end; at += kLineBytes) {
    __builtin_prefetch(from + at + kPrefetchBytes, 0, 3);
    __builtin_prefetch(to + at + kPrefetchBytes, 1, 3);
    std::memcpy(to + at, from + at, kLineBytes);
  }
  std::memcpy(to + lines_end, from + lines_end, size_bytes - lines_end);
}

void RunHostCopy(const HostCopy& copy, std::byte* const* tensors) {
  const size_t loop_count = copy.loops.size();
  absl::InlinedVector<uint64_t, 8> counts(loop_count, 0);
  const uint64_t staging_step = copy.rows.rows * copy.rows.staging_run_bytes;
  uint64_t tensor = copy.first_tensor;
  uint64_t offset = copy.byte_offset;
  std::byte* staging = copy.staging;
  while (true) {
    copy.copy_rows(tensors[tensor] + offset, staging, copy.rows);
    size_t d = loop_count;
    while (d > 0 && ++counts[d - 1] == copy.loops[d - 1].extent) {
      const CopyLoop& loop = copy.loops[d - 1];
      tensor -= loop.tensor_step * (loop.extent - 1);
      offset -= loop.byte_step * (loop.extent - 1);
      counts[d - 1] = 0;
      --d;
    }
    if (d == 0) return;
    tensor += copy.loops[d - 1].tensor_step;
    offset += copy.loops[d - 1].byte_step;
    staging += staging_step;
  }
}

}  // namespace refit
