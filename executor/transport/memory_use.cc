#include "executor/transport/memory_use.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"

namespace refit {
namespace {

constexpr std::chrono::milliseconds kPause(1);
// Whoever is interrupted still waits so long, because users stop soon after
// they have heard of it.
constexpr std::chrono::seconds kInterruptedTime(2);

// A user says so before it looks whether the memory is revoked, and an owner
// revokes before it looks for users: one of them sees the other.
void Store(const SharedWords& words, int32_t index, uint64_t value) {
  __atomic_store_n(words.data() + index, value, __ATOMIC_SEQ_CST);
}
uint64_t Load(const SharedWords& words, int32_t index) {
  return __atomic_load_n(words.data() + index, __ATOMIC_SEQ_CST);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryUse>> MemoryUse::Create(
    int32_t rank, int32_t world_size) {
  absl::StatusOr<std::unique_ptr<SharedWords>> own =
      SharedWords::Create(static_cast<size_t>(world_size) + 1);
  if (!own.ok()) return own.status();
  return std::unique_ptr<MemoryUse>(
      new MemoryUse(rank, world_size, *std::move(own)));
}

absl::Status MemoryUse::Connect(absl::Span<const int32_t> peers,
                                absl::Span<const std::string> exported,
                                Deadline deadline) {
  absl::Status first;
  for (size_t i = 0; i < peers.size(); ++i) {
    if (peers[i] == rank_) continue;
    absl::StatusOr<std::unique_ptr<SharedWords>> words = SharedWords::Open(
        exported[i], static_cast<size_t>(world_size_) + 1, deadline);
    absl::Status status = words.status();
    if (status.ok()) status = (*words)->Hold(static_cast<size_t>(rank_));
    if (status.ok()) {
      peers_.push_back({peers[i], *std::move(words)});
    } else {
      first.Update(absl::Status(
          status.code(),
          absl::StrCat("rank ", peers[i], " cannot see when rank ", rank_,
                       " has stopped using its memory: ", status.message())));
    }
  }
  return first;
}

std::optional<int32_t> MemoryUse::Begin() {
  const std::lock_guard lock(mutex_);
  const auto tell = [&](bool uses) {
    is_using_ = uses;
    for (const Peer& peer : peers_) Store(*peer.words, rank_, uses ? 1 : 0);
  };
  const bool was_using = is_using_;  // by a refit in flight
  tell(true);
  for (const Peer& peer : peers_) {
    if (Load(*peer.words, world_size_) == 0) continue;
    tell(was_using);
    return peer.rank;
  }
  return std::nullopt;
}

void MemoryUse::End() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(is_using_, false)) return;
  for (const Peer& peer : peers_) Store(*peer.words, rank_, 0);
}

bool MemoryUse::IsUsing() {
  const std::lock_guard lock(mutex_);
  return is_using_;
}

void MemoryUse::Revoke() { Store(*own_, world_size_, 1); }

std::vector<int32_t> MemoryUse::Users() {
  std::vector<int32_t> users;
  for (int32_t user = 0; user < world_size_; ++user) {
    if (Load(*own_, user) != 0 && own_->IsHeld(static_cast<size_t>(user))) {
      users.push_back(user);
    }
  }
  return users;
}

std::vector<int32_t> MemoryUse::AwaitUnused(Deadline deadline) {
  const Deadline interrupted =
      std::chrono::steady_clock::now() + kInterruptedTime;
  while (true) {
    std::vector<int32_t> users = Users();
    if (!PollInterruption().ok()) deadline = std::min(deadline, interrupted);
    if (users.empty() || std::chrono::steady_clock::now() >= deadline) {
      return users;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace refit
