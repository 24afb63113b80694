#include "refit/executor.h"

#include <algorithm>
#include <cassert>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/binding.h"
#include "executor/tensor_box.h"

namespace refit {
namespace {

// Batch 0 of the prepared copies; the packs and unpacks of rounds follow.
constexpr size_t kFillBatch = 0;

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A timeout too long for the clock means no deadline.
Deadline DeadlineAfter(std::chrono::nanoseconds timeout) {
  const Clock::time_point now = Clock::now();
  return timeout > Clock::time_point::max() - now ? Clock::time_point::max()
                                                  : now + timeout;
}

absl::Status WithRank(const absl::Status& status, int32_t rank) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("rank ", rank, ": ", status.message()));
}

const fb::Buffer& BufferOf(const fb::Body& body, const fb::RankProgram& program,
                           const fb::Copy& copy) {
  return *body.buffers()->Get(program.buffers()->Get(copy.buffer_slot()));
}

TensorBox BoxOf(const fb::Body& body, const fb::Copy& copy,
                uint64_t tensor_elements) {
  TensorBox box = TensorBoxAt(copy.offset(), tensor_elements);
  for (uint32_t l = 0; l < copy.loops_count(); ++l) {
    const fb::Loop& loop = *body.loops()->Get(copy.loops_begin() + l);
    AddLoop(loop.extent(), loop.stride(), tensor_elements, box);
  }
  return box;
}

// Where a message lies in a tensor itself, byte for byte; null when it is more
// than one run, or casts. Such a message needs no staging.
std::byte* PlaceInTensor(const fb::Body& body, const fb::RankProgram& program,
                         const TensorTable& table,
                         absl::Span<std::byte* const> addresses,
                         const fb::Message& message) {
  const fb::CopyList& list = *body.copy_lists()->Get(message.copies());
  if (list.count() != 1) return nullptr;
  const fb::Copy& copy = *body.copies()->Get(list.begin());
  const fb::Buffer& buffer = BufferOf(body, program, copy);
  if (copy.wire_dtype() != buffer.dtype() || copy.staging_offset() != 0) {
    return nullptr;
  }
  const TensorBox box = BoxOf(body, copy, TensorElements(buffer));
  uint64_t elements = 1;
  for (size_t l = box.loops.size(); l-- > 0;) {
    const BoxLoop& loop = box.loops[l];
    if (loop.tensor_step != 0 || loop.element_step != elements) return nullptr;
    elements *= loop.extent;
  }
  const uint64_t element_bytes = DTypeBytes(buffer.dtype());
  if (elements * element_bytes != message.size_bytes()) return nullptr;
  return addresses[table.begin(copy.buffer_slot()) + box.first_tensor] +
         box.first_element * element_bytes;
}

void AppendCopies(const fb::Body& body, const fb::RankProgram& program,
                  const TensorTable& table, uint32_t copy_list,
                  std::byte* staging, CopyBatch& batch) {
  const fb::CopyList& list = *body.copy_lists()->Get(copy_list);
  for (uint32_t c = list.begin(); c < list.begin() + list.count(); ++c) {
    const fb::Copy& copy = *body.copies()->Get(c);
    const fb::Buffer& buffer = BufferOf(body, program, copy);
    const uint64_t element_bytes = DTypeBytes(buffer.dtype());
    const TensorBox box = BoxOf(body, copy, TensorElements(buffer));
    const bool zero = batch.kind == CopyKind::kZero;
    batch.copies.push_back(
        {.first_tensor = table.begin(copy.buffer_slot()) + box.first_tensor,
         .byte_offset = box.first_element * element_bytes,
         .loops_begin = static_cast<uint32_t>(batch.loops.size()),
         .loops_count = static_cast<uint32_t>(box.loops.size()),
         .tensor_dtype = buffer.dtype(),
         .staging_dtype = zero ? buffer.dtype() : copy.wire_dtype(),
         .staging = zero ? nullptr : staging + copy.staging_offset()});
    for (const BoxLoop& loop : box.loops) {
      batch.loops.push_back({.extent = loop.extent,
                             .tensor_step = loop.tensor_step,
                             .byte_step = loop.element_step * element_bytes});
    }
  }
}

}  // namespace

std::string_view ExecutorStateName(ExecutorState state) {
  switch (state) {
    case ExecutorState::kLoaded:
      return "loaded";
    case ExecutorState::kConnected:
      return "connected";
    case ExecutorState::kBound:
      return "bound";
    case ExecutorState::kTorn:
      return "torn";
    case ExecutorState::kClosed:
      return "closed";
  }
  return "unknown";
}

Executor::Executor(const PlanFile& plan, const ExecutorOptions& options)
    : plan_(plan), options_(options) {}

Executor::~Executor() = default;

