#include "bench/link_bench.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "refit/host_device.h"
#include "runner/rank_threads.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

constexpr LinkOptions kSmall = {.message_bytes = 1 << 16, .iterations = 3};

void ExpectAllPairs(const LinkTable& table, size_t ranks) {
  ASSERT_EQ(table.bytes_per_second.size(), ranks);
  for (size_t from = 0; from < ranks; ++from) {
    ASSERT_EQ(table.bytes_per_second[from].size(), ranks);
    for (size_t to = 0; to < ranks; ++to) {
      EXPECT_EQ(table.bytes_per_second[from][to] > 0, from != to)
          << from << " to " << to;
    }
  }
}

TEST(LinkBenchTest, MeasuresThreads) {
  const absl::StatusOr<LinkTable> table = MeasureLinksHere("local", 4, kSmall);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->wire, "local");
  ExpectAllPairs(*table, 4);
}

TEST(LinkBenchTest, RanksWithoutAGpuAreAnError) {
  EXPECT_EQ(MeasureLinksHere("nccl", 4096, kSmall).status().code(),
            absl::StatusCode::kNotFound);
}

// Inside hosts and between them, over the fake libnccl and host memory.
class NcclLinksTest : public testing::Test {
 protected:
  std::vector<absl::StatusOr<LinkTable>> Measure(Device& device) {
    fake_nccl_reset();
    const LinkTable hosts = {
        .wire = "nccl", .hosts = {"a", "a", "b"}, .names = {"a", "a", "b"}};
    const std::vector<std::unique_ptr<Transport>> ends =
        MakeNcclTransports(device, {0, 0, 1});
    std::vector<absl::StatusOr<LinkTable>> tables(ends.size(),
                                                  absl::UnknownError(""));
    EXPECT_TRUE(RunRankThreads(3, [&](int32_t rank) {
                  fake_nccl_set_rank(rank);
                  tables[rank] =
                      MeasureLinks(*ends[rank], device, hosts, kSmall);
                }).ok());
    return tables;
  }
};

TEST_F(NcclLinksTest, MeasuresInsideHostsAndBetween) {
  HostDevice device;
  for (const absl::StatusOr<LinkTable>& table : Measure(device)) {
    ASSERT_TRUE(table.ok()) << table.status();
    ExpectAllPairs(*table, 3);
  }
}

// The first copy after the three fills is the check of rank 0 to rank 1.
class DamagingDevice : public HostDevice {
 public:
  absl::Status Copy(std::byte* to, const std::byte* from, uint64_t size_bytes,
                    Stream stream) override {
    absl::Status status = HostDevice::Copy(to, from, size_bytes, stream);
    if (copies_++ == 3) to[7] = std::byte{255};
    return status;
  }

 private:
  std::atomic<int> copies_ = 0;
};

TEST_F(NcclLinksTest, NamesThePairWhoseMessageArrivesWrong) {
  DamagingDevice device;
  for (const absl::StatusOr<LinkTable>& table : Measure(device)) {
    EXPECT_EQ(table.status(),
              absl::DataLossError("rank 0 to rank 1: 1 bytes arrived wrong"));
  }
}

}  // namespace
}  // namespace refit
