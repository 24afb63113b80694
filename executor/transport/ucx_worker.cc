#include "executor/transport/ucx_worker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "refit/control_plane.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;
using ucx::RequestParam;

// How long a rank polls for messages before it sleeps: waking takes longer than
// a small message.
constexpr std::chrono::microseconds kPollTime(20);

// Progress calls between two looks at the clock.
constexpr int kProgressMax = 1000;

// Calls to let UCX end what was cancelled.
constexpr int kProgressAfterCancel = 100;

// How long receives that are given up have to end. An adapter may still read
// into one; one whose peer is gone never ends, and nobody writes into it.
constexpr std::chrono::seconds kEndTime(1);

// A tag is the sender's rank and the number of the message between the two.
constexpr int kSequenceBits = 44;
static_assert(TcpRendezvous::kWorldSizeMax <= 1 << (64 - kSequenceBits));

ucx::Tag TagOf(int32_t sender, uint64_t sequence) {
  return static_cast<ucx::Tag>(sender) << kSequenceBits | sequence;
}

}  // namespace

absl::StatusOr<std::unique_ptr<WakeSignal>> WakeSignal::Create() {
  FileDescriptor fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (fd.fd() < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return std::unique_ptr<WakeSignal>(new WakeSignal(std::move(fd)));
}

// The counter cannot overflow, and a full one would wake the thread as well.
void WakeSignal::Set() const { (void)!eventfd_write(fd(), 1); }

void WakeSignal::Clear() const {
  eventfd_t count = 0;
  (void)!eventfd_read(fd(), &count);
}

// Who receives a large message has to read it. An address that a peer was given
// to write to would be good after this rank has given the message up. UCX has
// receivers read by default, but chooses by its estimates where there is RDMA.
// TCP cannot read; its writes are done by the receiver's own thread.
static const char* RendezvousScheme() {
  std::error_code error;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband",
                                                    error);
  const bool has_rdma =
      !error && devices != std::filesystem::directory_iterator();
  return has_rdma ? "get_zcopy" : "auto";
}

static ucx::Status MakeContext(const ucx::Api& api,
                               const ucx::ContextParams& params,
                               ucx::Context* context) {
  ucx::Config config = nullptr;
  ucx::Status status = api.ConfigRead(nullptr, nullptr, &config);
  if (status < ucx::kOk) return status;
  status = api.ConfigModify(config, "RNDV_SCHEME", RendezvousScheme());
  if (status >= ucx::kOk) {
    status = api.InitVersion(1, 10, &params, config, context);
  }
  api.ConfigRelease(config);
  return status;
}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(
    const ucx::Api& api, const WakeSignal& wake, int32_t rank, size_t peers) {
  std::unique_ptr<UcxWorker> made(new UcxWorker(api, wake, rank));
  ucx::ContextParams params;
  params.field_mask =
      ucx::ContextParams::kFeatures | ucx::ContextParams::kEstimatedEndpoints;
  params.features = ucx::kFeatureTag | ucx::kFeatureWakeup;
  params.estimated_endpoints = peers;
  ucx::Status status = MakeContext(api, params, &made->context_);
  if (status < ucx::kOk) return StatusOf(api, status, "ucp_init");
  ucx::WorkerParams worker_params;
  worker_params.field_mask = ucx::WorkerParams::kThreadMode;
  worker_params.thread_mode = ucx::kThreadSerialized;
  status = api.WorkerCreate(made->context_, &worker_params, &made->worker_);
  if (status < ucx::kOk) return StatusOf(api, status, "ucp_worker_create");
  status = api.WorkerGetEfd(made->worker_, &made->event_fd_);
  if (status < ucx::kOk) return StatusOf(api, status, "ucp_worker_get_efd");
  return made;
}

UcxWorker::~UcxWorker() {
  // UCX has a warning for each message that is given up.
  const ucx::QuietLog quiet;
  const bool had_failed = has_failed_;
  for (const Pending& pending : pending_) {
    if (pending.done || pending.request == nullptr) continue;
    api_.RequestCancel(worker_, pending.request);
  }
  const Deadline end = Clock::now() + kEndTime;
  const auto is_receiving = [](const Pending& pending) {
    return !pending.done && pending.request != nullptr && pending.receives;
  };
  const bool cancelled =
      std::any_of(pending_.begin(), pending_.end(), [](const Pending& pending) {
        return !pending.done && pending.request != nullptr;
      });
  for (int i = 0; cancelled && i < kProgressAfterCancel; ++i) {
    api_.WorkerProgress(worker_);
  }
  while (std::any_of(pending_.begin(), pending_.end(), is_receiving) &&
         Clock::now() < end) {
    api_.WorkerProgress(worker_);
  }
  // UCX ends the process when it destroys a worker with requests that it cannot
  // end, as when a peer died while its memory was read. Such a worker is left.
  const bool is_whole =
      !had_failed && std::all_of(pending_.begin(), pending_.end(),
                                 [](const Pending& p) { return p.done; });
  if (!is_whole) return;
  if (worker_ != nullptr) api_.WorkerDestroy(worker_);
  if (context_ != nullptr) api_.Cleanup(context_);
}

