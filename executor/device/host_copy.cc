#include "executor/device/host_copy.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>

namespace refit {
namespace {

constexpr uint64_t kLineBytes = 64;

// How far ahead of the copy the lines of both tensors are asked for. Rows of a
// strided box defeat the CPU's own prefetching; a write whose line is on its
// way costs half of one that waits for it.
constexpr uint64_t kPrefetchBytes = 1024;

// Elements that a strided cast gathers or scatters at a time.
constexpr size_t kCastBlockElements = 512;

// The lines of one tensor's rows in the order of the copy, a fixed number of
// bytes ahead of it.
template <bool write>
class RowPrefetch {
 public:
  RowPrefetch(const std::byte* rows, const HostRuns& runs)
      : runs_(runs),
        row_(rows + kPrefetchBytes / runs.run_bytes * runs.stride_bytes),
        offset_(kPrefetchBytes % runs.run_bytes) {}

  // Asks for the next line. Past the last row it asks in vain, which is cheaper
  // than to find out.
  void Next() {
    __builtin_prefetch(row_ + offset_, write, 3);
    offset_ += kLineBytes;
    if (offset_ >= runs_.run_bytes) {
      offset_ = 0;
      row_ += runs_.stride_bytes;
    }
  }

 private:
  const HostRuns& runs_;
  const std::byte* row_;
  uint64_t offset_;
};

void CopyRuns(std::byte* to, const std::byte* from, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    std::memcpy(to, from, rows.to.run_bytes);
    to += rows.to.stride_bytes;
    from += rows.from.stride_bytes;
  }
}

// The same for runs of a line or more.
void CopyLongRuns(std::byte* to, const std::byte* from, const HostRows& rows) {
  const uint64_t run_bytes = rows.to.run_bytes;
  const uint64_t lines_end = run_bytes - run_bytes % kLineBytes;
  RowPrefetch<false> from_lines(from, rows.from);
  RowPrefetch<true> to_lines(to, rows.to);
  for (uint64_t i = 0; i < rows.rows; ++i) {
    for (uint64_t at = 0; at < lines_end; at += kLineBytes) {
      from_lines.Next();
      to_lines.Next();
      std::memcpy(to + at, from + at, kLineBytes);
    }
    std::memcpy(to + lines_end, from + lines_end, run_bytes - lines_end);
    to += rows.to.stride_bytes;
    from += rows.from.stride_bytes;
  }
}

#ifdef __SSE2__
// Runs so long that writing them through the caches would only read every line
// of the target first, a third of the memory's work: as memcpy does for what it
// takes to be larger than the caches.
constexpr uint64_t kStreamedRunBytes = 256 << 10;

void StreamRun(std::byte* to, const std::byte* from, uint64_t size_bytes) {
  const uint64_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
  std::memcpy(to, from, head);
  uint64_t at = head;
  for (; at + kLineBytes <= size_bytes; at += kLineBytes) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    _mm_prefetch(reinterpret_cast<const char*>(from + at + kPrefetchBytes),
                 _MM_HINT_NTA);
    for (int i = 0; i < 4; ++i) {
      _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
    }
  }
  std::memcpy(to + at, from + at, size_bytes - at);
}

void StreamRuns(std::byte* to, const std::byte* from, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    StreamRun(to, from, rows.to.run_bytes);
    to += rows.to.stride_bytes;
    from += rows.from.stride_bytes;
  }
  // Streamed stores are not ordered by what other threads wait for.
  _mm_sfence();
}
#endif

void ZeroRuns(std::byte* to, const std::byte*, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    std::memset(to, 0, rows.to.run_bytes);
    to += rows.to.stride_bytes;
  }
}

template <size_t element_bytes>
void CopyElements(std::byte* to, const std::byte* from, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    std::memcpy(to + i * rows.to.stride_bytes,
                from + i * rows.from.stride_bytes, element_bytes);
  }
}

HostRowsFunction ElementCopyFunction(uint64_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return CopyElements<1>;
    case 2:
      return CopyElements<2>;
    case 4:
      return CopyElements<4>;
    default:
      assert(element_bytes == 8);
      return CopyElements<8>;
  }
}

void CastRuns(std::byte* to, const std::byte* from, const HostRows& rows) {
  for (uint64_t i = 0; i < rows.rows; ++i) {
    rows.cast(to, from, rows.run_elements);
    to += rows.to.stride_bytes;
    from += rows.from.stride_bytes;
  }
}

