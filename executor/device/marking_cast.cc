#include "executor/device/marking_cast.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "executor/device/cast.h"

namespace refit {
namespace {

constexpr uint64_t kBitsOfWord = 32;

bool IsAligned(const void* address, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace

absl::Status CheckMarkingCast(const MarkingCast& cast) {
  if (cast.to_dtype != DType::kBf16 && cast.to_dtype != DType::kFp16) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a cast that marks changes is to ",
        std::string(DTypeName(cast.to_dtype)), "; wanted bf16 or fp16"));
  }
  if (cast.elements == 0) return absl::OkStatus();
  if (cast.first_element >
      std::numeric_limits<uint64_t>::max() - cast.elements) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_element ", cast.first_element, " and ",
                     cast.elements, " elements are beyond 64 bits"));
  }
  struct Named {
    const char* name;
    const void* address;
    uint64_t bytes;
  };
  for (const Named& of : {Named{"from", cast.from, 4}, Named{"to", cast.to, 2},
                          Named{"changes", cast.changes, 4}}) {
    if (of.address == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(of.name, " is null"));
    }
    if (!IsAligned(of.address, of.bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat(of.name, " is at 0x",
                       absl::Hex(reinterpret_cast<uintptr_t>(of.address)),
                       "; wanted a multiple of ", of.bytes, " bytes"));
    }
  }
  return absl::OkStatus();
}

// A word of the bitmap at a time. Words are shared with casts of neighbouring
// elements, which may run on other threads.
void RunMarkingCast(const MarkingCast& cast) {
  const CastFunction narrow = FindCast(DType::kFp32, cast.to_dtype);
  auto* const to = static_cast<uint16_t*>(cast.to);
  for (uint64_t done = 0; done < cast.elements;) {
    const uint64_t first = cast.first_element + done;
    const uint64_t count =
        std::min(kBitsOfWord - first % kBitsOfWord, cast.elements - done);
    uint16_t made[kBitsOfWord];
    narrow(made, cast.from + done, count);
    if (std::memcmp(made, to + done, count * sizeof(*made)) != 0) {
      uint32_t bits = 0;
      for (uint64_t i = 0; i < count; ++i) {
        bits |= uint32_t{made[i] != to[done + i]} << (first % kBitsOfWord + i);
      }
      std::memcpy(to + done, made, count * sizeof(*made));
      std::atomic_ref<uint32_t>(cast.changes[first / kBitsOfWord])
          .fetch_or(bits, std::memory_order_relaxed);
    }
    done += count;
  }
}

}  // namespace refit