absl::StatusOr<std::string> UcxWorker::Address() const {
  ucx::Address* address = nullptr;
  size_t size_bytes = 0;
  const ucx::Status status =
      api_.WorkerGetAddress(worker_, &address, &size_bytes);
  if (status < ucx::kOk) {
    return StatusOf(api_, status, "ucp_worker_get_address");
  }
  const std::string bytes(reinterpret_cast<const char*>(address), size_bytes);
  api_.WorkerReleaseAddress(worker_, address);
  return bytes;
}

absl::Status UcxWorker::AddPeer(int32_t peer, std::string_view address) {
  ucx::EndpointParams params;
  params.field_mask = ucx::EndpointParams::kRemoteAddress;
  params.address = reinterpret_cast<const ucx::Address*>(address.data());
  const ucx::Status status =
      api_.EndpointCreate(worker_, &params, &peers_[peer].endpoint);
  if (status < ucx::kOk) {
    const absl::Status failed = StatusOf(api_, status, "ucp_ep_create");
    return absl::Status(failed.code(), absl::StrCat("reaching rank ", peer,
                                                    ": ", failed.message()));
  }
  return absl::OkStatus();
}

void UcxWorker::Finish(Pending& pending, ucx::Status status,
                       uint64_t received) {
  pending.done = true;
  pending.status = status;
  pending.received = received;
  --open_;
  failed_ |= status < ucx::kOk;
  has_failed_ |= status < ucx::kOk;
}

void UcxWorker::OnSent(void* request, ucx::Status status, void* pending) {
  Pending& sent = *static_cast<Pending*>(pending);
  sent.worker->Finish(sent, status, 0);
  sent.worker->api_.RequestFree(request);
}

void UcxWorker::OnReceived(void* request, ucx::Status status,
                           const ucx::ReceiveInfo* info, void* pending) {
  Pending& received = *static_cast<Pending*>(pending);
  received.worker->Finish(received, status,
                          status == ucx::kOk ? info->length : 0);
  received.worker->api_.RequestFree(request);
}

void UcxWorker::Post(const Operation& operation, Pending& pending) {
  RequestParam param;
  param.attributes = RequestParam::kCallback | RequestParam::kUserData |
                     RequestParam::kMemoryType |
                     RequestParam::kNoImmediateCompletion;
  param.user_data = &pending;
  Peer& peer = peers_.at(operation.peer);
  pending.peer = operation.peer;
  pending.receives = operation.kind == fb::MessageKind::kRecv;
  ucx::StatusPointer posted = nullptr;
  if (operation.kind == fb::MessageKind::kSend) {
    param.callback.send = OnSent;
    posted =
        api_.TagSendSync(peer.endpoint, operation.data, operation.size_bytes,
                         TagOf(rank_, peer.sends++), &param);
  } else {
    param.callback.receive = OnReceived;
    posted = api_.TagReceive(worker_, operation.data, operation.size_bytes,
                             TagOf(operation.peer, peer.receives++),
                             ~ucx::Tag{0}, &param);
  }
  if (ucx::IsRequest(posted)) {
    pending.request = posted;
  } else {
    Finish(pending, ucx::StatusOfPointer(posted), operation.size_bytes);
  }
}

absl::Status UcxWorker::OutcomeOf(const Operation& operation,
                                  const Pending& pending) const {
  const bool send = operation.kind == fb::MessageKind::kSend;
  if (!send && pending.status == ucx::kMessageTruncated) {
    return absl::InternalError("it meets a send of more bytes");
  }
  if (!send && pending.status == ucx::kOk &&
      pending.received != operation.size_bytes) {
    return absl::InternalError(
        absl::StrCat("it meets a send of ", pending.received, " bytes"));
  }
  return StatusOf(api_, pending.status, send ? "ucp_tag_send" : "ucp_tag_recv");
}

