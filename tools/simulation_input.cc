#include "tools/simulation_input.h"

#include <iostream>

#include "absl/strings/str_cat.h"
#include "compiler/diagnostics.h"
#include "compiler/plan_of_job.h"

namespace refit {

using simulator::Executor;

std::string ReadExecutor(const std::string& text, simulator::Options& options) {
  for (const Executor executor : {Executor::kGpu, Executor::kCpu}) {
    if (text != simulator::ExecutorText(executor)) continue;
    options = simulator::OptionsOf(executor);
    return "";
  }
  return absl::StrCat("--executor is \"", text, "\"; wanted gpu or cpu");
}

std::optional<Job> ReadPlansJob(const ToolInfo& tool, const std::string& path,
                                const PlanFile& plan,
                                simulator::Options& options) {
  Diagnostics diagnostics;
  std::optional<Job> job =
      ReadJob(path, diagnostics, std::string(tool.name) + " --job");
  const bool is_plans = job.has_value() && HasInputsOf(*job, plan, diagnostics);
  if (!diagnostics.ok() || !job.has_value()) {
    std::cerr << diagnostics.Render();
    return std::nullopt;
  }
  if (!is_plans) {
    Fail(tool, absl::StrCat("--job is \"", path,
                            "\", which this plan was not compiled from: the "
                            "digests of inputs differ; wanted the plan's job"));
    return std::nullopt;
  }
  if (plan.body().topology() != nullptr) return job;  // it has the speeds
  // A job that says nothing of NVLink says nothing of shared memory.
  const auto& peer = job->topology.peer_gigabytes_per_second;
  options.has_plan_speeds = peer.given || options.executor == Executor::kGpu;
  if (options.has_plan_speeds) options.peer_bytes_per_second = peer.value * 1e9;
  options.network_bytes_per_second =
      job->topology.network_gigabytes_per_second.value * 1e9;
  return job;
}

}  // namespace refit
