#include "refit/executor.h"

#include <algorithm>
#include <cassert>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/binding.h"
#include "executor/nvtx.h"
#include "executor/rank_schedule.h"
#include "executor/refit_graph.h"
#include "executor/round_copies.h"
#include "plan/scratch_windows.h"

namespace refit {
namespace {

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

}  // namespace

std::string_view ExecutorStateName(ExecutorState state) {
  switch (state) {
    case ExecutorState::kLoaded:
      return "loaded";
    case ExecutorState::kConnected:
      return "connected";
    case ExecutorState::kBound:
      return "bound";
    case ExecutorState::kRunning:
      return "running";
    case ExecutorState::kTorn:
      return "torn";
    case ExecutorState::kClosed:
      return "closed";
  }
  return "unknown";
}

RunCounters& RunCounters::operator+=(const RunCounters& other) {
  rounds += other.rounds;
  messages_sent += other.messages_sent;
  messages_received += other.messages_received;
  bytes_sent += other.bytes_sent;
  bytes_received += other.bytes_received;
  graph_launches += other.graph_launches;
  pack_seconds += other.pack_seconds;
  wire_seconds += other.wire_seconds;
  unpack_seconds += other.unpack_seconds;
  scratch_bytes += other.scratch_bytes;
  for (size_t route = 0; route < traffic.size(); ++route) {
    for (size_t mechanism = 0; mechanism < traffic[route].size(); ++mechanism) {
      Traffic& mine = traffic[route][mechanism];
      mine.bytes_sent += other.traffic[route][mechanism].bytes_sent;
      mine.bytes_received += other.traffic[route][mechanism].bytes_received;
    }
  }
  return *this;
}

// When a staged round's parts are done, and how long a round took. Only those
// that are needed are made.
struct Executor::RoundEvents {
  RoundRangeText range_text;
  std::unique_ptr<DeviceEvent> packed;
  std::unique_ptr<DeviceEvent> exchanged;
  std::unique_ptr<DeviceEvent> unpacked;
  std::unique_ptr<DeviceTimer> timer;
};

// When the rounds that a quantise work comes after are done, and when it is.
struct Executor::QuantiseEvents {
  std::unique_ptr<DeviceEvent> may_begin;
  std::unique_ptr<DeviceEvent> done;
};

struct Executor::Bound {
  std::vector<std::string> names;      // in the order of Bind
  std::vector<const void*> addresses;  // likewise
  std::unique_ptr<MemoryWatch> memory;
  bool is_recorded = false;  // as a graph, or cannot be
  std::map<int32_t, std::unique_ptr<MappedMemory>> peers;
  std::vector<Operation> operations;
  std::unique_ptr<PreparedCopies> copies;
};

Executor::Executor(const PlanFile& plan, const ExecutorOptions& options)
    : plan_(plan),
      options_(options),
      schedule_(std::make_unique<RankSchedule>(plan, options.rank)),
      post_hooks_(TensorTable(plan, options.rank).PostHooks()),
      graph_(std::make_shared<RefitGraph>()) {
  options_.transport->OnBreak([graph = graph_] { graph->Drop(); });
}

Executor::~Executor() { Close(); }

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

absl::Status Executor::CreateStreams() {
  Device& device = *options_.device;
  const auto make = [&](auto& target, auto made) {
    if (made.ok()) target = *std::move(made);
    return made.status();
  };
  absl::Status status = make(pack_stream_, device.CreateStream());
  status.Update(make(unpack_stream_, device.CreateStream()));
  status.Update(make(started_, device.CreateEvent()));
  status.Update(make(ended_, device.CreateEvent()));
  quantise_events_.clear();
  if (!schedule_->quantises().empty()) {
    status.Update(make(quantise_stream_, device.CreateStream()));
  }
  for (size_t i = 0; i < schedule_->quantises().size(); ++i) {
    QuantiseEvents& events = quantise_events_.emplace_back();
    status.Update(make(events.may_begin, device.CreateEvent()));
    status.Update(make(events.done, device.CreateEvent()));
  }
  events_.clear();
  for (const RoundWork& work : schedule_->rounds()) {
    RoundEvents& events = events_.emplace_back();
    events.range_text = RoundRangeText(work.index, work.route, work.mechanism);
    if (options_.time_rounds)
      status.Update(make(events.timer, device.CreateTimer()));
    if (work.mechanism == fb::Mechanism::kDirect) continue;
    status.Update(make(events.exchanged, device.CreateEvent()));
    if (work.pack_batch.has_value()) {
      status.Update(make(events.packed, device.CreateEvent()));
    }
    if (work.unpack_batch.has_value()) {
      status.Update(make(events.unpacked, device.CreateEvent()));
    }
  }
  return status;
}

absl::Status Executor::Connect(std::chrono::nanoseconds timeout) {
  const ProfilerRange range("refit connect");
  const bool again = state_ == ExecutorState::kConnected ||
                     state_ == ExecutorState::kBound ||
                     state_ == ExecutorState::kTorn;
  if (!again && state_ != ExecutorState::kLoaded) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank, ": Connect while ",
                     std::string(ExecutorStateName(state_))));
  }
  const Deadline deadline = DeadlineAfter(timeout);
  graph_->Drop();
  has_run_ = false;
  if (bound_ != nullptr) bound_->is_recorded = false;
  absl::Status made;
  if (!again) {
    made = CreateStreams();
    const auto allocate = [&](std::unique_ptr<DeviceMemory>& memory,
                              uint64_t size_bytes) {
      auto allocated = options_.device->Allocate(size_bytes);
      if (allocated.ok()) memory = *std::move(allocated);
      made.Update(allocated.status());
    };
    allocate(staging_, program().staging_bytes());
    allocate(scratch_, ScratchBytes(plan_, options_.rank));
  }
  HandshakeRecord record = Record(HandshakeStage::kConnect);
  record.ready = made.ok();
  const absl::Status connected =
      options_.transport->Connect(record, schedule_->Edges(), deadline);
  if (!made.ok()) return WithRank(made, options_.rank);
  if (!connected.ok()) return WithRank(connected, options_.rank);
  if (!again) state_ = ExecutorState::kConnected;
  return absl::OkStatus();
}

