#include "refit/executor.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "executor/bound.h"
#include "executor/delta/delta_rounds.h"
#include "executor/delta/refit_versions.h"
#include "executor/digest/state_check.h"
#include "executor/executor_calls.h"
#include "executor/notices.h"
#include "executor/nvtx.h"
#include "executor/post_hooks.h"
#include "executor/refit_enqueuer.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/scratch_windows.h"
#include "plan/sent_ranges.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

// Adds to `seconds` how long the call takes.
template <typename Call>
auto Timed(double& seconds, const Call& call) {
  const Clock::time_point start = Clock::now();
  auto result = call();
  seconds += SecondsSince(start);
  return result;
}

// Whether any rank has post-hooks.
bool HasPostHooks(const PlanFile& plan) {
  const auto& buffers = *plan.body().buffers();
  return std::any_of(buffers.begin(), buffers.end(), [](const auto* buffer) {
    return buffer->post_hooks() != nullptr && buffer->post_hooks()->size() > 0;
  });
}

}  // namespace

std::string_view ExecutorStateName(ExecutorState state) {
  switch (state) {
    case ExecutorState::kLoaded:
      return "loaded";
    case ExecutorState::kConnected:
      return "connected";
    case ExecutorState::kBound:
      return "bound";
    case ExecutorState::kRunning:
      return "running";
    case ExecutorState::kTorn:
      return "torn";
    case ExecutorState::kClosed:
      return "closed";
  }
  return "unknown";
}

RunCounters& RunCounters::operator+=(const RunCounters& other) {
  rounds += other.rounds;
  messages_sent += other.messages_sent;
  messages_received += other.messages_received;
  bytes_sent += other.bytes_sent;
  bytes_received += other.bytes_received;
  graph_launches += other.graph_launches;
  pack_seconds += other.pack_seconds;
  wire_seconds += other.wire_seconds;
  unpack_seconds += other.unpack_seconds;
  scratch_bytes += other.scratch_bytes;
  fused_elements += other.fused_elements;
  for (size_t route = 0; route < traffic.size(); ++route) {
    for (size_t mechanism = 0; mechanism < traffic[route].size(); ++mechanism) {
      Traffic& mine = traffic[route][mechanism];
      mine.bytes_sent += other.traffic[route][mechanism].bytes_sent;
      mine.bytes_received += other.traffic[route][mechanism].bytes_received;
    }
  }
  return *this;
}

Executor::Executor(const PlanFile& plan, const ExecutorOptions& options)
    : plan_(plan),
      options_(options),
      schedule_(std::make_unique<RankSchedule>(
          plan, options.rank,
          options.transport->ReachesPeerMemory() ? DirectRounds::kStored
                                                 : DirectRounds::kSent)),
      post_hooks_(AssignPostHooks(TensorTable(plan, options.rank), {}).hooks),
      versions_(HasRungs(plan.body()) ? std::make_unique<RefitVersions>(plan)
                                      : nullptr),
      enqueuer_(std::make_unique<RefitEnqueuer>(
          *schedule_, options_, versions_ != nullptr,
          plan.body().limits()->direct_multiprocessors())) {}

Executor::~Executor() { Close(); }

absl::StatusOr<std::unique_ptr<Executor>> Executor::Load(
    const PlanFile& plan, const ExecutorOptions& options) {
  if (options.device == nullptr || options.transport == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.device == nullptr ? "device" : "transport",
                     " is null, an executor needs one"));
  }
  if (options.rank < 0 || options.rank >= plan.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " is not one of the plan's ",
                     plan.world_size(), " ranks"));
  }
  if (options.transport->rank() != options.rank ||
      options.transport->world_size() != plan.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the transport is rank ", options.transport->rank(), " of ",
        options.transport->world_size(), ", the executor is rank ",
        options.rank, " of ", plan.world_size()));
  }
  return std::unique_ptr<Executor>(new Executor(plan, options));
}

const fb::RankProgram& Executor::program() const {
  return *plan_.body().programs()->Get(options_.rank);
}

