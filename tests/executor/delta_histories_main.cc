// Random histories of a plan with deltas, of ranks that are processes: changes,
// refits that are left out, torn refits, new memory, refits that are to be
// dense. After each refit every element of the destination is checked.
//
// usage: delta_histories PLAN.refit nccl|ucx HISTORIES
//
// One process for each rank, as torchrun starts them. The plan has staged
// rounds alone.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "refit/host_device.h"
#include "runner/world_rank.h"

namespace refit {
namespace {

constexpr std::chrono::minutes kTimeout{1};
constexpr int kSteps = 8;

// What ended how often, by what ended.
using Tally = std::map<std::string, int64_t>;

class History {
 public:
  // All ranks draw the same numbers.
  History(const PlanFile& plan, TcpRendezvous meeting,
          std::shared_ptr<Device> device, uint32_t seed)
      : plan_(plan), device_(std::move(device)), random_(seed) {
    meeting_ = std::move(meeting);
  }

  absl::Status Live(Tally& tally) {
    absl::StatusOr<std::unique_ptr<ControlPlane>> control =
        ConnectTcp(meeting_, std::chrono::steady_clock::now() + kTimeout);
    if (!control.ok()) return control.status();
    absl::StatusOr<std::unique_ptr<WorldRank>> made =
        WorldRank::Create(plan_, *std::move(control), device_, kTimeout);
    if (!made.ok()) return made.status();
    rank_ = *std::move(made);
    constexpr double kRates[] = {0.0003, 0.01, 0.05, 0.2, 1};
    const double rate = kRates[Draw(5)];
    absl::Status status = rank_->FillSources();
    bool has_base = false;
    for (int step = 0; step < kSteps && status.ok(); ++step) {
      // Some changes are of versions that are never sent.
      for (uint32_t changes = Draw(4); changes > 0 && status.ok(); --changes) {
        status = rank_->ChangeSources(rate);
      }
      const uint32_t event = Draw(8);
      if (event == 0) status.Update(Tear(tally));
      if (event == 1) status.Update(Rebind(tally));
      has_base &= event > 1;
      if (status.ok()) status = Refit(has_base, tally);
      has_base = true;
    }
    return status;
  }

 private:
  uint32_t Draw(uint32_t below) {
    return static_cast<uint32_t>(random_() % below);
  }

  absl::Status Refit(bool has_base, Tally& tally) {
    const bool dense = Draw(8) == 0;
    // A delta refit would leave the poison where nothing changed.
    if (dense || !has_base) {
      if (absl::Status s = rank_->PoisonDestinations(); !s.ok()) return s;
    }
    const bool digest = Draw(4) == 0;
    const absl::StatusOr<RefitMeasurement> refit = rank_->Refit(digest, dense);
    if (!refit.ok()) return refit.status();
    const DeltaReport& report = *refit->delta;
    if (report.is_delta != (has_base && !dense)) {
      return absl::InternalError(
          absl::StrCat("a refit was ", report.is_delta ? "a delta" : "dense",
                       ": ", report.why_dense));
    }
    const absl::StatusOr<CheckResult> check = rank_->Check();
    if (!check.ok()) return check.status();
    if (check->wrong_elements > 0) {
      return absl::DataLossError(absl::StrCat(
          check->wrong_elements,
          " elements are wrong, the first: ", check->mismatches.front()));
    }
    ++tally[!report.is_delta   ? "dense"
            : report.rung == 1 ? "whole"
                               : absl::StrCat("1/", report.rung)];
    return absl::OkStatus();
  }

  // A refit that one rank refuses.
  absl::Status Tear(Tally& tally) {
    const auto victim =
        static_cast<int32_t>(Draw(static_cast<uint32_t>(plan_.world_size())));
    Executor& executor = rank_->executor();
    const std::vector<const void*> elsewhere(rank_->tensors().size(), this);
    RunOptions options = {.timeout = kTimeout};
    if (meeting_.rank == victim) options.addresses = elsewhere;
    absl::Status run = executor.Run(rank_->stream(), options);
    if (run.ok()) run = executor.Wait();
    if (run.ok() || executor.state() != ExecutorState::kTorn) {
      return absl::InternalError("a refit that a rank refused is not torn");
    }
    ++tally["torn"];
    return executor.Connect(kTimeout);
  }

  // One rank binds anew, which is local to it.
  absl::Status Rebind(Tally& tally) {
    const auto victim =
        static_cast<int32_t>(Draw(static_cast<uint32_t>(plan_.world_size())));
    ++tally["bound anew"];
    if (meeting_.rank != victim) return absl::OkStatus();
    std::vector<void*> addresses;
    for (const BoundTensor& tensor : rank_->tensors()) {
      addresses.push_back(tensor.data);
    }
    return rank_->BindAt(addresses);
  }

  const PlanFile& plan_;
  TcpRendezvous meeting_;
  const std::shared_ptr<Device> device_;
  std::mt19937 random_;
  std::unique_ptr<WorldRank> rank_;
};

absl::Status LiveAll(const char* path, std::string_view transport,
                     uint32_t histories) {
  const absl::StatusOr<PlanFile> plan = PlanFile::Open(path);
  if (!plan.ok()) return plan.status();
  const absl::StatusOr<TcpRendezvous> meeting = RendezvousFromEnvironment();
  if (!meeting.ok()) return meeting.status();
  std::shared_ptr<Device> device = std::make_shared<HostDevice>();
  if (transport == "nccl") {
    const absl::StatusOr<int32_t> local_rank = LocalRankFromEnvironment();
    if (!local_rank.ok()) return local_rank.status();
    const absl::StatusOr<int> devices = DevicesHere();
    if (!devices.ok()) return devices.status();
    absl::StatusOr<std::unique_ptr<Device>> gpu =
        CreateCudaDevice(*local_rank % *devices);
    if (!gpu.ok()) return gpu.status();
    device = *std::move(gpu);
  }
  Tally tally;
  for (uint32_t seed = 0; seed < histories; ++seed) {
    const absl::Status status =
        History(*plan, *meeting, device, seed).Live(tally);
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrCat("history ", seed, ": ",
                                                      status.message()));
    }
  }
  if (meeting->rank != 0) return absl::OkStatus();
  std::printf("%u histories:", histories);
  for (const auto& [what, count] : tally) {
    std::printf(" %s %lld", what.c_str(), static_cast<long long>(count));
  }
  std::printf("\n");
  return absl::OkStatus();
}

}  // namespace
}  // namespace refit

int main(int argc, char** argv) {
  const std::string_view transport = argc == 4 ? argv[2] : "";
  uint32_t histories = 0;
  if ((transport != "nccl" && transport != "ucx") ||
      !absl::SimpleAtoi(argv[3], &histories)) {
    std::fprintf(stderr,
                 "usage: delta_histories PLAN.refit nccl|ucx HISTORIES\n");
    return 2;
  }
  const absl::Status status = refit::LiveAll(argv[1], transport, histories);
  if (status.ok()) return 0;
  std::fprintf(stderr, "delta_histories: %s\n", status.ToString().c_str());
  return 1;
}