void Executor::PlaceScratch(std::vector<std::byte*>& addresses) const {
  const TensorTable table(plan_, options_.rank);
  const std::vector<ScratchPlace> places =
      ScratchPlaces(plan_.body(), program());
  for (size_t i = 0; i < places.size(); ++i) {
    const size_t slot = table.workers_stacks() + i;
    const fb::Buffer& buffer = table.buffer(slot);
    const uint64_t tensor_bytes =
        TensorElements(buffer) * DTypeBytes(buffer.dtype());
    for (uint64_t entry = table.begin(slot); entry < table.begin(slot + 1);
         ++entry) {
      addresses[entry] = scratch_->data() + places[i].begin_byte +
                         (entry - table.begin(slot)) * tensor_bytes;
    }
  }
}

// Makes the receivers' tensors reachable: each shows its own to its senders.
absl::Status Executor::MapPeers(absl::Span<std::byte* const> addresses,
                                Deadline deadline) {
  const TensorTable table(plan_, options_.rank);
  const std::vector<int32_t> senders = schedule_->DirectSenders();
  const std::vector<int32_t> receivers = schedule_->DirectReceivers();
  std::vector<MemoryRange> ranges;
  if (!senders.empty()) {
    for (size_t slot = 0; slot < table.stacks(); ++slot) {
      const fb::Buffer& buffer = table.buffer(slot);
      const uint64_t size_bytes =
          TensorElements(buffer) * DTypeBytes(buffer.dtype());
      for (uint64_t entry = table.begin(slot); entry < table.begin(slot + 1);
           ++entry) {
        ranges.push_back({.data = addresses[entry], .size_bytes = size_bytes});
      }
    }
  }
  const absl::StatusOr<std::string> mine = options_.device->Export(ranges);
  HandshakeRecord record = Record(HandshakeStage::kBind);
  record.ready = mine.ok();
  const absl::Status agreed = options_.transport->Handshake(record, deadline);
  if (!mine.ok()) return mine.status();
  if (!agreed.ok()) return agreed;
  absl::StatusOr<std::vector<std::string>> shown =
      options_.transport->Share(*mine, senders, receivers, deadline);
  if (!shown.ok()) return shown.status();
  for (size_t i = 0; i < receivers.size(); ++i) {
    absl::StatusOr<std::unique_ptr<MappedMemory>> mapped =
        options_.device->Import((*shown)[i]);
    const uint64_t wanted = TensorTable(plan_, receivers[i]).size();
    if (mapped.ok() && (*mapped)->addresses().size() != wanted) {
      mapped = absl::InternalError(
          absl::StrCat("shows ", (*mapped)->addresses().size(),
                       " tensors when it should be ", wanted));
    }
    if (!mapped.ok()) {
      return absl::Status(mapped.status().code(),
                          absl::StrCat("tensors of rank ", receivers[i], ": ",
                                       mapped.status().message()));
    }
    bound_->peers[receivers[i]] = *std::move(mapped);
  }
  return absl::OkStatus();
}

