#include "tests/executor/fake_nccl/engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace refit::nccl::fake {
namespace {

std::string OperationText(const Operation& operation) {
  return absl::StrCat(
      "rank ", operation.comm->rank,
      operation.is_send ? " sends " : " receives ", operation.count, " uint8",
      operation.is_send ? " to rank " : " from rank ", operation.peer);
}

// Sorts a group into kernels of at most `budget` operations.
std::vector<std::unique_ptr<Operation>> Schedule(
    const Communicator& comm,
    std::vector<std::unique_ptr<Operation>> operations, size_t budget) {
  const size_t ranks = comm.clique->members.size();
  const size_t count = operations.size();
  std::vector<std::deque<std::unique_ptr<Operation>>> sends(ranks),
      recvs(ranks);
  for (auto& operation : operations) {
    auto& queues = operation->is_send ? sends : recvs;
    queues[operation->peer].push_back(std::move(operation));
  }
  std::vector<std::unique_ptr<Operation>> scheduled;
  size_t round = 0, kernel = 0, begin = 0;
  while (scheduled.size() < count) {
    auto& to = sends[(comm.rank + round) % ranks];
    auto& from = recvs[(comm.rank + ranks - round) % ranks];
    const size_t more = size_t{!to.empty()} + size_t{!from.empty()};
    const size_t used = scheduled.size() - begin;
    if (used > 0 && used + more > budget) {
      begin = scheduled.size();
      ++kernel;
      round = 0;
      continue;
    }
    for (auto* queue : {&to, &from}) {
      if (queue->empty()) continue;
      queue->front()->kernel = kernel;
      scheduled.push_back(std::move(queue->front()));
      queue->pop_front();
    }
    round = (round + 1) % ranks;
  }
  return scheduled;
}

}  // namespace

thread_local ThreadState thread;

ThreadState::~ThreadState() {
  if (depth == 0) return;
  std::lock_guard lock(Engine::Get().mutex);
  Engine::Get().RecordViolation("a thread ended inside a group");
}

// Ranks given by the test are even, numbers of threads odd: they never meet.
uint64_t ThreadState::Owner() const {
  static std::atomic<uint64_t> threads = 0;
  static thread_local const uint64_t number = threads++;
  return rank >= 0 ? 2 * rank : 2 * number + 1;
}

Engine& Engine::Get() {
  // Never destroyed: threads may end after the main one.
  static Engine& engine = *new Engine;
  return engine;
}

void Engine::Reset() {
  settings = {};
  counts = {};
  workers.clear();
  is_released = false;
  cliques_.clear();
  communicators_.clear();
  next_due_ = Time::max();
}

uint64_t Engine::AddClique() {
  cliques_[++cliques_made_];
  return cliques_made_;
}

Clique* Engine::FindClique(uint64_t id) {
  const auto found = cliques_.find(id);
  return found == cliques_.end() ? nullptr : &found->second;
}

Communicator& Engine::AddCommunicator() {
  return *communicators_.emplace_back(std::make_unique<Communicator>());
}

Communicator* Engine::Find(Comm comm) {
  for (const auto& known : communicators_) {
    if (static_cast<void*>(known.get()) == comm) return known.get();
  }
  return nullptr;
}

void Engine::SetChanged() {
  has_changed_ = true;
  changed_.notify_all();
}

void Engine::Join(Communicator& comm, size_t ranks) {
  Clique& clique = *comm.clique;
  comm.groups_with.resize(ranks);
  if (clique.members.empty()) clique.members.resize(ranks);
  if (clique.error != kSuccess)
    return Fail(comm, clique.error, clique.error_text);
  if (clique.members.size() != ranks) {
    clique.error_text = absl::StrCat("rank ", comm.rank, " wants ", ranks,
                                     " ranks, others ", clique.members.size());
  } else if (clique.members[comm.rank] != nullptr) {
    clique.error_text = absl::StrCat("two ranks are rank ", comm.rank);
  } else {
    clique.members[comm.rank] = &comm;
    ++clique.came;
    return SetChanged();
  }
  clique.error = kInvalidUsage;
  Fail(comm, clique.error, clique.error_text);
  for (Communicator* member : clique.members) {
    if (member != nullptr && member->state == State::kInitializing) {
      Fail(*member, clique.error, clique.error_text);
    }
  }
}

