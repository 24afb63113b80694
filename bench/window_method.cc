#include "bench/window_method.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/measured_communicator.h"
#include "bench/pattern.h"
#include "bench/repeated_calls.h"
#include "bench/staged_messages.h"
#include "bench/window_memory.h"
#include "runner/world_rank.h"

namespace refit {
namespace {

class WindowMethod : public TransferMethod {
 public:
  WindowMethod(const PlanFile& plan, Transport& transport, Device& device,
               const nccl::Api& api, const nccl::WindowApi& windows,
               const WindowOptions& options,
               std::unique_ptr<NcclCommunicator> communicator)
      : rank_(transport.rank()),
        device_(device),
        api_(api),
        windows_(windows),
        options_(options),
        communicator_(std::move(communicator)),
        rounds_(StagedRounds(plan, transport.rank())),
        calls_(device, options.graph) {
    for (const fb::RankProgram* program : *plan.body().programs()) {
      arena_bytes_ = std::max(arena_bytes_, program->staging_bytes());
    }
    for (const std::vector<StagedMessage>& round : rounds_) {
      for (const StagedMessage& message : round) {
        if (message.is_send) sent_bytes_ += message.size_bytes;
      }
    }
  }
  ~WindowMethod() override {
    calls_.DropGraph();
    if (window_ != nullptr) window_->Deregister(*communicator_);
    communicator_ = nullptr;
  }

  absl::Status Init() {
    absl::Status status = Allocate();
    absl::StatusOr<std::unique_ptr<DeviceStream>> stream =
        device_.CreateStream();
    status.Update(stream.status());
    if (!status.ok()) return status;
    stream_ = *std::move(stream);
    status =
        FillPattern(device_, stream_->get(), rank_, outgoing_, arena_bytes_);
    status.Update(FillZeroes(device_, stream_->get(), incoming_, arena_bytes_));
    return status;
  }

  std::string name() const override {
    return absl::StrCat("its messages",
                        options_.registered ? ", in windows" : "",
                        options_.graph ? ", graph" : "");
  }
  std::string remark() const override {
    return absl::StrCat(rounds_.size(), " rounds, no packing");
  }
  uint64_t sent_bytes() const override { return sent_bytes_; }

  absl::Status Enqueue(Stream stream) override {
    return calls_.Enqueue(stream, [&](Stream to) { return Issue(to); });
  }

  absl::StatusOr<std::optional<uint64_t>> WrongElements() override {
    uint64_t wrong = 0;
    std::map<uint64_t, uint64_t> later;  // begin and end of what came later
    for (size_t r = rounds_.size(); r-- > 0;) {
      for (const StagedMessage& message : rounds_[r]) {
        if (message.is_send || Merge(message, later)) continue;
        const absl::StatusOr<uint64_t> of_message = CountWrongBytes(
            device_, stream_->get(), incoming_ + message.offset,
            message.size_bytes, message.peer, message.peer_offset);
        if (!of_message.ok()) return of_message.status();
        wrong += *of_message;
      }
    }
    return wrong;
  }

 private:
  absl::Status Allocate() {
    if (!options_.registered) {
      absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
          device_.Allocate(2 * arena_bytes_);
      if (!memory.ok()) return memory.status();
      memory_ = *std::move(memory);
      outgoing_ = memory_->data();
    } else {
      absl::StatusOr<std::unique_ptr<WindowMemory>> window =
          WindowMemory::Create(api_, windows_, *communicator_,
                               2 * arena_bytes_);
      if (!window.ok()) return window.status();
      window_ = *std::move(window);
      outgoing_ = window_->data();
    }
    incoming_ = outgoing_ + arena_bytes_;
    return absl::OkStatus();
  }

  absl::Status Issue(Stream stream) {
    for (const std::vector<StagedMessage>& round : rounds_) {
      operations_.clear();
      for (const StagedMessage& message : round) {
        operations_.push_back(
            {.kind = message.is_send ? fb::MessageKind::kSend
                                     : fb::MessageKind::kRecv,
             .peer = message.peer,
             .data = (message.is_send ? outgoing_ : incoming_) + message.offset,
             .size_bytes = message.size_bytes});
      }
      absl::Status status = communicator_->Exchange(
          operations_, stream, MeasurementDeadline(), NeverInterrupted);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Adds the message's range to `ranges`, and says whether it met one of them.
  static bool Merge(const StagedMessage& message,
                    std::map<uint64_t, uint64_t>& ranges) {
    uint64_t begin = message.offset;
    uint64_t end = begin + message.size_bytes;
    auto next = ranges.upper_bound(begin);
    if (next != ranges.begin() && std::prev(next)->second > begin) --next;
    bool met = false;
    while (next != ranges.end() && next->first < end) {
      met = true;
      begin = std::min(begin, next->first);
      end = std::max(end, next->second);
      next = ranges.erase(next);
    }
    ranges[begin] = end;
    return met;
  }

  const int32_t rank_;
  Device& device_;
  const nccl::Api& api_;
  const nccl::WindowApi& windows_;
  const WindowOptions options_;
  std::unique_ptr<NcclCommunicator> communicator_;
  const std::vector<std::vector<StagedMessage>> rounds_;
  uint64_t arena_bytes_ = 0;  // the same on all ranks, as NCCL wants of windows
  uint64_t sent_bytes_ = 0;
  std::unique_ptr<DeviceMemory> memory_;  // null: the arenas are NCCL's memory
  std::byte* outgoing_ = nullptr;
  std::byte* incoming_ = nullptr;
  std::unique_ptr<WindowMemory> window_;
  std::unique_ptr<DeviceStream> stream_;
  std::vector<Operation> operations_;
  RepeatedCalls calls_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TransferMethod>> MakeWindowMethod(
    const PlanFile& plan, Transport& transport, Device& device,
    const nccl::Api& api, const nccl::WindowApi& windows,
    const WindowOptions& options) {
  if (absl::Status s = device.MakeCurrent(); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> communicator =
      MakeCommunicator(transport, api, AllRanks(plan));
  if (!communicator.ok()) return communicator.status();
  auto made = std::make_unique<WindowMethod>(
      plan, transport, device, api, windows, options, *std::move(communicator));
  if (absl::Status s = made->Init(); !s.ok()) return s;
  return made;
}

}  // namespace refit