absl::Status Executor::PrepareCopies(absl::Span<std::byte* const> addresses) {
  absl::StatusOr<RoundCopies> copies =
      BuildRoundCopies(plan_, options_.rank, *schedule_, addresses,
                       staging_->data(), bound_->peers);
  if (!copies.ok()) return copies.status();
  absl::StatusOr<std::unique_ptr<PreparedCopies>> prepared =
      options_.device->Prepare(copies->table, copies->batches);
  if (!prepared.ok()) return prepared.status();
  bound_->copies = *std::move(prepared);
  bound_->operations = std::move(copies->operations);
  return absl::OkStatus();
}

absl::Status Executor::WatchTensors(absl::Span<const BoundTensor> tensors) {
  std::vector<MemoryRange> ranges;
  for (const BoundTensor& tensor : tensors) {
    bound_->names.push_back(tensor.name);
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

absl::Status Executor::Bind(absl::Span<const BoundTensor> tensors,
                            std::chrono::nanoseconds timeout) {
  const ProfilerRange range("refit bind");
  const bool first = state_ == ExecutorState::kConnected;
  if (!first && state_ != ExecutorState::kBound &&
      state_ != ExecutorState::kTorn) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank, ": Bind while ",
                     std::string(ExecutorStateName(state_))));
  }
  const Deadline deadline = DeadlineAfter(timeout);
  std::unique_ptr<Bound> earlier = std::exchange(bound_, nullptr);
  bound_ = std::make_unique<Bound>();
  absl::StatusOr<std::vector<std::byte*>> addresses =
      BindTensors(TensorTable(plan_, options_.rank), options_.rank, tensors,
                  options_.device->CopiesUnaligned());
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
  const bool mapped = HasDirectRounds(plan_);
  if (mapped) agree();
  if (mapped && status.ok()) {
    status = WithRank(MapPeers(*addresses, deadline), options_.rank);
  }
  if (status.ok()) {
    status = WithRank(PrepareCopies(*addresses), options_.rank);
  }
  if (status.ok()) {
    status = WithRank(WatchTensors(tensors), options_.rank);
  }
  if (first || mapped) agree();
  if (!status.ok()) {
    bound_ = std::move(earlier);
    return status;
  }
  // It uses what is freed with `earlier`.
  graph_->Drop();
  if (first) state_ = ExecutorState::kBound;
  return absl::OkStatus();
}

absl::Status Executor::Run(Stream stream, const RunOptions& options) {
  const ProfilerRange range("refit run");
  if (state_ != ExecutorState::kBound && state_ != ExecutorState::kRunning &&
      state_ != ExecutorState::kTorn) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank, ": Run while ",
                     std::string(ExecutorStateName(state_))));
  }
  const Deadline deadline = DeadlineAfter(options.timeout);
  RecordGraph(stream, deadline);
  const bool in_flight = state_ == ExecutorState::kRunning;
  state_ = ExecutorState::kTorn;
  counters_ = {};
  counters_.scratch_bytes = scratch_->size_bytes();
  rounds_.clear();
  absl::Status status = RunRounds(stream, options, deadline, in_flight);
  if (!status.ok()) {
    options_.transport->Abort(status);
    // Quantisation that began has a stream of its own.
    for (const QuantiseEvents& events : quantise_events_) {
      (void)events.done->Await(stream);
    }
    // What was enqueued before ends first, so that the caller may free memory.
    (void)options_.transport->Wait();
    return WithRank(status, options_.rank);
  }
  state_ = ExecutorState::kRunning;
  return absl::OkStatus();
}

