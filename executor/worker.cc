#include "refit/worker.h"

#include <unistd.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/transport/ucx_api.h"
#include "refit/nccl_transport.h"
#include "refit/ucx_transport.h"

namespace refit {
namespace {

std::vector<uint32_t> HostsOf(const PlanFile& plan) {
  std::vector<uint32_t> hosts;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    hosts.push_back(program->host());
  }
  return hosts;
}

// Before others wait for a rank that cannot send.
absl::Status FindUcx() {
  const absl::Status found = ucx::Load().status();
  if (found.ok()) return found;
  return absl::Status(
      found.code(),
      absl::StrCat(
          "ranks in host memory that are processes need UCX: ", found.message(),
          "; install libucx0, or run all ranks as threads of one "
          "process that share a local fabric"));
}

absl::StatusOr<std::unique_ptr<Transport>> CreateTransport(
    WorkerOptions& options) {
  const bool is_host = options.device->IsHost();
  if (options.meeting.has_value() == (options.fabric != nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks meet at a rendezvous or in a fabric, ",
        options.fabric == nullptr ? "none is given" : "both are given"));
  }
  const int32_t rank = options.executor.rank;
  if (options.fabric != nullptr) {
    if (options.wire != Wire::kDefault) {
      return absl::InvalidArgumentError(
          "a transport is chosen, but a local fabric is one itself");
    }
    if (!is_host) {
      return absl::InvalidArgumentError(
          "a local fabric carries host memory only, the device is a GPU");
    }
    return options.fabric->CreateTransport(rank);
  }
  if (options.meeting->rank() != rank) {
    return absl::InvalidArgumentError(
        absl::StrCat("the rendezvous is of rank ", options.meeting->rank(),
                     ", the executor of rank ", rank));
  }
  if (options.wire == Wire::kUcx && !is_host) {
    return absl::InvalidArgumentError(
        "UCX carries host memory only, the device is a GPU");
  }
  if (options.wire == Wire::kNccl || !is_host) {
    return CreateNcclTransport({.device = options.device.get(),
                                .meeting = *std::move(options.meeting),
                                .hosts = HostsOf(*options.plan)});
  }
  const bool takes_part =
      rank >= 0 && rank < options.plan->world_size() &&
      options.plan->messages().Of(static_cast<uint32_t>(rank)).size() > 0;
  if (takes_part) {
    if (absl::Status s = FindUcx(); !s.ok()) return s;
  }
  return CreateUcxTransport(*std::move(options.meeting));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(WorkerOptions options) {
  if (options.plan == nullptr || options.device == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.plan == nullptr ? "plan" : "device",
                     " is null, a worker needs one"));
  }
  std::unique_ptr<Worker> made(new Worker());
  made->device_ = options.device;
  made->wire_ = options.wire;
  made->options_ = options.executor;
  const absl::Status status = made->Load(std::move(options));
  if (!status.ok()) return status;
  return made;
}

// Closes the executor that there is, once nothing more can be refused.
absl::Status Worker::Load(WorkerOptions options) {
  const int64_t process = options.meeting.has_value() ? getpid() : 0;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      CreateTransport(options);
  if (!transport.ok()) return transport.status();
  options.executor.device = device_.get();
  options.executor.transport = transport->get();
  options.executor.torn = IsTorn();
  absl::StatusOr<std::unique_ptr<Executor>> executor =
      Executor::Load(*options.plan, options.executor);
  if (!executor.ok()) return executor.status();
  absl::Status left;
  if (executor_ != nullptr) {
    if (executor_->bound() != nullptr) kept_ = executor_->bound();
    executor_->Close([&] { left = transport_->Leave(); });
    (*transport)->TakeLinks(*transport_);
  }
  executor_ = *std::move(executor);
  transport_ = *std::move(transport);
  fabric_ = std::move(options.fabric);
  plan_ = std::move(options.plan);
  options_.rank = options.executor.rank;
  options_.torn = options.executor.torn;
  process_ = process;
  return left;
}

absl::Status Worker::Replace(Replacement replacement,
                             std::chrono::nanoseconds timeout,
                             const Interruption& poll) {
  if (absl::Status s = CheckOwn(); !s.ok()) return s;
  if (replacement.plan == nullptr) {
    return absl::InvalidArgumentError("plan is null, a worker needs one");
  }
  const ExecutorState state = executor_->state();
  if (state == ExecutorState::kRunning || state == ExecutorState::kClosed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", options_.rank, ": Replace while ",
        std::string(ExecutorStateName(state)), ": ",
        state == ExecutorState::kRunning ? "wait first" : "make a new worker"));
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto left = [&] {
    return timeout - (std::chrono::steady_clock::now() - begin);
  };
  interrupted_ = false;
  const ScopedInterruption interruption([&] { return Interrupted(poll); });
  ExecutorOptions options = options_;
  options.rank = replacement.rank;
  absl::Status status = Load({.plan = std::move(replacement.plan),
                              .device = device_,
                              .meeting = std::move(replacement.meeting),
                              .fabric = std::move(replacement.fabric),
                              .wire = wire_,
                              .executor = options});
  if (status.ok()) status = executor_->Connect(left());
  if (status.ok() && kept_ != nullptr) status = executor_->Bind(*kept_, left());
  if (executor_->bound() != nullptr) kept_.reset();
  return status;
}

// Whether its tensors are. A plan that was never bound tells nothing new.
bool Worker::IsTorn() const {
  if (executor_ == nullptr) return options_.torn;
  const ExecutorState state = executor_->state();
  return state == ExecutorState::kTorn ||
         (options_.torn && state != ExecutorState::kBound);
}

absl::Status Worker::Interrupted(const Interruption& poll) const {
  if (interrupted_) return absl::CancelledError("interrupted");
  return poll == nullptr ? absl::OkStatus() : poll();
}

absl::Status Worker::CheckOwn() const {
  if (!IsParents()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the executor belongs to process ", process_,
      ", from which this one was forked: make an executor in this process"));
}

absl::Status Worker::Call(const std::function<absl::Status(Executor&)>& call,
                          const Interruption& poll) {
  if (absl::Status s = CheckOwn(); !s.ok()) return s;
  interrupted_ = false;
  const ScopedInterruption interruption([&] { return Interrupted(poll); });
  absl::Status status = call(*executor_);
  if (executor_->bound() != nullptr) kept_.reset();
  return status;
}

bool Worker::IsParents() const { return process_ != 0 && process_ != getpid(); }

Worker::~Worker() {
  if (IsParents()) {
    // Their ends would wait for threads that are not here, and libraries such
    // as UCX end a process that frees what its parent made.
    (void)executor_.release();
    new std::shared_ptr<const BoundRank>(std::move(kept_));
    (void)transport_.release();
    new std::shared_ptr<Device>(std::move(device_));
    return;
  }
  // Create may have failed before there was an executor.
  if (executor_ != nullptr) Close();
}

void Worker::Close() {
  if (IsParents()) return;
  executor_->Close([this] {
    if (transport_ != nullptr) (void)transport_->Leave();
  });
  kept_.reset();
  // Nothing gets past the state of a closed executor to its transport.
  transport_.reset();
}

}  // namespace refit
