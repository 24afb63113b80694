// The C++ API as installed: every rank of a plan meets the others, as threads.
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "plan/plan_file.h"
#include "refit/executor.h"
#include "refit/host_device.h"
#include "refit/local_transport.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const absl::StatusOr<refit::PlanFile> plan = refit::PlanFile::Open(argv[1]);
  if (!plan.ok()) {
    std::fprintf(stderr, "%s\n", plan.status().ToString().c_str());
    return 1;
  }
  refit::HostDevice device;
  refit::LocalFabric fabric(plan->world_size());
  std::vector<absl::Status> connected(plan->world_size());
  std::vector<std::thread> ranks;
  for (int32_t rank = 0; rank < plan->world_size(); ++rank) {
    ranks.emplace_back([&, rank] {
      const auto transport = *fabric.CreateTransport(rank);
      const auto executor =
          *refit::Executor::Load(*plan, {.rank = rank,
                                         .device = &device,
                                         .transport = transport.get()});
      connected[rank] = executor->Connect(std::chrono::seconds(60));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const absl::Status& status : connected) {
    if (!status.ok()) return 1;
  }
  std::printf("%d ranks connected\n", plan->world_size());
  return 0;
}