absl::Status Executor::Wait() {
  if (state_ != ExecutorState::kRunning) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", options_.rank, ": Wait while ",
                     std::string(ExecutorStateName(state_))));
  }
  const absl::Status status = options_.transport->Wait();
  state_ = status.ok() ? ExecutorState::kBound : ExecutorState::kTorn;
  if (!status.ok()) return WithRank(status, options_.rank);
  has_run_ = true;
  return WithRank(MeasureRounds(), options_.rank);
}

absl::Status Executor::MeasureRounds() {
  if (!is_timed_) return absl::OkStatus();
  for (size_t i = 0; i < schedule_->rounds().size(); ++i) {
    const RoundWork& work = schedule_->rounds()[i];
    const absl::StatusOr<double> seconds = events_[i].timer->Seconds();
    if (!seconds.ok()) return seconds.status();
    const Traffic traffic = TrafficOf(work);
    rounds_.push_back({.round = work.index,
                       .route = work.route,
                       .mechanism = work.mechanism,
                       .bytes_sent = traffic.bytes_sent,
                       .bytes_received = traffic.bytes_received,
                       .seconds = *seconds});
  }
  return absl::OkStatus();
}

// Between refits, when nobody can break off what is recorded; after one, which
// made what NCCL makes at first use. What cannot be recorded goes on as before.
void Executor::RecordGraph(Stream stream, Deadline deadline) {
  if (!options_.graph || options_.time_rounds || bound_->is_recorded ||
      !has_run_ || state_ != ExecutorState::kBound ||
      !schedule_->GainsFromGraph()) {
    return;
  }
  // One that the caller records is none to measure by.
  const absl::StatusOr<bool> capturing = options_.device->IsCapturing(stream);
  if (!capturing.ok() || *capturing) return;
  bound_->is_recorded = true;
  options_.transport->BeginRecording(deadline);
  absl::StatusOr<std::unique_ptr<DeviceGraph>> graph = options_.device->Record(
      [&](Stream recorded) { return EnqueueRounds(recorded); });
  if (graph.ok()) graph_->Set(*std::move(graph));
}

// That the tensors are where they were, in the memory they were.
absl::Status Executor::CheckTensors(const RunOptions& options) const {
  if (!options.addresses.empty() &&
      !std::equal(options.addresses.begin(), options.addresses.end(),
                  bound_->addresses.begin(), bound_->addresses.end())) {
    return absl::FailedPreconditionError("a tensor moved since Bind");
  }
  if (bound_->memory == nullptr) return absl::OkStatus();
  const std::optional<size_t> gone = bound_->memory->FirstGone();
  if (!gone.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the memory of \"", bound_->names[*gone], "\" was freed since Bind"));
}

absl::Status Executor::RunRounds(Stream stream, const RunOptions& options,
                                 Deadline deadline, bool in_flight) {
  Transport& transport = *options_.transport;
  if (absl::Status s = transport.BeginRefit(deadline); !s.ok()) return s;
  if (absl::Status s = CheckTensors(options); !s.ok()) return s;
  const absl::StatusOr<bool> capturing = options_.device->IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  is_timed_ = options_.time_rounds && !*capturing;
  absl::Status status;
  // They use the same staging. A graph may not wait for what is outside of it.
  if (in_flight && !*capturing) status = ended_->Await(stream);
  if (!status.ok()) return status;
  if (*capturing || !graph_->IsSet()) {
    status = EnqueueRounds(stream);
  } else {
    transport.Replay();
    const Clock::time_point start = Clock::now();
    status = graph_->Launch(stream);
    counters_.wire_seconds += SecondsSince(start);
    counters_.graph_launches = 1;
  }
  if (!status.ok()) return status;
  for (const RoundWork& work : schedule_->rounds()) CountMessages(work);
  if (!*capturing) status = ended_->Record(stream);
  return status.ok() ? transport.EndRefit(stream) : status;
}

