#include "refit/nccl_transport.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "executor/transport/handshake.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/nccl_communicator.h"

namespace refit {
namespace {

// How often the watchdog looks at a refit that is under way, and Wait at its
// end.
constexpr std::chrono::milliseconds kWatchPause(5);
constexpr std::chrono::microseconds kWaitPause(20);

// Touching an edge sends one byte; both directions of a step need one each.
constexpr uint64_t kScratchBytes = 256;

Deadline Now() { return std::chrono::steady_clock::now(); }

template <typename Struct>
std::string BytesOf(const Struct& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename Struct>
absl::StatusOr<std::vector<Struct>> StructsOf(
    absl::StatusOr<std::vector<std::string>> gathered) {
  if (!gathered.ok()) return gathered.status();
  std::vector<Struct> values(gathered->size());
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if ((*gathered)[rank].size() != sizeof(Struct)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, " runs another version of Refit: it says ",
          (*gathered)[rank].size(), " bytes when it should say ",
          sizeof(Struct)));
    }
    std::memcpy(&values[rank], (*gathered)[rank].data(), sizeof(Struct));
  }
  return values;
}

// What a rank says of itself when it connects.
struct Introduction {
  int32_t nccl_version = 0;  // 0: it has no libnccl
  int32_t uses_domain = 0;   // stages inside its host
  int32_t uses_world = 0;    // stages across hosts
  int32_t uses_fence = 0;
};

}  // namespace

class NcclTransport : public Transport {
 public:
  explicit NcclTransport(NcclOptions options) : options_(std::move(options)) {
    control().OnAbort(
        [this](uint64_t, const absl::Status& s) { Fail(s, false); });
  }
  ~NcclTransport() override;

  int32_t rank() const override { return options_.control->rank(); }
  int32_t world_size() const override { return options_.control->world_size(); }
  absl::Status Connect(const HandshakeRecord& record,
                       absl::Span<const Edge> edges,
                       Deadline deadline) override;
  absl::Status Handshake(const HandshakeRecord& record,
                         Deadline deadline) override;
  absl::StatusOr<std::vector<std::string>> Share(std::string_view mine,
                                                 absl::Span<const int32_t> to,
                                                 absl::Span<const int32_t> from,
                                                 Deadline deadline) override;
  Fence* fence() override { return fence_.get(); }
  absl::Status BeginRefit(Deadline deadline) override;
  absl::Status Exchange(const ExchangeRound& round, Stream stream) override;
  absl::Status EndRefit(Stream stream) override;
  absl::Status Wait() override;
  void Abort(const absl::Status& status) override { Fail(status, true); }

 private:
  // A staged round that was enqueued, for whoever asks what did not end.
  struct Enqueued {
    uint32_t round = 0;
    Operation first;
    size_t operations = 0;
    std::unique_ptr<DeviceEvent> event;
  };

  ControlPlane& control() { return *options_.control; }
  Device& device() { return *options_.device; }
  absl::Status Agree(absl::Status mine, const char* what, Deadline deadline);
  absl::Status ConnectAll(absl::Span<const Edge> edges, Deadline deadline);
  absl::Status Introduce(absl::Span<const Edge> edges, Deadline deadline,
                         std::vector<Introduction>& all);
  absl::Status CreateCommunicator(const std::vector<int32_t>& ranks,
                                  bool takes_part, Deadline deadline,
                                  std::unique_ptr<NcclCommunicator>& made);
  absl::Status TouchEdges(NcclCommunicator& communicator,
                          absl::Span<const Edge> edges, Deadline deadline);
  absl::Status ConnectFence(absl::Span<const Edge> edges, Deadline deadline);
  std::vector<int32_t> RanksOfHost(uint32_t host) const;
  NcclCommunicator* CommunicatorOf(fb::Route route);

  // The failure of the refit under way, or OK.
  absl::Status failure();
  void Fail(const absl::Status& status, bool tell_others);
  void StopWork();
  void Watch();
  absl::Status CheckProgress(bool& over);
  std::string Unfinished();
  void BeginStep();

  NcclOptions options_;
  std::optional<nccl::Api> api_;

