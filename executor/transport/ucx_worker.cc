#include "executor/transport/ucx_worker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>
#include <tuple>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "control/compared_structs.h"
#include "control/own_thread.h"
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

// How long receives that are given up have to end. An adapter may still read
// into one; one whose peer is gone never ends, and nobody writes into it.
constexpr std::chrono::seconds kEndTime(1);

// How long endpoints have to close. Those to a peer whose shared memory was
// full when it died never do.
constexpr std::chrono::milliseconds kCloseTime(100);

// A tag is the receiver's epoch, the sender's rank and the number of the
// message between the two. Epoch and number wrap: no message is that late.
constexpr int kRankBits = 20;
constexpr int kSequenceBits = 28;
static_assert(TcpRendezvous::kWorldSizeMax <= 1 << kRankBits);

ucx::Tag TagOf(uint16_t epoch, int32_t sender, uint64_t sequence) {
  return ucx::Tag{epoch} << (kRankBits + kSequenceBits) |
         static_cast<ucx::Tag>(sender) << kSequenceBits |
         (sequence & ((ucx::Tag{1} << kSequenceBits) - 1));
}

// What a worker tells its peers of itself.
struct UcxIntroduction {
  uint64_t id = 0;
  uint16_t epoch = 0;
  std::vector<uint64_t> reached = {};  // workers that it has an endpoint to
  std::string address = {};

  static auto FieldsOf(auto& self) {
    return std::tie(self.id, self.epoch, self.reached, self.address);
  }
};

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

static ucx::Status MakeContext(const ucx::Api& api,
                               const ucx::ContextParams& params,
                               ucx::Context* context) {
  const std::pair<const char*, const char*> settings[] = {
      // Who receives a large message reads it. An address that a peer was given
      // to write to would be good after this rank has given the message up.
      {"RNDV_SCHEME", "get_zcopy"},
      // Endpoints that can be closed whatever became of the peer, within a host
      // too. The control plane notices a peer's death.
      {"MM_ERROR_HANDLING", "y"},
      {"MEMORY_INVALIDATE", "y"},
      {"KEEPALIVE_INTERVAL", "inf"},
      // UCX, up to 1.19 at least, ends the process when a peer dies while TCP
      // sends to it without a copy. Nothing is sent at once without one then,
      // whatever carries it. Copies are cheaper in larger segments.
      {"PUT_ENABLE", "n"},
      {"ZCOPY_THRESH", "inf"},
      {"TX_SEG_SIZE", "128k"},
      {"RX_SEG_SIZE", "128k"}};
  ucx::Config config = nullptr;
  ucx::Status status = api.ConfigRead(nullptr, nullptr, &config);
  if (status < ucx::kOk) return status;
  for (const auto& [name, value] : settings) {
    if (status >= ucx::kOk) status = api.ConfigModify(config, name, value);
  }
  if (status >= ucx::kOk) {
    status = api.InitVersion(1, 12, &params, config, context);
  }
  api.ConfigRelease(config);
  return status;
}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(
    const ucx::Api& api, size_t peers) {
  std::random_device random;
  const uint64_t id = uint64_t{random()} << 32 | random();
  std::unique_ptr<UcxWorker> made(new UcxWorker(api, id));
  // So that no epoch is one of a worker that this one replaces.
  made->epoch_ = static_cast<uint16_t>(random());
  ucx::ContextParams params;
  params.field_mask =
      ucx::ContextParams::kFeatures | ucx::ContextParams::kEstimatedEndpoints;
  params.features = ucx::kFeatureTag | ucx::kFeatureWakeup;
  params.estimated_endpoints = peers;
  ucx::Status status = MakeContext(api, params, &made->context_);
  if (status < ucx::kOk) return StatusOf(api, status, "ucp_init");
  // UCX has a warning for settings of ways that it does not take.
  const ucx::QuietLog quiet;
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
  for (const auto& [id, peer] : peers_) peer->failed = true;
  if (worker_ != nullptr && !is_broken_) End();
  // What a peer that is gone sent half of is never received, and UCX may end a
  // process that frees such a request. The worker is left then.
  if (IsReceiving()) return;
  const ucx::QuietLog quiet;
  if (worker_ != nullptr) api_.WorkerDestroy(worker_);
  if (context_ != nullptr) api_.Cleanup(context_);
}