absl::StatusOr<std::unique_ptr<Executor>> Executor::Load(
    const PlanFile& plan, const ExecutorOptions& options) {
  assert(options.device != nullptr && options.transport != nullptr);
  if (options.rank < 0 || options.rank >= plan.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " is not one of the plan's ",
                     plan.world_size(), " ranks"));
  }
  if (options.transport->rank() != options.rank ||
      options.transport->world_size() != plan.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the transport is rank ", options.transport->rank(), " of ",
        options.transport->world_size(), ", the executor is rank ",
        options.rank, " of ", plan.world_size()));
  }
  return std::unique_ptr<Executor>(new Executor(plan, options));
}

const fb::RankProgram& Executor::program() const {
  return *plan_.body().programs()->Get(options_.rank);
}

HandshakeRecord Executor::Record(HandshakeStage stage) const {
  HandshakeRecord record;
  record.stage = stage;
  record.format_version = plan_.plan().format_version();
  record.world_size = static_cast<uint32_t>(plan_.world_size());
  if (const fb::Digest* digest = plan_.plan().body_digest()) {
    record.body_digest = *digest;
  }
  return record;
}

absl::Status Executor::Connect(std::chrono::nanoseconds timeout) {
  if (state_ != ExecutorState::kLoaded) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank, ": Connect while ",
                     std::string(ExecutorStateName(state_))));
  }
  const Deadline deadline = DeadlineAfter(timeout);
  absl::StatusOr<std::unique_ptr<DeviceMemory>> staging =
      options_.device->Allocate(program().staging_bytes());
  HandshakeRecord record = Record(HandshakeStage::kConnect);
  record.ready = staging.ok();
  std::vector<Edge> edges;
  if (staging.ok()) {
    staging_ = *std::move(staging);
    PlanRounds();
    for (const RoundWork& work : rounds_) {
      for (uint32_t i = 0; i < work.operations_count; ++i) {
        edges.push_back({.peer = operations_[work.operations_begin + i].peer,
                         .route = work.route});
      }
    }
    const auto key = [](const Edge& edge) {
      return std::pair(edge.peer, edge.route);
    };
    std::sort(edges.begin(), edges.end(),
              [&](const Edge& a, const Edge& b) { return key(a) < key(b); });
    edges.erase(std::unique(edges.begin(), edges.end(),
                            [&](const Edge& a, const Edge& b) {
                              return key(a) == key(b);
                            }),
                edges.end());
  }
  absl::Status connected = options_.transport->Connect(record, edges, deadline);
  if (!record.ready) return WithRank(staging.status(), options_.rank);
  if (!connected.ok()) return WithRank(connected, options_.rank);
  state_ = ExecutorState::kConnected;
  return absl::OkStatus();
}

// Fills rounds_ and operations_: what Run walks.
void Executor::PlanRounds() {
  rounds_.clear();
  operations_.clear();
  if (program().messages() == nullptr) return;
  size_t next_batch = kFillBatch + 1;
  for (const fb::Message* message : *program().messages()) {
    if (rounds_.empty() || rounds_.back().index != message->round()) {
      rounds_.push_back(
          {.index = message->round(),
           .route = plan_.body().rounds()->Get(message->round())->route(),
           .operations_begin = static_cast<uint32_t>(operations_.size())});
    }
    RoundWork& work = rounds_.back();
    if (message->kind() == fb::MessageKind::kSend && !work.packs) {
      work.packs = true;
      work.pack_batch = next_batch++;
    } else if (message->kind() == fb::MessageKind::kRecv && !work.unpacks) {
      work.unpacks = true;
      work.unpack_batch = next_batch++;
    }
    ++work.operations_count;
    operations_.push_back({.kind = message->kind(),
                           .peer = static_cast<int32_t>(message->peer()),
                           .size_bytes = message->size_bytes()});
  }
}

// The batches that PlanRounds has numbered, and where every operation's bytes
// are: in a tensor itself, or in staging with copies around it.
std::vector<CopyBatch> Executor::BuildBatches(
    absl::Span<std::byte* const> addresses,
    std::vector<Operation>& operations) const {
  const fb::Body& body = plan_.body();
  const TensorTable table(plan_, options_.rank);
  std::vector<CopyBatch> batches(kFillBatch + 1);
  batches[kFillBatch].kind = CopyKind::kZero;
  AppendCopies(body, program(), table, program().fills(), nullptr,
               batches[kFillBatch]);
  for (const RoundWork& work : rounds_) {
    batches.resize(batches.size() + work.packs + work.unpacks);
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const size_t position = work.operations_begin + i;
      const fb::Message& message = *program().messages()->Get(position);
      Operation& operation = operations[position];
      const bool send = operation.kind == fb::MessageKind::kSend;
      CopyBatch& batch = batches[send ? work.pack_batch : work.unpack_batch];
      batch.kind = send ? CopyKind::kPack : CopyKind::kUnpack;
      operation.data =
          PlaceInTensor(body, program(), table, addresses, message);
      if (operation.data != nullptr) continue;
      operation.data = staging_->data() + message.staging_offset();
      AppendCopies(body, program(), table, message.copies(), operation.data,
                   batch);
    }
  }
  return batches;
}

