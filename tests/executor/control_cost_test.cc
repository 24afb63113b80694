// What ranks tell each other over the control plane, in bytes: it has to grow
// with the number of ranks, and no faster.
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "refit/host_device.h"
#include "runner/rank_report.h"
#include "tests/control/control_plane_fixture.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

// More are too much for one machine: each has five threads here. If all told
// all others what they hold, as they once did, these would exceed the limits
// too.
constexpr int32_t kRanks = kSanitized ? 64 : 256;
constexpr int32_t kRanksPerHost = 8;

// What this process, which is all ranks, has sent over its present TCP
// connections.
uint64_t SentBytes() {
  uint64_t bytes = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().string());
    tcp_info about = {};
    socklen_t size = sizeof(about);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &about, &size) == 0) {
      // On a busy machine the kernel sends some again.
      bytes += about.tcpi_bytes_sent - about.tcpi_bytes_retrans;
    }
  }
  return bytes;
}

// A rank's neighbours: the next one of its host, by staged and direct rounds,
// and its like on the next host.
std::vector<Edge> EdgesOf(int32_t rank) {
  constexpr int32_t kHosts = kRanks / kRanksPerHost;
  const auto at = [](int32_t host, int32_t local) {
    return (host + kHosts) % kHosts * kRanksPerHost +
           (local + kRanksPerHost) % kRanksPerHost;
  };
  const int32_t host = rank / kRanksPerHost;
  const int32_t local = rank % kRanksPerHost;
  std::vector<Edge> edges;
  const auto add = [&](int32_t to, int32_t from, fb::Route route,
                       fb::Mechanism mechanism) {
    edges.push_back({to, fb::MessageKind::kSend, route, mechanism});
    edges.push_back({from, fb::MessageKind::kRecv, route, mechanism});
  };
  for (const auto mechanism :
       {fb::Mechanism::kStaged, fb::Mechanism::kDirect}) {
    add(at(host, local + 1), at(host, local - 1), fb::Route::kPeer, mechanism);
  }
  add(at(host + 1, local), at(host - 1, local), fb::Route::kNetwork,
      fb::Mechanism::kStaged);
  return edges;
}

TEST(ControlCostTest, ConnectAndWaitGrowWithTheNumberOfRanks) {
  fake_nccl_reset();
  HostDevice device;
  std::vector<uint32_t> hosts;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    hosts.push_back(rank / kRanksPerHost);
  }
  const auto ends = MakeNcclTransports(device, hosts);
  const auto on_all = [&](const std::function<absl::Status(Transport&)>& call) {
    const uint64_t before = SentBytes();
    EXPECT_TRUE(RunRankThreads(kRanks, [&](int32_t rank) {
                  fake_nccl_set_rank(rank);
                  const absl::Status status = call(*ends[rank]);
                  EXPECT_TRUE(status.ok()) << status;
                }).ok());
    return SentBytes() - before;
  };
  // Among 8,192 ranks: 100 MB and 2 MB.
  constexpr uint64_t kConnectBytes = uint64_t{kRanks} * 12'200;
  constexpr uint64_t kWaitBytes = uint64_t{kRanks} * 244;
  // Of refit-run, there and back.
  constexpr uint64_t kReportBytes = uint64_t{kRanks} * 1'200;
  EXPECT_LE(on_all([&](Transport& end) {
              return end.Connect({}, EdgesOf(end.rank()), Ample());
            }),
            kConnectBytes);
  EXPECT_LE(on_all([&](Transport& end) {
              absl::Status status = end.BeginRefit(Ample(), false);
              if (status.ok()) status = end.EndRefit(nullptr);
              return status.ok() ? end.Wait() : status;
            }),
            kWaitBytes);
  RankReport mine;
  mine.refit.seconds = 1;
  mine.refit.rounds.resize(2);
  EXPECT_LE(on_all([&](Transport& end) {
              const absl::StatusOr<RankReport> all =
                  GatherReports(end, mine, Ample());
              if (!all.ok()) return all.status();
              EXPECT_EQ(all->refit.rounds.size(), 1u);
              return absl::OkStatus();
            }),
            kReportBytes);
}

}  // namespace
}  // namespace refit
