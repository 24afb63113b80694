// Executor: the tensors of a rank, and what refits need that move them.
#include <set>
#include <utility>

#include "control/waiting.h"
#include "executor/binding.h"
#include "executor/bound.h"
#include "executor/delta/bitmaps.h"
#include "executor/delta/delta_rounds.h"
#include "executor/delta/refit_versions.h"
#include "executor/executor_calls.h"
#include "executor/notices.h"
#include "executor/nvtx.h"
#include "executor/post_hooks.h"
#include "executor/quantize_pulls.h"
#include "executor/refit_enqueuer.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/round_copies.h"
#include "plan/scratch_windows.h"
#include "refit/executor.h"

namespace refit {

void Executor::PlaceScratch(std::vector<std::byte*>& addresses) const {
  const TensorTable table(plan_, options_.rank);
  const std::vector<ScratchRange> ranges =
      ScratchRanges(plan_.body(), program());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const size_t slot = table.workers_stacks() + i;
    const fb::Buffer& buffer = table.buffer(slot);
    const uint64_t tensor_bytes =
        TensorElements(buffer) * DTypeBytes(buffer.dtype());
    for (uint64_t entry = table.begin(slot); entry < table.begin(slot + 1);
         ++entry) {
      addresses[entry] = scratch_->data() + ranges[i].begin_byte +
                         (entry - table.begin(slot)) * tensor_bytes;
    }
  }
}

absl::StatusOr<BoundRounds> Executor::PrepareRounds(
    absl::Span<std::byte* const> addresses,
    absl::Span<const BoundTensor> tensors, const CopyBatch& hooks) const {
  absl::StatusOr<RoundCopies> copies = BuildRoundCopies(
      plan_, options_.rank, *schedule_, addresses, staging_->data(),
      bound_->peers, bound_->peers.addresses(),
      /*joins_rounds=*/!options_.time_rounds);
  if (!copies.ok()) return copies.status();
  copies->batches[RankSchedule::kHookBatch] = hooks;
  DeltaRounds delta;
  if (versions_ != nullptr) {
    const absl::Status added =
        AddDeltaRounds(plan_, options_.rank, *schedule_,
                       BitmapsByEntry(plan_, options_.rank, tensors),
                       snapshot_ == nullptr ? nullptr : snapshot_->data(),
                       staging_->data(), *options_.device, *copies, delta);
    if (!added.ok()) return added;
  }
  absl::StatusOr<std::unique_ptr<PreparedCopies>> prepared =
      options_.device->Prepare(copies->table, copies->batches);
  if (!prepared.ok()) return prepared.status();
  BoundRounds rounds{
      .operations = std::move(copies->operations),
      .copies = *std::move(prepared),
      .fused = std::move(copies->fused),
      .direct_ends =
          ListDirectEnds(plan_, options_.rank, *schedule_, bound_->peers),
      .pulled_ends = ListDirectEnds(plan_, options_.rank, *schedule_,
                                    bound_->peers, /*pulls=*/true),
      .delta = std::move(delta)};
  const absl::Status status = enqueuer_->Prepare(rounds);
  if (!status.ok()) return status;
  return rounds;
}

absl::Status Executor::WatchTensors(absl::Span<const BoundTensor> tensors) {
  std::vector<MemoryRange> ranges;
  for (const BoundTensor& tensor : tensors) {
    bound_->tensors.push_back(tensor);
    bound_->addresses.push_back(tensor.data);
    ranges.push_back({.data = static_cast<std::byte*>(tensor.data),
                      .size_bytes = tensor.size_bytes});
  }
  if (!options_.watch_memory) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<MemoryWatch>> memory =
      options_.device->Watch(ranges);
  if (memory.ok()) bound_->memory = *std::move(memory);
  return memory.status();
}

// `status`, which ranks agreed on, may be a peer's failure to map this rank's
// tensors: this rank knows why it was to.
absl::Status Executor::WithUnmapped(const absl::Status& status) const {
  if (!absl::IsAborted(status) || bound_->peers.unmapped.empty()) {
    return status;
  }
  const auto& [peer, why] = *bound_->peers.unmapped.begin();
  return absl::AbortedError(absl::StrCat(
      status.message(), " (rank ", peer, " was to map tensors of rank ",
      options_.rank, ", which cannot map its: ", why, ")"));
}

absl::Status Executor::MapPeers(absl::Span<std::byte* const> addresses,
                                Deadline deadline) {
  absl::Status status = MapPeerTensors(
      plan_, options_.rank, *schedule_, addresses, bound_->shared,
      *options_.transport, deadline, bound_->peers);
  // Also after an error: the others take their part in it.
  status.Update(AgreeOnPulls(plan_, options_.rank, *schedule_, addresses,
                             bound_->shared, *options_.transport, deadline,
                             bound_->peers));
  return WithRank(status, options_.rank);
}