absl::Status Executor::Bind(absl::Span<const BoundTensor> tensors,
                            std::chrono::nanoseconds timeout) {
  const bool first = state_ == ExecutorState::kConnected;
  if (!first && state_ != ExecutorState::kBound &&
      state_ != ExecutorState::kTorn) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank, ": Bind while ",
                     std::string(ExecutorStateName(state_))));
  }
  const Deadline deadline = DeadlineAfter(timeout);
  absl::Status bound = [&]() -> absl::Status {
    absl::StatusOr<std::vector<std::byte*>> addresses =
        BindTensors(TensorTable(plan_, options_.rank), options_.rank, tensors);
    if (!addresses.ok()) return addresses.status();
    std::vector<Operation> operations = operations_;
    absl::StatusOr<std::unique_ptr<PreparedCopies>> copies =
        options_.device->Prepare(*addresses,
                                 BuildBatches(*addresses, operations));
    if (!copies.ok()) return WithRank(copies.status(), options_.rank);
    copies_ = *std::move(copies);
    operations_ = std::move(operations);
    bound_addresses_.clear();
    for (const BoundTensor& tensor : tensors) {
      bound_addresses_.push_back(tensor.data);
    }
    return absl::OkStatus();
  }();
  if (first) {
    // The records hold no fingerprint of the tensors: that they were checked
    // against the plan of this digest says all that names and sizes could.
    HandshakeRecord record = Record(HandshakeStage::kBind);
    record.ready = bound.ok();
    const absl::Status agreed = options_.transport->Handshake(record, deadline);
    if (bound.ok()) bound = WithRank(agreed, options_.rank);
    if (bound.ok()) state_ = ExecutorState::kBound;
  }
  return bound;
}

absl::Status Executor::Run(Stream stream, const RunOptions& options) {
  if (state_ != ExecutorState::kBound && state_ != ExecutorState::kTorn) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank, ": Run while ",
                     std::string(ExecutorStateName(state_))));
  }
  state_ = ExecutorState::kTorn;
  counters_ = {};
  absl::Status status =
      RunRounds(stream, options, DeadlineAfter(options.timeout));
  if (!status.ok()) {
    options_.transport->Abort(status);
    return WithRank(status, options_.rank);
  }
  state_ = ExecutorState::kBound;
  return absl::OkStatus();
}

// One slot at a time: on a host device each call below returns when its work is
// done. The plan's slots leave room for packing a round while earlier ones
// are on the wire.
absl::Status Executor::RunRounds(Stream stream, const RunOptions& options,
                                 Deadline deadline) {
  Transport& transport = *options_.transport;
  if (absl::Status s = transport.BeginRefit(deadline); !s.ok()) return s;
  if (!options.addresses.empty() &&
      !std::equal(options.addresses.begin(), options.addresses.end(),
                  bound_addresses_.begin(), bound_addresses_.end())) {
    return absl::FailedPreconditionError("a tensor moved since Bind");
  }
  if (absl::Status s = copies_->Enqueue(kFillBatch, stream); !s.ok()) return s;
  for (const RoundWork& work : rounds_) {
    const auto operations =
        absl::MakeConstSpan(operations_)
            .subspan(work.operations_begin, work.operations_count);
    Clock::time_point start = Clock::now();
    if (work.packs) {
      if (absl::Status s = copies_->Enqueue(work.pack_batch, stream); !s.ok()) {
        return s;
      }
      counters_.pack_seconds +=
          SecondsSince(std::exchange(start, Clock::now()));
    }
    if (absl::Status s = transport.Exchange({.index = work.index,
                                             .route = work.route,
                                             .operations = operations},
                                            stream);
        !s.ok()) {
      return s;
    }
    counters_.wire_seconds += SecondsSince(std::exchange(start, Clock::now()));
    if (work.unpacks) {
      if (absl::Status s = copies_->Enqueue(work.unpack_batch, stream);
          !s.ok()) {
        return s;
      }
      counters_.unpack_seconds += SecondsSince(start);
    }
    ++counters_.rounds;
    for (const Operation& operation : operations) {
      const bool send = operation.kind == fb::MessageKind::kSend;
      ++(send ? counters_.messages_sent : counters_.messages_received);
      (send ? counters_.bytes_sent : counters_.bytes_received) +=
          operation.size_bytes;
    }
  }
  return transport.EndRefit(stream);
}

void Executor::Close() {
  copies_.reset();
  staging_.reset();
  rounds_.clear();
  operations_.clear();
  bound_addresses_.clear();
  state_ = ExecutorState::kClosed;
}

}  // namespace refit
