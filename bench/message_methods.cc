#include "bench/message_methods.h"

#include <algorithm>
#include <map>
#include <set>
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

class MessageMethod : public TransferMethod {
 public:
  MessageMethod(const PlanFile& plan, Transport& transport, Device& device,
                const nccl::Api& api, const nccl::WindowApi& windows,
                const MessageOptions& options,
                std::unique_ptr<NcclCommunicator> communicator)
      : rank_(transport.rank()),
        device_(device),
        api_(api),
        windows_(windows),
        options_(options),
        communicator_(std::move(communicator)),
        rounds_(StagedRounds(plan, transport.rank())),
        ahead_(plan.body().limits()->slots()),
        calls_(device, options.graph) {
    for (const fb::RankProgram* program : *plan.body().programs()) {
      arena_bytes_ = std::max(arena_bytes_, program->staging_bytes());
    }
    std::set<int32_t> sent_to;
    std::set<int32_t> received_from;
    for (const std::vector<StagedMessage>& round : rounds_) {
      for (const StagedMessage& message : round) {
        (message.is_send ? sent_to : received_from).insert(message.peer);
        if (message.is_send) sent_bytes_ += message.size_bytes;
      }
    }
    for (const int32_t peer : sent_to) {
      if (received_from.contains(peer)) ahead_ = 1;
    }
  }
  ~MessageMethod() override {
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
    const char* way = options_.way == MessageWay::kSendRecv ? "send/recv"
                      : options_.way == MessageWay::kRegistered
                          ? "send/recv in windows"
                          : "PutSignal";
    return absl::StrCat("its messages, ", way, options_.graph ? ", graph" : "");
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
  absl::Status Call(const char* name,
                    const std::function<nccl::Result(nccl::Comm)>& function) {
    return communicator_->Call(name, function, MeasurementDeadline(),
                               NeverInterrupted);
  }

  absl::Status Allocate() {
    if (options_.way == MessageWay::kSendRecv) {
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
    if (options_.way == MessageWay::kPutSignal) return IssuePuts(stream);
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

  absl::Status IssuePuts(Stream stream) {
    absl::Status status;
    if (rounds_.empty()) {
      // NCCL prepares one-sided sends on all ranks together, in each one's
      // first call.
      status.Update(Signal({rank_}, stream));
      status.Update(AwaitSignals({{rank_, 1}}, stream));
    }
    for (size_t r = 0; r < std::min<size_t>(ahead_, rounds_.size()); ++r) {
      status.Update(SayReady(r, stream));
    }
    for (size_t r = 0; r < rounds_.size() && status.ok(); ++r) {
      std::map<int32_t, int> ready;
      std::map<int32_t, int> arrived;
      for (const StagedMessage& message : rounds_[r]) {
        if (message.is_send) {
          ready[message.peer] = 1;
        } else {
          ++arrived[message.peer];
        }
      }
      status.Update(AwaitSignals(ready, stream));
      status.Update(Put(r, stream));
      status.Update(AwaitSignals(arrived, stream));
      if (r + ahead_ < rounds_.size()) {
        status.Update(SayReady(r + ahead_, stream));
      }
    }
    return status;
  }

  // To those who send in round `r`.
  absl::Status SayReady(size_t r, Stream stream) {
    std::set<int32_t> senders;
    for (const StagedMessage& message : rounds_[r]) {
      if (!message.is_send) senders.insert(message.peer);
    }
    return senders.empty() ? absl::OkStatus() : Signal(senders, stream);
  }

  absl::Status Signal(const std::set<int32_t>& peers, Stream stream) {
    return Call("ncclSignal", [&](nccl::Comm comm) {
      nccl::Result result = api_.GroupStart();
      for (const int32_t peer : peers) {
        if (result != nccl::kSuccess) break;
        result = windows_.Signal(peer, 0, 0, 0, comm, stream);
      }
      const nccl::Result ended = api_.GroupEnd();
      return result == nccl::kSuccess ? ended : result;
    });
  }

  absl::Status AwaitSignals(const std::map<int32_t, int>& counts,
                            Stream stream) {
    if (counts.empty()) return absl::OkStatus();
    std::vector<nccl::AwaitedSignals> awaited;
    for (const auto& [peer, count] : counts) {
      awaited.push_back({.count = count, .peer = peer});
    }
    return Call("ncclWaitSignal", [&](nccl::Comm comm) {
      return windows_.WaitSignal(static_cast<int>(awaited.size()),
                                 awaited.data(), comm, stream);
    });
  }

  absl::Status Put(size_t r, Stream stream) {
    const auto sends = [](const StagedMessage& m) { return m.is_send; };
    if (std::none_of(rounds_[r].begin(), rounds_[r].end(), sends)) {
      return absl::OkStatus();
    }
    return Call("ncclPutSignal", [&](nccl::Comm comm) {
      nccl::Result result = api_.GroupStart();
      for (const StagedMessage& message : rounds_[r]) {
        if (!message.is_send || result != nccl::kSuccess) continue;
        result = windows_.PutSignal(
            outgoing_ + message.offset, message.size_bytes, nccl::kUint8,
            message.peer, window_->window(), arena_bytes_ + message.peer_offset,
            0, 0, 0, comm, stream);
      }
      const nccl::Result ended = api_.GroupEnd();
      return result == nccl::kSuccess ? ended : result;
    });
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
  const MessageOptions options_;
  std::unique_ptr<NcclCommunicator> communicator_;
  const std::vector<std::vector<StagedMessage>> rounds_;
  size_t ahead_;
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

absl::StatusOr<std::unique_ptr<TransferMethod>> MakeMessageMethod(
    const PlanFile& plan, Transport& transport, Device& device,
    const nccl::Api& api, const nccl::WindowApi& windows,
    const MessageOptions& options) {
  if (absl::Status s = device.MakeCurrent(); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> communicator =
      MakeCommunicator(transport, api, AllRanks(plan));
  if (!communicator.ok()) return communicator.status();
  auto made = std::make_unique<MessageMethod>(
      plan, transport, device, api, windows, options, *std::move(communicator));
  if (absl::Status s = made->Init(); !s.ok()) return s;
  return made;
}

}  // namespace refit