absl::Status Executor::EnqueueRounds(Stream stream) {
  absl::Status status =
      bound_->copies->Enqueue(RankSchedule::kFillBatch, stream);
  status.Update(started_->Record(stream));
  // Only streams that will be waited for: one that is not would be left open
  // when the caller's stream is captured.
  if (schedule_->Packs()) status.Update(started_->Await(pack_stream_->get()));
  if (schedule_->Unpacks()) {
    status.Update(started_->Await(unpack_stream_->get()));
  }
  if (quantise_stream_ != nullptr) {
    status.Update(started_->Await(quantise_stream_->get()));
  }
  for (size_t i = 0; i < schedule_->rounds().size(); ++i) {
    status.Update(EnqueueQuantises(i, stream));
    if (!status.ok()) return status;
    const RoundWork& work = schedule_->rounds()[i];
    const ProfilerRange range(events_[i].range_text);
    status = AwaitQuantised(i, stream);
    // What a relay sends is in place: unpacked, not only received.
    if (work.relays.has_value()) {
      status.Update(events_[*work.relays].unpacked->Await(stream));
    }
    if (!status.ok()) return status;
    status = work.mechanism == fb::Mechanism::kDirect ? RunDirect(i, stream)
                                                      : RunStaged(i, stream);
    if (!status.ok()) return status;
  }
  status.Update(EnqueueQuantises(schedule_->rounds().size(), stream));
  for (const RoundEvents& events : events_) {
    if (events.unpacked != nullptr) {
      status.Update(events.unpacked->Await(stream));
    }
  }
  if (!quantise_events_.empty()) {
    status.Update(quantise_events_.back().done->Await(stream));
  }
  return status;
}

// What read or wrote the memory before is over: packing, sends and stores from
// scratch come before a point of the caller's stream, like what comes into
// scratch; unpacking has a stream of its own.
absl::Status Executor::EnqueueQuantises(size_t rounds_before, Stream stream) {
  absl::Status status;
  for (size_t i = 0; i < quantise_events_.size(); ++i) {
    const QuantiseStep& work = schedule_->quantises()[i];
    if (work.after != rounds_before) continue;
    const Stream quantise = quantise_stream_->get();
    status.Update(quantise_events_[i].may_begin->Record(stream));
    status.Update(quantise_events_[i].may_begin->Await(quantise));
    for (size_t round = rounds_before; round-- > 0;) {
      if (events_[round].unpacked == nullptr) continue;
      status.Update(events_[round].unpacked->Await(quantise));
      break;
    }
    status.Update(bound_->copies->Enqueue(work.batch, quantise));
    status.Update(quantise_events_[i].done->Record(quantise));
  }
  return status;
}

absl::Status Executor::AwaitQuantised(size_t round, Stream stream) {
  const std::vector<RoundWork>& works = schedule_->rounds();
  const std::optional<size_t> quantised = works[round].quantised;
  if (!quantised.has_value() ||
      (round > 0 && works[round - 1].quantised == quantised)) {
    return absl::OkStatus();
  }
  return quantise_events_[*quantised].done->Await(stream);
}

Traffic Executor::TrafficOf(const RoundWork& work) const {
  Traffic traffic;
  for (uint32_t m = 0; m < work.messages_count; ++m) {
    const Operation& operation = bound_->operations[work.messages_begin + m];
    const bool send = operation.kind == fb::MessageKind::kSend;
    (send ? traffic.bytes_sent : traffic.bytes_received) +=
        operation.size_bytes;
  }
  return traffic;
}

void Executor::CountMessages(const RoundWork& work) {
  ++counters_.rounds;
  for (uint32_t m = 0; m < work.messages_count; ++m) {
    const Operation& operation = bound_->operations[work.messages_begin + m];
    ++(operation.kind == fb::MessageKind::kSend ? counters_.messages_sent
                                                : counters_.messages_received);
  }
  const Traffic traffic = TrafficOf(work);
  counters_.bytes_sent += traffic.bytes_sent;
  counters_.bytes_received += traffic.bytes_received;
  counters_.by(work.route, work.mechanism).bytes_sent += traffic.bytes_sent;
  counters_.by(work.route, work.mechanism).bytes_received +=
      traffic.bytes_received;
}

