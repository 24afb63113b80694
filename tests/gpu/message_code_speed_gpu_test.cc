// Finding, encoding and applying what changed costs little more than to touch
// the same memory and do nothing else.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "refit/cuda_device.h"
#include "tests/gpu/plain_read.h"

namespace refit {
namespace {

constexpr uint64_t kMessageBytes = uint64_t{32} << 20;
constexpr uint64_t kMessages = 128;
constexpr uint64_t kBytes = kMessageBytes * kMessages;
constexpr uint64_t kCodeBytesMax = 2 * kMessageBytes;
constexpr uint64_t kSectorBytes = 32;  // a GPU reads and writes no less

// Table entries.
enum : uint64_t {
  kNow,
  kHeld,
  kNowShadow,
  kHeldShadow,
  kNowMarks,
  kHeldMarks,
  kEntries
};

// A message of bf16, one run or the rows of a slice of `columns`.
MessageToCode MessageAt(uint64_t number, bool send, uint64_t columns,
                        uint64_t room, std::byte* codes) {
  MessageToCode of;
  of.message = {.size_bytes = kMessageBytes, .element_bytes = 2};
  of.is_send = send;
  of.rooms = {room};
  const uint64_t rows = kMessageBytes / 2 / columns;
  // Slices of one tensor: rows of one message lie beside those of the others.
  const bool is_run = columns == kMessageBytes / 2;
  const uint64_t first = is_run ? number * kMessageBytes : number * columns * 2;
  const uint64_t stride = is_run ? columns * 2 : kMessages * columns * 2;
  of.copies.push_back({.from = {send ? kNow : kHeld, first, DType::kBf16},
                       .to = {0, 0, DType::kBf16},
                       .loops_begin = 0,
                       .loops_count = 2});
  of.loops = {{rows, {0, stride}, {0, columns * 2}}, {columns, {0, 2}, {0, 2}}};
  of.always = {false};
  of.code = codes + number * kCodeBytesMax;
  return of;
}

struct Case {
  const char* text;
  uint64_t columns;
  ChangesBy changes_by = ChangesBy::kShadows;
};

class MessageCodeSpeedTest : public testing::TestWithParam<Case> {};

TEST_P(MessageCodeSpeedTest, RatesBesideAPlainRead) {
  const auto& [text, columns, changes_by] = GetParam();
  const bool by_marks = changes_by == ChangesBy::kMarks;
  auto device = *CreateCudaDevice(0);
  auto now = *device->Allocate(kBytes);
  auto before = *device->Allocate(kBytes);
  auto held = *device->Allocate(kBytes);
  auto marks = *device->Allocate(kBytes / 16);
  auto codes = *device->Allocate(kMessages * kCodeBytesMax);
  auto word = *device->Allocate(16);
  auto timer = *device->CreateTimer();
  std::vector<std::byte*> table(kEntries);
  table[kNow] = now->data();
  table[kHeld] = held->data();
  table[kNowShadow] = before->data();
  table[kNowMarks] = marks->data();
  const auto seconds_of = [&](const std::function<absl::Status()>& enqueue) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(timer->Start(nullptr).ok());
      EXPECT_TRUE(enqueue().ok());
      EXPECT_TRUE(timer->Stop(nullptr).ok());
      EXPECT_TRUE(device->Synchronize(nullptr).ok());
      best = std::min(best, *timer->Seconds());
    }
    return best;
  };
  const double plain =
      static_cast<double>(kBytes) / seconds_of([&] {
        EXPECT_EQ(
            LaunchPlainRead(now->data(), kBytes,
                            reinterpret_cast<uint32_t*>(word->data()), nullptr),
            cudaSuccess);
        return absl::OkStatus();
      });
  std::printf(
      "%s, %.1f GB of bf16 in messages of 32 MiB; %% is of the plain read's "
      "%.0f GB/s\n",
      text, kBytes / 1e9, plain / 1e9);
  for (const double share : {0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 0.6}) {
    std::mt19937_64 random(1);
    std::vector<uint16_t> values(kMessageBytes / 2);
    for (uint16_t& value : values) value = static_cast<uint16_t>(random());
    std::vector<uint16_t> changed = values;
    std::vector<uint32_t> bits(changed.size() / 32);
    uint64_t count = 0;
    std::vector<uint32_t> sectors;
    uint64_t wide_sectors = 0, last_wide = ~uint64_t{0};
    std::bernoulli_distribution changes(share);
    for (uint64_t i = 0; i < changed.size(); ++i) {
      if (!changes(random)) continue;
      changed[i] ^= 1;
      bits[i / 32] |= uint32_t{1} << i % 32;
      ++count;
      const auto sector = static_cast<uint32_t>(i * 2 / kSectorBytes);
      if (sectors.empty() || sectors.back() != sector) {
        sectors.push_back(sector);
      }
      wide_sectors += sector / 2 != last_wide ? 1 : 0;
      last_wide = sector / 2;
    }
    const auto fill = [&](DeviceMemory& to, const std::vector<uint16_t>& from) {
      for (uint64_t m = 0; m < kMessages; ++m) {
        const std::byte* const message =
            m == 0 ? reinterpret_cast<const std::byte*>(from.data())
                   : to.data();
        ASSERT_TRUE(device
                        ->Copy(to.data() + m * kMessageBytes, message,
                               kMessageBytes, nullptr)
                        .ok());
      }
      ASSERT_TRUE(device->Synchronize(nullptr).ok());
    };
    fill(*now, changed);
    fill(*before, values);
    fill(*held, values);
    for (uint64_t m = 0; m < kMessages; ++m) {
      ASSERT_TRUE(device
                      ->Copy(marks->data() + m * bits.size() * 4,
                             reinterpret_cast<const std::byte*>(bits.data()),
                             bits.size() * 4, nullptr)
                      .ok());
    }
    ASSERT_TRUE(device->Synchronize(nullptr).ok());
    // What a plan's rung has, but of 60 %: these would travel whole.
    const CodedMessage message =
        MessageAt(0, true, columns, 0, nullptr).message;
    uint64_t room = message.elements();
    for (uint32_t rung = 1; rung < 8; ++rung) {
      // In rows another share of a message may have changed.
      if (message.RoomOn(rung) >= count * 1.01) room = message.RoomOn(rung);
    }
    std::vector<MessageToCode> sends, receives;
    for (uint64_t m = 0; m < kMessages; ++m) {
      sends.push_back(MessageAt(m, true, columns, room, codes->data()));
      receives.push_back(MessageAt(m, false, columns, room, codes->data()));
    }
    const ChangeEntries changes_of = {
        changes_by, by_marks ? kNowMarks - kNow : kNowShadow - kNow};
    auto sender = *device->PrepareCodes(table, changes_of, sends);
    auto receiver = *device->PrepareCodes(table, changes_of, receives);
    const double counting = seconds_of([&] {
      absl::Status status = sender->Restart(nullptr);
      status.Update(sender->Count(nullptr));
      return status;
    });
    const double encoding =
        seconds_of([&] { return sender->Encode(0, kMessages, 0, nullptr); });
    const double applying =
        seconds_of([&] { return receiver->Apply(0, kMessages, 0, nullptr); });
    EXPECT_FALSE(receiver->FirstFailure(nullptr)->has_value());
    const double keeping = seconds_of([&] { return sender->Keep(nullptr); });
    auto numbers = *device->Allocate(sectors.size() * 4 + 16);
    ASSERT_TRUE(device
                    ->Copy(numbers->data(),
                           reinterpret_cast<const std::byte*>(sectors.data()),
                           sectors.size() * 4, nullptr)
                    .ok());
    // The same sectors, and nothing else done.
    const auto touching = [&](const std::byte* from, std::byte* to) {
      return seconds_of([&] {
        EXPECT_EQ(
            LaunchPlainTouch(
                from, to,
                {.sectors = reinterpret_cast<const uint32_t*>(numbers->data()),
                 .count = sectors.size(),
                 .sector_bytes = kSectorBytes,
                 .pieces = kMessages,
                 .piece_bytes = kMessageBytes},
                reinterpret_cast<uint32_t*>(word->data()), nullptr),
            cudaSuccess);
        return absl::OkStatus();
      });
    };
    const double gathering = touching(now->data(), nullptr);
    const double scattering = touching(nullptr, held->data());
    const double copying = touching(now->data(), before->data());
    // `streamed`: bytes of a message that are contiguous. `passes`: how often
    // its scattered sectors are read or written; a part of one that is stored
    // is read, then written.
    const auto print = [&](const char* what, double seconds, uint64_t streamed,
                           uint64_t passes, double touching) {
      const auto of_all = [&](uint64_t bytes) {
        return static_cast<double>(bytes * kMessages);
      };
      const double bytes =
          of_all(streamed + passes * sectors.size() * kSectorBytes);
      const double wide_bytes =
          of_all(streamed + passes * wide_sectors * 2 * kSectorBytes);
      const double beside =
          of_all(streamed) / plain + (passes == 0 ? 0 : touching);
      std::printf(
          "%5.1f %% %-6s %8.3f ms, %5.2f GB, %4.0f GB/s, %3.0f %%; by 64 "
          "bytes %5.2f GB, %3.0f %%; beside the same touched %3.0f %%\n",
          100 * share, what, seconds * 1e3, bytes / 1e9, bytes / seconds / 1e9,
          100 * bytes / seconds / plain, wide_bytes / 1e9,
          100 * wide_bytes / seconds / plain, 100 * beside / seconds);
    };
    const uint64_t groups = kMessageBytes / 256;
    const uint64_t bits_bytes = kMessageBytes / 16;
    print("find", counting,
          (by_marks ? bits_bytes : 2 * kMessageBytes) + bits_bytes, 0, 0);
    print("encode", encoding, bits_bytes + groups + 3 * count, 1, gathering);
    if (!by_marks) print("keep", keeping, bits_bytes, 3, copying);
    print("apply", applying, groups + 3 * count, 2, scattering);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, MessageCodeSpeedTest,
    testing::Values(Case{"runs", kMessageBytes / 2},
                    Case{"rows of 2 KiB", 1024},
                    Case{"runs, bitmap", kMessageBytes / 2, ChangesBy::kMarks},
                    Case{"rows of 2 KiB, bitmap", 1024, ChangesBy::kMarks}));

}  // namespace
}  // namespace refit
