#include "bench/transfer_methods.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "bench/measured_communicator.h"
#include "control/payload.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/nccl_communicator.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

constexpr uint64_t kPackBytes = uint64_t{1} << 30;  // as vLLM's and SkyRL's

// The root of broadcasts and all receivers.
std::vector<int32_t> RootAndDestinations(const PlanFile& plan) {
  std::vector<int32_t> ranks = {0};
  for (int32_t r = plan.source_ranks(); r < plan.world_size(); ++r) {
    ranks.push_back(r);
  }
  return ranks;
}

// A rank's tensors as one range of memory, as WorldRank allocates them.
MemoryRange RangeOf(const WorldRank& rank) {
  MemoryRange range;
  for (const BoundTensor& tensor : rank.tensors()) {
    if (tensor.size_bytes == 0) continue;
    auto* begin = static_cast<std::byte*>(tensor.data);
    if (range.data == nullptr) range.data = begin;
    range.size_bytes =
        static_cast<uint64_t>(begin + tensor.size_bytes - range.data);
  }
  return range;
}

// Contiguous bytes of a pair in the memory of both.
struct Segment {
  PairBytes pair;
  uint64_t offset = 0;  // in this rank's range
};

std::vector<Segment> SegmentsOf(const PlanFile& plan, int32_t rank,
                                uint64_t range_bytes) {
  std::map<std::pair<int32_t, fb::MessageKind>, uint64_t> pairs;
  const fb::RankProgram& program =
      *plan.body().programs()->Get(static_cast<uint32_t>(rank));
  for (const fb::Message* message : plan.messages().Of(program)) {
    const uint32_t peer = PeerOf(plan.body(), program, *message);
    pairs[{static_cast<int32_t>(peer), message->kind()}] +=
        message->size_bytes();
  }
  std::vector<Segment> segments;
  uint64_t offset = 0;
  for (const auto& [key, size_bytes] : pairs) {
    // Padding of staging may make the sum larger than the tensors are.
    if (offset + size_bytes > range_bytes) offset = 0;
    segments.push_back(
        {.pair = {.peer = key.first,
                  .kind = key.second,
                  .size_bytes = std::min(size_bytes, range_bytes)},
         .offset = offset});
    offset = (offset + size_bytes + 255) / 256 * 256;
  }
  return segments;
}

// The plan's own traffic, contiguous: one operation per pair, one group.
class NcclBytesAlone : public TransferMethod {
 public:
  NcclBytesAlone(const PlanFile& plan, WorldRank& rank,
                 std::unique_ptr<NcclCommunicator> communicator)
      : communicator_(std::move(communicator)) {
    const MemoryRange range = RangeOf(rank);
    for (const Segment& segment :
         SegmentsOf(plan, rank.transport().rank(), range.size_bytes)) {
      operations_.push_back({.kind = segment.pair.kind,
                             .peer = segment.pair.peer,
                             .data = range.data + segment.offset,
                             .size_bytes = segment.pair.size_bytes});
      if (segment.pair.kind == fb::MessageKind::kSend) {
        sent_bytes_ += segment.pair.size_bytes;
      }
    }
  }
  std::string name() const override { return "bytes alone, NCCL send/recv"; }
  std::string remark() const override { return "contiguous, one group"; }
  uint64_t sent_bytes() const override { return sent_bytes_; }
  absl::Status Enqueue(Stream stream) override {
    if (operations_.empty()) return absl::OkStatus();
    return communicator_->Exchange(operations_, stream, MeasurementDeadline(),
                                   NeverInterrupted);
  }

 private:
  std::unique_ptr<NcclCommunicator> communicator_;
  std::vector<Operation> operations_;
  uint64_t sent_bytes_ = 0;
};

