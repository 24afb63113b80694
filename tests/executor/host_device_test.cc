#include "refit/host_device.h"

#include "tests/executor/apply_conformance.h"
#include "tests/executor/device_conformance.h"
#include "tests/executor/digest_conformance.h"
#include "tests/executor/marking_cast_conformance.h"
#include "tests/executor/message_code_conformance.h"
#include "tests/executor/quantize_conformance.h"

namespace refit {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, ApplyConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));
INSTANTIATE_TEST_SUITE_P(Host, DigestConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));
INSTANTIATE_TEST_SUITE_P(Host, MarkingCastConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));
INSTANTIATE_TEST_SUITE_P(Host, MessageCodeConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));
INSTANTIATE_TEST_SUITE_P(Host, QuantizeConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));
INSTANTIATE_TEST_SUITE_P(Host, DeviceConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));

constexpr auto kNoDeadline = std::chrono::steady_clock::time_point::max();

std::unique_ptr<DeviceFence> MakeFence(int32_t rank) {
  absl::StatusOr<std::unique_ptr<DeviceFence>> fence =
      HostDevice().CreateFence(rank, /*world_size=*/2, /*sharing=*/{});
  return fence.ok() ? *std::move(fence) : nullptr;
}

// As when the exchange fails on the peer alone.
TEST(HostFenceTest, AFenceThatIsGoneBeforeItsPeerConnectsIsRefused) {
  const std::unique_ptr<DeviceFence> fence = MakeFence(0);
  std::string exported;
  {
    const std::unique_ptr<DeviceFence> gone = MakeFence(1);
    const absl::StatusOr<std::string> theirs = gone->Export();
    ASSERT_TRUE(theirs.ok()) << theirs.status();
    exported = *theirs;
    EXPECT_TRUE(fence->Connect({1}, {exported}, kNoDeadline).ok());
  }
  const absl::Status status = fence->Connect({1}, {exported}, kNoDeadline);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "fence of rank 1: the rank has given it up");
}

TEST(HostFenceTest, APeerHoldsAnEndLongerThanItsFence) {
  const std::unique_ptr<DeviceFence> fence = MakeFence(0);
  std::unique_ptr<DeviceFence> gone = MakeFence(1);
  const absl::StatusOr<std::string> theirs = gone->Export();
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  ASSERT_TRUE(fence->Connect({1}, {*theirs}, kNoDeadline).ok());
  gone.reset();
  EXPECT_TRUE(fence->Grant({1}, nullptr).ok());
}

TEST(HostFenceTest, AnOriginThatWithdrewIsNotWaitedFor) {
  const std::unique_ptr<DeviceFence> origin = MakeFence(0);
  const std::unique_ptr<DeviceFence> target = MakeFence(1);
  ASSERT_TRUE(origin->Connect({1}, {*target->Export()}, kNoDeadline).ok());
  ASSERT_TRUE(target->Connect({0}, {*origin->Export()}, kNoDeadline).ok());
  ASSERT_TRUE(target->Grant({0}, nullptr).ok());
  ASSERT_TRUE(origin->AwaitGrants({1}, nullptr).ok());
  origin->Withdraw();
  target->Abort();
  EXPECT_EQ(target->AwaitFinishes({0}, nullptr).code(),
            absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace refit
