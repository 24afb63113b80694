#include "executor/device/host_digest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "executor/device/element_digest.h"

namespace refit {
namespace {

static_assert(std::endian::native == std::endian::little);

// Elements that are cast at a time.
constexpr uint64_t kCastElements = 512;

using Sum = unsigned __int128;  // of fewer than 2^38 products of a word

uint64_t Reduced(Sum sum) {
  // 2^64 is 8 mod p.
  const Sum folded = static_cast<uint64_t>(sum) + (sum >> 64) * 8;
  return DigestReduced(DigestFold(static_cast<uint64_t>(folded)) +
                       DigestReduced(static_cast<uint64_t>(folded >> 64) * 8));
}

uint64_t Multiplier(uint64_t block_key, uint32_t word) {
  return DigestLowDigit(block_key, word) |
         uint64_t{DigestHighDigit(block_key, word)} << kDigestDigitBits;
}

void AddBlock(const std::byte* block, uint64_t block_key, Sum& sum) {
  std::array<uint32_t, 4> words;
  std::memcpy(words.data(), block, sizeof(words));
  for (uint32_t k = 0; k < words.size(); ++k) {
    sum += static_cast<Sum>(words[k]) * Multiplier(block_key, k);
  }
}

// Bytes that stand in the param from byte `position` on.
void AddRun(const std::byte* run, uint64_t position, uint64_t size_bytes,
            uint64_t param_key, Sum& sum) {
  uint64_t at = 0;
  // A part of a block: the block with zeros around it.
  const auto add_part = [&](uint64_t bytes) {
    std::array<std::byte, kDigestBlockBytes> block = {};
    std::memcpy(block.data() + (position + at) % kDigestBlockBytes, run + at,
                bytes);
    AddBlock(block.data(),
             DigestBlockKey(param_key, (position + at) / kDigestBlockBytes),
             sum);
    at += bytes;
  };
  if (const uint64_t begin = position % kDigestBlockBytes; begin != 0) {
    add_part(std::min(size_bytes, kDigestBlockBytes - begin));
  }
  for (; size_bytes - at >= kDigestBlockBytes; at += kDigestBlockBytes) {
    AddBlock(run + at,
             DigestBlockKey(param_key, (position + at) / kDigestBlockBytes),
             sum);
  }
  if (at < size_bytes) add_part(size_bytes - at);
}

void AddRun(const HostDigest& digest, const std::byte* run, uint64_t position,
            Sum& sum) {
  const uint64_t key = digest.target.param_key;
  if (digest.cast == nullptr) {
    AddRun(run, position, digest.run_elements * digest.element_bytes, key, sum);
    return;
  }
  const uint64_t from_bytes = DTypeBytes(digest.from.dtype);
  std::array<std::byte, kCastElements * sizeof(uint32_t)> cast;
  for (uint64_t done = 0; done < digest.run_elements; done += kCastElements) {
    const uint64_t count = std::min(kCastElements, digest.run_elements - done);
    digest.cast(cast.data(), run + done * from_bytes, count);
    AddRun(cast.data(), position + done * digest.element_bytes,
           count * digest.element_bytes, key, sum);
  }
}

}  // namespace

HostDigest MakeHostDigest(const StridedCopy& copy,
                          absl::Span<const CopyLoop> loops,
                          const DigestTarget& target) {
  HostDigest digest;
  digest.from = copy.from;
  digest.param_byte = copy.to.byte_offset;
  digest.target = target;
  digest.element_bytes = DTypeBytes(copy.to.dtype);
  if (copy.from.dtype != copy.to.dtype) {
    digest.cast = FindCast(copy.from.dtype, copy.to.dtype);
  }
  digest.loops = MergedLoops(loops);
  if (digest.loops.empty()) return digest;
  const CopyLoop& inner = digest.loops.back();
  if (inner.from.entries == 0 &&
      inner.from.bytes == static_cast<uint64_t>(DTypeBytes(copy.from.dtype)) &&
      inner.to.bytes == digest.element_bytes) {
    digest.run_elements = inner.extent;
    digest.loops.pop_back();
  }
  return digest;
}

void RunHostDigest(const HostDigest& digest, std::byte* const* table) {
  Sum sum = 0;
  const CopyAddress param = {.entry = 0, .byte_offset = digest.param_byte};
  ForEachIteration(digest.loops, digest.from, param,
                   [&](const CopyAddress& from, const CopyAddress& position) {
                     AddRun(digest, table[from.entry] + from.byte_offset,
                            position.byte_offset, sum);
                   });
  std::byte* const target =
      table[digest.target.entry] + digest.target.byte_offset;
  DigestSum total;
  std::memcpy(&total, target, sizeof(total));
  const uint64_t part = Reduced(sum);
  total.low += part;
  total.high += total.low < part;
  std::memcpy(target, &total, sizeof(total));
}

}  // namespace refit
