#include "bench/pattern.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

namespace refit {
namespace {

// Word `index` of what `rank` sends from.
uint64_t PatternWord(int32_t rank, uint64_t index) {
  uint64_t word = (static_cast<uint64_t>(rank) << 48) + index + 1;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  return word ^ (word >> 27);
}

// Memory is filled and read in parts of this size.
constexpr uint64_t kPartBytes = uint64_t{1} << 24;

// Of the part at `begin_byte`, a multiple of 8.
void MakePattern(int32_t rank, uint64_t begin_byte,
                 std::vector<uint64_t>& words) {
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = PatternWord(rank, begin_byte / 8 + i);
  }
}

// Calls `body` with the begin and the size of each part of `size_bytes`.
absl::Status ForEachPart(
    uint64_t size_bytes,
    const std::function<absl::Status(uint64_t, uint64_t)>& body) {
  for (uint64_t begin = 0; begin < size_bytes; begin += kPartBytes) {
    absl::Status status = body(begin, std::min(kPartBytes, size_bytes - begin));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FillPattern(Device& device, Stream stream, int32_t rank,
                         std::byte* data, uint64_t size_bytes) {
  std::vector<uint64_t> pattern(kPartBytes / 8);
  return ForEachPart(size_bytes, [&](uint64_t begin, uint64_t part_bytes) {
    MakePattern(rank, begin, pattern);
    absl::Status status = device.Copy(
        data + begin, reinterpret_cast<const std::byte*>(pattern.data()),
        part_bytes, stream);
    status.Update(device.Synchronize(stream));
    return status;
  });
}

absl::Status FillZeroes(Device& device, Stream stream, std::byte* data,
                        uint64_t size_bytes) {
  const std::vector<std::byte> zeroes(kPartBytes);
  return ForEachPart(size_bytes, [&](uint64_t begin, uint64_t part_bytes) {
    absl::Status status =
        device.Copy(data + begin, zeroes.data(), part_bytes, stream);
    status.Update(device.Synchronize(stream));
    return status;
  });
}

absl::StatusOr<uint64_t> CountWrongBytes(Device& device, Stream stream,
                                         const std::byte* data,
                                         uint64_t size_bytes, int32_t from,
                                         uint64_t from_offset) {
  const uint64_t part_bytes_max = std::min(kPartBytes, size_bytes);
  std::vector<uint64_t> pattern((part_bytes_max + 7) / 8);
  std::vector<std::byte> found(part_bytes_max);
  uint64_t wrong = 0;
  absl::Status status =
      ForEachPart(size_bytes, [&](uint64_t begin, uint64_t part_bytes) {
        absl::Status copied =
            device.Copy(found.data(), data + begin, part_bytes, stream);
        copied.Update(device.Synchronize(stream));
        MakePattern(from, from_offset + begin, pattern);
        const auto* const expected =
            reinterpret_cast<const std::byte*>(pattern.data());
        if (std::memcmp(found.data(), expected, part_bytes) == 0) return copied;
        for (uint64_t i = 0; i < part_bytes; ++i) {
          wrong += found[i] != expected[i];
        }
        return copied;
      });
  if (!status.ok()) return status;
  return wrong;
}

}  // namespace refit