void Engine::Issue(Communicator& comm,
                   std::vector<std::unique_ptr<Operation>> operations) {
  std::set<int> peers;
  for (const auto& operation : operations) {
    const int peer = operation->peer;
    if (peers.insert(peer).second) ++comm.groups_with[peer];
    operation->pair_group = comm.groups_with[peer];
    const auto ends = operation->is_send ? std::pair(comm.rank, peer)
                                         : std::pair(peer, comm.rank);
    operation->edge = &comm.clique->edges[ends];
    if (peer == comm.rank) operation->edge->is_connected = true;
    OwnQueue(*operation).push_back(operation.get());
  }
  Group& group = comm.group;
  group.operations = Schedule(comm, std::move(operations), settings.budget);
  group.is_active = true;
  group.is_connecting = true;
  RunKernel(group, 0);
  counts.largest_group =
      std::max<uint64_t>(counts.largest_group, group.operations.size());
  if (group.operations.back()->kernel > 0) ++counts.cut_groups;
  comm.is_observed = false;
  SetChanged();
}

void Engine::RunKernel(Group& group, size_t begin) {
  group.begin = group.end = begin;
  group.kernel = group.operations[begin]->kernel;
  while (group.end < group.operations.size() &&
         group.operations[group.end]->kernel == group.kernel) {
    ++group.end;
  }
  group.open = group.end - group.begin;
}

void Engine::Fail(Communicator& comm, Result error, const std::string& text) {
  comm.last_error = text;
  Leave(comm, State::kFailed);
  comm.error = error;
}

void Engine::Leave(Communicator& comm, State state) {
  comm.state = state;
  for (const auto& operation : comm.group.operations) {
    if (!operation->is_done) std::erase(OwnQueue(*operation), operation.get());
  }
  comm.group = {};
  SetChanged();
}

Result Engine::AsyncState(Communicator& comm) {
  Progress();
  if (comm.state == State::kFailed) return comm.error;
  const bool is_busy = comm.state == State::kInitializing ||
                       comm.group.is_active || now_ < comm.captured_at;
  return is_busy ? kInProgress : kSuccess;
}

Fault Engine::TakeFault(const Communicator& comm) {
  Worker& worker = workers[comm.worker];
  const auto found = worker.faults.find(worker.issued++);
  return found == worker.faults.end() ? Fault{} : found->second;
}

void Engine::RecordViolation(const std::string& text) {
  ++counts.violations;
  if (counts.first_violation.empty()) counts.first_violation = text;
}

void Engine::RecordOverlaps(const Communicator& comm) {
  for (const auto& other : communicators_) {
    const bool is_in_use =
        other->group.is_active ||
        (!other->is_observed && other->state <= State::kReady);
    if (other.get() != &comm && other->owner == comm.owner && is_in_use) {
      RecordViolation(absl::StrCat(
          "rank ", comm.worker,
          " starts a group while another communicator of it is in use"));
    }
  }
}

int Engine::LiveCommunicators() const {
  return std::count_if(
      communicators_.begin(), communicators_.end(),
      [](const auto& c) { return c->state <= State::kFailed; });
}

int Engine::Unawaited(uint64_t owner) const {
  return std::count_if(communicators_.begin(), communicators_.end(),
                       [&](const auto& c) {
                         return c->state <= State::kFailed &&
                                c->owner == owner && !c->is_observed;
                       });
}

void Engine::Progress() {
  now_ = Clock::now();
  if (!has_changed_ && now_ < next_due_) return;
  has_changed_ = false;
  next_due_ = Time::max();
  bool has_moved = false;
  for (bool again = true; again;) {
    again = false;
    for (const auto& comm : communicators_) again |= Advance(*comm);
    has_moved |= again;
  }
  has_changed_ = false;  // by what was just looked at
  if (has_moved) changed_.notify_all();
}

// Advance and what it calls return whether anything changed.
bool Engine::Advance(Communicator& comm) {
  if (workers[comm.worker].is_killed) return false;
  if (comm.state == State::kInitializing) return AdvanceInit(comm);
  Group& group = comm.group;
  if (!group.is_active) return false;
  if (group.is_connecting) return Connect(comm);
  bool has_moved = false;
  const size_t kernel = group.kernel, begin = group.begin, end = group.end;
  for (size_t i = begin; i < end; ++i) {
    has_moved |= Try(*group.operations[i]);
    if (!group.is_active || group.kernel != kernel) break;
  }
  return has_moved;
}

bool Engine::AdvanceInit(Communicator& comm) {
  const Clique& clique = *comm.clique;
  for (const Communicator* member : clique.members) {
    if (member == nullptr || !IsLost(*member)) continue;
    if (!settings.remote_errors) return false;
    Fail(comm, kRemoteError, absl::StrCat("rank ", member->rank, " is lost"));
    return true;
  }
  if (clique.came < clique.members.size()) return false;
  comm.state = State::kReady;
  return true;
}

