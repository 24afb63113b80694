#include "executor/transport/memory_use.h"

#include <utility>

namespace refit {
namespace {

// Of this process. Never destroyed: a transport may outlive what is static.
TokenTable<MemoryUsers>& AllMemoryUsers() {
  static auto* const users = new TokenTable<MemoryUsers>;
  return *users;
}

}  // namespace

bool MemoryUsers::Add(int32_t user) {
  const std::lock_guard lock(mutex_);
  if (is_revoked_) return false;
  users_.insert(user);
  return true;
}

void MemoryUsers::Remove(int32_t user) {
  {
    const std::lock_guard lock(mutex_);
    users_.erase(user);
  }
  changed_.notify_all();
}

void MemoryUsers::Revoke() {
  const std::lock_guard lock(mutex_);
  is_revoked_ = true;
}

std::vector<int32_t> MemoryUsers::AwaitNone(
    std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return users_.empty(); });
  return {users_.begin(), users_.end()};
}

MemoryUse::MemoryUse(int32_t rank)
    : rank_(rank),
      own_(std::make_shared<MemoryUsers>()),
      token_(AllMemoryUsers().Add(own_)) {}

MemoryUse::~MemoryUse() {
  AllMemoryUsers().Remove(token_);
  End();
}

void MemoryUse::Connect(absl::Span<const int32_t> peers,
                        absl::Span<const std::string> exported) {
  for (size_t i = 0; i < peers.size(); ++i) {
    const std::optional<Token> token = TokenOf(exported[i]);
    if (!token.has_value() || peers[i] == rank_) continue;
    std::shared_ptr<MemoryUsers> users = AllMemoryUsers().Find(*token);
    if (users != nullptr) peers_.push_back({peers[i], std::move(users)});
  }
}

std::optional<int32_t> MemoryUse::Begin() {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.users->Add(rank_)) return peer.rank;
    is_using_ = true;
  }
  return std::nullopt;
}

void MemoryUse::End() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(is_using_, false)) return;
  for (const Peer& peer : peers_) peer.users->Remove(rank_);
}

bool MemoryUse::IsUsing() {
  const std::lock_guard lock(mutex_);
  return is_using_;
}

}  // namespace refit
