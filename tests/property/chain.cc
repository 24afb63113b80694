#include "tests/property/chain.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "plan/dtype.h"
#include "plan/plan_file.h"
#include "runner/local_ranks.h"
#include "simulator/simulation.h"
#include "tests/compiler/temporary_directory.h"
#include "tests/executor/refit_order.h"
#include "tests/property/module_check.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kTimeout{120};

// The plan, or why there is none.
struct Compiled {
  std::vector<uint8_t> bytes;
  std::string error;
  simulator::Options options = {};  // the job's links
};

Compiled CompileText(const std::string& text,
                     const std::function<void(Limits&)>& change_limits = {}) {
  const TemporaryDirectory directory;
  Diagnostics diagnostics;
  const std::optional<Job> job =
      ReadJob(directory.Write("job.json", text), diagnostics, "refitc");
  if (!job.has_value()) {
    return {.bytes = {},
            .error = absl::StrCat("ReadJob: ",
                                  directory.Relative(diagnostics.Render()))};
  }
  ModuleCheck check;
  absl::StatusOr<std::vector<uint8_t>> bytes = Compile(
      *job,
      {.change_limits = change_limits,
       .passed = [&](std::string_view pass,
                     const Module& module) { check.After(pass, module); }},
      diagnostics);
  if (!check.mistake().empty()) return {.bytes = {}, .error = check.mistake()};
  if (!bytes.ok()) {
    return {.bytes = {},
            .error = absl::StrCat("Compile: ", bytes.status().ToString(), "\n",
                                  directory.Relative(diagnostics.Render()))};
  }
  simulator::Options options;
  options.peer_bytes_per_second =
      job->topology.peer_gigabytes_per_second.value * 1e9;
  options.network_bytes_per_second =
      job->topology.network_gigabytes_per_second.value * 1e9;
  if (const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(*bytes);
      plan.ok()) {
    simulator::UseSpeedsOf(*plan, options);
  }
  return {.bytes = *std::move(bytes), .error = "", .options = options};
}

// "" or a rank that has more messages in a staged round than the limits say,
// which NCCL may cut into groups that hang.
std::string OverfullRound(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  const uint32_t limit = body.limits()->operations_per_round();
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    std::map<uint32_t, uint32_t> operations;             // by round
    std::set<std::pair<uint32_t, uint32_t>> broadcasts;  // by round and number
    for (const fb::Message* message : plan.messages().Of(rank)) {
      const fb::Round& round = *body.rounds()->Get(message->round());
      if (round.mechanism() != fb::Mechanism::kStaged) continue;
      if (message->broadcast() != 0 &&
          message->kind() == fb::MessageKind::kSend &&
          !broadcasts.emplace(message->round(), message->broadcast()).second) {
        continue;
      }
      if (++operations[message->round()] > limit) {
        return absl::StrFormat(
            "rank %d has more than %d operations in round %d", rank, limit,
            message->round());
      }
    }
  }
  return "";
}

// "" or what is wrong with a simulation of the plan: it is as long as the
// compiler's bound at least, every byte arrives, and a second one is the same.
std::string SimulationMistake(const PlanFile& plan,
                              const simulator::Options& options) {
  const absl::StatusOr<simulator::Simulation> first =
      simulator::Simulate(plan, options);
  if (!first.ok()) return absl::StrCat("Simulate: ", first.status().ToString());
  const double bound = EstimatesOf(plan).lower_bound_seconds;
  if (first->seconds < bound * (1 - 1e-6)) {
    return absl::StrFormat("simulated %g s, less than the bound of %g s",
                           first->seconds, bound);
  }
  uint64_t sent = 0, arrived = 0, crossed = 0, hops = 0;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    for (const fb::Message* message : plan.messages().Of(*program)) {
      const bool sends = message->kind() == fb::MessageKind::kSend;
      sent += sends ? message->size_bytes() : 0;
    }
  }
  for (const simulator::RoundTimes& round : first->rounds) {
    arrived += round.size_bytes;
  }
  for (const simulator::Message& message : first->graph.messages) {
    hops += message.links.size() * message.size_bytes;
  }
  for (const simulator::Link& link : first->graph.links) crossed += link.bytes;
  if (sent != arrived || hops != crossed) {
    return absl::StrFormat(
        "%d bytes sent, %d arrived; %d crossed links, not %d", sent, arrived,
        crossed, hops);
  }
  simulator::Options folds = options;
  folds.folds_equal_ranks = true;
  const absl::StatusOr<simulator::Simulation> second =
      simulator::Simulate(plan, folds);
  if (!second.ok() || second->seconds != first->seconds) {
    return "a second simulation, of equal ranks once, takes another time";
  }
  simulator::Options on_cpus = options;
  on_cpus.executor = simulator::Executor::kCpu;
  const absl::Status status = simulator::Simulate(plan, on_cpus).status();
  return status.ok() ? "" : absl::StrCat("Simulate: ", status.ToString());
}

BoundTensor Bind(TensorBytes& tensor) {
  return {.name = tensor.name,
          .data = tensor.bytes.empty() ? nullptr : tensor.bytes.data(),
          .size_bytes = tensor.bytes.size(),
          .dtype = *ParseDType(tensor.dtype),
          .shape = {tensor.shape.begin(), tensor.shape.end()}};
}