// Pack, exchange and unpack each go on as soon as what they read is there and
// what they overwrite is no longer needed; rounds within the plan's slots
// overlap.
absl::Status Executor::RunStaged(size_t round, Stream stream) {
  const RoundWork& work = schedule_->rounds()[round];
  const RoundEvents& events = events_[round];
  const RoundEvents* reused =
      work.reuses.has_value() ? &events_[*work.reuses] : nullptr;
  absl::Status status;
  Clock::time_point start = Clock::now();
  if (work.pack_batch.has_value()) {
    const Stream pack = pack_stream_->get();
    if (reused != nullptr && reused->exchanged != nullptr) {
      status.Update(reused->exchanged->Await(pack));
    }
    if (work.quantised.has_value()) {
      status.Update(quantise_events_[*work.quantised].done->Await(pack));
    }
    if (events.timer != nullptr) status.Update(events.timer->Start(pack));
    status.Update(bound_->copies->Enqueue(*work.pack_batch, pack));
    status.Update(events.packed->Record(pack));
    status.Update(events.packed->Await(stream));
    counters_.pack_seconds += SecondsSince(std::exchange(start, Clock::now()));
  }
  if (reused != nullptr && reused->unpacked != nullptr) {
    status.Update(reused->unpacked->Await(stream));
  }
  if (events.timer != nullptr && !work.pack_batch.has_value()) {
    status.Update(events.timer->Start(stream));
  }
  if (!status.ok()) return status;
  status = options_.transport->Exchange(
      {.index = work.index,
       .route = work.route,
       .operations = absl::MakeConstSpan(bound_->operations)
                         .subspan(work.messages_begin, work.messages_count)},
      stream);
  if (!status.ok()) return status;
  status = events.exchanged->Record(stream);
  counters_.wire_seconds += SecondsSince(std::exchange(start, Clock::now()));
  if (work.unpack_batch.has_value()) {
    const Stream unpack = unpack_stream_->get();
    status.Update(events.exchanged->Await(unpack));
    status.Update(bound_->copies->Enqueue(*work.unpack_batch, unpack));
    status.Update(events.unpacked->Record(unpack));
    counters_.unpack_seconds += SecondsSince(start);
  }
  if (events.timer != nullptr) {
    status.Update(events.timer->Stop(
        work.unpack_batch.has_value() ? unpack_stream_->get() : stream));
  }
  return status;
}

// Receivers say that their tensors may be overwritten, senders store, then say
// that they are done.
absl::Status Executor::RunDirect(size_t round, Stream stream) {
  const RoundWork& work = schedule_->rounds()[round];
  DeviceTimer* const timer = events_[round].timer.get();
  Fence& fence = *options_.transport->fence();
  const Clock::time_point start = Clock::now();
  absl::Status status;
  if (timer != nullptr) status.Update(timer->Start(stream));
  if (!work.senders.empty()) {
    status.Update(fence.Grant(work.senders, stream));
  }
  if (work.pack_batch.has_value()) {
    status.Update(fence.AwaitGrants(work.receivers, stream));
    if (status.ok()) {
      status.Update(
          bound_->copies->Enqueue(*work.pack_batch, stream, fence.aborted()));
      status.Update(fence.Finish(work.receivers, stream));
    }
  }
  if (!work.senders.empty() && status.ok()) {
    status.Update(fence.AwaitFinishes(work.senders, stream));
  }
  if (timer != nullptr) status.Update(timer->Stop(stream));
  counters_.wire_seconds += SecondsSince(start);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("round ", work.index, ": ",
                                                  status.message()));
}

void Executor::Close() {
  if (state_ == ExecutorState::kRunning) {
    options_.transport->Abort(absl::CancelledError(
        absl::StrCat("rank ", options_.rank, " was closed before Wait")));
  }
  graph_->Drop();
  bound_.reset();
  events_.clear();
  quantise_events_.clear();
  ended_.reset();
  started_.reset();
  quantise_stream_.reset();
  unpack_stream_.reset();
  pack_stream_.reset();
  staging_.reset();
  scratch_.reset();
  state_ = ExecutorState::kClosed;
}

}  // namespace refit
