// What every Device must do with a cast that marks what changed. A test file
// instantiates the suite as it does DeviceConformance.
#ifndef REFIT_TESTS_EXECUTOR_MARKING_CAST_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_MARKING_CAST_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/executor/device_conformance.h"

namespace refit {

// By values, not by bits: the nearer of the two neighbours, the even one of two
// that are as near.
inline uint16_t Bf16Nearest(uint32_t bits) {
  const uint32_t below = bits >> 16;
  if (std::isnan(std::bit_cast<float>(bits))) {
    return static_cast<uint16_t>(below | 0x40);
  }
  // Infinity stands for 2^128 here, the next number of the format.
  const auto value = [](uint32_t half) {
    const float wide = std::bit_cast<float>(half << 16);
    return std::isinf(wide) ? std::copysign(0x1p128, double{wide})
                            : double{wide};
  };
  if (std::isinf(std::bit_cast<float>(bits))) {
    return static_cast<uint16_t>(below);
  }
  const double exact = double{std::bit_cast<float>(bits)};
  const double to_below = std::fabs(exact - value(below));
  const double to_above = std::fabs(value(below + 1) - exact);
  const bool up =
      to_above < to_below || (to_above == to_below && below % 2 == 1);
  return static_cast<uint16_t>(below + (up ? 1 : 0));
}

class MarkingCastConformance : public DeviceConformance {
 protected:
  struct Result {
    std::vector<uint16_t> to;
    std::vector<uint32_t> changes;
  };

  // With a guard of 8 elements on either side of `to`.
  Result Run(const std::vector<uint32_t>& from,
             const std::vector<uint16_t>& before, DType dtype, uint64_t first,
             const std::vector<uint32_t>& changes) {
    const auto bytes_of = [](const auto& values) {
      Bytes bytes(values.size() * sizeof(values[0]));
      if (!bytes.empty()) {
        std::memcpy(bytes.data(), values.data(), bytes.size());
      }
      return bytes;
    };
    std::vector<uint16_t> guarded(before.size() + 16, 0xabcd);
    std::copy(before.begin(), before.end(), guarded.begin() + 8);
    const auto masters = Upload(bytes_of(from));
    const auto weights = Upload(bytes_of(guarded));
    const auto bits = Upload(bytes_of(changes));
    const absl::Status status = device_->CastAndMark(
        {.from = reinterpret_cast<const float*>(masters->data()),
         .to = weights->data() + 16,
         .to_dtype = dtype,
         .changes = reinterpret_cast<uint32_t*>(bits->data()),
         .first_element = first,
         .elements = from.size()},
        kStream);
    EXPECT_TRUE(status.ok()) << status;
    const Bytes held = Download(*weights);
    const Bytes marked = Download(*bits);
    Result result;
    std::memcpy(guarded.data(), held.data(), held.size());
    for (size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(guarded[i], 0xabcd);
      EXPECT_EQ(guarded[guarded.size() - 1 - i], 0xabcd);
    }
    result.to.assign(guarded.begin() + 8, guarded.end() - 8);
    result.changes.resize(changes.size());
    std::memcpy(result.changes.data(), marked.data(), marked.size());
    return result;
  }

  void ExpectMarked(const std::vector<uint16_t>& before,
                    const std::vector<uint16_t>& wanted, uint64_t first,
                    std::vector<uint32_t> changes, const Result& result) {
    EXPECT_EQ(result.to, wanted);
    for (uint64_t i = 0; i < before.size(); ++i) {
      if (before[i] == wanted[i]) continue;
      changes[(first + i) / 32] |= uint32_t{1} << ((first + i) % 32);
    }
    EXPECT_EQ(result.changes, changes);
  }
};

// Every bf16 number, NaN and infinity, with what is left of it rounded down,
// up, and from halfway.
TEST_P(MarkingCastConformance, RoundsToNearestEven) {
  std::vector<uint32_t> from;
  std::vector<uint16_t> wanted;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      from.push_back(high << 16 | low);
      wanted.push_back(Bf16Nearest(from.back()));
    }
  }
  std::vector<uint16_t> before = wanted;
  for (size_t i = 0; i < before.size(); i += 7) before[i] ^= 1;
  const std::vector<uint32_t> changes((from.size() + 31) / 32, 0);
  ExpectMarked(before, wanted, 0, changes,
               Run(from, before, DType::kBf16, 0, changes));
}

