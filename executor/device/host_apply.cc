#include "executor/device/host_apply.h"

#include <cstring>

#include "executor/device/element_function.h"

namespace refit {
namespace {

// `Bits` are those of an element, which may stand at any address.
template <typename Bits, typename Widen, typename Narrow>
void ApplyToEach(const HostApply& host, std::byte* elements, Widen widen,
                 Narrow narrow) {
  for (uint64_t i = 0; i < host.apply.elements; ++i) {
    std::byte* const element = elements + i * sizeof(Bits);
    Bits bits;
    std::memcpy(&bits, element, sizeof(bits));
    bits = narrow(AppliedTo(widen(bits), host.functions.data(),
                            static_cast<uint32_t>(host.functions.size())));
    std::memcpy(element, &bits, sizeof(bits));
  }
}

}  // namespace

void RunHostApply(const HostApply& host, std::byte* const* table) {
  const CopyAddress& address = host.apply.tensor;
  std::byte* const elements = table[address.entry] + address.byte_offset;
  if (address.dtype == DType::kFp32) {
    const auto same = [](uint32_t bits) { return bits; };
    ApplyToEach<uint32_t>(host, elements, same, same);
  } else if (address.dtype == DType::kBf16) {
    ApplyToEach<uint16_t>(host, elements, Fp32FromBf16, Bf16FromFp32);
  } else {
    ApplyToEach<uint16_t>(host, elements, Fp32FromFp16, Fp16FromFp32);
  }
}

}  // namespace refit
