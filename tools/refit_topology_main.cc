// refit-topology: what a job says of hosts like this one.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/job/text_file.h"
#include "tools/args.h"
#include "tools/plan_input.h"
#include "topology/probe.h"

// Real ones have some kilobytes.
static constexpr int64_t kNcclBytesMax = int64_t{16} << 20;

static int Main(int argc, char** argv) {
  std::string sys = "/sys";
  std::string nccl_file;
  const refit::ToolInfo tool = {
      .name = "refit-topology",
      .usage = "refit-topology [--nccl-topology FILE] [--sys DIR]",
      .summary =
          "Prints the \"topology\" of a job on hosts like this one: its GPUs "
          "and the NICs next\n"
          "to them from /sys, its NVLinks from NVIDIA's driver where it is "
          "loaded. Comments\n"
          "say what a host does not know.\n"
          "Exit status: 0 printed, 2 this host has no GPU.",
      .flags = {{"--sys", "", "DIR",
                 "read this copy of another host's /sys, and ask no driver",
                 &sys},
                {"--nccl-topology", "", "FILE",
                 "the topology file that NCCL is given, which shows a virtual "
                 "machine's bridges\n"
                 "(default: $NCCL_TOPO_FILE, with a warning where it cannot "
                 "be read)",
                 &nccl_file}},
      .positional_min = 0,
      .positional_max = 0,
  };
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  std::vector<refit::GpuFacts> facts;
  const bool is_here = std::find(args.flags.begin(), args.flags.end(),
                                 "--sys") == args.flags.end();
  if (is_here) {
    absl::StatusOr<std::vector<refit::GpuFacts>> read = refit::ReadNvml();
    if (read.ok()) facts = *std::move(read);
  }
  const char* const of_nccl = std::getenv("NCCL_TOPO_FILE");
  const bool is_given = !nccl_file.empty();
  if (is_here && !is_given && of_nccl != nullptr) nccl_file = of_nccl;
  absl::StatusOr<refit::BridgesByBusId> bridges = refit::BridgesByBusId();
  if (!nccl_file.empty()) {
    const absl::StatusOr<std::shared_ptr<const refit::SourceFile>> file =
        refit::ReadTextFile(nccl_file, kNcclBytesMax);
    if (file.ok()) {
      bridges = refit::ParseNcclTopology((*file)->text);
    } else if (is_given) {
      bridges = file.status();
    } else {  // as NCCL
      std::cerr << "refit-topology: warning: NCCL_TOPO_FILE: " << nccl_file
                << ": " << file.status().message() << "; going on without it\n";
    }
  }
  if (!bridges.ok()) {
    return refit::Fail(
        tool, nccl_file + ": " + std::string(bridges.status().message()));
  }
  const absl::StatusOr<refit::ProbedHost> host =
      refit::ProbeHost(sys, std::move(facts), *bridges);
  if (!host.ok()) return refit::Fail(tool, host.status());
  const absl::Status status = refit::WriteStdout(refit::TopologyJson(*host));
  return status.ok() ? refit::kExitSuccess : refit::Fail(tool, status);
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-topology", Main, argc, argv);
}