// The same bytes, pushed by the senders' copy engines, a stream per receiver.
class CopyEngineBytesAlone : public TransferMethod {
 public:
  static absl::StatusOr<std::unique_ptr<TransferMethod>> Make(
      const PlanFile& plan, WorldRank& rank) {
    auto made = std::make_unique<CopyEngineBytesAlone>(rank.device());
    const MemoryRange range = RangeOf(rank);
    absl::StatusOr<std::unique_ptr<ExportedMemory>> mine =
        rank.device().Export({&range, 1});
    if (!mine.ok()) return mine.status();
    made->exported_ = *std::move(mine);
    const std::string message = PayloadWriter()
                                    .U64(range.size_bytes)
                                    .Bytes(made->exported_->bytes())
                                    .Take();
    const absl::StatusOr<std::vector<std::string>> shown =
        rank.transport().ExchangeBytes(message, AllRanks(plan), AllRanks(plan),
                                       MeasurementDeadline());
    if (!shown.ok()) return shown.status();
    for (const Segment& segment :
         SegmentsOf(plan, rank.transport().rank(), range.size_bytes)) {
      if (segment.pair.kind != fb::MessageKind::kSend) continue;
      PayloadReader reader((*shown)[static_cast<size_t>(segment.pair.peer)]);
      const uint64_t size_bytes = reader.U64();
      if (size_bytes < segment.pair.size_bytes) {
        return absl::InternalError("a receiver has less than it is sent");
      }
      absl::StatusOr<std::unique_ptr<MappedMemory>> mapped =
          rank.device().Import(reader.rest(), {size_bytes},
                               std::chrono::steady_clock::time_point::max());
      if (!mapped.ok()) return mapped.status();
      // Where the receiver's segment of this sender lies does not matter for
      // the time; its tensors are larger than what one sender sends.
      Copy copy;
      copy.from = range.data + segment.offset;
      copy.to = (*mapped)->addresses().front();
      copy.size_bytes = segment.pair.size_bytes;
      absl::StatusOr<std::unique_ptr<DeviceStream>> stream =
          rank.device().CreateStream();
      if (!stream.ok()) return stream.status();
      copy.stream = *std::move(stream);
      absl::StatusOr<std::unique_ptr<DeviceEvent>> done =
          rank.device().CreateEvent();
      if (!done.ok()) return done.status();
      copy.done = *std::move(done);
      made->copies_.push_back(std::move(copy));
      made->mapped_.push_back(*std::move(mapped));
    }
    absl::StatusOr<std::unique_ptr<DeviceEvent>> start =
        rank.device().CreateEvent();
    if (!start.ok()) return start.status();
    made->start_ = *std::move(start);
    return made;
  }
  explicit CopyEngineBytesAlone(Device& device) : device_(device) {}

  std::string name() const override { return "bytes alone, copy engines"; }
  std::string remark() const override { return "contiguous, no completion"; }
  uint64_t sent_bytes() const override {
    uint64_t sum = 0;
    for (const Copy& copy : copies_) sum += copy.size_bytes;
    return sum;
  }
  absl::Status Enqueue(Stream stream) override {
    absl::Status status = start_->Record(stream);
    for (Copy& copy : copies_) {
      status.Update(start_->Await(copy.stream->get()));
      status.Update(device_.Copy(copy.to, copy.from, copy.size_bytes,
                                 copy.stream->get()));
      status.Update(copy.done->Record(copy.stream->get()));
      status.Update(copy.done->Await(stream));
    }
    return status;
  }

 private:
  struct Copy {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    uint64_t size_bytes = 0;
    std::unique_ptr<DeviceStream> stream;
    std::unique_ptr<DeviceEvent> done;
  };
  Device& device_;
  std::unique_ptr<ExportedMemory> exported_;
  std::vector<std::unique_ptr<MappedMemory>> mapped_;
  std::vector<Copy> copies_;
  std::unique_ptr<DeviceEvent> start_;
};

// What `sender` sends `receiver`, tensor by tensor: the parts of tensors that
// the plan moves between these two.
std::vector<uint64_t> TensorParts(const PlanFile& plan, int32_t sender,
                                  int32_t receiver) {
  const fb::Body& body = plan.body();
  const fb::RankProgram& program =
      *body.programs()->Get(static_cast<uint32_t>(sender));
  std::vector<uint64_t> parts;
  const MessageVector& messages = plan.messages().Of(program);
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message& message = *messages.Get(i);
    if (message.kind() != fb::MessageKind::kSend ||
        static_cast<int32_t>(PeerOf(body, program, message)) != receiver) {
      continue;
    }
    const SentCopies sent =
        SentCopiesOf(plan.messages(), static_cast<uint32_t>(sender), i);
    const fb::RankProgram& packer = *body.programs()->Get(sent.packer);
    for (const fb::Copy* sent_copy : sent.copies) {
      const fb::Copy& copy = *sent_copy;
      const fb::Buffer& buffer =
          *body.buffers()->Get(packer.buffers()->Get(copy.buffer_slot()));
      const uint64_t tensor_elements = TensorElements(buffer);
      uint64_t tensors = 1;
      uint64_t elements = 1;  // of one tensor's part
      for (const fb::Loop& loop : LoopsOf(body, copy)) {
        // Loops that step over whole tensors are those of layers and experts.
        (loop.stride() >= tensor_elements ? tensors : elements) *=
            loop.extent();
      }
      // Whole tensors may follow each other in one loop.
      if (elements > tensor_elements) {
        tensors *= elements / tensor_elements;
        elements = tensor_elements;
      }
      const uint64_t bytes =
          elements * static_cast<uint64_t>(DTypeBytes(copy.wire_dtype()));
      parts.insert(parts.end(), tensors, bytes);
    }
  }
  return parts;
}

