#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/ir/print.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

constexpr PassInfo kPipeline[] = {
    {"lay-out-source", "lists the source ranks' buffers and what they hold",
     LayOutSource, SourceText},
    {"lay-out-destination",
     "lists the destination ranks' buffers and what they hold",
     LayOutDestination, DestinationText},
    // From here on nothing knows a framework's name.
    {"name-post-hooks",
     "names what workers do after a refit where the sides' values differ",
     NamePostHooks, PostHooksText},
    {"place-ranks", "gives every rank its host and its links", PlaceRanks,
     TopologyText},
    // After hosts: the sources of a host share what they quantize.
    {"place-quantization",
     "decides where blocks are quantized, and lists the scratch for it",
     PlaceQuantization, QuantizationText},
    // Before pieces: what follows grows with the ranks of one part.
    {"fold-ranks",
     "finds parts of the job, to plan one of those that are alike", FoldRanks,
     FoldText},
    {"intersect-layouts",
     "cuts destination fragments where the set of holders changes",
     IntersectLayouts, PiecesText},
    {"bound-time", "finds the time that no plan beats", BoundTime, BoundText},
    // Before sources are chosen: who of several receivers a source feeds
    // decides how much each source sends.
    {"route-flows", "sends each host once what its ranks want of other hosts",
     RouteFlows, PiecesText},
    {"fan-out", "lets receivers of a source's host relay to each other", FanOut,
     PiecesText},
    // Before buckets: which pair a piece belongs to decides what is packed
    // together.
    {"choose-sources", "picks the sender of every piece for every receiver",
     ChooseSources, TransfersText},
    {"form-buckets", "packs the transfers of a pair of ranks into messages",
     FormBuckets, MessagesText},
    {"schedule-rounds", "puts messages into rounds within every rank's limits",
     ScheduleRounds, RoundsText},
    {"estimate-cost", "computes bytes and predicted time", EstimateCost,
     CostText},
};

}  // namespace

absl::Span<const PassInfo> Pipeline() { return kPipeline; }

absl::Status RunPipeline(const PassOptions& options,
                         const PipelineOptions& pipeline, Module& module) {
  using Clock = std::chrono::steady_clock;
  for (const PassInfo& pass : kPipeline) {
    const Clock::time_point start = Clock::now();
    absl::Status status = pass.run(options, module);
    const std::chrono::duration<double, std::milli> elapsed =
        Clock::now() - start;
    if (!status.ok()) return status;
    if (pipeline.time_passes) {
      *pipeline.log << absl::StrFormat("%-20s %9.3f ms\n", pass.name,
                                       elapsed.count());
    }
    if (pipeline.passed) pipeline.passed(pass.name, module);
    // Both sides are laid out before their mistakes are reported, so that one
    // run shows both.
    const bool report = pass.run != LayOutSource;
    if (report && !options.diagnostics.ok()) {
      return absl::InvalidArgumentError("the job has errors");
    }
    if (pipeline.print_after == pass.name || pipeline.print_after == "all") {
      *pipeline.shown << "// after " << pass.name << "\n" << pass.print(module);
    }
  }
  return absl::OkStatus();
}

}  // namespace refit
