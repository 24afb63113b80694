// Finding, encoding and applying what changed costs little more than a read of
// the memory that it must touch.
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
constexpr uint64_t kSectorBytes = 32;  // a GPU reads and writes no less

// Table entries.
enum : uint64_t { kNow, kHeld, kNowShadow, kHeldShadow };

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
  of.code = codes + number * kMessageBytes;
  return of;
}

TEST(MessageCodeSpeedTest, RatesBesideAPlainRead) {
  auto device = *CreateCudaDevice(0);
  auto now = *device->Allocate(kBytes);
  auto before = *device->Allocate(kBytes);
  auto before_on_host = *device->AllocateOnHost(kBytes);
  auto held = *device->Allocate(kBytes);
  auto codes = *device->Allocate(kBytes);
  auto word = *device->Allocate(16);
  auto timer = *device->CreateTimer();
  std::vector<std::byte*> table(4);
  table[kNow] = now->data();
  table[kHeld] = held->data();
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
  std::printf("plain read %.0f GB/s; of that, bf16 messages of 32 MiB:\n",
              plain / 1e9);
  struct Case {
    const char* text;
    uint64_t columns;
    DeviceMemory& snapshot;
  };
  for (const Case& of : {Case{"runs", kMessageBytes / 2, *before},
                         Case{"rows of 2 KiB", 1024, *before},
                         Case{"runs, snapshot on the host", kMessageBytes / 2,
                              *before_on_host}}) {
    const uint64_t columns = of.columns;
    std::printf("%s\n", of.text);
    table[kNowShadow] = of.snapshot.data();
    for (const double share : {0.0, 0.001, 0.01, 0.1}) {
      const uint32_t rung = share > 1.0 / 16 ? 2 : share > 1.0 / 64 ? 4 : 6;
      std::mt19937_64 random(1);
      std::vector<uint16_t> values(kMessageBytes / 2);
      for (uint16_t& value : values) value = static_cast<uint16_t>(random());
      std::vector<uint16_t> changed = values;
      uint64_t count = 0, sectors = 0, last = ~uint64_t{0};
      std::bernoulli_distribution changes(share);
      for (uint64_t i = 0; i < changed.size(); ++i) {
        if (!changes(random)) continue;
        changed[i] ^= 1;
        ++count;
        const uint64_t sector = i * 2 / kSectorBytes;
        sectors += sector != last ? 1 : 0;
        last = sector;
      }
      const auto fill = [&](DeviceMemory& to,
                            const std::vector<uint16_t>& from) {
        for (uint64_t m = 0; m < kMessages; ++m) {
          ASSERT_TRUE(
              device
                  ->Copy(to.data() + m * kMessageBytes,
                         reinterpret_cast<const std::byte*>(from.data()),
                         kMessageBytes, nullptr)
                  .ok());
        }
        ASSERT_TRUE(device->Synchronize(nullptr).ok());
      };
      fill(*now, changed);
      fill(of.snapshot, values);
      fill(*held, values);
      const uint64_t room =
          MessageAt(0, true, columns, 0, nullptr).message.RoomOn(rung);
      // In rows another share of a message may have changed.
      ASSERT_LE(count, room);
      std::vector<MessageToCode> sends, receives;
      for (uint64_t m = 0; m < kMessages; ++m) {
        sends.push_back(MessageAt(m, true, columns, room, codes->data()));
        receives.push_back(MessageAt(m, false, columns, room, codes->data()));
      }
      auto sender = *device->PrepareCodes(table, 2, sends);
      auto receiver = *device->PrepareCodes(table, 2, receives);
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
      const auto print = [&](const char* what, double seconds,
                             uint64_t message_bytes) {
        const double rate =
            static_cast<double>(message_bytes * kMessages) / seconds;
        std::printf("  %s %.3f ms, %.0f GB/s (%.0f %%)", what, seconds * 1e3,
                    rate / 1e9, 100 * rate / plain);
      };
      const uint64_t groups = kMessageBytes / 256;
      const uint64_t bits = kMessageBytes / 16;
      const uint64_t scattered = sectors * kSectorBytes;
      std::printf("%5.1f %% changed:", 100 * share);
      print("count", counting, 2 * kMessageBytes + 3 * bits);
      print("encode", encoding, bits + scattered + groups + 3 * count);
      print("apply", applying, 2 * groups + 3 * count + 2 * scattered);
      print("keep", keeping, bits + 3 * scattered);
      std::printf("\n");
    }
  }
}

}  // namespace
}  // namespace refit
