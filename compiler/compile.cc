#include "compiler/compile.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/binding_link.h"
#include "compiler/emit/emit_plan.h"
#include "compiler/inputs_digest.h"
#include "compiler/job_warnings.h"
#include "compiler/layout/layout.h"
#include "compiler/model/model.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rounds.h"
#include "compiler/simulated_seconds.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"

namespace refit {
namespace {

absl::Status JobHasErrors() {
  return absl::InvalidArgumentError("the job has errors");
}

Limits LimitsOf(const Job& job, const std::function<void(Limits&)>& change,
                Diagnostics& diagnostics) {
  const OptionsSpec& options = job.options;
  Limits limits = {
      .bucket_bytes = options.bucket_bytes.value,
      .fills_buckets = options.bucket_bytes.given,
      .staging_bytes = options.staging_bytes.value,
      .network_peers = static_cast<int32_t>(options.network_peers.value),
      .direct_multiprocessors =
          static_cast<int32_t>(options.direct_multiprocessors.value),
      .direct_pulls = options.direct.value == DirectKind::kPull,
      .mapped = options.peer.value,
      .scratch_bytes = options.scratch_bytes.value,
      // A rank that relays does not know what changed.
      .relays = !options.delta.value.enabled,
      .broadcasts = job.topology.transport.value == TransportKind::kNccl,
      // Engines on the trainers' GPUs mostly sleep while these train, in memory
      // that no other process can map.
      .relays_directly = !job.colocated.value,
      .shape = {}};
  if (change) change(limits);
  if (limits.direct_pulls && limits.mapped != Mechanism::kDirect) {
    diagnostics.Error(
        options.direct.place,
        "options.direct is \"pull\" beside options.peer \"staged\": no round "
        "is direct; wanted \"push\", or options.peer \"direct\"");
  }
  const int64_t staging_bytes =
      AlignStaging(limits.bucket_bytes) * limits.slots;
  if (staging_bytes > limits.staging_bytes) {
    const bool staging = options.staging_bytes.given;
    diagnostics.Error(
        staging ? options.staging_bytes.place : options.bucket_bytes.place,
        absl::StrFormat("options.staging_bytes %d is too small; wanted at "
                        "least %d (%d x bucket_bytes %d)",
                        limits.staging_bytes, staging_bytes, limits.slots,
                        limits.bucket_bytes));
  }
  return limits;
}

// Room for 1/128, 1/64 … 1/2 of a message's elements: of bf16 a message then
// takes 1/64, 1/36 … 3/4 of its bytes. A rung costs the plan a byte, and one
// that is missing up to half of what a refit sends.
constexpr uint8_t kRungs[] = {7, 6, 5, 4, 3, 2, 1};

// How staged rounds leave out what did not change. Reports what cannot. Without
// staged rounds the plan is dense.
void DeclareDelta(const Job& job, Diagnostics& diagnostics, Module& module) {
  if (!module.delta.has_value()) return;
  const auto refuse = [&](const std::string& why) {
    diagnostics.Error(job.options.delta.place,
                      absl::StrCat("options.delta: ", why));
  };
  if (!module.quantizations.empty()) {
    refuse(
        "params that are quantized on the way cannot be delta yet; wanted "
        "one dtype family on both sides, or no delta");
    return;
  }
  const bool stages = std::any_of(
      module.messages.begin(), module.messages.end(),
      [&](const Message& message) {
        return module.rounds[message.round].mechanism == Mechanism::kStaged;
      });
  if (stages) {
    module.delta->rungs.assign(std::begin(kRungs), std::end(kRungs));
  } else {
    module.delta.reset();
  }
}

// The rank that exchanges with the most ranks of other hosts.
struct MostPeers {
  size_t rank = 0;
  size_t count = 0;
};

MostPeers FindMostPeers(Module& module) {
  std::vector<std::set<size_t>> peers(static_cast<size_t>(module.world_size()));
  const auto add = [&](Rank a, Rank b) {
    peers[IndexOf(a)].insert(IndexOf(b));
    peers[IndexOf(b)].insert(IndexOf(a));
  };
  for (Message& message : module.messages) {
    if (message.is_sent_with_other() ||
        module.RouteBetween(message.source, message.destination) !=
            Route::kNetwork) {
      continue;
    }
    Rank sender = message.source;
    ForEachSentWith(module, message, [&](const Message& received) {
      add(sender, received.destination);
      sender = received.destination;
    });
    // A broadcast goes round a ring.
    add(sender, message.source);
  }
  const auto most = std::max_element(
      peers.begin(), peers.end(),
      [](const auto& a, const auto& b) { return a.size() < b.size(); });
  return {.rank = static_cast<size_t>(most - peers.begin()),
          .count = most->size()};
}

// Whether the job allows a rank so many peers.
bool AllowsPeers(const Limits& limits, const MostPeers& most) {
  return limits.network_peers == 0 ||
         most.count <= static_cast<size_t>(limits.network_peers);
}

void ReportPeers(const Job& job, const MostPeers& most,
                 Diagnostics& diagnostics) {
  diagnostics.Error(
      job.options.network_peers.place,
      absl::StrFormat(
          "options.network_peers is %d, but rank %d exchanges with %d ranks of "
          "other hosts; wanted at least %d, or %s",
          job.options.network_peers.value, most.rank, most.count, most.count,
          job.options.delta.value.enabled
              ? "no delta: with options.delta no rank receives for others"
              : "meshes whose ranks need fewer"));
}

// What a compilation does, one after the other: the passes, and what is before
// and after them.
class PassTimes {
 public:
  explicit PassTimes(const CompileOptions& options) : options_(options) {}