// "" or the first byte that differs.
std::string Compare(size_t rank, const TensorBytes& found,
                    const TensorBytes& wanted) {
  if (found.bytes == wanted.bytes) return "";
  size_t at = 0;
  while (found.bytes[at] == wanted.bytes[at]) ++at;
  const int64_t size = ElementBytes(wanted.dtype);
  int64_t element = static_cast<int64_t>(at) / size;
  const int64_t flat = element;
  std::vector<int64_t> index(wanted.shape.size());
  for (size_t d = index.size(); d-- > 0;) {
    index[d] = element % wanted.shape[d];
    element /= wanted.shape[d];
  }
  const auto hex = [&](const TensorBytes& tensor) {
    std::string text;
    for (int64_t b = size; b-- > 0;) {
      absl::StrAppendFormat(&text, "%02x",
                            static_cast<int>(tensor.bytes[flat * size + b]));
    }
    return text;
  };
  return absl::StrFormat(
      "destination rank %d, tensor \"%s\" (%s), element [%s]: found %s, wanted "
      "%s",
      rank, wanted.name, wanted.dtype, absl::StrJoin(index, ", "), hex(found),
      hex(wanted));
}

bool HoldsBetweenHosts(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  for (uint32_t rank = body.source_ranks(); rank < body.programs()->size();
       ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    for (const fb::Message* message : plan.messages().Of(program)) {
      if (message->kind() == fb::MessageKind::kSend && IsHeld(body, *message) &&
          body.programs()->Get(PeerOf(body, program, *message))->host() !=
              program.host()) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

int64_t ElementBytes(const std::string& dtype) {
  return DTypeBytes(*ParseDType(dtype));
}

std::string CompileChain(const std::string& job) {
  return CompileText(job).error;
}

TimeOverBound SimulateChain(const std::string& job) {
  Compiled compiled = CompileText(job);
  if (!compiled.error.empty()) return {.error = compiled.error};
  const absl::StatusOr<PlanFile> plan =
      PlanFile::FromBytes(std::move(compiled.bytes));
  if (!plan.ok()) return {.error = plan.status().ToString()};
  const absl::StatusOr<simulator::Simulation> simulation =
      simulator::Simulate(*plan, compiled.options);
  if (!simulation.ok()) return {.error = simulation.status().ToString()};
  const double bound = EstimatesOf(*plan).lower_bound_seconds;
  return {.ratio = simulation->seconds / bound,
          .bound_seconds = bound,
          .features = RequiredFeatures(plan->body()),
          .error = ""};
}

std::string RunChain(const ChainCase& chain) {
  ChainFacts facts;
  return RunChain(chain, facts);
}

std::string RunChain(const ChainCase& chain, ChainFacts& facts) {
  Compiled compiled = CompileText(chain.job, chain.change_limits);
  if (!compiled.error.empty()) return compiled.error;
  if (CompileText(chain.job, chain.change_limits).bytes != compiled.bytes) {
    return "the second compilation gives other bytes";
  }
  const absl::StatusOr<PlanFile> plan =
      PlanFile::FromBytes(std::move(compiled.bytes));
  if (!plan.ok()) return absl::StrCat("PlanFile: ", plan.status().ToString());
  facts = {.features = RequiredFeatures(plan->body()),
           .holds_between_hosts = HoldsBetweenHosts(*plan)};
  const size_t ranks = chain.sources.size() + chain.destinations.size();
  if (plan->source_ranks() != static_cast<int32_t>(chain.sources.size()) ||
      plan->world_size() != static_cast<int32_t>(ranks)) {
    return absl::StrFormat(
        "the plan has %d source ranks of %d; wanted %d of %d",
        plan->source_ranks(), plan->world_size(), chain.sources.size(), ranks);
  }
  if (std::string overfull = OverfullRound(*plan); !overfull.empty()) {
    return overfull;
  }
  // What is stored the compiler proved to be ordered.
  if (HasDirectRounds(*plan)) {
    std::string race =
        RefitOrder(*plan, {.direct = DirectRounds::kSent}).FirstRace();
    if (!race.empty()) return race;
  }

  if (std::string mistake = SimulationMistake(*plan, compiled.options);
      !mistake.empty()) {
    return mistake;
  }

  std::vector<std::vector<TensorBytes>> sources = chain.sources;
  std::vector<std::vector<TensorBytes>> found = chain.destinations;
  std::vector<std::vector<BoundTensor>> bound;
  for (std::vector<TensorBytes>& rank : sources) {
    bound.emplace_back();
    for (TensorBytes& tensor : rank) bound.back().push_back(Bind(tensor));
  }
  for (std::vector<TensorBytes>& rank : found) {
    bound.emplace_back();
    for (TensorBytes& tensor : rank) {
      std::fill(tensor.bytes.begin(), tensor.bytes.end(), kUntouchedByte);
      bound.back().push_back(Bind(tensor));
    }
  }
  const absl::StatusOr<std::unique_ptr<LocalRanks>> local =
      LocalRanks::Create(*plan, bound, kTimeout);
  if (!local.ok()) return absl::StrCat("Bind: ", local.status().ToString());
  const absl::StatusOr<RefitMeasurement> refit =
      (*local)->Refit(/*digest=*/true);
  if (!refit.ok()) return absl::StrCat("Run: ", refit.status().ToString());

  for (size_t rank = 0; rank < found.size(); ++rank) {
    for (size_t i = 0; i < found[rank].size(); ++i) {
      const std::string difference =
          Compare(rank, found[rank][i], chain.destinations[rank][i]);
      if (!difference.empty()) return difference;
    }
  }
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    for (size_t i = 0; i < sources[rank].size(); ++i) {
      if (sources[rank][i].bytes != chain.sources[rank][i].bytes) {
        return absl::StrFormat("the refit wrote to source rank %d, tensor %s",
                               rank, sources[rank][i].name);
      }
    }
  }
  return "";
}

}  // namespace refit