  // Made by Connect, used by the rank's thread and the watchdog.
  std::unique_ptr<NcclCommunicator> domain_;
  std::unique_ptr<NcclCommunicator> world_;
  std::unique_ptr<DeviceFence> fence_;
  std::unique_ptr<DeviceEvent> ended_;
  // Of the refit under way, in the order of enqueuing. Grows in the first refit
  // only.
  std::vector<Enqueued> enqueued_;
  size_t enqueued_count_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread watchdog_;
  // Guarded by mutex_, as is all that the watchdog looks at.
  bool closing_ = false;
  bool running_ = false;       // from BeginRefit until Wait, or until stopped
  bool all_enqueued_ = false;  // of the refit that is running
  bool over_ = false;          // on this rank
  bool broken_ = true;         // until Connect, and after work was stopped
  Deadline deadline_;          // of the refit
  absl::Status failure_;       // of the step this rank is in
};

NcclTransport::~NcclTransport() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  // Before anything that its callback touches is gone.
  options_.control.reset();
}

absl::Status NcclTransport::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void NcclTransport::BeginStep() {
  control().BeginStep();
  std::lock_guard lock(mutex_);
  failure_ = absl::OkStatus();
}

// The first failure of a step counts. Work that is under way is stopped by the
// watchdog: this may be a thread that others wait for.
void NcclTransport::Fail(const absl::Status& status, bool tell_others) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = failure_.ok();
    if (first) failure_ = status;
  }
  changed_.notify_all();
  if (first && tell_others) control().Abort(status);
}

// Ends kernels that wait for peers. Called with mutex_ held.
void NcclTransport::StopWork() {
  if (fence_ != nullptr) fence_->Abort();
  if (domain_ != nullptr) domain_->Abort();
  if (world_ != nullptr) world_->Abort();
  running_ = false;
  broken_ = true;
  changed_.notify_all();
}

absl::Status NcclTransport::CheckProgress(bool& over) {
  over = false;
  for (NcclCommunicator* communicator : {domain_.get(), world_.get()}) {
    if (communicator == nullptr) continue;
    absl::Status status = communicator->AsyncError();
    if (!status.ok()) return status;
  }
  if (!all_enqueued_) return absl::OkStatus();
  absl::StatusOr<bool> reached = ended_->Reached();
  if (!reached.ok()) return reached.status();
  over = *reached;
  return absl::OkStatus();
}

void NcclTransport::Watch() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] {
      return closing_ || (running_ && (!over_ || !failure_.ok()));
    });
    if (closing_) return;
    absl::Status status = failure_.ok() ? CheckProgress(over_) : failure_;
    if (status.ok() && !over_ && Now() > deadline_) {
      status = absl::DeadlineExceededError(
          absl::StrCat(Unfinished(), " before the deadline"));
    }
    if (status.ok()) {
      changed_.wait_for(lock, kWatchPause);
      continue;
    }
    StopWork();
    lock.unlock();
    Fail(status, true);
    lock.lock();
  }
}

// What the refit waits for. Called with mutex_ held.
std::string NcclTransport::Unfinished() {
  for (size_t i = 0; i < enqueued_count_; ++i) {
    const absl::StatusOr<bool> reached = enqueued_[i].event->Reached();
    if (reached.ok() && *reached) continue;
    std::string text = OperationText(enqueued_[i].round, enqueued_[i].first);
    if (enqueued_[i].operations > 1) {
      absl::StrAppend(&text, " and ", enqueued_[i].operations - 1,
                      " more operations");
    }
    return absl::StrCat(text, " did not end");
  }
  if (fence_ != nullptr) {
    const std::vector<int32_t> peers = fence_->Waiting();
    if (!peers.empty()) {
      return absl::StrCat(
          "direct round: ", peers.size() == 1 ? "rank " : "ranks ",
          absl::StrJoin(peers, ", "), " did not come");
    }
  }
  return "the refit did not end";
}

// Ends a collective step: it succeeds if it did on all ranks.
absl::Status NcclTransport::Agree(absl::Status mine, const char* what,
                                  Deadline deadline) {
  if (!mine.ok()) {
    control().Abort(mine);
    return mine;
  }
  return control().AllGather("", what, deadline).status();
}

std::vector<int32_t> NcclTransport::RanksOfHost(uint32_t host) const {
  std::vector<int32_t> ranks;
  for (size_t rank = 0; rank < options_.hosts.size(); ++rank) {
    if (options_.hosts[rank] == host) {
      ranks.push_back(static_cast<int32_t>(rank));
    }
  }
  return ranks;
}

NcclCommunicator* NcclTransport::CommunicatorOf(fb::Route route) {
  return route == fb::Route::kNetwork ? world_.get() : domain_.get();
}