  // Runs what is not a pass, timed like one.
  template <typename Work>
  auto Timed(const char* name, const Work& work) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    auto result = work();
    if (options_.time_passes) {
      const std::chrono::duration<double, std::milli> elapsed =
          Clock::now() - start;
      *options_.log << absl::StrFormat("%-20s %9.3f ms\n", name,
                                       elapsed.count());
    }
    Done(name);
    return result;
  }

  void Done(std::string_view name) {
    ++done_;
    if (!options_.progress) return;
    // read-model, find-binding-link, emit-plan and weigh-plans
    constexpr int kOthers = 4;
    const int total = static_cast<int>(Pipeline().size()) + kOthers +
                      (options_.prove ? 1 : 0);
    options_.progress(name, done_, total);
  }

 private:
  const CompileOptions& options_;
  int done_ = 0;
};

// A plan, not proved. What it is made from is gone when it is proved.
struct Draft {
  std::vector<uint8_t> bytes;
  std::string shown;   // what CompileOptions::print_after asks for
  Diagnostics doubts;  // warnings of its messages
  // What is asked of it before another one is drafted, to compare the two.
  Topology topology;
  Stats stats;
  size_t messages = 0;
  MostPeers most_peers;
  bool has_deltas = false;
  bool relays_directly = false;  // as Limits'
  bool joins_hosts = false;      // Module::JoinsHosts, where ranks relay
};

// What all drafts of a job begin with.
struct Inputs {
  Limits limits;
  Model model;
  fb::Digest digest;
};

// None: the job has errors.
std::optional<Inputs> ReadInputs(const Job& job, const CompileOptions& options,
                                 PassTimes& times, Diagnostics& diagnostics) {
  const Limits limits = LimitsOf(job, options.change_limits, diagnostics);
  std::optional<Model> model =
      times.Timed("read-model", [&] { return ReadModel(job, diagnostics); });
  if (!model.has_value()) return std::nullopt;
  ApplyExcludes(job.options, *model, diagnostics);
  const fb::Digest digest = InputsDigest(job, *model);
  return Inputs{.limits = limits, .model = *std::move(model), .digest = digest};
}

// "qwen3_moe, 48 layers, hidden size 2048, 128 experts, 18867 params". Not the
// path of its config.json: that is another one on another host.
std::string DescribeModel(const Model& model) {
  size_t params = 0;
  for (const Param& param : model.params) {
    size_t count = 1;
    for (const IndexDim& dim : param.index) count *= dim.numbers.size();
    params += count;
  }
  std::string text;
  if (const Architecture& shape = model.architecture; shape.layers > 0) {
    absl::StrAppend(&text, std::string(shape.family->model_type), ", ",
                    shape.layers, " layers, hidden size ", shape.hidden, ", ");
    if (shape.experts > 0) absl::StrAppend(&text, shape.experts, " experts, ");
  }
  return absl::StrCat(text, params, " params");
}

absl::StatusOr<Draft> Drafted(const Job& job, const Inputs& inputs,
                              const Limits& limits,
                              const CompileOptions& options, PassTimes& times,
                              Diagnostics& diagnostics) {
  Module module;
  module.limits = limits;
  if (const DeltaSpec& delta = job.options.delta.value; delta.enabled) {
    module.delta = {.changes = delta.changes,
                    .dense_every = delta.dense_every,
                    .check = delta.check,
                    .rungs = {}};
  }
  module.params = inputs.model.params;
  module.skips = inputs.model.skips;
  DeclareQuantizations(job, module, diagnostics);
  if (!diagnostics.ok()) return JobHasErrors();
  module.inputs_digest = inputs.digest;
  module.job_facts = job.facts;
  module.job_facts["model"] = DescribeModel(inputs.model);
  std::ostringstream shown;
  const absl::Status status = RunPipeline(
      {.job = job, .model = inputs.model, .diagnostics = diagnostics},
      {.print_after = options.print_after,
       .time_passes = options.time_passes,
       .shown = &shown,
       .log = options.log,
       .passed =
           [&](std::string_view pass, const Module& passed) {
             times.Done(pass);
             if (options.passed) options.passed(pass, passed);
           }},
      module);
  // What passes made of a job with errors is shown as well.
  const auto fail = [&](absl::Status why) {
    if (options.shown != nullptr) *options.shown << shown.str();
    return why;
  };
  if (!status.ok()) return fail(status);
  DeclareDelta(job, diagnostics, module);
  // Not of a job with errors: mending those may settle it.
  WarnOfJob(job, inputs.model, diagnostics);
  if (!diagnostics.ok()) return fail(JobHasErrors());
  const BindingLink binding =
      times.Timed("find-binding-link", [&] { return FindBindingLink(module); });
  module.stats.binding_link = binding.text;
  // Passes that cost rounds know nothing of leaves and the spine.
  module.stats.predicted_seconds =
      std::max(module.stats.predicted_seconds, binding.seconds);
  absl::StatusOr<std::vector<uint8_t>> bytes =
      times.Timed("emit-plan", [&] { return EmitPlan(module); });
  if (!bytes.ok()) return fail(bytes.status());
  Draft draft;
  draft.bytes = *std::move(bytes);
  WarnOfMessages(job, module, draft.doubts);
  draft.shown = shown.str();
  if (limits.network_peers > 0) draft.most_peers = FindMostPeers(module);
  draft.joins_hosts = limits.relays && module.JoinsHosts();
  draft.topology = std::move(module.topology);
  draft.stats = std::move(module.stats);
  draft.messages = module.messages.size();
  draft.has_deltas = module.delta.has_value();
  draft.relays_directly = std::any_of(
      module.messages.begin(), module.messages.end(), [&](const Message& of) {
        return of.mechanism == Mechanism::kDirect && module.IsRelay(of.source);
      });
  return draft;
}

// Another one than the first, whose messages nobody reads.
absl::StatusOr<Draft> DraftedQuietly(const Job& job, const Inputs& inputs,
                                     const Limits& limits,
                                     const CompileOptions& options) {
  const CompileOptions quiet = {.print_after = options.print_after,
                                .passed = options.passed};
  PassTimes unheard(quiet);
  Diagnostics unread;
  return Drafted(job, inputs, limits, quiet, unheard, unread);
}

// What decides between plans of a job is compared in whole nanoseconds, so that
// the last bit of a sum does not.
int64_t Nanoseconds(double seconds) {
  constexpr double kMost = 1e15;  // times a percentage, in 64 bits
  return std::llround(std::min(seconds * 1e9, kMost));
}
// Whether `nanoseconds` are less than this percentage of `of`.
bool IsLess(int64_t nanoseconds, int64_t percent, int64_t of) {
  return nanoseconds * 100 < of * percent;
}

// Plans of a job are compared until so many messages have been simulated, which
// takes a second.
constexpr size_t kMessagesSimulated = size_t{1} << 18;
// One whose rounds have another shape is kept only if it takes less than this
// part of the time of the best so far.
constexpr int64_t kFasterPercent = 99;
// Nor is any tried where one takes no more than this part of the bound.
constexpr int64_t kNearBoundPercent = 101;
absl::StatusOr<int64_t> NanosecondsOf(const Draft& draft) {
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(draft.bytes);
  if (!plan.ok()) return plan.status();
  const absl::StatusOr<double> seconds =
      SimulatedSeconds(*plan, draft.topology);
  if (!seconds.ok()) return seconds.status();
  return Nanoseconds(*seconds);
}

// The plan that the simulator finds fastest: `draft`, whose rounds are full,
// one with rounds of another shape, one along trees instead of broadcasts, one
// along two trees instead of a chain, one in which sources feed every host, or
// one whose flows are planned by host instead of by NVLink domain.
class Contest {
 public:
  Contest(const Job& job, const Inputs& inputs, const Limits& limits,
          const CompileOptions& options, Draft draft)
      : job_(job),
        inputs_(inputs),
        options_(options),
        limits_(limits),
        draft_(std::move(draft)) {}

