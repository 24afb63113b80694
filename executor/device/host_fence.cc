#include "executor/device/host_fence.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/process_identity.h"
#include "executor/waiting.h"

namespace refit {
namespace {

// A fence is aborted once, and another one made then.
constexpr uint64_t kOnlyStep = 1;

// What Export writes: a number and no pointer, as the fence may be gone before
// its peers connect.
struct Exported {
  ProcessIdentity process;
  uint64_t number = 0;
};

// The ends of the process's fences, by number. Thread-safe.
class FenceEnds {
 public:
  // Never destroyed: a fence may outlive what is static.
  static FenceEnds& OfThisProcess() {
    static FenceEnds* const ends = new FenceEnds;
    return *ends;
  }

  uint64_t Add(std::shared_ptr<FenceEnd> end) {
    std::lock_guard lock(mutex_);
    ends_.emplace(++last_number_, std::move(end));
    return last_number_;
  }
  void Remove(uint64_t number) {
    std::lock_guard lock(mutex_);
    ends_.erase(number);
  }
  // Null once removed.
  std::shared_ptr<FenceEnd> Find(uint64_t number) {
    std::lock_guard lock(mutex_);
    const auto it = ends_.find(number);
    return it == ends_.end() ? nullptr : it->second;
  }

 private:
  std::mutex mutex_;
  uint64_t last_number_ = 0;
  absl::flat_hash_map<uint64_t, std::shared_ptr<FenceEnd>> ends_;
};

}  // namespace

HostFence::HostFence(int32_t rank)
    : rank_(rank),
      own_(std::make_shared<FenceEnd>()),
      own_number_(FenceEnds::OfThisProcess().Add(own_)),
      fence_(rank, [this](int32_t of) -> FenceEnd& {
        return of == rank_ ? *own_ : *peers_.at(of);
      }) {}

HostFence::~HostFence() { FenceEnds::OfThisProcess().Remove(own_number_); }

absl::StatusOr<std::string> HostFence::Export() {
  const Exported exported = {.process = ThisProcess(), .number = own_number_};
  std::string bytes(sizeof(exported), '\0');
  std::memcpy(bytes.data(), &exported, sizeof(exported));
  return bytes;
}

absl::Status HostFence::Connect(absl::Span<const int32_t> peers,
                                absl::Span<const std::string> exported) {
  peers_.clear();
  for (size_t i = 0; i < peers.size(); ++i) {
    Exported theirs;
    if (exported[i].size() != sizeof(theirs)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fence of rank ", peers[i], ": not exported by a host device"));
    }
    std::memcpy(&theirs, exported[i].data(), sizeof(theirs));
    if (theirs.process != ThisProcess()) {
      return absl::FailedPreconditionError(
          absl::StrCat("fence of rank ", peers[i],
                       ": host memory cannot be shared between processes"));
    }
    std::shared_ptr<FenceEnd> end =
        FenceEnds::OfThisProcess().Find(theirs.number);
    if (end == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "fence of rank ", peers[i], ": the rank has given it up"));
    }
    peers_.emplace(peers[i], std::move(end));
  }
  return absl::OkStatus();
}

void HostFence::Abort() { own_->Abort(kOnlyStep); }

std::vector<int32_t> HostFence::Waiting() const {
  const std::optional<int32_t> peer = fence_.waiting();
  return peer.has_value() ? std::vector<int32_t>{*peer}
                          : std::vector<int32_t>{};
}

absl::Status HostFence::Outcome(std::optional<int32_t> absent) {
  if (!absent.has_value()) return absl::OkStatus();
  // Whoever owns the fence tells the others and aborts it.
  if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
  // A peer that has left knows why; here the word of it is on its way.
  own_->AwaitAbort(kOnlyStep);
  fence_.Leave(kOnlyStep);
  return absl::AbortedError(absl::StrCat("the fence was aborted before rank ",
                                         *absent, " came to it"));
}

absl::Status HostFence::Grant(absl::Span<const int32_t> movers, void*) {
  fence_.Grant(movers, kOnlyStep);
  return absl::OkStatus();
}

absl::Status HostFence::AwaitGrants(absl::Span<const int32_t> holders, void*) {
  return Outcome(
      fence_.AwaitGrants(holders, kOnlyStep, FenceEnd::Deadline::max()));
}

absl::Status HostFence::Finish(absl::Span<const int32_t> holders, void*) {
  fence_.Finish(holders, kOnlyStep);
  return absl::OkStatus();
}

absl::Status HostFence::AwaitFinishes(absl::Span<const int32_t> movers, void*) {
  return Outcome(
      fence_.AwaitFinishes(movers, kOnlyStep, FenceEnd::Deadline::max()));
}

}  // namespace refit
