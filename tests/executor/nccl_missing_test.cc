// NcclTransport in a process without libnccl.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "refit/host_device.h"
#include "refit/nccl_transport.h"
#include "runner/rank_threads.h"

namespace refit {
namespace {

constexpr int32_t kRanks = 3;
const Edge kEdge[] = {{1, fb::MessageKind::kSend, fb::Route::kPeer},
                      {0, fb::MessageKind::kRecv, fb::Route::kPeer}};

// Connects ranks of which 0 sends to 1, and prints what each has of it.
void ConnectAndPrint() {
  setenv("REFIT_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  HostDevice device;
  const TcpRendezvous rendezvous = *LoopbackRendezvous(kRanks);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::minutes(1);
  std::vector<std::string> texts(kRanks);
  const absl::Status started = RunRankThreads(kRanks, [&](int32_t rank) {
    TcpRendezvous mine = rendezvous;
    mine.rank = rank;
    NcclOptions options;
    options.device = &device;
    options.meeting = *ConnectTcp(mine, deadline);
    options.hosts.resize(kRanks);
    const auto transport = *CreateNcclTransport(std::move(options));
    absl::Span<const Edge> edges;
    if (rank < 2) edges = {&kEdge[rank], 1};
    texts[rank] = transport->Connect({}, edges, deadline).ToString();
  });
  for (const std::string& text : texts) {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::_Exit(started.ok() ? 0 : 1);
}

// In a process of its own, for what is loaded stays loaded. Rank 2, which needs
// NCCL for its host's communicator, says it too.
TEST(NcclMissingTest, RanksThatNeedItSayWhatWasTried) {
  constexpr char kText[] =
      "NOT_FOUND: no libnccl: none is loaded in this process, and the file "
      "that REFIT_NCCL_LIBRARY names cannot be: /nowhere/libnccl.so.2: cannot "
      "open shared object file[^\n]*\n";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(ConnectAndPrint(), testing::ExitedWithCode(0),
              std::string(kText) + kText + kText);
}

}  // namespace
}  // namespace refit