  Draft Fastest() && {
    const Stats& stats = draft_.stats;
    std::vector<Limits> others;
    if (stats.trees) others.emplace_back(limits_).trees = false;
    if (stats.broadcasts) others.emplace_back(limits_).broadcasts = false;
    if (stats.long_chains) others.emplace_back(limits_).long_chains = false;
    if (draft_.joins_hosts) others.emplace_back(limits_).joins_hosts = false;
    if (stats.routes_flows && !stats.broadcasts && !draft_.joins_hosts &&
        !stats.routes_between_hosts()) {
      using Sizes = RoundShape::Sizes;
      others.emplace_back(limits_).shape.sizes = Sizes::kEven;
      others.emplace_back(limits_).shape.sizes = Sizes::kFitted;
    }
    // Simulating the first is in vain if no other one is.
    if (others.empty() || 2 * draft_.messages > kMessagesSimulated ||
        !Start().ok()) {
      return std::move(draft_);
    }
    for (const Limits& other : others) Try(other);
    return std::move(draft_);
  }

 private:
  absl::Status Start() {
    const absl::StatusOr<int64_t> nanoseconds = NanosecondsOf(draft_);
    if (nanoseconds.ok()) least_ = *nanoseconds;
    simulated_ = draft_.messages;
    return nanoseconds.status();
  }

