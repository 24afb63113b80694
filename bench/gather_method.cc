#include "bench/gather_method.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/measured_communicator.h"
#include "bench/pattern.h"
#include "bench/repeated_calls.h"
#include "bench/staged_messages.h"
#include "bench/window_memory.h"
#include "executor/agreement.h"
#include "runner/world_rank.h"

namespace refit {
namespace {

constexpr size_t kHalves = 2;
constexpr uint64_t kAlignment = 256;  // of what a rank gives to a gather

// Bytes of the rank's staged messages of a kind.
uint64_t StagedBytes(const PlanFile& plan, int32_t rank, bool sent) {
  uint64_t size_bytes = 0;
  for (const std::vector<StagedMessage>& round : StagedRounds(plan, rank)) {
    for (const StagedMessage& message : round) {
      if (message.is_send == sent) size_bytes += message.size_bytes;
    }
  }
  return size_bytes;
}

class GatherMethod : public TransferMethod {
 public:
  GatherMethod(const PlanFile& plan, Transport& transport, Device& device,
               const nccl::Api& api, const GatherOptions& options)
      : rank_(transport.rank()),
        receivers_(static_cast<uint64_t>(plan.world_size() - 1)),
        device_(device),
        api_(api),
        options_(options),
        calls_(device, options.graph) {
    const uint64_t step = receivers_ * kAlignment;
    const auto aligned = [&](uint64_t size_bytes) {
      return (size_bytes + step - 1) / step * step;
    };
    half_bytes_ = aligned(options.round_bytes);
    uint64_t left = StagedBytes(plan, 0, /*sent=*/true);
    while (left > 0) {
      const uint64_t of_round = std::min(left, half_bytes_);
      parts_.push_back(aligned(of_round) / receivers_);
      left -= of_round;
    }
  }

  ~GatherMethod() override {
    calls_.DropGraph();
    if (window_ != nullptr) window_->Deregister(*gathering_);
  }

  absl::Status Init(Transport& transport, const PlanFile& plan) {
    const std::vector<int32_t> everyone = AllRanks(plan);
    absl::Status status;
    const auto make = [&](auto& target, auto made) {
      if (made.ok()) target = *std::move(made);
      status.Update(made.status());
    };
    make(sending_, MakeCommunicator(transport, api_, everyone));
    if (!status.ok()) return status;
    make(gathering_, MakeCommunicator(transport, api_,
                                      {everyone.begin() + 1, everyone.end()}));
    make(stream_, device_.CreateStream());
    make(forked_, device_.CreateEvent());
    for (size_t half = 0; half < kHalves; ++half) {
      make(arrived_[half], device_.CreateEvent());
      make(gathered_[half], device_.CreateEvent());
    }
    const uint64_t size_bytes = kHalves * half_bytes_;
    if (!status.ok()) return status;
    if (options_.windows != nullptr && !IsSource()) {
      make(window_, WindowMemory::Create(api_, *options_.windows, *gathering_,
                                         size_bytes));
    } else {
      make(memory_, device_.Allocate(size_bytes));
    }
    if (!status.ok()) return status;
    data_ = window_ != nullptr ? window_->data() : memory_->data();
    return IsSource()
               ? FillPattern(device_, stream_->get(), rank_, data_, size_bytes)
               : FillZeroes(device_, stream_->get(), data_, size_bytes);
  }

  std::string name() const override {
    return absl::StrCat("all-gather, ", options_.round_bytes >> 20, " MiB",
                        options_.windows != nullptr ? ", in windows" : "");
  }
  std::string remark() const override {
    return absl::StrCat(parts_.size(), " rounds, no packing",
                        options_.graph ? ", graph" : "");
  }
  uint64_t sent_bytes() const override {
    uint64_t of_one = 0;
    for (const uint64_t part : parts_) of_one += part;
    return of_one * (IsSource() ? receivers_ : receivers_ - 1);
  }

  absl::Status Enqueue(Stream stream) override {
    return calls_.Enqueue(stream, [&](Stream to) { return Issue(to); });
  }

  absl::StatusOr<std::optional<uint64_t>> WrongElements() override {
    if (IsSource()) return 0;
    uint64_t wrong = 0;
    for (size_t half = 0; half < std::min(kHalves, parts_.size()); ++half) {
      const uint64_t offset = half * half_bytes_;
      const absl::StatusOr<uint64_t> of_half =
          CountWrongBytes(device_, stream_->get(), data_ + offset,
                          parts_[half] * receivers_, /*from=*/0, offset);
      if (!of_half.ok()) return of_half.status();
      wrong += *of_half;
    }
    return wrong;
  }

