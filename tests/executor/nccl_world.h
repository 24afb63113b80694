// Ranks of this process that meet over TCP and send over the fake libnccl.
#ifndef REFIT_TESTS_EXECUTOR_NCCL_WORLD_H_
#define REFIT_TESTS_EXECUTOR_NCCL_WORLD_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "compiler/ir/module.h"
#include "plan/plan_file.h"
#include "refit/nccl_transport.h"
#include "tests/executor/executor_world.h"

namespace refit {

// The ends of a world whose ranks are on `hosts`. `device` must outlive them.
// `port`, if it is not null, becomes that of the control planes' meeting.
// `real`: what each rank takes for its host; empty: those are as planned.
// `abort_time`: NcclOptions::abort_time.
std::vector<std::unique_ptr<Transport>> MakeNcclTransports(
    Device& device, const std::vector<uint32_t>& hosts,
    uint16_t* port = nullptr, bool has_secret = true,
    const std::vector<std::string>& real = {},
    std::chrono::milliseconds abort_time = NcclOptions().abort_time);

// Compiles `job`, which needs no files.
// `config`: beside it, as config.json. `change_limits`: see CompileOptions.
PlanFile CompiledPlan(const std::string& job, const std::string& config = "",
                      const std::function<void(Limits&)>& change_limits = {});

// Sources and destinations quantize to fp8, in three windows or more each.
// `options`: those of the job.
PlanFile WindowsPlan(const std::string& options);

// One rank feeds five replicas, by slow links, in small buckets. `hosts`: of
// the six ranks.
PlanFile HostsPlan(std::string_view hosts, std::string_view options,
                   int32_t slots = kStagingSlots,
                   std::string_view transport = "nccl");

// A job that cuts two parameters by rows over `sources` ranks, and by columns
// and rows over `destinations` ranks. `more` are further keys of the job.
std::string ReshardJob(int sources, int destinations,
                       const std::string& options,
                       const std::string& more = "");

class NcclWorld : public ExecutorWorld {
 public:
  // Ranks are on the hosts that `plan` says.
  explicit NcclWorld(
      const PlanFile& plan, const ExecutorOptions& options = {},
      std::chrono::milliseconds abort_time = NcclOptions().abort_time);
  NcclWorld(const PlanFile& plan,
            const std::function<ExecutorOptions(int32_t rank)>& options,
            std::chrono::milliseconds abort_time = NcclOptions().abort_time);

  // The fake knows each thread's rank.
  std::vector<absl::Status> OnAllRanks(
      const std::function<absl::Status(int32_t)>& body) override;

  uint16_t port() const { return port_; }

 private:
  uint16_t port_ = 0;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_NCCL_WORLD_H_