HandshakeRecord Executor::Record(HandshakeStage stage) const {
  HandshakeRecord record;
  record.stage = stage;
  record.format_version = plan_.plan().format_version();
  record.world_size = static_cast<uint32_t>(plan_.world_size());
  if (const fb::Digest* digest = plan_.plan().body_digest()) {
    record.body_digest = *digest;
  }
  return record;
}

absl::Status Executor::Connect(std::chrono::nanoseconds timeout) {
  const ProfilerRange range("refit connect");
  const bool again = state_ == ExecutorState::kConnected ||
                     state_ == ExecutorState::kBound ||
                     state_ == ExecutorState::kTorn;
  if (!again && state_ != ExecutorState::kLoaded) {
    return OutOfOrder(options_.rank, "Connect", state_);
  }
  const Deadline deadline = DeadlineAfter(timeout);
  if (versions_ != nullptr) versions_->Forget(DenseReason::kConnected);
  enqueuer_->DropGraph();
  absl::Status made;
  if (!again) {
    made = enqueuer_->CreateStreams();
    Device& device = *options_.device;
    const auto take = [&](std::unique_ptr<DeviceMemory>& memory,
                          absl::StatusOr<std::unique_ptr<DeviceMemory>> from) {
      if (from.ok()) memory = *std::move(from);
      made.Update(from.status());
    };
    take(staging_, device.Allocate(schedule_->staging_bytes()));
    take(scratch_, device.Allocate(ScratchBytes(plan_, options_.rank)));
    if (made.ok() && versions_ != nullptr &&
        plan_.body().delta()->changes() == fb::DeltaChanges::kSnapshot) {
      take(snapshot_, device.Allocate(SnapshotBytes(plan_, options_.rank)));
      if (!made.ok()) {
        made = absl::Status(
            made.code(),
            absl::StrCat(
                "the snapshot of what this rank sends: ", made.message(),
                "; options.delta with \"changes\": \"bitmap\" needs "
                "none, but 1/16 of that from the worker"));
      }
    }
  }
  HandshakeRecord record = Record(HandshakeStage::kConnect);
  record.ready = made.ok();
  // Calls that others made and failed without this rank are over. A driver that
  // calls all ranks in step would find them one call apart for ever.
  absl::Status connected;
  bool missed = false;
  for (bool goes_on = true; goes_on; missed |= goes_on) {
    connected =
        options_.transport->Connect(record, schedule_->Edges(), deadline);
    goes_on = !connected.ok() && options_.transport->TakeMissedStep();
  }
  if (missed && state_ == ExecutorState::kBound) state_ = ExecutorState::kTorn;
  if (!made.ok()) return WithRank(made, options_.rank);
  if (!connected.ok()) return WithRank(connected, options_.rank);
  SetNotices(NoticeKind::kHosts, options_.transport->notices(), notices_);
  if (!again) state_ = ExecutorState::kConnected;
  return absl::OkStatus();
}

void Executor::NoticeRecording() {
  const absl::Status& recorded = enqueuer_->recorded();
  std::vector<std::string> texts;
  if (!recorded.ok()) {
    texts.push_back(
        absl::StrCat("the rounds are enqueued one by one, since they could not "
                     "be recorded as a graph: ",
                     recorded.message()));
  }
  SetNotices(NoticeKind::kNotRecorded, texts, notices_);
}

