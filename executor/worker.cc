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
  if (options.meeting.has_value()) made->process_ = getpid();
  made->plan_ = options.plan;
  made->device_ = options.device;
  made->fabric_ = options.fabric;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      CreateTransport(options);
  if (!transport.ok()) return transport.status();
  made->transport_ = *std::move(transport);
  options.executor.device = made->device_.get();
  options.executor.transport = made->transport_.get();
  absl::StatusOr<std::unique_ptr<Executor>> executor =
      Executor::Load(*made->plan_, options.executor);
  if (!executor.ok()) return executor.status();
  made->executor_ = *std::move(executor);
  return made;
}

absl::Status Worker::Call(const std::function<absl::Status(Executor&)>& call,
                          const Interruption& poll) {
  if (IsParents()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the executor belongs to process ", process_,
        ", from which this one was forked: make an executor in this process"));
  }
  interrupted_ = false;
  const ScopedInterruption interruption([&] {
    if (interrupted_) return absl::CancelledError("interrupted");
    return poll == nullptr ? absl::OkStatus() : poll();
  });
  return call(*executor_);
}

bool Worker::IsParents() const { return process_ != 0 && process_ != getpid(); }

Worker::~Worker() {
  if (IsParents()) {
    // Their ends would wait for threads that are not here, and libraries such
    // as UCX end a process that frees what its parent made.
    (void)executor_.release();
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
    if (transport_ != nullptr) transport_->Leave();
  });
  // Nothing gets past the state of a closed executor to its transport.
  transport_.reset();
}

}  // namespace refit
