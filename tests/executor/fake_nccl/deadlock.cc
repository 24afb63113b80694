#include "tests/executor/fake_nccl/engine.h"

namespace refit::nccl::fake {

bool Engine::IsDeadlocked() {
  Progress();
  // The largest set whose members each wait for one of it, or for a rank that
  // is lost.
  std::set<const Communicator*> stuck;
  for (const auto& comm : communicators_) {
    if (comm->group.is_active && !IsLost(*comm)) stuck.insert(comm.get());
  }
  for (size_t before = stuck.size() + 1; before != stuck.size();) {
    before = stuck.size();
    std::erase_if(stuck, [&](const auto* c) { return !IsStuck(*c, stuck); });
  }
  return !stuck.empty();
}

bool Engine::IsStuck(const Communicator& comm,
                     const std::set<const Communicator*>& stuck) const {
  const Group& group = comm.group;
  const auto is_blocked = [&](const auto& operation) {
    return !operation->is_done && IsBlocked(*operation, stuck);
  };
  if (group.is_connecting) {
    return std::any_of(group.operations.begin(), group.operations.end(),
                       is_blocked);
  }
  return std::any_of(group.operations.begin() + group.begin,
                     group.operations.begin() + group.end, is_blocked);
}

// Whether the operation, or its connection, waits for what cannot come while
// `stuck` are.
bool Engine::IsBlocked(const Operation& operation,
                       const std::set<const Communicator*>& stuck) const {
  const Communicator* peer = operation.comm->clique->Peer(operation);
  const Operation* other = Counterpart(operation);
  if (operation.comm->group.is_connecting) {
    if (operation.edge->is_connected || other != nullptr) return false;
    return IsLost(*peer) || stuck.contains(peer);
  }
  if (OwnQueue(operation).front() != &operation) return false;
  if (operation.fault.kind == Fault::kHang || IsLost(*peer)) return true;
  if (other != nullptr && IsRunning(*other)) {
    return other->fault.kind == Fault::kHang;
  }
  return stuck.contains(peer);
}

}  // namespace refit::nccl::fake
