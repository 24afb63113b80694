// Compiling, and all that can be said of a plan from its file.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/job/text_file.h"
#include "compiler/plan_of_job.h"
#include "executor/post_hooks.h"
#include "files/atomic_file.h"
#include "plan/diff/diff.h"
#include "plan/dtype.h"
#include "plan/plan_file.h"
#include "plan/progress.h"
#include "plan/proof/proof.h"
#include "plan/schedule/tensor_table.h"
#include "plan/text/plan_view.h"
#include "plan/text/text.h"
#include "python/src/bindings.h"
#include "python/src/signals.h"
#include "python/src/status.h"

namespace refit::python {
namespace {

namespace nb = nanobind;

// Calls `function(step, done, total)` while the caller holds no lock; what it
// raises ends the computation.
Progress ToProgress(const nb::object& function) {
  if (function.is_none()) return {};
  return [&function](std::string_view step, int done, int total) {
    const nb::gil_scoped_acquire lock;
    function(nb::str(step.data(), step.size()), done, total);
  };
}

// Reads the job `text`, which messages call `name`.
std::optional<Job> ReadText(const std::string& text, const std::string& name,
                            const std::string& directory,
                            Diagnostics& diagnostics, std::string_view reader) {
  Check(CheckText(text));
  return ReadJobText(std::make_shared<const SourceFile>(
                         SourceFile{.path = name, .text = text}),
                     directory, diagnostics, reader);
}

absl::Status JobErrors(const Diagnostics& diagnostics) {
  return diagnostics.ok() ? absl::OkStatus()
                          : absl::InvalidArgumentError(diagnostics.Render());
}

// The plan, and a line for each warning.
using Compiled = std::pair<PlanFile, std::vector<std::string>>;
Compiled CompileText(const std::string& text, const std::string& name,
                     const std::string& directory, const nb::object& progress) {
  const CompileOptions options = {.progress = ToProgress(progress)};
  const nb::gil_scoped_release unlocked;
  Diagnostics diagnostics;
  const std::optional<Job> job =
      ReadText(text, name, directory, diagnostics, "refit.compile");
  Check(JobErrors(diagnostics));
  absl::StatusOr<std::vector<uint8_t>> bytes =
      Compile(*job, options, diagnostics);
  Check(JobErrors(diagnostics));
  return {Check(PlanFile::FromBytes(Check(std::move(bytes)))),
          diagnostics.WarningLines()};
}

// "" if the plan is that of the job.
std::string DifferenceFrom(const PlanFile& plan, const std::string& text,
                           const std::string& name,
                           const std::string& directory) {
  const nb::gil_scoped_release unlocked;
  Diagnostics diagnostics;
  const std::optional<Job> job =
      ReadText(text, name, directory, diagnostics, "Plan.verify");
  Check(JobErrors(diagnostics));
  absl::StatusOr<std::string> difference =
      DifferenceFromJob(*job, plan, diagnostics);
  Check(JobErrors(diagnostics));
  return Check(std::move(difference));
}

PlanFile Open(const std::string& path) { return Check(PlanFile::Open(path)); }

PlanFile FromBytes(const nb::bytes& bytes) {
  const auto* data = static_cast<const uint8_t*>(bytes.data());
  return Check(
      PlanFile::FromBytes(std::vector<uint8_t>(data, data + bytes.size())));
}

void Save(const PlanFile& plan, const std::string& path) {
  Signals signals;
  absl::Status status;
  {
    const nb::gil_scoped_release unlocked;
    status =
        WriteFileAtomically(path, plan.bytes(), [&] { return signals.Poll(); });
  }
  signals.Rethrow();
  Check(status);
}

nb::bytes ToBytes(const PlanFile& plan) {
  return nb::bytes(plan.bytes().data(), plan.bytes().size());
}

void CheckRank(const PlanFile& plan, int32_t rank) {
  if (rank >= 0 && rank < plan.world_size()) return;
  Check(absl::InvalidArgumentError(absl::StrCat("rank ", rank,
                                                " is not one of the plan's ",
                                                plan.world_size(), " ranks")));
}

std::string Text(const PlanFile& plan, std::optional<int32_t> rank,
                 const std::string& tensor, bool json) {
  if (rank.has_value()) CheckRank(plan, *rank);
  if (!tensor.empty() && !HasTensor(plan, tensor)) {
    Check(absl::NotFoundError(
        absl::StrCat("tensor \"", tensor,
                     "\": no param, buffer or skip of this plan has such a "
                     "name")));
  }
  const TextOptions options = {.rank = rank, .tensor_glob = tensor};
  return json ? PlanJson(plan, options) : PlanText(plan, options);
}

// Name, dtype and shape of each tensor that a rank binds, in plan order. The
// executor's scratch comes last among a rank's buffers; nobody binds it.
using TensorInfo = std::tuple<std::string, std::string, std::vector<uint64_t>>;
std::vector<TensorInfo> Tensors(const PlanFile& plan, int32_t rank) {
  CheckRank(plan, rank);
  std::vector<TensorInfo> tensors;
  const fb::Body& body = plan.body();
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const uint32_t workers =
      program.buffers()->size() - program.scratch_buffers();
  for (uint32_t slot = 0; slot < workers; ++slot) {
    const fb::Buffer& buffer =
        *body.buffers()->Get(program.buffers()->Get(slot));
    std::vector<uint64_t> shape;
    if (buffer.shape() != nullptr) {
      shape.assign(buffer.shape()->begin(), buffer.shape()->end());
    }
    for (uint64_t i = 0; i < StackTensors(buffer); ++i) {
      tensors.emplace_back(TensorName(buffer, i),
                           std::string(DTypeName(buffer.dtype())), shape);
    }
  }
  return tensors;
}

// What the framework of a rank's worker must be set to, by key.
std::map<std::string, std::string> Requirements(const PlanFile& plan,
                                                int32_t rank) {
  CheckRank(plan, rank);
  const fb::Side side =
      rank < plan.source_ranks() ? fb::Side::kSource : fb::Side::kDestination;
  const auto* requirements = plan.body().requirements();
  std::map<std::string, std::string> values;
  for (uint32_t i = 0; i < Length(requirements); ++i) {
    const fb::Requirement& requirement = *requirements->Get(i);
    if (requirement.side() != side) continue;
    values.emplace(requirement.key()->str(), requirement.value()->str());
  }
  return values;
}

// The names of a rank's tensors that no refit reads or writes.
// The names of the worker's tensors at entries that are set.
std::vector<std::string> NamesOf(const TensorTable& table,
                                 const std::vector<bool>& entries) {
  std::vector<std::string> names;
  for (size_t slot = 0; slot < table.workers_stacks(); ++slot) {
    for (uint64_t entry = table.begin(slot); entry < table.begin(slot + 1);
         ++entry) {
      if (!entries[entry]) continue;
      names.push_back(table.Name(slot, entry - table.begin(slot)));
    }
  }
  return names;
}

std::vector<std::string> Skipped(const PlanFile& plan, int32_t rank) {
  CheckRank(plan, rank);
  const TensorTable table(plan, rank);
  return NamesOf(table, table.Skipped());
}

std::vector<std::string> LeftAlone(const PlanFile& plan, int32_t rank) {
  CheckRank(plan, rank);
  const TensorTable table(plan, rank);
  return NamesOf(table, table.LeftAlone());
}

// Tensor, name, detail, and whether an executor does it where the caller does
// not.
using HookTuple = std::tuple<std::string, std::string, std::string, bool>;
std::vector<HookTuple> PostHooks(const PlanFile& plan, int32_t rank) {
  CheckRank(plan, rank);
  std::vector<HookTuple> hooks;
  for (const TensorPostHook& hook :
       AssignPostHooks(TensorTable(plan, rank), {}).hooks) {
    hooks.emplace_back(hook.tensor, hook.name, hook.detail, hook.by_executor);
  }
  return hooks;
}

// Payload bytes by sender and receiver.
using PairBytes = std::tuple<int32_t, int32_t, uint64_t>;
std::vector<PairBytes> TrafficOf(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  const SendPayloads payloads(plan.messages());
  std::map<std::pair<int32_t, int32_t>, uint64_t> bytes;
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const MessageVector& messages = plan.messages().Of(rank);
    for (uint32_t i = 0; i < messages.size(); ++i) {
      const fb::Message& message = *messages.Get(i);
      if (message.kind() != fb::MessageKind::kSend) continue;
      bytes[{static_cast<int32_t>(rank),
             static_cast<int32_t>(PeerOf(body, rank, message))}] +=
          payloads.Bytes(rank, i);
    }
  }
  std::vector<PairBytes> pairs;
  for (const auto& [pair, sum] : bytes) {
    pairs.emplace_back(pair.first, pair.second, sum);
  }
  return pairs;
}

nb::dict Stats(const PlanFile& plan) {
  const fb::Body& body = plan.body();
  const fb::Stats& stats = *body.stats();
  uint64_t messages = 0;
  uint64_t largest_staging = 0;
  uint64_t tensors = 0;
  for (const fb::RankProgram* program : *body.programs()) {
    largest_staging = std::max(largest_staging, program->staging_bytes());
    ForEachMessage(body, *program, [&](const fb::Message& message) {
      messages += message.kind() == fb::MessageKind::kSend;
      return true;
    });
    for (const uint32_t id : *program->buffers()) {
      tensors += StackTensors(*body.buffers()->Get(id));
    }
  }
  uint64_t params = 0;
  for (const fb::Param* param : *body.params()) {
    params += StackTensors(*param);
  }
  nb::dict result;
  result["moved_bytes"] = stats.moved_bytes();
  result["local_bytes"] = stats.local_bytes();
  result["peer_bytes"] = stats.peer_bytes();
  result["network_bytes"] = stats.network_bytes();
  const Estimates estimates = EstimatesOf(plan);
  result["lower_bound_seconds"] = estimates.lower_bound_seconds;
  result["predicted_seconds"] = estimates.predicted_seconds;
  result["binding_link"] = estimates.binding_link;
  result["messages"] = messages;
  result["rounds"] = body.rounds()->size();
  result["staging_bytes_max"] = largest_staging;
  result["params"] = params;
  result["param_stacks"] = body.params()->size();
  result["tensors"] = tensors;
  result["skips"] = Length(body.skips());
  result["file_bytes"] = plan.bytes().size();
  return result;
}

nb::dict Verify(const PlanFile& plan, const nb::object& progress) {
  const Progress heard = ToProgress(progress);
  ProofResult proof;
  {
    const nb::gil_scoped_release unlocked;
    proof = Prove(plan, heard);
  }
  nb::dict result;
  result["valid"] = proof.valid;
  result["violation"] = proof.violation;
  result["messages"] = proof.messages;
  result["destination_elements"] = proof.destination_elements;
  result["moved_bytes"] = proof.moved_bytes;
  return result;
}

std::pair<std::string, std::string> Diff(const PlanFile& a, const PlanFile& b) {
  const nb::gil_scoped_release unlocked;
  const PlanDifference difference = ComparePlans(a, b);
  return {DifferenceText(difference), DifferenceJson(difference)};
}

std::string Digest(const fb::Digest* digest) {
  return digest == nullptr ? "" : DigestText(*digest);
}

}  // namespace