absl::Status Executor::Run(Stream stream, const RunOptions& options) {
  const ProfilerRange range("refit run");
  if (state_ != ExecutorState::kBound && state_ != ExecutorState::kRunning &&
      state_ != ExecutorState::kTorn) {
    return OutOfOrder(options_.rank, "Run", state_);
  }
  if (options.addresses.has_value() &&
      options.addresses->size() != bound_->addresses.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", options_.rank, ": Run was given ", options.addresses->size(),
        " addresses, Bind ", bound_->addresses.size(), " tensors"));
  }
  const Deadline deadline = DeadlineAfter(options.timeout);
  began_ = Clock::now();
  agree_seconds_ = 0;
  const bool in_flight = state_ == ExecutorState::kRunning;
  const absl::StatusOr<bool> capturing = options_.device->IsCapturing(stream);
  if (in_flight && capturing.ok() && *capturing) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank,
                     ": a refit is under way; Wait for it before one is "
                     "captured"));
  }
  state_ = ExecutorState::kTorn;
  rounds_.clear();
  counters_ = {};
  delta_report_.reset();
  const bool is_captured = capturing.ok() && *capturing;
  bool check = options.check;
  bool is_delta = false;
  absl::Status status;
  if (versions_ != nullptr && !is_captured) {
    const absl::StatusOr<size_t> rung = FindRung(stream, options, deadline);
    status = Timed(agree_seconds_, [&] {
      return versions_->Agree(options.dense, rung, *options_.transport,
                              deadline);
    });
    is_delta = versions_->is_delta();
    check |= is_delta && plan_.body().delta()->check();
  }
  checks_ = check || (in_flight && checks_);
  deadline_ = deadline;
  if (status.ok() && check && !is_captured) status = PrepareCheck(deadline);
  if (status.ok()) {
    status = options_.transport->BeginRefit(deadline, is_captured);
  }
  if (status.ok()) status = capturing.status();
  if (status.ok()) status = CheckTensors(options);
  if (status.ok() && is_captured) status = CheckCapture(options.check);
  if (status.ok()) {
    status = enqueuer_->Enqueue(
        stream,
        {.in_flight = in_flight,
         .check = check ? bound_->check.get() : nullptr,
         .rung = is_delta ? std::optional(versions_->rung()) : std::nullopt,
         .direct_multiprocessors =
             options.direct_multiprocessors > 0
                 ? options.direct_multiprocessors
                 : plan_.body().limits()->direct_multiprocessors()});
    counters_ = enqueuer_->counters();
    NoticeRecording();
  }
  counters_.scratch_bytes = scratch_->size_bytes();
  if (status.ok()) {
    status = Timed(agree_seconds_,
                   [&] { return options_.transport->EndRefit(stream); });
  }
  in_flight_ = (in_flight ? in_flight_ : 0) + 1;
  if (!status.ok()) {
    options_.transport->Abort(status);
    // What was enqueued before ends first, so that the caller may free memory.
    return WithRank(options_.transport->Settle(status, stream), options_.rank);
  }
  state_ = ExecutorState::kRunning;
  return absl::OkStatus();
}

// Where the refit can be no delta, any will do. Tensors that are gone fail the
// refit when all ranks are in it.
absl::StatusOr<size_t> Executor::FindRung(Stream stream,
                                          const RunOptions& options,
                                          Deadline deadline) {
  if (!versions_->MayBeDelta() || options.dense ||
      !CheckTensors(options).ok()) {
    return 0;
  }
  return enqueuer_->FindRung(stream, deadline);
}

absl::Status Executor::Wait() {
  if (state_ != ExecutorState::kRunning) {
    return OutOfOrder(options_.rank, "Wait", state_);
  }
  absl::Status status = options_.transport->AwaitOwnEnd();
  if (status.ok()) {
    const absl::Status coded = enqueuer_->CheckCoding();
    // The others are to fail with this, before any of them has a base.
    if (!coded.ok()) options_.transport->Abort(coded);
    status = Timed(agree_seconds_, [&] { return options_.transport->Wait(); });
    status.Update(coded);
  }
  // Also if a function of the caller's throws.
  state_ = ExecutorState::kTorn;
  if (status.ok()) status = CompareStates();
  if (status.ok() && HasPostHooks(plan_)) status = PerformHooksTogether();
  if (status.ok()) status = ReadMeasurements();
  if (status.ok()) status = ReportDelta();
  if (status.ok()) {
    refits_ += in_flight_;
    NoteHooks();
  }
  if (status.ok()) state_ = ExecutorState::kBound;
  return WithRank(status, options_.rank);
}

// A device whose timers fail may have failed in other ways.
absl::Status Executor::ReadMeasurements() {
  absl::StatusOr<std::vector<RoundMeasurement>> measured = enqueuer_->Measure();
  if (measured.ok()) rounds_ = *std::move(measured);
  return measured.status();
}