bool UcxWorker::IsReceiving() const {
  return std::any_of(
      pending_.begin(), pending_.end(),
      [](const Pending& pending) { return pending.receives && !pending.done; });
}

bool UcxWorker::End() {
  // UCX has a warning for each message that is given up.
  const ucx::QuietLog quiet;
  for (const Pending& pending : pending_) {
    if (pending.done && pending.status == ucx::kOk) continue;
    if (!pending.done && pending.receives) {
      api_.RequestCancel(worker_, pending.request);
    }
    // A flush is of all peers.
    for (const auto& [rank, peer] : by_rank_) {
      peer->failed |= pending.peer == rank || pending.peer < 0;
    }
  }
  for (const auto& [id, peer] : peers_) {
    if (peer->failed) Close(*peer);
  }
  absl::erase_if(by_rank_,
                 [](const auto& peer) { return peer.second->failed; });
  std::erase_if(peers_, [](const auto& peer) { return peer.second->failed; });
  const auto progress_while = [&](auto condition, Deadline end) {
    while (condition() && Clock::now() < end) api_.WorkerProgress(worker_);
  };
  const auto is_open = [this] { return open_ > 0; };
  progress_while([this] { return IsReceiving(); }, Clock::now() + kEndTime);
  progress_while(is_open, Clock::now() + kCloseTime);
  if (!is_open()) {
    PostFlush();
    progress_while(is_open, Clock::now() + kCloseTime);
  }
  is_broken_ = open_ > 0;
  return !is_broken_;
}

absl::StatusOr<std::string> UcxWorker::Introduce(int32_t rank,
                                                 const WakeSignal& wake) {
  Drop();
  rank_ = rank;
  wake_ = &wake;
  UcxIntroduction introduction{.id = id_, .epoch = ++epoch_};
  for (const auto& [id, peer] : peers_) {
    if (!peer->failed) introduction.reached.push_back(id);
  }
  ucx::Address* address = nullptr;
  size_t size_bytes = 0;
  const ucx::Status status =
      api_.WorkerGetAddress(worker_, &address, &size_bytes);
  if (status < ucx::kOk) {
    return StatusOf(api_, status, "ucp_worker_get_address");
  }
  introduction.address.assign(reinterpret_cast<const char*>(address),
                              size_bytes);
  api_.WorkerReleaseAddress(worker_, address);
  return StructBytes(introduction);
}

// Receives what came and was never received into no memory, so that UCX frees
// it.
void UcxWorker::Drop() const {
  const ucx::QuietLog quiet;
  for (int i = 0; i < kProgressMax && api_.WorkerProgress(worker_) != 0; ++i) {
  }
  const RequestParam param;
  ucx::ReceiveInfo info;
  while (ucx::Message message = api_.TagProbe(worker_, 0, 0, 1, &info)) {
    const ucx::StatusPointer receiving =
        api_.TagMessageReceive(worker_, nullptr, 0, message, &param);
    if (ucx::IsRequest(receiving)) api_.RequestFree(receiving);
  }
}

absl::Status UcxWorker::Meet(absl::Span<const int32_t> ranks,
                             absl::Span<const std::string> introductions) {
  std::vector<UcxIntroduction> told;
  for (size_t i = 0; i < ranks.size(); ++i) {
    absl::StatusOr<UcxIntroduction> one = ReadStruct<UcxIntroduction>(
        introductions[i], ranks[i], "UCX addresses");
    if (!one.ok()) return one.status();
    told.push_back(*std::move(one));
  }
  std::map<uint64_t, std::unique_ptr<Peer>> earlier = std::move(peers_);
  peers_.clear();
  by_rank_.clear();
  for (const auto& one : told) {
    const auto found = earlier.find(one.id);
    if (found != earlier.end() && !found->second->failed &&
        absl::c_linear_search(one.reached, id_)) {
      peers_.insert(earlier.extract(found));
    }
  }
  for (const auto& [id, peer] : earlier) Close(*peer);
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::unique_ptr<Peer>& peer = peers_[told[i].id];
    if (peer == nullptr) {
      peer = std::make_unique<Peer>();
      absl::Status status = Reach(ranks[i], told[i].address, *peer);
      if (!status.ok()) return status;
    }
    peer->epoch = told[i].epoch;
    peer->sends = peer->receives = 0;
    by_rank_[ranks[i]] = peer.get();
  }
  return absl::OkStatus();
}