absl::Status NcclTransport::Introduce(absl::Span<const Edge> edges,
                                      Deadline deadline,
                                      std::vector<Introduction>& all) {
  Introduction mine;
  for (const Edge& edge : edges) {
    if (edge.mechanism == fb::Mechanism::kDirect) {
      mine.uses_fence = 1;
    } else if (edge.route == fb::Route::kNetwork) {
      mine.uses_world = 1;
    } else {
      mine.uses_domain = 1;
    }
  }
  if ((mine.uses_world || mine.uses_domain) && !api_.has_value()) {
    absl::StatusOr<nccl::Api> api = nccl::Load();
    if (!api.ok()) return api.status();
    api_ = *std::move(api);
  }
  if (api_.has_value()) mine.nccl_version = api_->version;
  absl::StatusOr<std::vector<Introduction>> said = StructsOf<Introduction>(
      control().AllGather(BytesOf(mine), "connecting", deadline));
  if (!said.ok()) return said.status();
  all = *std::move(said);
  std::optional<size_t> first;
  for (size_t other = 0; other < all.size(); ++other) {
    if (all[other].nccl_version == 0) continue;
    if (!first.has_value()) first = other;
    if (all[other].nccl_version != all[*first].nccl_version) {
      return absl::FailedPreconditionError(absl::StrCat(
          "NCCL version differs: ", nccl::VersionText(all[*first].nccl_version),
          " on rank ", *first, ", ", nccl::VersionText(all[other].nccl_version),
          " on rank ", other));
    }
  }
  return absl::OkStatus();
}

// Collective over all ranks; those of `ranks` get a communicator, whose id its
// lowest rank makes.
absl::Status NcclTransport::CreateCommunicator(
    const std::vector<int32_t>& ranks, bool takes_part, Deadline deadline,
    std::unique_ptr<NcclCommunicator>& made) {
  nccl::UniqueId id = {};
  absl::Status status;
  if (takes_part && ranks.front() == rank()) {
    status = nccl::StatusOf(*api_, api_->GetUniqueId(&id), "ncclGetUniqueId",
                            nullptr);
  }
  if (!status.ok()) return Agree(status, "making an NCCL id", deadline);
  absl::StatusOr<std::vector<nccl::UniqueId>> ids = StructsOf<nccl::UniqueId>(
      control().AllGather(BytesOf(id), "making an NCCL id", deadline));
  if (!ids.ok()) return ids.status();
  if (takes_part) {
    absl::StatusOr<std::unique_ptr<NcclCommunicator>> created =
        NcclCommunicator::Create(
            *api_, (*ids)[static_cast<size_t>(ranks.front())], ranks, rank(),
            deadline, [this] { return failure(); });
    if (created.ok()) {
      std::lock_guard lock(mutex_);
      made = *std::move(created);
    }
    status = created.status();
  }
  return Agree(status, "making an NCCL communicator", deadline);
}