// From now on refits move what is bound.
void Executor::TakeBound(BoundRounds rounds, std::vector<std::byte*> entries,
                         std::vector<TensorPostHook> hooks,
                         std::vector<PostHookPerformer> performers) {
  enqueuer_->Bind(std::move(rounds));
  if (versions_ != nullptr) versions_->Forget(DenseReason::kBound);
  delta_report_.reset();
  bound_->shared.DropUnused();
  bound_->hooks = std::move(performers);
  bound_->entries = std::move(entries);
  for (size_t i = 0; i < post_hooks_.size(); ++i) {
    hooks[i].refit = post_hooks_[i].refit;
  }
  post_hooks_ = std::move(hooks);
  SetNotices(NoticeKind::kPull,
             TextsOfMixedEnds(plan_, options_.rank, *schedule_, bound_->peers),
             notices_);
  SetNotices(NoticeKind::kUnwatched,
             TextsOfUnwatched(bound_->memory.get(), bound_->tensors), notices_);
  std::vector<std::string> whole;
  if (versions_ != nullptr && plan_.side(options_.rank) == fb::Side::kSource &&
      plan_.body().delta()->changes() == fb::DeltaChanges::kBitmap) {
    const std::string text = SentWhole(plan_, options_.rank, bound_->tensors);
    if (!text.empty()) whole.push_back(text);
  }
  SetNotices(NoticeKind::kNotDelta, whole, notices_);
  NoticeRecording();
}

std::vector<int32_t> Executor::pulls_from() const {
  if (bound_ == nullptr) return {};
  const std::set<int32_t>& senders = bound_->peers.pulled_from;
  return {senders.begin(), senders.end()};
}

absl::Status Executor::Bind(absl::Span<const BoundTensor> tensors,
                            std::chrono::nanoseconds timeout,
                            std::vector<PostHookPerformer> hooks) {
  return BindAfter(nullptr, tensors, timeout, std::move(hooks));
}

absl::Status Executor::Bind(const BoundRank& earlier,
                            std::chrono::nanoseconds timeout) {
  return BindAfter(&earlier, earlier.tensors, timeout, earlier.hooks);
}

absl::Status Executor::BindAfter(const BoundRank* before,
                                 absl::Span<const BoundTensor> tensors,
                                 std::chrono::nanoseconds timeout,
                                 std::vector<PostHookPerformer> hooks) {
  const ProfilerRange range("refit bind");
  const bool first = state_ == ExecutorState::kConnected;
  if (!first && state_ != ExecutorState::kBound &&
      state_ != ExecutorState::kTorn) {
    return OutOfOrder(options_.rank, "Bind", state_);
  }
  const Deadline deadline = DeadlineAfter(timeout);
  std::shared_ptr<BoundRank> earlier = std::exchange(bound_, nullptr);
  const bool is_as_before =
      before != nullptr && (options_.device->IsHost() || before->IsWatched());
  bound_ = std::make_shared<BoundRank>(*options_.device,
                                       is_as_before ? before : nullptr);
  const TensorTable table(plan_, options_.rank);
  AssignedHooks assigned = AssignPostHooks(table, hooks);
  for (std::string& problem : BitmapProblems(plan_, options_.rank, tensors)) {
    assigned.problems.push_back(std::move(problem));
  }
  if (before != nullptr) {
    const absl::Status there = before->CheckMemory();
    if (!there.ok()) assigned.problems.emplace_back(there.message());
  }
  absl::StatusOr<std::vector<std::byte*>> addresses =
      BindTensors(table, options_.rank, tensors,
                  options_.device->CopiesUnaligned(), assigned.problems);
  absl::Status status = addresses.status();
  if (addresses.ok()) PlaceScratch(*addresses);
  // The records hold no fingerprint of the tensors: that they were checked
  // against the plan of this digest says all that names and sizes could.
  const auto agree = [&] {
    HandshakeRecord record = Record(HandshakeStage::kBind);
    record.ready = status.ok();
    const absl::Status agreed = options_.transport->Handshake(record, deadline);
    if (status.ok()) status = WithRank(agreed, options_.rank);
  };
  const bool mapped =
      HasDirectRounds(plan_) && options_.transport->ReachesPeerMemory();
  if (mapped) agree();
  if (mapped && status.ok()) status = MapPeers(*addresses, deadline);
  BoundRounds rounds;
  if (status.ok()) {
    absl::StatusOr<BoundRounds> prepared =
        PrepareRounds(*addresses, tensors, assigned.batch);
    status = WithRank(prepared.status(), options_.rank);
    if (prepared.ok()) rounds = *std::move(prepared);
  }
  if (status.ok()) {
    status = WithRank(WatchTensors(tensors), options_.rank);
  }
  const bool ready = status.ok();
  if (first || mapped) agree();
  if (ready) status = WithUnmapped(status);
  if (!status.ok()) {
    bound_ = std::move(earlier);
    return status;
  }
  TakeBound(std::move(rounds), *std::move(addresses), std::move(assigned.hooks),
            std::move(hooks));
  if (first) {
    state_ = options_.torn ? ExecutorState::kTorn : ExecutorState::kBound;
  }
  return absl::OkStatus();
}

}  // namespace refit