absl::Status UcxWorker::Reach(int32_t rank, std::string_view address,
                              Peer& peer) const {
  ucx::EndpointParams params;
  params.field_mask = ucx::EndpointParams::kRemoteAddress |
                      ucx::EndpointParams::kErrorMode |
                      ucx::EndpointParams::kErrorHandler;
  params.address = reinterpret_cast<const ucx::Address*>(address.data());
  params.error_mode = ucx::kErrorModePeer;
  params.error_handler = OnFailed;
  params.error_argument = &peer;
  const ucx::Status status =
      api_.EndpointCreate(worker_, &params, &peer.endpoint);
  if (status >= ucx::kOk) return absl::OkStatus();
  const absl::Status failed = StatusOf(api_, status, "ucp_ep_create");
  return absl::Status(failed.code(), absl::StrCat("reaching rank ", rank, ": ",
                                                  failed.message()));
}

void UcxWorker::Close(const Peer& peer) const {
  if (peer.endpoint == nullptr) return;
  RequestParam param;
  param.attributes = RequestParam::kFlags;
  param.flags = ucx::kForceClose;
  const ucx::StatusPointer closing = api_.EndpointClose(peer.endpoint, &param);
  if (ucx::IsRequest(closing)) api_.RequestFree(closing);
}

// Sends to the peer end with an error. Whoever receives from it hears of its
// end from the control plane.
void UcxWorker::OnFailed(void* peer, ucx::Endpoint, ucx::Status) {
  static_cast<Peer*>(peer)->failed = true;
}

void UcxWorker::Finish(Pending& pending, ucx::Status status,
                       uint64_t received) {
  pending.done = true;
  pending.status = status;
  pending.received = received;
  --open_;
  failed_ |= status < ucx::kOk;
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
  Peer& peer = *by_rank_.at(operation.peer);
  pending.peer = operation.peer;
  pending.receives = operation.kind == fb::MessageKind::kRecv;
  ucx::StatusPointer posted = nullptr;
  if (operation.kind == fb::MessageKind::kSend) {
    param.callback.send = OnSent;
    posted =
        api_.TagSendSync(peer.endpoint, operation.data, operation.size_bytes,
                         TagOf(peer.epoch, rank_, peer.sends++), &param);
  } else {
    param.callback.receive = OnReceived;
    posted = api_.TagReceive(worker_, operation.data, operation.size_bytes,
                             TagOf(epoch_, operation.peer, peer.receives++),
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

void UcxWorker::PostFlush() {
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
}

absl::Status UcxWorker::Flush(Deadline deadline,
                              const Interruption& interruption) {
  PostFlush();
  const absl::Status status = Await(deadline, interruption);
  return pending_[0].done
             ? StatusOf(api_, pending_[0].status, "ucp_worker_flush")
             : status;
}

// UCX's TCP has a flush answered by the peer, which does so as it progresses.
// Without that a rank whose flush ends late would wait for those that wait for
// all ranks.
absl::Status UcxWorker::ServeDuring(
    const std::function<absl::Status()>& call) const {
  std::atomic<bool> is_over = false;
  std::thread server;
  absl::Status status = StartThread(server, "a thread that serves UCX", [&] {
    while (!is_over) {
      int progressed = 0;
      while (progressed < kProgressMax && api_.WorkerProgress(worker_) != 0) {
        ++progressed;
      }
      if (progressed == 0 && !Sleep(Clock::now() + std::chrono::hours(1)).ok())
        return;
    }
  });
  if (!status.ok()) return status;
  status = call();
  is_over = true;
  wake_->Set();
  server.join();
  return status;
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
                  {.fd = wake_->fd(), .events = POLLIN, .revents = 0}};
  const auto left = std::clamp<std::chrono::nanoseconds>(
      until - Clock::now(), std::chrono::nanoseconds(0), std::chrono::hours(1));
  const timespec time = {.tv_sec = left.count() / 1'000'000'000,
                         .tv_nsec = left.count() % 1'000'000'000};
  if (ppoll(fds, 2, &time, nullptr) > 0 && fds[1].revents != 0) wake_->Clear();
  return absl::OkStatus();
}

}  // namespace refit