bool Engine::Connect(Communicator& comm) {
  bool has_moved = false, is_complete = true;
  for (const auto& operation : comm.group.operations) {
    Edge& edge = *operation->edge;
    if (edge.is_connected) continue;
    if (FailForLostPeer(comm, *operation)) return true;
    if (!edge.is_connecting && Counterpart(*operation) != nullptr) {
      edge.is_connecting = has_moved = true;
      edge.connected_at = now_ + settings.connect_delay;
      ++counts.lazy_connects;
    }
    if (edge.is_connecting && edge.connected_at <= now_) {
      edge.is_connected = has_moved = true;
      continue;
    }
    if (edge.is_connecting) next_due_ = std::min(next_due_, edge.connected_at);
    is_complete = false;
  }
  comm.group.is_connecting = !is_complete;
  return has_moved || is_complete;
}

// Whether the communicator will not take part in anything any more.
bool Engine::IsLost(const Communicator& comm) const {
  const auto worker = workers.find(comm.worker);
  return comm.state > State::kReady ||
         (worker != workers.end() && worker->second.is_killed);
}

bool Engine::FailForLostPeer(Communicator& comm, const Operation& operation) {
  if (!settings.remote_errors || !IsLost(*comm.clique->Peer(operation))) {
    return false;
  }
  Fail(comm, kRemoteError,
       absl::StrCat(OperationText(operation), ", which is lost"));
  return true;
}

bool Engine::IsRunning(const Operation& operation) const {
  const Group& group = operation.comm->group;
  return !IsLost(*operation.comm) && !group.is_connecting &&
         group.kernel == operation.kernel;
}

bool Engine::Try(Operation& operation) {
  if (operation.is_done || OwnQueue(operation).front() != &operation ||
      operation.fault.kind == Fault::kHang) {
    return false;
  }
  Communicator& comm = *operation.comm;
  if (operation.fault.kind == Fault::kFail) {
    Fail(comm, operation.fault.result,
         absl::StrCat(OperationText(operation), ": fault of the test"));
    return true;
  }
  if (FailForLostPeer(comm, operation)) return true;
  Operation* other = Counterpart(operation);
  if (other == nullptr) return false;
  Operation& send = operation.is_send ? operation : *other;
  Operation& recv = operation.is_send ? *other : operation;
  if (send.count != recv.count) {
    FailMismatch(send, recv);
    return true;
  }
  if (!IsRunning(*other) || other->fault.KeepsFromMoving() ||
      !IsDue(operation, *other)) {
    return false;
  }
  Move(send, recv);
  return true;
}

void Engine::FailMismatch(const Operation& send, const Operation& recv) {
  const std::string text =
      absl::StrCat(OperationText(send), ", but ", OperationText(recv));
  Communicator& sender = *send.comm;
  Communicator& receiver = *recv.comm;
  Fail(sender, kInvalidUsage, text);
  if (&receiver != &sender) Fail(receiver, kInvalidUsage, text);
}

bool Engine::IsDue(Operation& operation, Operation& other) {
  if (operation.due == Time{}) {
    const auto delay = std::max(workers[operation.comm->worker].delay,
                                workers[other.comm->worker].delay);
    operation.due = other.due = now_ + delay;
  }
  if (operation.due <= now_) return true;
  next_due_ = std::min(next_due_, operation.due);
  return false;
}

void Engine::Move(Operation& send, Operation& recv) {
  std::memmove(recv.data, send.data, send.count);
  for (const Operation* end : {&send, &recv}) {
    if (end->fault.kind == Fault::kCorrupt && recv.count > 0) {
      recv.data[end->fault.byte % recv.count] ^= std::byte{0xff};
    }
  }
  ++counts.messages;
  if (send.pair_group != recv.pair_group) {
    ++counts.group_mismatches;
    if (counts.first_violation.empty()) {
      counts.first_violation =
          absl::StrCat(OperationText(send), " in their group ", send.pair_group,
                       ", which receives it in their group ", recv.pair_group);
    }
  }
  send.edge->sends.pop_front();
  send.edge->recvs.pop_front();
  MarkDone(send);
  MarkDone(recv);
}

void Engine::MarkDone(Operation& operation) {
  operation.is_done = true;
  Group& group = operation.comm->group;
  if (--group.open > 0) return;
  if (group.end == group.operations.size()) {
    group = {};
  } else {
    RunKernel(group, group.end);
  }
}

}  // namespace refit::nccl::fake