// Before anyone enqueues the refit: what is allocated here may wait for the
// device, on which another rank's work would wait for this one.
absl::Status Executor::PrepareCheck(Deadline deadline) {
  absl::Status made;
  if (bound_->check == nullptr) {
    absl::StatusOr<std::unique_ptr<StateCheck>> check = StateCheck::Create(
        plan_, options_.rank, *schedule_, *options_.device, bound_->entries,
        ListArrivals(plan_, options_.rank, *schedule_, bound_->peers));
    made = check.status();
    if (check.ok()) made = enqueuer_->PrepareCheck(**check);
    if (made.ok()) bound_->check = *std::move(check);
  }
  // Each time: a rank that alone bound anew has to make its own again.
  HandshakeRecord record = Record(HandshakeStage::kCheck);
  record.ready = made.ok();
  record.why = std::string(made.message());
  const absl::Status agreed = Timed(agree_seconds_, [&] {
    return options_.transport->Handshake(record, deadline);
  });
  return made.ok() ? agreed : made;
}

absl::Status Executor::CompareStates() {
  if (!checks_) return absl::OkStatus();
  const absl::Status status =
      bound_->check->Compare(*options_.transport, deadline_);
  std::vector<std::string> texts;
  const std::vector<std::string>& params = bound_->check->not_compared();
  if (!params.empty()) {
    texts.push_back(absl::StrCat(
        "the check after a refit compares what destinations quantize as it "
        "arrives, and not what they make of it: \"",
        params.front(), "\"",
        params.size() == 1
            ? ""
            : absl::StrCat(" and ", params.size() - 1, " more params")));
  }
  SetNotices(NoticeKind::kNotCompared, texts, notices_);
  return status;
}

// The refit is over on all ranks: it is the base of the next one.
absl::Status Executor::ReportDelta() {
  if (versions_ == nullptr) return absl::OkStatus();
  absl::StatusOr<DeltaReport> report = enqueuer_->MeasureDelta();
  if (!report.ok()) return report.status();
  report->is_delta = versions_->is_delta();
  report->why_dense = versions_->why_dense();
  report->base_version = versions_->base();
  report->version = versions_->version();
  if (checks_) {
    const absl::StatusOr<double> checked = bound_->check->Seconds();
    if (!checked.ok()) return checked.status();
    report->check_seconds = *checked;
  }
  report->agree_seconds = agree_seconds_;
  report->total_seconds = SecondsSince(began_);
  delta_report_ = *std::move(report);
  versions_->Commit();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ParamDigest>> Executor::Digest(
    Stream stream, const DigestOptions& options) {
  if (state_ != ExecutorState::kBound && state_ != ExecutorState::kTorn) {
    return OutOfOrder(options_.rank, "Digest", state_);
  }
  std::vector<int32_t> among(options.among.begin(), options.among.end());
  if (among.empty()) among.push_back(options_.rank);
  for (const int32_t rank : among) {
    if (rank >= 0 && rank < plan_.world_size()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", options_.rank, ": the digest is to be among rank ", rank,
        ", which is not one of the plan's ", plan_.world_size(), " ranks"));
  }
  if (std::find(among.begin(), among.end(), options_.rank) == among.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options_.rank, ": the digest is to be among ",
                     RanksText(among), "; this rank has to be one of them"));
  }
  const absl::StatusOr<bool> capturing = options_.device->IsCapturing(stream);
  if (!capturing.ok()) return WithRank(capturing.status(), options_.rank);
  if (*capturing) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", options_.rank,
        ": Digest on a stream that is captured: it reads its result at once; "
        "give it another stream, or call it when the capture has ended"));
  }
  absl::StatusOr<std::unique_ptr<RankDigest>> digest = RankDigest::Create(
      plan_, options_.rank, *options_.device, bound_->entries,
      BoxesCountedBy(plan_, options_.rank, among, HeldStacks::kUnhooked));
  absl::Status status = digest.status();
  if (status.ok()) status = (*digest)->Enqueue(stream);
  if (status.ok()) status = options_.device->Synchronize(stream);
  if (!status.ok()) return WithRank(status, options_.rank);
  const absl::StatusOr<std::vector<uint64_t>> sums = (*digest)->Read();
  if (!sums.ok()) return WithRank(sums.status(), options_.rank);
  return ParamDigests(plan_, **digest, *sums);
}

