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

TEST(MessageCodeSpeedTest, RatesBesideAPlainRead) {
  auto device = *CreateCudaDevice(0);
  auto now = *device->Allocate(kBytes);
  auto before = *device->Allocate(kBytes);
  auto codes = *device->Allocate(kBytes);
  auto word = *device->Allocate(16);
  auto timer = *device->CreateTimer();
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
    const CodedMessage message = {.size_bytes = kMessageBytes,
                                  .element_bytes = 2,
                                  .ranges = {{0, kMessageBytes, 2}}};
    const uint64_t room = message.RoomOn(rung);
    ASSERT_LE(count, room);
    std::vector<MessageToCode> sends, receives;
    for (uint64_t m = 0; m < kMessages; ++m) {
      const uint64_t at = m * kMessageBytes;
      const auto copy = [&](DeviceMemory& to,
                            const std::vector<uint16_t>& from) {
        ASSERT_TRUE(device
                        ->Copy(to.data() + at,
                               reinterpret_cast<const std::byte*>(from.data()),
                               kMessageBytes, nullptr)
                        .ok());
        ASSERT_TRUE(device->Synchronize(nullptr).ok());
      };
      copy(*now, changed);
      copy(*before, values);
      MessageToCode& send = sends.emplace_back();
      send = {.message = message,
              .rooms = {room},
              .elements = now->data() + at,
              .before = before->data() + at,
              .code = codes->data() + at};
      MessageToCode& receive = receives.emplace_back(send);
      receive.elements = before->data() + at;
      receive.before = nullptr;
    }
    auto sender = *device->PrepareCodes(sends);
    auto receiver = *device->PrepareCodes(receives);
    const double counting = seconds_of([&] {
      absl::Status status = sender->Restart(nullptr);
      status.Update(sender->Count(0, kMessages, nullptr));
      return status;
    });
    const double encoding =
        seconds_of([&] { return sender->Encode(0, kMessages, 0, nullptr); });
    const double applying =
        seconds_of([&] { return receiver->Apply(0, kMessages, 0, nullptr); });
    EXPECT_FALSE(sender->FirstFailure(nullptr)->has_value());
    EXPECT_FALSE(receiver->FirstFailure(nullptr)->has_value());
    const auto print = [&](const char* what, double seconds,
                           uint64_t message_bytes) {
      const double rate =
          static_cast<double>(message_bytes * kMessages) / seconds;
      std::printf("  %s %.3f ms, %.0f GB/s (%.0f %%)", what, seconds * 1e3,
                  rate / 1e9, 100 * rate / plain);
    };
    const uint64_t groups = kMessageBytes / 256;
    std::printf("%5.1f %% changed:", 100 * share);
    print("count", counting, 2 * kMessageBytes);
    print("encode", encoding, 2 * kMessageBytes + groups + 3 * count);
    print("apply", applying, groups + 3 * count + 2 * sectors * kSectorBytes);
    std::printf("\n");
  }
}

}  // namespace
}  // namespace refit
