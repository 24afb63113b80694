// The passes and their order. A pass is a function in a table; nothing else
// registers it. Each reads what the passes before it wrote into the module.
#ifndef REFIT_COMPILER_PASSES_PASSES_H_
#define REFIT_COMPILER_PASSES_PASSES_H_

#include <functional>
#include <ostream>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "compiler/model/model.h"

namespace refit {

// What a pass may know besides the module. All outlive the pipeline.
struct PassOptions {
  const Job& job;
  const Model& model;
  Diagnostics& diagnostics;
};

// Lists the buffers of every rank of a side and what stands where in them.
//
// Ensures: `source` (or `destination`) and `buffers`; a destination's fragments
// and regions tile each of its buffers.
absl::Status LayOutSource(const PassOptions& options, Module& module);
absl::Status LayOutDestination(const PassOptions& options, Module& module);

// Names what workers must do after a refit with tensors whose values the two
// sides keep in different forms.
//
// Requires: both sides are laid out.
// Ensures:  `post_hooks` of every destination buffer.
absl::Status NamePostHooks(const PassOptions& options, Module& module);

// Gives every rank its host, and links their speeds, from the job's topology.
//
// Requires: both sides are laid out.
// Ensures:  `topology.host` has an entry for every rank.
absl::Status PlaceRanks(const PassOptions& options, Module& module);

// Decides for each param that only the destination holds quantized where its
// blocks are: at the source when each source fragment is whole blocks, at the
// destination otherwise. Lists the operations, and the scratch they need.
//
// Requires: place-ranks.
// Ensures:  `quantizes`; what is quantized at the source stands in scratch of
//           its ranks, what is quantized at the destination comes into scratch
//           there. Reports ranks that need more than `limits.scratch_bytes`.
absl::Status PlaceQuantization(const PassOptions& options, Module& module);

// Finds whether the job is smaller jobs side by side, as data-parallel copies
// that feed engines of their own are. Most of these parts are alike.
//
// Requires: place-quantization.
// Ensures:  `fold` if it is: what follows plans the first part of those that
//           are alike. `is_compact`.
absl::Status FoldRanks(const PassOptions& options, Module& module);

// Cuts every destination fragment into pieces that one set of source ranks
// holds.
//
// Requires: both sides are laid out.
// Ensures:  `pieces` of one destination fragment tile it, each with at least
//           one source; `casts`. Reports params that only one
//           side has and dtype changes that the job does not declare.
absl::Status IntersectLayouts(const PassOptions& options, Module& module);

// Finds the time that no plan for this job on this topology beats, while pieces
// are what sources and destinations make them.
//
// Requires: intersect-layouts.
// Ensures:  `stats.lower_bound_seconds`.
absl::Status BoundTime(const PassOptions& options, Module& module);

// Decides the way of what ranks want and no source of their hosts holds. Where
// sources would send more than ranks receive, it goes by trees from host to
// host. Else each host is sent it once, by way of ranks that receive alike.
// Receivers relay for sources that send more than others. Does nothing unless
// `limits.relays`.
//
// Requires: intersect-layouts.
// Ensures:  a piece that `is_routed` has one destination, or those to which its
//           source `broadcasts`, and `relays` to the others, each behind the
//           one that feeds it. Receivers stay the same,
//           but one that does not want the piece may pass it on (`root_keeps`).
//           `stats.routes_flows`, `held_rounds`, `levels_sources`, `trees`,
//           `broadcasts`; `limits.bucket_bytes` has room where hosts pass on to
//           hosts.
absl::Status RouteFlows(const PassOptions& options, Module& module);

// Lets receivers on a source's host that want the same piece pass it on: each
// is sent a stripe of it, which it relays to the others there. Where that is
// faster, nothing casts on the way, and `limits.relays_directly` allows it.
//
// Requires: route-flows.
// Ensures:  a piece with `relays` has one destination; receivers and what they
//           receive stay the same.
absl::Status FanOut(const PassOptions& options, Module& module);

// Picks the sender of every piece for every receiver: the nearest replica
// first (same GPU, same host, same NVLink domain, any), then the least loaded;
// cuts pieces while that balances the senders better.
//
// Requires: fan-out.
// Ensures:  `transfers` feed every (piece, destination) and every relayed one
//           exactly once, and are sorted by source, destination, piece.
absl::Status ChooseSources(const PassOptions& options, Module& module);

// Packs the transfers of a pair of ranks into messages of at most
// `limits.bucket_bytes`, cutting boxes where they cross the limit.
//
// What is relayed is cut into the chunks of a pipeline: a relay passes on one
// while it receives the next.
//
// Requires: choose-sources.
// Ensures:  `messages` and their `contents`; every copy starts on a staging
//           alignment boundary; a relay's message has the contents of messages
//           that its sender receives in an earlier round.
absl::Status FormBuckets(const PassOptions& options, Module& module);

// Puts messages into rounds of one route each, such that every rank stays
// below the limits of operations and staging in every round.
//
// Requires: form-buckets.
// Ensures:  `rounds`; each message has its round and staging offsets, relays
//           after what they pass on; rounds less than `StagingTurns` apart
//           share no staging of a rank. `message_order`; if `is_compact`,
//           offsets follow it.
absl::Status ScheduleRounds(const PassOptions& options, Module& module);

// Fills `stats`: bytes by route, predicted time.
//
// Requires: schedule-rounds.
absl::Status EstimateCost(const PassOptions& options, Module& module);

struct PassInfo {
  std::string_view name;
  std::string_view summary;
  absl::Status (*run)(const PassOptions&, Module&);
  // What the pass produced, as stable text.
  std::string (*print)(const Module&);
};

// In order of execution.
absl::Span<const PassInfo> Pipeline();

struct PipelineOptions {
  std::string_view print_after;  // a pass's name, "all", or ""
  bool time_passes = false;
  std::ostream* shown = nullptr;  // where print_after goes; not owned
  std::ostream* log = nullptr;    // where time_passes goes; not owned
  // Called after each pass; may be empty.
  std::function<void(std::string_view pass, const Module& module)> passed = {};
};

// Runs every pass until one fails or reports a user's mistake.
absl::Status RunPipeline(const PassOptions& options,
                         const PipelineOptions& pipeline, Module& module);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_PASSES_H_
