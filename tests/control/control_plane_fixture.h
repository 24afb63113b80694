// Worlds of ranks that are threads, for the tests of the control plane.
#ifndef REFIT_TESTS_CONTROL_CONTROL_PLANE_FIXTURE_H_
#define REFIT_TESTS_CONTROL_CONTROL_PLANE_FIXTURE_H_

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "refit/control_plane.h"
#include "refit/interruption.h"
#include "runner/rank_threads.h"

namespace refit {

using Deadline = ControlPlane::Deadline;
using Gathered = absl::StatusOr<std::vector<std::string>>;

inline Deadline In(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}
inline Deadline Ample() { return In(std::chrono::minutes(1)); }

// Whether another process may listen at the port.
inline bool IsFree(uint16_t port) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  const bool is_free =
      bind(listener, reinterpret_cast<const sockaddr*>(&address),
           sizeof(address)) == 0;
  close(listener);
  return is_free;
}

// Interrupts its thread once `time` has passed.
inline ScopedInterruption InterruptedAfter(std::chrono::milliseconds time) {
  return ScopedInterruption([end = In(time)] {
    return std::chrono::steady_clock::now() < end
               ? absl::OkStatus()
               : absl::CancelledError("the worker stops");
  });
}

inline std::string Joined(const Gathered& gathered) {
  if (!gathered.ok()) return gathered.status().ToString();
  std::string text;
  for (const std::string& part : *gathered) text += "[" + part + "]";
  return text;
}

// Every rank's `mine`, by rank.
inline Gathered GatherAll(ControlPlane& plane, std::string_view mine,
                          std::string_view what, Deadline deadline) {
  std::vector<int32_t> everyone(static_cast<size_t>(plane.world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return plane.Exchange(mine, everyone, everyone, what, deadline);
}

class ControlPlaneTest : public testing::Test {
 protected:
  TcpRendezvous Rendezvous(int32_t rank, int32_t world_size) const {
    return {"127.0.0.1", port_, rank, world_size};
  }
  absl::StatusOr<std::unique_ptr<ControlPlane>> Connect(int32_t rank,
                                                        int32_t world_size) {
    return ConnectTcp(Rendezvous(rank, world_size), Ample());
  }

  // Connects the ranks of this process, each on a thread. Others may be in
  // other processes.
  void MakeWorld(int32_t world_size, const std::vector<int32_t>& here) {
    planes_.resize(world_size);
    OnRanks(here, [&](int32_t rank) {
      auto plane = Connect(rank, world_size);
      ASSERT_TRUE(plane.ok()) << plane.status();
      planes_[rank] = *std::move(plane);
    });
  }
  void MakeWorld(int32_t world_size) {
    std::vector<int32_t> here;
    for (int32_t rank = 0; rank < world_size; ++rank) here.push_back(rank);
    MakeWorld(world_size, here);
  }

  static void OnRanks(const std::vector<int32_t>& ranks,
                      const std::function<void(int32_t)>& body) {
    ASSERT_TRUE(
        RunRankThreads(static_cast<int32_t>(ranks.size()), [&](int32_t i) {
          body(ranks[i]);
        }).ok());
  }

  // What each of `ranks` has of its call; in the order of `ranks`.
  static std::vector<Gathered> GatherOn(
      const std::vector<int32_t>& ranks,
      const std::function<Gathered(int32_t)>& call) {
    std::vector<Gathered> results(ranks.size());
    EXPECT_TRUE(
        RunRankThreads(static_cast<int32_t>(ranks.size()), [&](int32_t i) {
          results[i] = call(ranks[i]);
        }).ok());
    return results;
  }
  Gathered Gather(int32_t rank, const std::string& what = "ids",
                  Deadline deadline = Ample()) {
    return GatherAll(*planes_[rank], "of " + std::to_string(rank), what,
                     deadline);
  }

  // For the port: nobody listens there, or is given it.
  const TcpRendezvous free_ = *LoopbackRendezvous(1);
  const uint16_t port_ = free_.port;
  std::vector<std::unique_ptr<ControlPlane>> planes_;  // by rank
};

inline void ExpectStatus(const absl::Status& status, absl::StatusCode code,
                         const std::string& message) {
  EXPECT_EQ(status.code(), code);
  EXPECT_EQ(status.message(), message);
}

}  // namespace refit

#endif  // REFIT_TESTS_CONTROL_CONTROL_PLANE_FIXTURE_H_