TEST_P(MarkingCastConformance, ComparesBitsAndNotValues) {
  const std::vector<uint32_t> from = {
      0x80000000,  // -0
      0x00000000,
      0x7fc00000,  // NaN
      0xffc00001,  // another NaN, whose last bits bf16 drops
      0x7f800001,  // a signalling NaN
      0xff800000,  // -infinity
      0x7f7fffff,  // becomes infinity
      0x00000001,  // becomes 0
      0x80000001,  // becomes -0
      0x3f808000,  // halfway to an odd number
      0x3f818000,  // halfway to an even one
  };
  const std::vector<uint16_t> wanted = {0x8000, 0x0000, 0x7fc0, 0xffc0,
                                        0x7fc0, 0xff80, 0x7f80, 0x0000,
                                        0x8000, 0x3f80, 0x3f82};
  const std::vector<uint16_t> before = {0x0000, 0x0000, 0x7fc1, 0xffc0,
                                        0x7f80, 0xff80, 0x7f7f, 0x0000,
                                        0x0000, 0x3f80, 0x3f81};
  const Result result = Run(from, before, DType::kBf16, 0, {0});
  EXPECT_EQ(result.to, wanted);
  EXPECT_EQ(result.changes[0], 0b10101010101u);
}

TEST_P(MarkingCastConformance, BitsBesideWhatChangedStay) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    const uint64_t first = random() % 100;
    const size_t elements = random() % (round < 50 ? 140 : 70000);
    const DType dtype = round % 2 == 0 ? DType::kBf16 : DType::kFp16;
    std::vector<uint32_t> from(elements);
    for (uint32_t& bits : from) bits = static_cast<uint32_t>(random());
    std::vector<uint16_t> wanted(elements);
    FindCast(DType::kFp32, dtype)(wanted.data(), from.data(), elements);
    std::vector<uint16_t> before = wanted;
    const uint64_t one_of = std::vector<uint64_t>{1, 3, 100}[round % 3];
    for (uint16_t& bits : before) {
      if (random() % one_of == 0) bits ^= 1u << (random() % 16);
    }
    std::vector<uint32_t> changes((first + elements) / 32 + 2);
    for (uint32_t& bits : changes) {
      bits = static_cast<uint32_t>(random() & random());
    }
    SCOPED_TRACE(testing::Message()
                 << "first " << first << ", elements " << elements);
    ExpectMarked(before, wanted, first, changes,
                 Run(from, before, dtype, first, changes));
  }
}

TEST_P(MarkingCastConformance, RefusesWhatItCannotCast) {
  const auto memory = Upload(Bytes(256));
  const MarkingCast right = {
      .from = reinterpret_cast<const float*>(memory->data()),
      .to = memory->data() + 128,
      .to_dtype = DType::kBf16,
      .changes = reinterpret_cast<uint32_t*>(memory->data() + 192),
      .first_element = 0,
      .elements = 4};
  EXPECT_TRUE(device_->CastAndMark(right, kStream).ok());
  const auto refused = [&](const MarkingCast& cast) {
    const absl::Status status = device_->CastAndMark(cast, kStream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  MarkingCast wrong = right;
  wrong.to_dtype = DType::kFp32;
  EXPECT_EQ(refused(wrong),
            "a cast that marks changes is to fp32; wanted bf16 or fp16");
  wrong = right;
  wrong.changes = nullptr;
  EXPECT_EQ(refused(wrong), "changes is null");
  wrong = right;
  wrong.to = memory->data() + 129;
  EXPECT_NE(refused(wrong).find("to is at 0x"), std::string::npos);
  EXPECT_NE(refused(wrong).find("; wanted a multiple of 2 bytes"),
            std::string::npos);
  wrong = right;
  wrong.first_element = std::numeric_limits<uint64_t>::max() - 3;
  EXPECT_EQ(refused(wrong),
            "first_element 18446744073709551612 and 4 elements are beyond 64 "
            "bits");
  EXPECT_TRUE(device_->CastAndMark({.elements = 0}, kStream).ok());
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_MARKING_CAST_CONFORMANCE_H_
