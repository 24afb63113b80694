#include "runner/checked_run.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "executor/delta/bitmaps.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/tensor_table.h"
#include "plan/scratch_windows.h"
#include "plan/sent_ranges.h"
#include "refit/host_device.h"
#include "runner/available_memory.h"

namespace refit {
namespace {

// Before anything is allocated: the system would give the addresses, and end
// this process or another when they are written to.
absl::Status CheckMemory(const RunOfRanksResult& sizes) {
  const uint64_t needed_bytes = sizes.source_bytes + sizes.destination_bytes +
                                sizes.staging_bytes + sizes.scratch_bytes +
                                sizes.snapshot_bytes;
  const std::optional<uint64_t> available_bytes = AvailableMemoryBytes();
  if (!available_bytes.has_value() || needed_bytes <= *available_bytes) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "needs %d bytes (sources + destinations + staging + "
      "scratch%s), this machine has %d "
      "available",
      needed_bytes, sizes.snapshot_bytes > 0 ? " + snapshots" : "",
      *available_bytes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMemory>> AllocateTensors(
    Device& device, std::vector<BoundTensor>& tensors) {
  constexpr uint64_t kTensorAlignmentBytes = 256;  // as cudaMalloc aligns
  const auto aligned = [](uint64_t size_bytes) {
    return (size_bytes + kTensorAlignmentBytes - 1) / kTensorAlignmentBytes *
           kTensorAlignmentBytes;
  };
  uint64_t total_bytes = 0;
  for (const BoundTensor& tensor : tensors) {
    total_bytes += aligned(tensor.size_bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      device.Allocate(total_bytes);
  if (!memory.ok()) return memory.status();
  std::byte* next = (*memory)->data();
  for (BoundTensor& tensor : tensors) {
    if (tensor.size_bytes == 0) continue;
    tensor.data = next;
    next += aligned(tensor.size_bytes);
  }
  return memory;
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> AllocateBitmaps(
    const PlanFile& plan, int32_t rank, Device& device,
    std::vector<BoundTensor>& tensors) {
  if (!HasRungs(plan.body()) ||
      plan.body().delta()->changes() != fb::DeltaChanges::kBitmap ||
      plan.side(rank) != fb::Side::kSource) {
    return nullptr;
  }
  uint64_t total_bytes = 0;
  for (const BoundTensor& tensor : tensors) {
    total_bytes += BitmapBytes(tensor.size_bytes / DTypeBytes(tensor.dtype));
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      device.Allocate(total_bytes);
  if (!memory.ok()) return memory.status();
  std::byte* next = (*memory)->data();
  for (BoundTensor& tensor : tensors) {
    if (tensor.size_bytes == 0) continue;
    tensor.changes = reinterpret_cast<uint32_t*>(next);
    next += BitmapBytes(tensor.size_bytes / DTypeBytes(tensor.dtype));
  }
  return memory;
}

std::vector<BoundTensor> TensorsOfRank(const PlanFile& plan, int32_t rank) {
  const fb::Body& body = plan.body();
  const fb::RankProgram& program = *body.programs()->Get(rank);
  std::vector<BoundTensor> tensors;
  if (program.buffers() == nullptr) return tensors;
  for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
    if (IsScratch(program, slot)) continue;
    const fb::Buffer& stack =
        *body.buffers()->Get(program.buffers()->Get(slot));
    BoundTensor tensor;
    tensor.dtype = stack.dtype();
    tensor.size_bytes = TensorElements(stack) * DTypeBytes(stack.dtype());
    if (stack.shape() != nullptr) {
      tensor.shape.assign(stack.shape()->begin(), stack.shape()->end());
    }
    for (uint64_t i = 0; i < StackTensors(stack); ++i) {
      tensor.name = TensorName(stack, i);
      tensors.push_back(tensor);
    }
  }
  return tensors;
}

std::vector<PostHookPerformer> LeavePostHooks(const Executor& executor) {
  std::vector<PostHookPerformer> performers;
  for (const TensorPostHook& hook : executor.post_hooks()) {
    performers.push_back({.name = hook.name, .perform = nullptr});
  }
  return performers;
}

void MeasureSizes(const PlanFile& plan, RunOfRanksResult& result) {
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    uint64_t tensor_bytes = 0;
    for (const BoundTensor& tensor : TensorsOfRank(plan, rank)) {
      tensor_bytes += tensor.size_bytes;
    }
    (plan.side(rank) == fb::Side::kSource ? result.source_bytes
                                          : result.destination_bytes) +=
        tensor_bytes;
    result.scratch_bytes += ScratchBytes(plan, rank);
    if (plan.body().delta() != nullptr &&
        plan.body().delta()->changes() == fb::DeltaChanges::kSnapshot) {
      result.snapshot_bytes += SnapshotBytes(plan, rank);
    }
    const uint64_t staging_bytes = RankSchedule(plan, rank).staging_bytes();
    TensorTable(plan, rank)
        .ForEachPostHook([&](size_t, uint64_t, const fb::PostHook& hook) {
          ++result.post_hooks[hook.name()->str()];
        });
    result.staging_bytes += staging_bytes;
    result.peak_staging_bytes =
        std::max(result.peak_staging_bytes, staging_bytes);
  }
}

absl::StatusOr<RunOfRanksResult> RunChecked(const PlanFile& plan,
                                            const RunOfRanksOptions& options) {
  RunOfRanksResult result;
  MeasureSizes(plan, result);
  if (absl::Status status = CheckMemory(result); !status.ok()) return status;
  HostDevice device;
  TensorsByRank tensors;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    tensors.push_back(TensorsOfRank(plan, rank));
    absl::StatusOr<std::unique_ptr<DeviceMemory>> allocated =
        AllocateTensors(device, tensors.back());
    if (!allocated.ok()) return allocated.status();
    memory.push_back(*std::move(allocated));
    if (!options.change_rate.has_value()) continue;
    allocated = AllocateBitmaps(plan, rank, device, tensors.back());
    if (!allocated.ok()) return allocated.status();
    if (*allocated == nullptr) continue;
    std::memset((*allocated)->data(), 0, (*allocated)->size_bytes());
    memory.push_back(*std::move(allocated));
  }
  ValueCheck check(plan);
  check.FillSources(tensors);
  absl::StatusOr<std::unique_ptr<LocalRanks>> ranks =
      LocalRanks::Create(plan, tensors, options.timeout, options.time_rounds);
  if (!ranks.ok()) return ranks.status();
  const int64_t refits =
      options.iterations + (options.change_rate.has_value() ? 1 : 0);
  for (int64_t i = 0; i < refits; ++i) {
    const bool dense = !options.change_rate.has_value() || i == 0;
    if (dense) {
      check.PoisonDestinations(tensors);
    } else {
      check.ChangeSources(tensors, *options.change_rate);
    }
    absl::StatusOr<RefitMeasurement> refit =
        (*ranks)->Refit(options.digest, dense);
    if (!refit.ok()) return refit.status();
    result.refits.push_back(*refit);
    result.check = check.Check(tensors);
    if (result.check.wrong_elements > 0) break;
  }
  return result;
}

}  // namespace refit
