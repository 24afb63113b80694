#include "bench/transfer_bench.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/m2n_method.h"
#include "bench/transfer_methods.h"
#include "bench/window_method.h"
#include "executor/device/cuda/cuda_status.h"
#include "plan/scratch_windows.h"
#include "refit/cuda_device.h"
#include "runner/rank_threads.h"
#include "runner/world_rank.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::minutes kTransferTimeout(3);
constexpr int kWarmUps = 3;

class PlanMethod : public TransferMethod {
 public:
  // `check`: RunOptions::check, of which this times the digests alone.
  // `multiprocessors`: RunOptions::direct_multiprocessors.
  PlanMethod(const PlanFile& plan, WorldRank& rank, bool check,
             uint32_t multiprocessors = 0)
      : rank_(rank), check_(check), multiprocessors_(multiprocessors) {
    for (const fb::Message* message :
         plan.messages().Of(rank.transport().rank())) {
      if (message->kind() == fb::MessageKind::kSend) {
        sent_bytes_ += message->size_bytes();
      }
    }
  }
  std::string name() const override {
    if (check_) return "this plan, with digests";
    if (multiprocessors_ == 0) return "this plan";
    return absl::StrCat("this plan, ", multiprocessors_, " multiprocessors");
  }
  uint64_t sent_bytes() const override { return sent_bytes_; }
  absl::Status Enqueue(Stream stream) override {
    return rank_.executor().Run(stream,
                                {.timeout = kTransferTimeout,
                                 .addresses = {},
                                 .check = check_,
                                 .dense = true,
                                 .direct_multiprocessors = multiprocessors_});
  }

 private:
  WorldRank& rank_;
  const bool check_;
  const uint32_t multiprocessors_;
  uint64_t sent_bytes_ = 0;
};