// Runs of one element that cast: gathered, cast and scattered in blocks, so
// that the cast itself works on contiguous elements.
void CastScattered(std::byte* to, const std::byte* from, const HostRows& rows) {
  std::array<std::byte, kCastBlockElements * 4> gathered;
  std::array<std::byte, kCastBlockElements * 4> cast;
  HostRows gather = rows;
  gather.to = {.stride_bytes = rows.from.element_bytes};
  HostRows scatter = rows;
  scatter.from = {.stride_bytes = rows.to.element_bytes};
  for (uint64_t done = 0; done < rows.rows; done += gather.rows) {
    gather.rows = std::min<uint64_t>(kCastBlockElements, rows.rows - done);
    scatter.rows = gather.rows;
    ElementCopyFunction(rows.from.element_bytes)(
        gathered.data(), from + done * rows.from.stride_bytes, gather);
    rows.cast(cast.data(), gathered.data(), gather.rows);
    ElementCopyFunction(rows.to.element_bytes)(to + done * rows.to.stride_bytes,
                                               cast.data(), scatter);
  }
}

HostRowsFunction ChooseFunction(CopyKind kind, const HostRows& rows) {
  if (kind == CopyKind::kZero) return ZeroRuns;
  const bool elements = rows.run_elements == 1 && rows.rows > 1;
  if (rows.cast != nullptr) return elements ? CastScattered : CastRuns;
  if (elements) return ElementCopyFunction(rows.to.element_bytes);
#ifdef __SSE2__
  if (rows.to.run_bytes >= kStreamedRunBytes) return StreamRuns;
#endif
  return rows.to.run_bytes >= kLineBytes ? CopyLongRuns : CopyRuns;
}

bool InsideTensors(const CopyLoop& loop) {
  return loop.from.entries == 0 && loop.to.entries == 0;
}

}  // namespace

HostCopy MakeHostCopy(CopyKind kind, const StridedCopy& copy,
                      absl::Span<const CopyLoop> loops) {
  HostCopy host;
  host.from = copy.from;
  host.to = copy.to;
  host.reads = kind == CopyKind::kCopy;
  host.loops = MergedLoops(loops);
  if (!host.reads) {
    // What is not read is taken to lie as what is written.
    host.from.dtype = copy.to.dtype;
    for (CopyLoop& loop : host.loops) loop.from = loop.to;
  }
  HostRows& rows = host.rows;
  rows.from.element_bytes = DTypeBytes(host.from.dtype);
  rows.to.element_bytes = DTypeBytes(host.to.dtype);
  if (!host.loops.empty() && InsideTensors(host.loops.back()) &&
      host.loops.back().from.bytes == rows.from.element_bytes &&
      host.loops.back().to.bytes == rows.to.element_bytes) {
    rows.run_elements = host.loops.back().extent;
    host.loops.pop_back();
  }
  if (!host.loops.empty() && InsideTensors(host.loops.back())) {
    rows.rows = host.loops.back().extent;
    rows.from.stride_bytes = host.loops.back().from.bytes;
    rows.to.stride_bytes = host.loops.back().to.bytes;
    host.loops.pop_back();
  }
  rows.from.run_bytes = rows.run_elements * rows.from.element_bytes;
  rows.to.run_bytes = rows.run_elements * rows.to.element_bytes;
  if (host.from.dtype != host.to.dtype) {
    rows.cast = FindCast(host.from.dtype, host.to.dtype);
  }
  host.copy_rows = ChooseFunction(kind, rows);
  return host;
}

void CopyContiguous(std::byte* to, const std::byte* from, uint64_t size_bytes) {
  const uint64_t lines_end = size_bytes - size_bytes % kLineBytes;
  for (uint64_t at = 0; at < lines_end; at += kLineBytes) {
    __builtin_prefetch(from + at + kPrefetchBytes, 0, 3);
    __builtin_prefetch(to + at + kPrefetchBytes, 1, 3);
    std::memcpy(to + at, from + at, kLineBytes);
  }
  std::memcpy(to + lines_end, from + lines_end, size_bytes - lines_end);
}

void RunHostCopy(const HostCopy& copy, std::byte* const* table) {
  ForEachIteration(copy.loops, copy.from, copy.to,
                   [&](const CopyAddress& from, const CopyAddress& to) {
                     copy.copy_rows(table[to.entry] + to.byte_offset,
                                    copy.reads
                                        ? table[from.entry] + from.byte_offset
                                        : nullptr,
                                    copy.rows);
                   });
}

}  // namespace refit