// Every part of a tensor that a pair of ranks exchanges is an operation of its
// own, one group for the n-th tensor of all pairs (as resharding by batches of
// point-to-point operations does, with groups that cannot hang). The parts are
// contiguous here, which favours this method.
class PerTensorSendRecv : public TransferMethod {
 public:
  PerTensorSendRecv(const PlanFile& plan, WorldRank& rank,
                    std::shared_ptr<NcclCommunicator> communicator)
      : communicator_(std::move(communicator)) {
    const int32_t me = rank.transport().rank();
    const MemoryRange range = RangeOf(rank);
    for (const Segment& segment : SegmentsOf(plan, me, range.size_bytes)) {
      const PairBytes& pair = segment.pair;
      const bool sends = pair.kind == fb::MessageKind::kSend;
      const std::vector<uint64_t> parts =
          sends ? TensorParts(plan, me, pair.peer)
                : TensorParts(plan, pair.peer, me);
      groups_.resize(std::max(groups_.size(), parts.size()));
      uint64_t offset = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        if (offset + parts[i] > pair.size_bytes) offset = 0;
        groups_[i].push_back({.kind = pair.kind,
                              .peer = pair.peer,
                              .data = range.data + segment.offset + offset,
                              .size_bytes = parts[i]});
        offset += parts[i];
        if (sends) sent_bytes_ += parts[i];
      }
    }
  }
  std::string name() const override { return "per-tensor send/recv"; }
  uint64_t sent_bytes() const override { return sent_bytes_; }
  int64_t iterations_max() const override { return 2; }
  absl::Status Enqueue(Stream stream) override {
    for (const std::vector<Operation>& group : groups_) {
      if (group.empty()) continue;
      absl::Status status = communicator_->Exchange(
          group, stream, MeasurementDeadline(), NeverInterrupted);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  std::shared_ptr<NcclCommunicator> communicator_;
  std::vector<std::vector<Operation>> groups_;
  uint64_t sent_bytes_ = 0;
};

// Every logical tensor is gathered on source rank 0 and broadcast to all
// destination ranks, which keep their shard (OpenRLHF's and verl's first way);
// or tensors are packed into buckets of 1 GiB first (vLLM's packed broadcast,
// SkyRL #1324). Gathering and keeping are contiguous copies here, which favours
// these methods.
class BroadcastWhole : public TransferMethod {
 public:
  BroadcastWhole(const PlanFile& plan, WorldRank& rank, bool gathers,
                 std::vector<uint64_t> parts, std::string name,
                 std::shared_ptr<NcclCommunicator> all,
                 std::shared_ptr<NcclCommunicator> broadcast,
                 std::shared_ptr<DeviceMemory> buffer)
      : device_(rank.device()),
        rank_(rank.transport().rank()),
        sources_(plan.source_ranks()),
        destinations_(plan.world_size() - plan.source_ranks()),
        gathers_(gathers && plan.source_ranks() > 1),
        parts_(std::move(parts)),
        name_(std::move(name)),
        range_(RangeOf(rank)),
        all_(std::move(all)),
        broadcast_(std::move(broadcast)),
        buffer_(std::move(buffer)) {}

  std::string name() const override { return name_; }
  uint64_t sent_bytes() const override {
    uint64_t sum = 0;
    for (uint64_t part : parts_) {
      if (rank_ == 0) sum += part;
      if (gathers_ && rank_ > 0 && rank_ < sources_) {
        sum += part / static_cast<uint64_t>(sources_);
      }
    }
    return sum;
  }
  int64_t iterations_max() const override { return parts_.size() > 64 ? 2 : 5; }

  absl::Status Enqueue(Stream stream) override {
    for (uint64_t part : parts_) {
      if (gathers_ && rank_ < sources_) {
        if (absl::Status s = Gather(part, stream); !s.ok()) return s;
      }
      if (rank_ != 0 && rank_ < sources_) continue;
      absl::Status status =
          broadcast_->Broadcast(buffer_->data(), part, 0, stream,
                                MeasurementDeadline(), NeverInterrupted);
      if (!status.ok()) return status;
      if (rank_ >= sources_) {
        // The rank's part of it, into place.
        const uint64_t kept = std::min(
            part / static_cast<uint64_t>(destinations_), range_.size_bytes);
        status = device_.Copy(range_.data, buffer_->data(), kept, stream);
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Gather(uint64_t part, Stream stream) {
    const uint64_t each = part / static_cast<uint64_t>(sources_);
    if (each == 0) return absl::OkStatus();
    std::vector<Operation> operations;
    if (rank_ == 0) {
      for (int32_t r = 1; r < sources_; ++r) {
        operations.push_back(
            {.kind = fb::MessageKind::kRecv,
             .peer = r,
             .data = buffer_->data() + static_cast<uint64_t>(r) * each,
             .size_bytes = each});
      }
      absl::Status status =
          device_.Copy(buffer_->data(), range_.data, each, stream);
      if (!status.ok()) return status;
    } else {
      operations.push_back({.kind = fb::MessageKind::kSend,
                            .peer = 0,
                            .data = range_.data,
                            .size_bytes = each});
    }
    return all_->Exchange(operations, stream, MeasurementDeadline(),
                          NeverInterrupted);
  }

  Device& device_;
  const int32_t rank_;
  const int32_t sources_;
  const int32_t destinations_;
  const bool gathers_;
  const std::vector<uint64_t> parts_;
  const std::string name_;
  const MemoryRange range_;
  std::shared_ptr<NcclCommunicator> all_;
  std::shared_ptr<NcclCommunicator> broadcast_;
  std::shared_ptr<DeviceMemory> buffer_;
};

// Bytes of every logical tensor that is moved, in the checkpoint's dtype.
std::vector<uint64_t> TensorBytes(const PlanFile& plan) {
  std::vector<uint64_t> bytes;
  for (const fb::Param* param : *plan.body().params()) {
    if (param->skip() != fb::SkipReason::kUnspecified) continue;
    uint64_t one = static_cast<uint64_t>(DTypeBytes(param->dtype()));
    if (param->shape() != nullptr) {
      for (uint64_t extent : *param->shape()) one *= extent;
    }
    uint64_t count = 1;
    if (param->index() != nullptr) {
      for (const fb::IndexDim* dim : *param->index()) count *= dim->count();
    }
    bytes.insert(bytes.end(), count, one);
  }
  return bytes;
}

std::vector<uint64_t> Packs(const std::vector<uint64_t>& tensors) {
  uint64_t left = 0;
  for (uint64_t bytes : tensors) left += bytes;
  std::vector<uint64_t> packs;
  for (; left > 0; left -= packs.back()) {
    packs.push_back(std::min(left, kPackBytes));
  }
  return packs;
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<TransferMethod>>> MakeMethods(
    const PlanFile& plan, WorldRank& rank, bool peers) {
  std::vector<std::unique_ptr<TransferMethod>> methods;
  const bool one_gpu_each = !plan.body().colocated();
  static const absl::StatusOr<nccl::Api> api = nccl::Load();
  if (!api.ok()) return api.status();
  if (absl::Status s = rank.device().MakeCurrent(); !s.ok()) return s;
  std::shared_ptr<NcclCommunicator> all;
  if (one_gpu_each) {
    absl::StatusOr<std::unique_ptr<NcclCommunicator>> made =
        MakeCommunicator(rank.transport(), *api, AllRanks(plan));
    if (!made.ok()) return made.status();
    methods.push_back(
        std::make_unique<NcclBytesAlone>(plan, rank, *std::move(made)));
  }
  absl::StatusOr<std::unique_ptr<TransferMethod>> engines =
      CopyEngineBytesAlone::Make(plan, rank);
  if (!engines.ok()) return engines.status();
  methods.push_back(*std::move(engines));
  if (!peers || !one_gpu_each) return methods;
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> made =
      MakeCommunicator(rank.transport(), *api, AllRanks(plan));
  if (!made.ok()) return made.status();
  all = *std::move(made);
  made = MakeCommunicator(rank.transport(), *api, RootAndDestinations(plan));
  if (!made.ok()) return made.status();
  const std::shared_ptr<NcclCommunicator> broadcast = *std::move(made);
  const std::vector<uint64_t> tensors = TensorBytes(plan);
  const uint64_t largest = std::max(
      kPackBytes,
      tensors.empty() ? 0 : *std::max_element(tensors.begin(), tensors.end()));
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      rank.device().Allocate(largest);
  if (!memory.ok()) return memory.status();
  const std::shared_ptr<DeviceMemory> buffer = *std::move(memory);
  const auto add = [&](bool gathers, std::vector<uint64_t> parts,
                       std::string name) {
    methods.push_back(std::make_unique<BroadcastWhole>(
        plan, rank, gathers, std::move(parts), std::move(name), all, broadcast,
        buffer));
  };
  add(false, Packs(tensors), "packed 1 GiB broadcast");
  add(true, Packs(tensors), "packed 1 GiB gather + broadcast");
  add(true, tensors, "per-tensor gather + broadcast");
  methods.push_back(std::make_unique<PerTensorSendRecv>(plan, rank, all));
  return methods;
}

}  // namespace refit