  void Try(const Limits& limits) {
    if (simulated_ + draft_.messages > kMessagesSimulated) return;
    // No plan would be kept, or one that is hardly faster.
    if (least_ * 100 <=
        Nanoseconds(draft_.stats.lower_bound_seconds) * kNearBoundPercent) {
      return;
    }
    absl::StatusOr<Draft> draft =
        DraftedQuietly(job_, inputs_, limits, options_);
    if (!draft.ok()) return;
    if (draft->relays_directly && !limits.relays_directly) return;
    if (!AllowsPeers(limits, draft->most_peers)) return;
    simulated_ += draft->messages;
    if (simulated_ > kMessagesSimulated) return;
    const absl::StatusOr<int64_t> nanoseconds = NanosecondsOf(*draft);
    if (!nanoseconds.ok() || !IsLess(*nanoseconds, kFasterPercent, least_)) {
      return;
    }
    least_ = *nanoseconds;
    draft_ = *std::move(draft);
  }

  const Job& job_;
  const Inputs& inputs_;
  const CompileOptions& options_;
  const Limits limits_;
  Draft draft_;
  int64_t least_ = 0;     // nanoseconds of `draft_`
  size_t simulated_ = 0;  // messages
};

// Above that the user is told of what deltas cost a dense refit.
constexpr double kMuchLonger = 1.25;

// What a refit of a job of deltas is predicted to take if it has none, and so
// ranks may relay. None: not much less than `seconds`, those with deltas.
std::optional<double> SecondsWithoutDelta(const Job& job, const Inputs& inputs,
                                          double seconds) {
  Diagnostics unheard;
  Module module;
  module.limits = inputs.limits;
  module.limits.relays = true;
  module.params = inputs.model.params;
  module.skips = inputs.model.skips;
  const PassOptions of = {
      .job = job, .model = inputs.model, .diagnostics = unheard};
  for (const PassInfo& pass : Pipeline()) {
    if (!pass.run(of, module).ok() || !unheard.ok()) return std::nullopt;
    // The passes that take long come behind the one that finds the bound.
    if (module.stats.lower_bound_seconds * kMuchLonger > seconds) {
      return std::nullopt;
    }
  }
  const double predicted = module.stats.predicted_seconds;
  if (predicted * kMuchLonger > seconds) return std::nullopt;
  return predicted;
}

// What to try, in this order, where ranks exchange with more than the job
// allows.
std::vector<Limits> WithFewerPeers(const Limits& limits, const Stats& stats) {
  std::vector<Limits> all;
  if (!limits.relays) return all;
  const auto also_by_rails = [&] {
    all.push_back(all.empty() ? limits : all.back());
    all.back().by_rails = true;
  };
  // A rank has four peers in two broadcasts.
  if (stats.broadcasts) all.emplace_back(limits).broadcasts = false;
  also_by_rails();
  if (stats.trees) {
    all.emplace_back(limits).trees = false;
    also_by_rails();
  }
  return all;
}

absl::StatusOr<std::vector<uint8_t>> Emitted(const Job& job,
                                             const CompileOptions& options,
                                             PassTimes& times,
                                             Diagnostics& diagnostics) {
  const std::optional<Inputs> inputs =
      ReadInputs(job, options, times, diagnostics);
  if (!inputs.has_value()) return JobHasErrors();
  Limits limits = inputs->limits;
  absl::StatusOr<Draft> draft =
      Drafted(job, *inputs, limits, options, times, diagnostics);
  if (!draft.ok()) return draft.status();
  std::optional<double> without_delta;
  Draft kept = times.Timed("weigh-plans", [&] {
    const auto draft_anew = [&] {
      absl::StatusOr<Draft> other =
          DraftedQuietly(job, *inputs, limits, options);
      if (other.ok()) draft = std::move(other);
    };
    for (const Limits& fewer : WithFewerPeers(limits, draft->stats)) {
      if (AllowsPeers(limits, draft->most_peers)) break;
      limits = fewer;
      draft_anew();
    }
    // What does not fit into staging is stored by those that received it.
    if (draft->relays_directly && !limits.relays_directly) {
      limits.relays = false;
      draft_anew();
    }
    Draft fastest =
        Contest(job, *inputs, limits, options, *std::move(draft)).Fastest();
    if (fastest.has_deltas) {
      without_delta =
          SecondsWithoutDelta(job, *inputs, fastest.stats.predicted_seconds);
    }
    return fastest;
  });
  if (!AllowsPeers(limits, kept.most_peers)) {
    ReportPeers(job, kept.most_peers, diagnostics);
    return JobHasErrors();
  }
  if (options.shown != nullptr) *options.shown << kept.shown;
  diagnostics.Append(kept.doubts);
  if (without_delta.has_value()) {
    WarnOfDelta(job.options, kept.stats.predicted_seconds, *without_delta,
                diagnostics);
  }
  if (!diagnostics.ok()) return JobHasErrors();
  return std::move(kept.bytes);
}

// The proof of what is about to be written, from its bytes.
absl::StatusOr<std::vector<uint8_t>> Proved(std::vector<uint8_t> bytes) {
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
  if (!plan.ok()) {
    return absl::InternalError(absl::StrCat("the compiled plan is malformed: ",
                                            plan.status().message()));
  }
  const ProofResult proof = Prove(*plan);
  if (!proof.valid) {
    return absl::InternalError(
        absl::StrCat("the compiled plan fails its proof: ", proof.violation));
  }
  return (*std::move(plan)).TakeBytes();
}

}  // namespace

absl::StatusOr<std::vector<uint8_t>> Compile(const Job& job,
                                             const CompileOptions& options,
                                             Diagnostics& diagnostics) {
  PassTimes times(options);
  absl::StatusOr<std::vector<uint8_t>> bytes =
      Emitted(job, options, times, diagnostics);
  if (!bytes.ok() || !options.prove) return bytes;
  return times.Timed("prove-plan", [&] { return Proved(*std::move(bytes)); });
}

absl::StatusOr<std::vector<uint8_t>> CompileFile(const std::string& path,
                                                 const CompileOptions& options,
                                                 Diagnostics& diagnostics) {
  const std::optional<Job> job = ReadJob(path, diagnostics, "refitc");
  if (!job.has_value()) return JobHasErrors();
  return Compile(*job, options, diagnostics);
}

}  // namespace refit
