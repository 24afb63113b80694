#include "executor/device/host_fence.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/payload.h"
#include "control/waiting.h"
#include "executor/device/process_identity.h"

namespace refit {
namespace {

// What Export writes: no pointer, as the fence may be gone before its peers
// connect.
struct Exported {
  ProcessIdentity process;
  Token token = {};
};

std::optional<Exported> ReadExported(std::string_view bytes) {
  PayloadReader reader(bytes);
  Exported exported;
  exported.process.process = reader.U64();
  exported.process.random = reader.U64();
  exported.token = TokenOf(reader.Bytes(sizeof(Token))).value_or(Token{});
  if (!reader.Complete()) return std::nullopt;
  return exported;
}

// The ends of the process's fences. Never destroyed: a fence may outlive what
// is static.
TokenTable<FenceEnd>& FenceEnds() {
  static auto* const ends = new TokenTable<FenceEnd>;
  return *ends;
}

}  // namespace

HostFence::HostFence(int32_t rank)
    : ThreadFence(rank),
      own_(std::make_shared<FenceEnd>()),
      own_token_(FenceEnds().Add(own_)) {}

HostFence::~HostFence() { FenceEnds().Remove(own_token_); }

absl::StatusOr<std::string> HostFence::Export() {
  const ProcessIdentity process = ThisProcess();
  return PayloadWriter()
      .U64(process.process)
      .U64(process.random)
      .Bytes(TokenBytes(own_token_))
      .Take();
}

absl::Status HostFence::Connect(absl::Span<const int32_t> peers,
                                absl::Span<const std::string> exported,
                                std::chrono::steady_clock::time_point) {
  peers_.clear();
  for (size_t i = 0; i < peers.size(); ++i) {
    const std::optional<Exported> theirs = ReadExported(exported[i]);
    if (!theirs.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fence of rank ", peers[i], ": not exported by a host device"));
    }
    if (theirs->process != ThisProcess()) {
      return absl::FailedPreconditionError(
          absl::StrCat("fence of rank ", peers[i],
                       ": host memory cannot be shared between processes"));
    }
    std::shared_ptr<FenceEnd> end = FenceEnds().Find(theirs->token);
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
  const int32_t peer = waiting();
  return peer < 0 ? std::vector<int32_t>() : std::vector<int32_t>{peer};
}

absl::Status HostFence::Absent(int32_t peer) {
  // Whoever owns the fence tells the others and aborts it.
  if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
  // A peer that has left knows why; here the word of it is on its way.
  own_->AwaitAbort(kOnlyStep);
  LeaveStep();
  return absl::AbortedError(
      absl::StrCat("the fence was aborted before rank ", peer, " came to it"));
}

}  // namespace refit