void BindPlan(nb::module_& module) {
  nb::class_<PlanFile>(module, "PlanFile")
      .def_static("open", &Open, nb::arg("path"))
      .def_static("from_bytes", &FromBytes, nb::arg("data"))
      .def("to_bytes", &ToBytes)
      .def("save", &Save, nb::arg("path"))
      .def_prop_ro("world_size", &PlanFile::world_size)
      .def_prop_ro("source_ranks", &PlanFile::source_ranks)
      .def_prop_ro("colocated",
                   [](const PlanFile& p) { return p.body().colocated(); })
      .def_prop_ro("format_version",
                   [](const PlanFile& p) {
                     const uint32_t version = p.plan().format_version();
                     return absl::StrCat(version >> 16, ".", version & 0xffff);
                   })
      .def_prop_ro(
          "digest",
          [](const PlanFile& p) { return Digest(p.plan().body_digest()); })
      .def_prop_ro(
          "inputs_digest",
          [](const PlanFile& p) { return Digest(p.plan().inputs_digest()); })
      .def_prop_ro(
          "job",
          [](const PlanFile& p) {
            std::vector<std::pair<std::string, std::string>> facts;
            const fb::Provenance* provenance = p.plan().provenance();
            if (provenance == nullptr || provenance->job() == nullptr) {
              return facts;
            }
            for (const fb::JobFact* fact : *provenance->job()) {
              facts.emplace_back(fact->key()->str(), fact->value()->str());
            }
            return facts;
          })
      .def(
          "host",
          [](const PlanFile& p, int32_t rank) {
            CheckRank(p, rank);
            return p.body().programs()->Get(rank)->host();
          },
          nb::arg("rank"))
      .def(
          "staging_bytes",
          [](const PlanFile& p, int32_t rank) {
            CheckRank(p, rank);
            return p.body().programs()->Get(rank)->staging_bytes();
          },
          nb::arg("rank"))
      .def("text", &Text, nb::arg("rank").none(), nb::arg("tensor"),
           nb::arg("json"))
      .def("stats_text", [](const PlanFile& p) { return StatsText(p); })
      .def("stats", &Stats)
      .def("tensors", &Tensors, nb::arg("rank"))
      .def("requirements", &Requirements, nb::arg("rank"))
      .def("skipped", &Skipped, nb::arg("rank"))
      .def("left_alone", &LeftAlone, nb::arg("rank"))
      .def("post_hooks", &PostHooks, nb::arg("rank"))
      .def("traffic", &TrafficOf)
      .def("verify", &Verify, nb::arg("progress").none())
      .def("difference_from_job", &DifferenceFrom, nb::arg("text"),
           nb::arg("name"), nb::arg("directory"))
      .def("diff", &Diff, nb::arg("other"));
  module.def("compile", &CompileText, nb::arg("text"), nb::arg("name"),
             nb::arg("directory"), nb::arg("progress").none());
}

}  // namespace refit::python