 private:
  bool IsSource() const { return rank_ == 0; }

  absl::Status Issue(Stream stream) {
    const Stream gather = stream_->get();
    absl::Status status;
    if (!IsSource()) {
      status.Update(forked_->Record(stream));
      status.Update(forked_->Await(gather));
    }
    for (size_t r = 0; r < parts_.size() && status.ok(); ++r) {
      const size_t half = r % kHalves;
      std::byte* const at = data_ + half * half_bytes_;
      // The other ranks are done with what this one had there, too: they have
      // gathered it.
      if (!IsSource() && r >= kHalves) {
        status.Update(gathered_[half]->Await(stream));
      }
      operations_.clear();
      for (uint64_t receiver = 0; receiver < receivers_; ++receiver) {
        const auto rank = static_cast<int32_t>(receiver) + 1;
        if (!IsSource() && rank != rank_) continue;
        operations_.push_back({.kind = IsSource() ? fb::MessageKind::kSend
                                                  : fb::MessageKind::kRecv,
                               .peer = IsSource() ? rank : 0,
                               .data = at + receiver * parts_[r],
                               .size_bytes = parts_[r]});
      }
      status.Update(sending_->Exchange(
          operations_, stream, MeasurementDeadline(), NeverInterrupted));
      if (IsSource() || !status.ok()) continue;
      status.Update(arrived_[half]->Record(stream));
      status.Update(arrived_[half]->Await(gather));
      const auto all_gather = [&](nccl::Comm comm) {
        const auto mine = static_cast<uint64_t>(rank_ - 1) * parts_[r];
        return api_.AllGather(at + mine, at, parts_[r], nccl::kUint8, comm,
                              gather);
      };
      status.Update(gathering_->Call("ncclAllGather", all_gather,
                                     MeasurementDeadline(), NeverInterrupted));
      status.Update(gathered_[half]->Record(gather));
    }
    if (IsSource() || !status.ok()) return status;
    return gathered_[(parts_.size() - 1) % kHalves]->Await(stream);
  }

  const int32_t rank_;
  const uint64_t receivers_;
  Device& device_;
  const nccl::Api& api_;
  const GatherOptions options_;
  uint64_t half_bytes_ = 0;
  std::vector<uint64_t> parts_;  // of each receiver, in each round
  // Go after what NCCL knows of them.
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<WindowMemory> window_;  // instead
  std::byte* data_ = nullptr;             // of one of them
  std::unique_ptr<NcclCommunicator> sending_;
  std::unique_ptr<NcclCommunicator> gathering_;  // of the receivers; else null
  std::unique_ptr<DeviceStream> stream_;         // that gathers
  std::unique_ptr<DeviceEvent> forked_;
  std::unique_ptr<DeviceEvent> arrived_[kHalves];
  std::unique_ptr<DeviceEvent> gathered_[kHalves];
  std::vector<Operation> operations_;
  RepeatedCalls calls_;
};

}  // namespace

absl::Status CanGather(const PlanFile& plan, const nccl::Api& api) {
  if (plan.body().colocated() || plan.source_ranks() != 1 ||
      plan.world_size() < 3) {
    return absl::FailedPreconditionError(
        "gather needs one source rank and several destination ranks, each on a "
        "GPU of its own");
  }
  const uint64_t sent = StagedBytes(plan, 0, /*sent=*/true);
  for (int32_t rank = 1; rank < plan.world_size(); ++rank) {
    if (sent > 0 && StagedBytes(plan, rank, /*sent=*/false) == sent) continue;
    return absl::FailedPreconditionError(
        "gather needs a plan in which each destination rank receives, in "
        "staged messages, as much as the source rank sends to all: relays "
        "give that");
  }
  if (api.AllGather == nullptr) {
    return absl::UnimplementedError("this libnccl has no ncclAllGather");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<TransferMethod>> MakeGatherMethod(
    const PlanFile& plan, Transport& transport, Device& device,
    const nccl::Api& api, const GatherOptions& options) {
  if (absl::Status s = device.MakeCurrent(); !s.ok()) return s;
  auto made =
      std::make_unique<GatherMethod>(plan, transport, device, api, options);
  const absl::Status status = made->Init(transport, plan);
  // A receiver alone learns that NCCL registers no windows.
  const absl::StatusOr<std::string> all =
      ThroughRankZero(transport, MeasurementDeadline(),
                      status.ok() ? absl::StatusOr<std::string>("") : status,
                      [](absl::Span<const std::string>) { return ""; });
  if (!all.ok()) return all.status();
  return made;
}

}  // namespace refit
