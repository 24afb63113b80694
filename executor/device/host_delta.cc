#include "executor/device/host_delta.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace refit {
namespace {

// Bytes that are compared and stored together: a line of the cache, so that
// storing less would not cost less.
constexpr uint64_t kDeltaLineBytes = 64;

constexpr uint64_t kBitsPerWord = 32;

// A run of a copy: where its first element is on all sides.
struct Run {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::byte* shadow = nullptr;
  std::byte* marks = nullptr;  // of the tensor
  uint64_t offset = 0;         // of `from` in the tensor, in bytes
};

uint32_t LoadWord(const std::byte* words, uint64_t word) {
  uint32_t bits = 0;
  std::memcpy(&bits, words + word * sizeof(bits), sizeof(bits));
  return bits;
}

// Marks what stands in bytes [begin, end) of the tensor.
void Mark(std::byte* marks, uint64_t begin, uint64_t end, uint32_t per_mark) {
  for (uint64_t bit = begin / per_mark; bit <= (end - 1) / per_mark; ++bit) {
    uint32_t bits = LoadWord(marks, bit / kBitsPerWord);
    bits |= uint32_t{1} << (bit % kBitsPerWord);
    std::memcpy(marks + bit / kBitsPerWord * sizeof(bits), &bits, sizeof(bits));
  }
}

// Stores `count` elements from element `first` of the run on.
void Store(const HostDelta& copy, const Run& run, uint64_t first,
           uint64_t count, DeltaCounts& counts) {
  const std::byte* const from = run.from + first * copy.from_bytes;
  std::byte* const to = run.to + first * copy.to_bytes;
  if (copy.cast != nullptr) {
    copy.cast(to, from, count);
  } else {
    std::memcpy(to, from, count * copy.to_bytes);
  }
  counts.bytes += count * copy.to_bytes;
}

void Keep(const HostDelta& copy, const Run& run, DeltaCounts& counts) {
  Store(copy, run, 0, copy.run_elements, counts);
  std::memcpy(run.shadow, run.from, copy.run_elements * copy.from_bytes);
}

void StoreChanged(const HostDelta& copy, const Run& run, DeltaCounts& counts) {
  const uint64_t size = copy.from_bytes;
  const uint64_t line = std::max<uint64_t>(1, kDeltaLineBytes / size);
  for (uint64_t first = 0; first < copy.run_elements; first += line) {
    const uint64_t count = std::min(line, copy.run_elements - first);
    const std::byte* const from = run.from + first * size;
    std::byte* const shadow = run.shadow + first * size;
    if (std::memcmp(from, shadow, count * size) == 0) continue;
    for (uint64_t i = 0; i < count; ++i) {
      counts.elements +=
          std::memcmp(from + i * size, shadow + i * size, size) != 0;
    }
    Store(copy, run, first, count, counts);
    if (copy.delta.marks) {
      const uint64_t begin = run.offset + first * size;
      Mark(run.marks, begin, begin + count * size, copy.delta.bytes_per_mark);
    } else {
      std::memcpy(shadow, from, count * size);
    }
  }
}

void StoreMarked(const HostDelta& copy, const Run& run, DeltaCounts& counts) {
  const uint64_t per_mark = copy.delta.bytes_per_mark;
  const uint64_t end = run.offset + copy.run_elements * copy.from_bytes;
  const uint64_t bits_end = (end - 1) / per_mark + 1;
  for (uint64_t bit = run.offset / per_mark; bit < bits_end;) {
    const uint32_t word =
        LoadWord(run.marks, bit / kBitsPerWord) >> (bit % kBitsPerWord);
    if (word == 0) {
      bit += kBitsPerWord - bit % kBitsPerWord;
      continue;
    }
    bit += static_cast<uint64_t>(std::countr_zero(word));
    if (bit >= bits_end) break;
    const uint64_t first = std::max(run.offset, bit * per_mark);
    const uint64_t last = std::min(end, (bit + 1) * per_mark);
    const uint64_t count = (last - first) / copy.from_bytes;
    Store(copy, run, (first - run.offset) / copy.from_bytes, count, counts);
    counts.elements += count;
    ++bit;
  }
}

}  // namespace

HostDelta MakeHostDelta(CopyKind kind, const StridedCopy& copy,
                        absl::Span<const CopyLoop> loops,
                        const DeltaCopies& delta) {
  HostDelta host;
  host.kind = kind;
  host.delta = delta;
  host.from = copy.from;
  host.to = copy.to;
  host.from_bytes = static_cast<uint64_t>(DTypeBytes(copy.from.dtype));
  host.to_bytes = static_cast<uint64_t>(DTypeBytes(copy.to.dtype));
  if (copy.from.dtype != copy.to.dtype) {
    host.cast = FindCast(copy.from.dtype, copy.to.dtype);
  }
  host.loops = MergedLoops(loops);
  if (host.loops.empty()) return host;
  const CopyLoop& inner = host.loops.back();
  if (inner.from.entries == 0 && inner.to.entries == 0 &&
      inner.from.bytes == host.from_bytes && inner.to.bytes == host.to_bytes) {
    host.run_elements = inner.extent;
    host.loops.pop_back();
  }
  return host;
}

void RunHostDelta(const HostDelta& copy, std::byte* const* table) {
  DeltaCounts found;
  ForEachIteration(copy.loops, copy.from, copy.to,
                   [&](const CopyAddress& from, const CopyAddress& to) {
                     Run run;
                     run.offset = from.byte_offset;
                     run.from = table[from.entry] + from.byte_offset;
                     run.to = table[to.entry] + to.byte_offset;
                     if (copy.kind != CopyKind::kMarked) {
                       run.shadow =
                           table[from.entry + copy.delta.shadow_entries] +
                           from.byte_offset;
                     }
                     if (copy.kind == CopyKind::kMarked || copy.delta.marks) {
                       run.marks = table[from.entry + copy.delta.marks_entries];
                     }
                     if (copy.kind == CopyKind::kKept) {
                       Keep(copy, run, found);
                     } else if (copy.kind == CopyKind::kChanged) {
                       StoreChanged(copy, run, found);
                     } else {
                       StoreMarked(copy, run, found);
                     }
                   });
  std::byte* const place = table[copy.delta.counts_entry];
  DeltaCounts total;
  std::memcpy(&total, place, sizeof(total));
  total.elements += found.elements;
  total.bytes += found.bytes;
  std::memcpy(place, &total, sizeof(total));
}

}  // namespace refit