// One rank's stopwatch and its way to the others' values.
class Harness {
 public:
  Harness(const PlanFile& plan, WorldRank& rank) : plan_(plan), rank_(rank) {
    for (int32_t r = 0; r < plan.world_size(); ++r) everyone_.push_back(r);
  }
  ~Harness() {
    for (cudaEvent_t event : {begin_, end_}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }

  absl::Status Init() {
    if (absl::Status s = rank_.device().MakeCurrent(); !s.ok()) return s;
    absl::Status status = CudaStatus(cudaEventCreate(&begin_), "event");
    status.Update(CudaStatus(cudaEventCreate(&end_), "event"));
    return status;
  }

  // Every rank's `mine`, by rank.
  template <typename T>
  absl::StatusOr<std::vector<T>> Gather(const T& mine) {
    const absl::StatusOr<std::vector<std::string>> all =
        rank_.transport().ExchangeBytes(
            std::string(reinterpret_cast<const char*>(&mine), sizeof(mine)),
            everyone_, everyone_, Clock::now() + kTransferTimeout);
    if (!all.ok()) return all.status();
    std::vector<T> values(all->size());
    for (size_t r = 0; r < values.size(); ++r) {
      std::memcpy(&values[r], (*all)[r].data(), sizeof(T));
    }
    return values;
  }

  absl::StatusOr<TransferRow> Time(TransferMethod& method, int64_t iterations) {
    const auto stream = static_cast<cudaStream_t>(rank_.stream());
    iterations = std::min(iterations, method.iterations_max());
    absl::Status status;
    for (int i = 0; i < kWarmUps && i < method.iterations_max(); ++i) {
      status.Update(method.Enqueue(stream));
    }
    status.Update(rank_.device().Synchronize(stream));
    absl::StatusOr<std::vector<int>> ready = Gather(0);
    status.Update(ready.status());
    status.Update(CudaStatus(cudaEventRecord(begin_, stream), "event"));
    for (int64_t i = 0; i < iterations && status.ok(); ++i) {
      status.Update(method.Enqueue(stream));
    }
    status.Update(CudaStatus(cudaEventRecord(end_, stream), "event"));
    status.Update(rank_.device().Synchronize(stream));
    if (!status.ok()) return status;
    float milliseconds = 0;
    status = CudaStatus(cudaEventElapsedTime(&milliseconds, begin_, end_),
                        "cudaEventElapsedTime");
    if (!status.ok()) return status;
    struct Result {
      double seconds;
      uint64_t bytes;
    };
    absl::StatusOr<std::vector<Result>> results =
        Gather(Result{milliseconds / 1e3 / static_cast<double>(iterations),
                      method.sent_bytes()});
    if (!results.ok()) return results.status();
    TransferRow row = {.method = method.name(), .remark = method.remark()};
    for (const Result& result : *results) {
      row.seconds = std::max(row.seconds, result.seconds);
      row.wire_bytes += result.bytes;
    }
    const absl::StatusOr<std::optional<uint64_t>> wrong =
        method.WrongElements();
    if (!wrong.ok()) return wrong.status();
    if (!wrong->has_value()) return row;
    const absl::StatusOr<std::vector<uint64_t>> wrongs = Gather(**wrong);
    if (!wrongs.ok()) return wrongs.status();
    row.wrong_elements = 0;
    for (const uint64_t of_rank : *wrongs) *row.wrong_elements += of_rank;
    return row;
  }

 private:
  const PlanFile& plan_;
  WorldRank& rank_;
  std::vector<int32_t> everyone_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

uint64_t FreeDeviceBytes() {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  return free_bytes;
}

// One after the other, so that each has the memory to itself.
absl::Status MeasureOthers(
    const PlanFile& plan, WorldRank& rank, const OtherMethods& others,
    const std::function<absl::Status(TransferMethod&)>& measure) {
  using Made = absl::StatusOr<std::unique_ptr<TransferMethod>>;
  if (others.windows.has_value()) {
    for (const bool graph : {false, true}) {
      for (const bool registered : {false, true}) {
        const Made made = MakeWindowMethod(
            plan, rank.transport(), rank.device(), others.nccl, *others.windows,
            {.registered = registered, .graph = graph});
        if (!made.ok()) return made.status();
        if (absl::Status s = measure(**made); !s.ok()) return s;
      }
    }
  }
  for (const bool groups : {false, true}) {
    if (!(groups ? others.m2n_groups : others.m2n_calls)) continue;
    const Made made = MakeM2nMethod(plan, rank, others.nccl, *others.m2n,
                                    others.m2n_tensors, groups);
    if (!made.ok()) return made.status();
    if (absl::Status s = measure(**made); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// What a rank tells the others.
struct RankReport {
  double first_seconds = 0;
  double first_host_seconds = 0;
  double host_seconds = 0;
  double latency_seconds = 0;
  double checked_seconds = 0;
  uint64_t extra_bytes = 0;
  uint64_t wrong_elements = 0;
};

void AddReport(const RankReport& report, TransferMeasurement& measured) {
  const auto raise = [](auto value, auto& most) {
    most = std::max(most, value);
  };
  raise(report.first_seconds, measured.first_seconds);
  raise(report.first_host_seconds, measured.first_host_seconds);
  raise(report.host_seconds, measured.run_host_seconds);
  raise(report.latency_seconds, measured.latency_seconds);
  raise(report.checked_seconds, measured.checked_seconds);
  raise(report.extra_bytes, measured.extra_bytes);
  measured.wrong_elements += report.wrong_elements;
}

// Of a refit that follows no other: what a worker's thread waits for.
absl::Status MeasureAlone(WorldRank& rank, int64_t iterations,
                          RankReport& report) {
  for (int64_t i = 0; i < iterations; ++i) {
    const auto lower = [&](double seconds, double& least) {
      least = i == 0 ? seconds : std::min(least, seconds);
    };
    const absl::StatusOr<RefitMeasurement> checked =
        rank.Refit(/*digest=*/true);
    if (!checked.ok()) return checked.status();
    lower(checked->seconds, report.checked_seconds);
    const absl::StatusOr<RefitMeasurement> alone = rank.Refit();
    if (!alone.ok()) return alone.status();
    lower(alone->seconds, report.latency_seconds);
    lower(alone->host_seconds, report.host_seconds);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TransferMeasurement> MeasureTransfer(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control, int ordinal,
    const TransferOptions& options) {
  // The context itself, which any worker has.
  absl::Status status = CudaStatus(cudaSetDevice(ordinal), "cudaSetDevice");
  status.Update(CudaStatus(cudaFree(nullptr), "cudaFree"));
  if (!status.ok()) return status;
  const uint64_t free_before = FreeDeviceBytes();
  absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice(ordinal);
  if (!device.ok()) return device.status();
  absl::StatusOr<std::unique_ptr<WorldRank>> made = WorldRank::Create(
      plan, std::move(control), *std::move(device), kTransferTimeout);
  if (!made.ok()) return made.status();
  WorldRank& rank = **made;
  uint64_t tensor_bytes = 0;
  for (const BoundTensor& tensor : rank.tensors()) {
    tensor_bytes += tensor.size_bytes;
  }
  const uint64_t used = free_before - std::min(free_before, FreeDeviceBytes());
  Harness harness(plan, rank);
  if (absl::Status s = harness.Init(); !s.ok()) return s;

  TransferMeasurement measured;
  const auto measure = [&](TransferMethod& method) -> absl::Status {
    const absl::StatusOr<TransferRow> row =
        harness.Time(method, options.iterations);
    if (!row.ok()) return row.status();
    measured.rows.push_back(*row);
    if (rank.transport().rank() == 0) options.on_row(*row);
    return absl::OkStatus();
  };
  // Before anything has warmed up.
  const absl::StatusOr<RefitMeasurement> first = rank.Refit();
  if (!first.ok()) return first.status();
  std::vector<PlanMethod> ways = {{plan, rank, false}, {plan, rank, true}};
  for (const uint32_t multiprocessors : options.multiprocessors) {
    ways.emplace_back(plan, rank, false, multiprocessors);
  }
  for (PlanMethod& method : ways) {
    if (absl::Status s = measure(method); !s.ok()) return s;
    if (absl::Status s = rank.executor().Wait(); !s.ok()) return s;
  }
  RankReport report = {.first_seconds = first->seconds,
                       .first_host_seconds = first->host_seconds};
  status = MeasureAlone(rank, options.iterations, report);
  if (!status.ok()) return status;
  {
    absl::StatusOr<std::vector<std::unique_ptr<TransferMethod>>> methods =
        MakeMethods(plan, rank, options.peers);
    if (!methods.ok()) return methods.status();
    for (const std::unique_ptr<TransferMethod>& method : *methods) {
      if (absl::Status s = measure(*method); !s.ok()) return s;
    }
  }
  if (options.others != nullptr) {
    absl::Status others = MeasureOthers(plan, rank, *options.others, measure);
    if (!others.ok()) return others;
  }
  // In one process NCCL ends the communicators of all ranks on the thread of
  // the last one.
  if (const auto ended = harness.Gather(0); !ended.ok()) return ended.status();
  if (absl::Status s = rank.FillSources(); !s.ok()) return s;
  if (absl::Status s = rank.PoisonDestinations(); !s.ok()) return s;
  const uint32_t last_multiprocessors =
      options.multiprocessors.empty() ? 0 : options.multiprocessors.back();
  absl::StatusOr<RefitMeasurement> last =
      rank.Refit(/*digest=*/false, /*dense=*/true, last_multiprocessors);
  if (!last.ok()) return last.status();
  absl::StatusOr<CheckResult> check = rank.Check();
  if (!check.ok()) return check.status();

  report.extra_bytes = used - std::min(used, tensor_bytes);
  report.wrong_elements = check->wrong_elements;
  const absl::StatusOr<std::vector<RankReport>> reports =
      harness.Gather(report);
  if (!reports.ok()) return reports.status();
  for (const RankReport& of_rank : *reports) AddReport(of_rank, measured);
  return measured;
}

absl::StatusOr<TransferMeasurement> MeasureTransferInProcess(
    const PlanFile& plan, const TransferOptions& options) {
  const int devices = CudaDeviceCount();
  if (devices == 0) return absl::NotFoundError("no CUDA device here");
  const absl::StatusOr<TcpRendezvous> meeting =
      LoopbackRendezvous(plan.world_size());
  if (!meeting.ok()) return meeting.status();
  std::vector<absl::StatusOr<TransferMeasurement>> results(
      static_cast<size_t>(plan.world_size()), absl::UnknownError(""));
  absl::Status threads = RunRankThreads(plan.world_size(), [&](int32_t rank) {
    TcpRendezvous mine = *meeting;
    mine.rank = rank;
    absl::StatusOr<std::unique_ptr<ControlPlane>> control =
        ConnectTcp(mine, Clock::now() + kTransferTimeout);
    results[static_cast<size_t>(rank)] =
        control.ok() ? MeasureTransfer(plan, *std::move(control),
                                       rank % devices, options)
                     : control.status();
  });
  if (!threads.ok()) return threads;
  std::vector<absl::Status> statuses;
  for (const auto& result : results) statuses.push_back(result.status());
  if (absl::Status s = MainError(statuses); !s.ok()) return s;
  return results.front();
}

// The most that a rank's arenas take.
std::string MemoryText(const PlanFile& plan,
                       const TransferMeasurement& measured) {
  constexpr double kMiB = 1 << 20;
  uint64_t staging = 0;
  uint64_t scratch = 0;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    staging = std::max(staging, program->staging_bytes());
    scratch = std::max(scratch, ScratchBytes(plan.body(), *program));
  }
  // What the driver says of a GPU includes the other process's tensors.
  const std::string extra =
      plan.body().colocated()
          ? "is not told apart where processes share GPUs"
          : absl::StrFormat("%.1f MiB",
                            static_cast<double>(measured.extra_bytes) / kMiB);
  return absl::StrFormat(
      "extra GPU memory %s; staging %.1f MiB, scratch %.1f MiB\n", extra,
      static_cast<double>(staging) / kMiB, static_cast<double>(scratch) / kMiB);
}

bool TransferMeasurement::all_right() const {
  return wrong_elements == 0 &&
         std::all_of(rows.begin(), rows.end(), [](const TransferRow& row) {
           return row.wrong_elements.value_or(0) == 0;
         });
}

std::string TransferHeader() {
  return absl::StrFormat("%-34s %10s %10s %8s  %s\n", "method", "ms", "GB/s",
                         "ratio", "");
}

std::string TransferRowText(const TransferRow& row, double ours) {
  return absl::StrFormat(
      "%-34s %10.3f %10.1f %8.3f  %s%s\n", row.method, row.seconds * 1e3,
      static_cast<double>(row.wire_bytes) / row.seconds / 1e9,
      ours / row.seconds, row.remark,
      row.wrong_elements.value_or(0) == 0
          ? ""
          : absl::StrCat("; ", *row.wrong_elements, " elements WRONG"));
}

std::string TransferSummary(const PlanFile& plan,
                            const TransferMeasurement& measured) {
  return absl::StrFormat(
      "ratio: time of this plan / time of the method; GB/s: bytes that leave a "
      "GPU, all ranks\n"
      "predicted %.3f ms, lower bound %.3f ms\n"
      "host time in Run %.3f ms; one Run and Wait %.3f ms, with a check "
      "%.3f ms (best of lone refits)\n"
      "first refit after Bind %.3f ms, its Run %.3f ms\n"
      "%s"
      "after all that, one more refit: %s\n",
      EstimatesOf(plan).predicted_seconds * 1e3,
      EstimatesOf(plan).lower_bound_seconds * 1e3,
      measured.run_host_seconds * 1e3, measured.latency_seconds * 1e3,
      measured.checked_seconds * 1e3, measured.first_seconds * 1e3,
      measured.first_host_seconds * 1e3, MemoryText(plan, measured),
      measured.wrong_elements == 0
          ? "every byte right"
          : absl::StrCat(measured.wrong_elements, " elements WRONG"));
}

}  // namespace refit
