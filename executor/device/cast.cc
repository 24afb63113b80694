#include "executor/device/cast.h"

#include <cassert>
#include <cstring>

#include "plan/dtype.h"

namespace refit {
namespace {

template <typename To, typename From, To (*convert)(From)>
void CastElements(void* to, const void* from, size_t count) {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, in + i * sizeof(From), sizeof(From));
    const To result = convert(value);
    std::memcpy(out + i * sizeof(To), &result, sizeof(To));
  }
}

uint16_t Fp16FromBf16(uint16_t bits) {
  return Fp16FromFp32(Fp32FromBf16(bits));
}

uint16_t Bf16FromFp16(uint16_t bits) {
  return Bf16FromFp32(Fp32FromFp16(bits));
}

}  // namespace

CastFunction FindCast(DType from, DType to) {
  assert(IsSupportedCast(from, to));
  if (from == DType::kFp32) {
    return to == DType::kBf16 ? CastElements<uint16_t, uint32_t, Bf16FromFp32>
                              : CastElements<uint16_t, uint32_t, Fp16FromFp32>;
  }
  if (from == DType::kBf16) {
    return to == DType::kFp32 ? CastElements<uint32_t, uint16_t, Fp32FromBf16>
                              : CastElements<uint16_t, uint16_t, Fp16FromBf16>;
  }
  return to == DType::kFp32 ? CastElements<uint32_t, uint16_t, Fp32FromFp16>
                            : CastElements<uint16_t, uint16_t, Bf16FromFp16>;
}

}  // namespace refit
