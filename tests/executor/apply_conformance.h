// What every Device must do to apply post-hooks' functions, beside a plain
// reference. Instantiated as device_conformance.h is.
#ifndef REFIT_TESTS_EXECUTOR_APPLY_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_APPLY_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "executor/device/cast.h"
#include "tests/executor/device_conformance.h"

namespace refit {

// FNV-1a over what AllDevicesGiveTheSameBits computes.
inline constexpr uint64_t kApplyDigest = 0xe10e2c575e107c05u;

class ApplyConformance : public DeviceConformance {
 protected:
  using Functions = std::vector<ElementFunction>;

  // In the widest arithmetic of the host, by its own library.
  static long double Reference(ElementFunction function, long double x) {
    switch (function) {
      case ElementFunction::kAddOne:
        return x + 1;
      case ElementFunction::kSubtractOne:
        return x - 1;
      case ElementFunction::kNegativeExp:
        return -std::exp(x);
      case ElementFunction::kLogOfNegative:
        return std::log(-x);
    }
    return x;
  }

  static uint32_t ReferenceBits(const Functions& functions, uint32_t fp32) {
    long double value = std::bit_cast<float>(fp32);
    for (const ElementFunction f : functions) value = Reference(f, value);
    return std::isnan(value)
               ? 0x7fc00000u
               : std::bit_cast<uint32_t>(static_cast<float>(value));
  }

  // `bits` as elements of `dtype`, 2 or 4 bytes each, from `offset` on.
  std::vector<uint32_t> Apply(const Functions& functions, DType dtype,
                              const std::vector<uint32_t>& bits,
                              uint64_t offset) {
    const size_t size = static_cast<size_t>(DTypeBytes(dtype));
    Bytes bytes(offset + bits.size() * size + 8, std::byte{0x5a});
    for (size_t i = 0; i < bits.size(); ++i) {
      std::memcpy(bytes.data() + offset + i * size, &bits[i], size);
    }
    const auto memory = Upload(bytes);
    std::byte* const table[] = {nullptr, memory->data()};
    CopyBatch batch;
    batch.kind = CopyKind::kApply;
    batch.functions = functions;
    batch.applies.push_back(
        {.tensor = {.entry = 1, .byte_offset = offset, .dtype = dtype},
         .elements = bits.size(),
         .functions_begin = 0,
         .functions_count = static_cast<uint32_t>(functions.size())});
    auto prepared = device_->Prepare(table, {&batch, 1});
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    EXPECT_TRUE((*prepared)->Enqueue(0, kStream).ok());
    const Bytes after = Download(*memory);
    EXPECT_EQ(after.back(), std::byte{0x5a});
    std::vector<uint32_t> result(bits.size(), 0);
    for (size_t i = 0; i < bits.size(); ++i) {
      std::memcpy(&result[i], after.data() + offset + i * size, size);
    }
    return result;
  }

  static std::vector<Functions> Compositions() {
    using enum ElementFunction;
    return {{kAddOne},
            {kSubtractOne},
            {kNegativeExp},
            {kLogOfNegative},
            {kLogOfNegative, kAddOne},
            Functions(16, kAddOne)};
  }
};

// Another arithmetic than the devices': a value that lies so near to the middle
// of two fp32 that the two round it apart is one in 2^20 at most.
inline uint32_t Distance(uint32_t a, uint32_t b) {
  return a > b ? a - b : b - a;
}

TEST_P(ApplyConformance, Fp32IsTheNearestOfTheRightValue) {
  std::vector<uint32_t> bits;
  std::mt19937 random(7);
  for (int i = 0; i < 60'000; ++i) bits.push_back(random());
  std::normal_distribution<float> normal(0, 3);
  for (int i = 0; i < 60'000; ++i) {
    bits.push_back(std::bit_cast<uint32_t>(normal(random)));
  }
  for (const float special :
       {0.0f, -0.0f, 1.0f, -1.0f, 88.72283f, 88.7229f, -87.4f, -103.9f, -104.0f,
        std::numeric_limits<float>::denorm_min(),
        -std::numeric_limits<float>::denorm_min(),
        std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::max(), std::nanf("")}) {
    bits.push_back(std::bit_cast<uint32_t>(special));
  }
  for (const Functions& functions : Compositions()) {
    const auto result = Apply(functions, DType::kFp32, bits, 4);
    int apart = 0;
    for (size_t i = 0; i < bits.size(); ++i) {
      const uint32_t wanted = ReferenceBits(functions, bits[i]);
      ASSERT_LE(Distance(result[i], wanted), 1)
          << std::hex << bits[i] << ": " << result[i] << ", not " << wanted;
      apart += result[i] != wanted;
    }
    EXPECT_LE(apart, 2);
  }
}

TEST_P(ApplyConformance, EveryHalfIsRight) {
  std::vector<uint32_t> bits;
  for (uint32_t half = 0; half < (1u << 16); ++half) bits.push_back(half);
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    for (const Functions& functions : Compositions()) {
      const auto result = Apply(functions, dtype, bits, 2);
      for (size_t i = 0; i < bits.size(); ++i) {
        const auto half = static_cast<uint16_t>(bits[i]);
        const uint32_t fp32 = ReferenceBits(
            functions,
            dtype == DType::kBf16 ? Fp32FromBf16(half) : Fp32FromFp16(half));
        const uint16_t wanted =
            dtype == DType::kBf16 ? Bf16FromFp32(fp32) : Fp16FromFp32(fp32);
        ASSERT_EQ(result[i], wanted) << std::hex << bits[i];
      }
    }
  }
}

// No tolerance: a digest of many results, the same on every device.
TEST_P(ApplyConformance, AllDevicesGiveTheSameBits) {
  std::vector<uint32_t> bits;
  std::mt19937 random(11);
  for (int i = 0; i < 1'000'000; ++i) bits.push_back(random());
  uint64_t digest = 0xcbf29ce484222325u;
  for (const Functions& functions : Compositions()) {
    for (const uint32_t value : Apply(functions, DType::kFp32, bits, 0)) {
      digest = (digest ^ value) * 0x100000001b3u;
    }
  }
  EXPECT_EQ(digest, kApplyDigest) << std::hex << digest;
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_APPLY_CONFORMANCE_H_