UcxWorker::Failure UcxWorker::Exchange(absl::Span<const Operation> operations,
                                       Deadline deadline,
                                       const Interruption& interruption) {
  pending_.assign(operations.size(), Pending{.worker = this});
  open_ = operations.size();
  // Receives first, so that no message has to wait in a buffer of UCX.
  for (const auto kind : {fb::MessageKind::kRecv, fb::MessageKind::kSend}) {
    for (size_t i = 0; i < operations.size(); ++i) {
      if (operations[i].kind == kind) Post(operations[i], pending_[i]);
    }
  }
  const absl::Status status = Await(deadline, interruption);
  for (size_t i = 0; i < operations.size(); ++i) {
    if (!pending_[i].done) continue;
    absl::Status outcome = OutcomeOf(operations[i], pending_[i]);
    if (!outcome.ok()) return {.status = std::move(outcome), .operation = i};
  }
  if (status.ok()) return {};
  const auto waits =
      std::find_if(pending_.begin(), pending_.end(),
                   [](const Pending& pending) { return !pending.done; });
  return {.status = status,
          .operation = static_cast<size_t>(waits - pending_.begin())};
}

absl::Status UcxWorker::Flush(Deadline deadline,
                              const Interruption& interruption) {
  pending_.assign(1, Pending{.worker = this});
  open_ = 1;
  RequestParam param;
  param.attributes = RequestParam::kCallback | RequestParam::kUserData;
  param.callback.send = OnSent;
  param.user_data = pending_.data();
  const ucx::StatusPointer posted = api_.WorkerFlush(worker_, &param);
  if (!ucx::IsRequest(posted)) {
    Finish(pending_[0], ucx::StatusOfPointer(posted), 0);
  }
  const absl::Status status = Await(deadline, interruption);
  return pending_[0].done
             ? StatusOf(api_, pending_[0].status, "ucp_worker_flush")
             : status;
}

// Returns when all pending are done, or one has failed.
absl::Status UcxWorker::Await(Deadline deadline,
                              const Interruption& interruption) {
  failed_ = std::any_of(pending_.begin(), pending_.end(), [](const Pending& p) {
    return p.done && p.status < 0;
  });
  const Deadline start = Clock::now();
  WaitReminder reminder(start);
  Deadline sleep_at = start + kPollTime;
  while (true) {
    int progressed = 0;
    while (progressed < kProgressMax && open_ > 0 && !failed_ &&
           api_.WorkerProgress(worker_) != 0) {
      ++progressed;
    }
    if (open_ == 0 || failed_) return absl::OkStatus();
    if (absl::Status s = interruption(); !s.ok()) return s;
    if (absl::Status s = PollInterruption(); !s.ok()) return s;
    const Deadline now = Clock::now();
    if (now >= deadline) {
      return absl::DeadlineExceededError(
          "the peer did not come before the deadline");
    }
    if (reminder.IsDue(now)) Report(reminder.Seconds(now));
    if (progressed > 0) sleep_at = now + kPollTime;
    if (now < sleep_at) continue;
    const Deadline until = NextPoll(std::min(deadline, reminder.next()));
    if (absl::Status s = Sleep(until); !s.ok()) return s;
  }
}

// Tells whom the thread waits for.
void UcxWorker::Report(int64_t seconds) const {
  std::vector<int32_t> peers;
  for (const Pending& pending : pending_) {
    if (!pending.done && pending.peer >= 0) peers.push_back(pending.peer);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  ReportWait(absl::StrCat("rank ", rank_),
             peers.empty() ? "UCX" : RanksText(peers), seconds);
}

// Until there may be something to do.
absl::Status UcxWorker::Sleep(Deadline until) const {
  const ucx::Status armed = api_.WorkerArm(worker_);
  if (armed == ucx::kBusy) return absl::OkStatus();
  if (armed < ucx::kOk) return StatusOf(api_, armed, "ucp_worker_arm");
  pollfd fds[] = {{.fd = event_fd_, .events = POLLIN, .revents = 0},
                  {.fd = wake_.fd(), .events = POLLIN, .revents = 0}};
  const auto left = std::clamp<std::chrono::nanoseconds>(
      until - Clock::now(), std::chrono::nanoseconds(0), std::chrono::hours(1));
  const timespec time = {.tv_sec = left.count() / 1'000'000'000,
                         .tv_nsec = left.count() % 1'000'000'000};
  if (ppoll(fds, 2, &time, nullptr) > 0 && fds[1].revents != 0) wake_.Clear();
  return absl::OkStatus();
}

}  // namespace refit