// That the tensors are where they were, in the memory they were.
absl::Status Executor::CheckTensors(const RunOptions& options) const {
  if (options.addresses.has_value() &&
      !std::equal(options.addresses->begin(), options.addresses->end(),
                  bound_->addresses.begin())) {
    return absl::FailedPreconditionError("a tensor moved since Bind");
  }
  return bound_->CheckMemory();
}

// A replay of the graph does not come by Wait, which compares states and calls
// the functions.
absl::Status Executor::CheckCapture(bool check) const {
  if (versions_ != nullptr) {
    return absl::FailedPreconditionError(
        "a replayed graph does not know what the destination holds: refits of "
        "a plan with options.delta cannot be captured");
  }
  if (check) {
    return absl::FailedPreconditionError(
        "a replayed graph compares no states: capture without check, and "
        "compare Executor::Digest of the ranks");
  }
  for (const PostHookPerformer& performer : bound_->hooks) {
    if (performer.perform == nullptr) continue;
    for (const TensorPostHook& hook : post_hooks_) {
      if (hook.name != performer.name) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "a replayed graph does not call the function of post-hook \"",
          hook.name, "\" of \"", hook.tensor,
          "\": bind without the function and perform it after each replay"));
    }
  }
  return absl::OkStatus();
}

// No rank's refit has succeeded before all ranks' hooks have.
absl::Status Executor::PerformHooksTogether() {
  absl::Status performed;
  std::exception_ptr thrown;
  try {
    performed = PerformHooks();
  } catch (...) {  // the caller's; the others are not to wait for this rank
    thrown = std::current_exception();
    performed = absl::InternalError("a post-hook's function threw");
  }
  HandshakeRecord record = Record(HandshakeStage::kPostHooks);
  record.ready = performed.ok();
  record.why = std::string(performed.message());
  const absl::Status agreed = Timed(agree_seconds_, [&] {
    return options_.transport->Handshake(record, deadline_);
  });
  if (thrown != nullptr) std::rethrow_exception(thrown);
  return performed.ok() ? agreed : performed;
}

void Executor::NoteHooks() {
  for (TensorPostHook& hook : post_hooks_) {
    const auto performer = bound_->PerformerOf(hook);
    if (performer == bound_->hooks.end() || performer->perform != nullptr) {
      hook.refit = refits_;
    }
  }
}

absl::Status Executor::PerformHooks() {
  for (const TensorPostHook& hook : post_hooks_) {
    const auto performer = bound_->PerformerOf(hook);
    if (performer == bound_->hooks.end() || performer->perform == nullptr) {
      continue;
    }
    const auto tensor = std::find_if(
        bound_->tensors.begin(), bound_->tensors.end(),
        [&](const BoundTensor& bound) { return bound.name == hook.tensor; });
    const absl::Status status = performer->perform(hook, *tensor);
    if (status.ok()) continue;
    return absl::Status(
        status.code(),
        absl::StrCat("post-hook \"", hook.name, "\" of \"", hook.tensor,
                     "\" failed: ", status.message()));
  }
  return absl::OkStatus();
}

void Executor::Close(const std::function<void()>& leave) {
  if (state_ == ExecutorState::kRunning) {
    options_.transport->Abort(absl::CancelledError(
        absl::StrCat("rank ", options_.rank, " was closed before Wait")));
    // What was enqueued ends first: freeing what it uses would wait for it, and
    // could hold up in the driver what ends it.
    (void)options_.transport->Wait();
  }
  if (leave != nullptr) leave();
  enqueuer_.reset();
  if (bound_ != nullptr) bound_->check.reset();  // of this plan
  bound_.reset();
  staging_.reset();
  scratch_.reset();
  snapshot_.reset();
  state_ = ExecutorState::kClosed;
}

}  // namespace refit
