// refit-topology: what a job says of hosts like this one.
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/args.h"
#include "tools/plan_input.h"
#include "topology/probe.h"

static int Main(int argc, char** argv) {
  std::string sys = "/sys";
  const refit::ToolInfo tool = {
      .name = "refit-topology",
      .usage = "refit-topology [--sys DIR]",
      .summary =
          "Prints the \"topology\" of a job on hosts like this one: its GPUs "
          "and the NICs next\n"
          "to them from /sys, its NVLinks from NVIDIA's driver where it is "
          "loaded. Comments\n"
          "say what a host does not know.\n"
          "Exit status: 0 printed, 2 this host has no GPU.",
      .flags = {{"--sys", "", "DIR",
                 "read this copy of another host's /sys, and ask no driver",
                 &sys}},
      .positional_min = 0,
      .positional_max = 0,
  };
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  std::vector<refit::GpuFacts> facts;
  if (args.flags.empty()) {
    absl::StatusOr<std::vector<refit::GpuFacts>> read = refit::ReadNvml();
    if (read.ok()) facts = *std::move(read);
  }
  const absl::StatusOr<refit::ProbedHost> host =
      refit::ProbeHost(sys, std::move(facts));
  if (!host.ok())
    return refit::Fail(tool, std::string(host.status().message()));
  const absl::Status status = refit::WriteStdout(refit::TopologyJson(*host));
  return status.ok() ? refit::kExitSuccess
                     : refit::Fail(tool, std::string(status.message()));
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-topology", Main, argc, argv);
}