// NCCL connects an edge when it is first used, which takes tens of
// milliseconds and both ends. In step k every rank talks to the ranks k before
// and k after it, so that both ends of an edge come to it in the same step.
absl::Status NcclTransport::TouchEdges(NcclCommunicator& communicator,
                                       absl::Span<const Edge> edges,
                                       Deadline deadline) {
  absl::StatusOr<std::unique_ptr<DeviceMemory>> scratch =
      device().Allocate(kScratchBytes);
  if (!scratch.ok()) return scratch.status();
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream =
      device().CreateStream();
  if (!stream.ok()) return stream.status();
  absl::StatusOr<std::unique_ptr<DeviceEvent>> event = device().CreateEvent();
  if (!event.ok()) return event.status();
  const std::vector<int32_t>& ranks = communicator.ranks();
  const auto size = static_cast<int32_t>(ranks.size());
  const auto me = static_cast<int32_t>(
      std::lower_bound(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  const Interruption interruption = [this] { return failure(); };
  for (int32_t k = 1; k < size; ++k) {
    const int32_t after = ranks[static_cast<size_t>((me + k) % size)];
    const int32_t before = ranks[static_cast<size_t>((me - k + size) % size)];
    std::vector<Operation> operations;
    for (const Edge& edge : edges) {
      const bool send = edge.kind == fb::MessageKind::kSend;
      if (edge.peer != (send ? after : before)) continue;
      operations.push_back({.kind = edge.kind,
                            .peer = edge.peer,
                            .data = (*scratch)->data() + (send ? 0 : 128),
                            .size_bytes = 1});
    }
    if (operations.empty()) continue;
    absl::Status status = communicator.Exchange(operations, (*stream)->get(),
                                                deadline, interruption);
    if (!status.ok()) return status;
  }
  absl::Status status = (*event)->Record((*stream)->get());
  while (status.ok()) {
    const absl::StatusOr<bool> reached = (*event)->Reached();
    if (!reached.ok()) return reached.status();
    if (*reached) return absl::OkStatus();
    status = failure();
    if (Now() > deadline) {
      status = absl::DeadlineExceededError(
          "touching the edges did not end before the deadline");
    }
    std::this_thread::sleep_for(kWaitPause);
  }
  // The work that was enqueued uses the scratch, which is about to be freed.
  communicator.Abort();
  (void)device().Synchronize((*stream)->get());
  return status;
}

absl::Status NcclTransport::ConnectFence(absl::Span<const Edge> edges,
                                         Deadline deadline) {
  std::set<int32_t> distinct;
  for (const Edge& edge : edges) {
    if (edge.mechanism == fb::Mechanism::kDirect) distinct.insert(edge.peer);
  }
  const std::vector<int32_t> peers(distinct.begin(), distinct.end());
  std::unique_ptr<DeviceFence> fence;
  std::string exported;
  absl::Status status;
  if (!peers.empty()) {
    absl::StatusOr<std::unique_ptr<DeviceFence>> created =
        device().CreateFence(rank(), world_size());
    status = created.status();
    if (status.ok()) {
      fence = *std::move(created);
      absl::StatusOr<std::string> mine = fence->Export();
      status = mine.status();
      if (mine.ok()) exported = *std::move(mine);
    }
  }
  status = Agree(status, "making the fence", deadline);
  if (!status.ok()) return status;
  absl::StatusOr<std::vector<std::string>> theirs = control().Exchange(
      exported, peers, peers, "connecting the fence", deadline);
  if (!theirs.ok()) return theirs.status();
  if (fence != nullptr) status = fence->Connect(peers, *theirs);
  status = Agree(status, "connecting the fence", deadline);
  std::lock_guard lock(mutex_);
  fence_ = std::move(fence);
  return status;
}

absl::Status NcclTransport::ConnectAll(absl::Span<const Edge> edges,
                                       Deadline deadline) {
  std::vector<Introduction> all;
  absl::Status status = Introduce(edges, deadline, all);
  if (!status.ok()) return Agree(status, "connecting", deadline);
  const auto any = [&](const std::vector<int32_t>& ranks, auto member) {
    return std::any_of(ranks.begin(), ranks.end(), [&](int32_t r) {
      return all[static_cast<size_t>(r)].*member != 0;
    });
  };
  std::vector<int32_t> everyone(all.size());
  for (size_t r = 0; r < all.size(); ++r) {
    everyone[r] = static_cast<int32_t>(r);
  }
  // One after the other; all domains at once, since they share no rank.
  if (any(everyone, &Introduction::uses_domain)) {
    const std::vector<int32_t> ranks =
        RanksOfHost(options_.hosts[static_cast<size_t>(rank())]);
    const bool takes_part = any(ranks, &Introduction::uses_domain);
    if (takes_part && !api_.has_value()) {
      absl::StatusOr<nccl::Api> api = nccl::Load();
      if (!api.ok()) return Agree(api.status(), "loading NCCL", deadline);
      api_ = *std::move(api);
    }
    status = CreateCommunicator(ranks, takes_part, deadline, domain_);
    if (!status.ok()) return status;
  }
  if (any(everyone, &Introduction::uses_world)) {
    if (!api_.has_value()) {
      absl::StatusOr<nccl::Api> api = nccl::Load();
      if (!api.ok()) return Agree(api.status(), "loading NCCL", deadline);
      api_ = *std::move(api);
    }
    status = CreateCommunicator(everyone, true, deadline, world_);
    if (!status.ok()) return status;
  }
  for (const bool network : {false, true}) {
    NcclCommunicator* communicator = network ? world_.get() : domain_.get();
    std::vector<Edge> touched;
    for (const Edge& edge : edges) {
      if (edge.mechanism == fb::Mechanism::kStaged &&
          (edge.route == fb::Route::kNetwork) == network) {
        touched.push_back(edge);
      }
    }
    if (communicator != nullptr) {
      status = TouchEdges(*communicator, touched, deadline);
    }
    status = Agree(status, "touching the edges", deadline);
    if (!status.ok()) return status;
  }
  if (any(everyone, &Introduction::uses_fence)) {
    return ConnectFence(edges, deadline);
  }
  return absl::OkStatus();
}

absl::Status NcclTransport::Connect(const HandshakeRecord& record,
                                    absl::Span<const Edge> edges,
                                    Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    StopWork();
    domain_.reset();
    world_.reset();
    fence_.reset();
  }
  absl::Status status = Handshake(record, deadline);
  if (!status.ok()) return status;
  status = device().MakeCurrent();
  if (status.ok() && ended_ == nullptr) {
    absl::StatusOr<std::unique_ptr<DeviceEvent>> event = device().CreateEvent();
    if (event.ok()) ended_ = *std::move(event);
    status = event.status();
  }
  if (status.ok()) {
    status = ConnectAll(edges, deadline);
  } else {
    control().Abort(status);
  }
  std::lock_guard lock(mutex_);
  if (!status.ok()) {
    StopWork();
    return status;
  }
  broken_ = false;
  if (!watchdog_.joinable()) watchdog_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

absl::Status NcclTransport::Handshake(const HandshakeRecord& record,
                                      Deadline deadline) {
  BeginStep();
  absl::StatusOr<std::vector<HandshakeRecord>> records =
      StructsOf<HandshakeRecord>(
          control().AllGather(BytesOf(record), "handshake", deadline));
  return records.ok() ? CompareRecords(*records) : records.status();
}

absl::StatusOr<std::vector<std::string>> NcclTransport::Share(
    std::string_view mine, absl::Span<const int32_t> to,
    absl::Span<const int32_t> from, Deadline deadline) {
  BeginStep();
  return control().Exchange(mine, to, from, "sharing", deadline);
}

absl::Status NcclTransport::BeginRefit(Deadline deadline) {
  BeginStep();
  std::lock_guard lock(mutex_);
  if (broken_) {
    return absl::FailedPreconditionError(
        "a failed refit was aborted; Connect makes the transport whole again");
  }
  running_ = true;
  all_enqueued_ = false;
  over_ = false;
  deadline_ = deadline;
  enqueued_count_ = 0;
  changed_.notify_all();
  return absl::OkStatus();
}

absl::Status NcclTransport::Exchange(const ExchangeRound& round,
                                     Stream stream) {
  if (absl::Status s = failure(); !s.ok()) return s;
  if (absl::Status s = device().MakeCurrent(); !s.ok()) return s;
  NcclCommunicator* communicator = CommunicatorOf(round.route);
  absl::Status status = communicator->Exchange(
      round.operations, stream, deadline_, [this] { return failure(); });
  if (!status.ok()) {
    return absl::Status(
        status.code(),
        absl::StrCat(OperationText(round.index, round.operations.front()),
                     round.operations.size() > 1 ? " and others" : "", ": ",
                     status.message()));
  }
  std::lock_guard lock(mutex_);
  if (enqueued_count_ == enqueued_.size()) {
    absl::StatusOr<std::unique_ptr<DeviceEvent>> event = device().CreateEvent();
    if (!event.ok()) return event.status();
    enqueued_.emplace_back().event = *std::move(event);
  }
  Enqueued& entry = enqueued_[enqueued_count_];
  entry.round = round.index;
  entry.first = round.operations.front();
  entry.operations = round.operations.size();
  status = entry.event->Record(stream);
  ++enqueued_count_;
  return status;
}

absl::Status NcclTransport::EndRefit(Stream stream) {
  const absl::StatusOr<bool> capturing = device().IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  if (*capturing) {
    // Nothing runs yet: who replays the graph also waits for it.
    running_ = false;
    return absl::OkStatus();
  }
  absl::Status status = ended_->Record(stream);
  all_enqueued_ = status.ok();
  return status;
}

absl::Status NcclTransport::Wait() {
  std::unique_lock lock(mutex_);
  absl::Status status = failure_;
  while (running_ && !over_ && status.ok()) {
    status = CheckProgress(over_);
    if (over_ || !status.ok()) break;
    lock.unlock();
    std::this_thread::sleep_for(kWaitPause);
    lock.lock();
    status = failure_;
  }
  lock.unlock();
  if (status.ok()) {
    status = control().AllGather("", "end of refit", deadline_).status();
  }
  if (!status.ok()) Fail(status, true);
  lock.lock();
  if (failure_.ok()) {
    running_ = false;
    return absl::OkStatus();
  }
  // What is under way ends first, so that the caller may free memory.
  changed_.wait(lock, [&] { return !running_; });
  return failure_;
}

absl::StatusOr<std::unique_ptr<Transport>> CreateNcclTransport(
    NcclOptions options) {
  if (options.hosts.size() !=
      static_cast<size_t>(options.control->world_size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hosts names ", options.hosts.size(), " ranks when the world has ",
        options.control->world_size()));
  }
  return std::make_unique<NcclTransport>(std::move(options));
}

}  // namespace refit
