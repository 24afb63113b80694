#include "refit/ucx_transport.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/compared_structs.h"
#include "executor/transport/handshake.h"
#include "executor/transport/last_words.h"
#include "executor/transport/ucx_api.h"
#include "executor/transport/ucx_worker.h"

namespace refit {
namespace {

// An error of UCX is mostly a trace of what befell a peer. The control plane
// knows that better, and has so much time to tell.
constexpr std::chrono::milliseconds kOthersWord(1000);

}  // namespace

// The rank's thread does all the work. Others only fail the step it is in: its
// own, by Abort, or the control plane's, when it hears of another rank's end.
class UcxTransport : public Transport {
 public:
  UcxTransport(Meeting meeting, std::unique_ptr<WakeSignal> wake)
      : wake_(std::move(wake)), meeting_(std::move(meeting)) {
    meeting_.OnAbort(
        [this](uint64_t step, const absl::Status& s) { Hear(step, s); });
  }

  int32_t rank() const override { return meeting_.rank(); }
  int32_t world_size() const override { return meeting_.world_size(); }
  bool ReachesPeerMemory() const override { return false; }
  absl::Status Connect(const HandshakeRecord& record,
                       absl::Span<const Edge> edges,
                       Deadline deadline) override;
  absl::Status Handshake(const HandshakeRecord& record,
                         Deadline deadline) override;
  bool TakeMissedStep() override { return meeting_.TakeMissedStep(); }
  absl::StatusOr<std::vector<std::string>> ExchangeBytes(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, Deadline deadline) override;
  Fence* fence() override { return nullptr; }
  absl::Status BeginRefit(Deadline deadline, bool is_captured) override;
  absl::Status Exchange(const ExchangeRound& round, Stream stream) override;
  absl::Status EndRefit(Stream stream) override;
  // Every call above returns when its work is done.
  absl::Status Wait() override { return absl::OkStatus(); }
  void Abort(const absl::Status& status) override;
  void TakeLinks(Transport& earlier) override;
  absl::Status Leave() override {
    meeting_.Close();
    return absl::OkStatus();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  ControlPlane& control() { return meeting_.control(); }
  void BeginStep(StepPurpose purpose = StepPurpose::kOther);
  void Hear(uint64_t step, const absl::Status& status);
  absl::Status failure();
  absl::Status Fail(const absl::Status& status);
  absl::Status FailByUcx(const absl::Status& status);
  absl::Status CompareServing(const char* what, Deadline deadline);
  // With mutex_ held, which it lets go of meanwhile.
  void Tell(Lock& lock, const absl::Status& status);

  absl::Status CheckEdges(absl::Span<const Edge> edges) const;
  absl::Status AgreeOnVersion(bool takes_part, Deadline deadline);
  absl::Status MeetPeers(const std::vector<int32_t>& peers, Deadline deadline);
  absl::Status TouchEdges(absl::Span<const Edge> edges, Deadline deadline);

  const std::unique_ptr<WakeSignal> wake_;
  std::optional<ucx::Api> api_;
  // Null until Connect, on a rank without edges, and if a failed refit broke
  // it.
  std::unique_ptr<UcxWorker> worker_;
  bool is_met_ = false;  // the last Connect with worker_ succeeded
  // The last that this rank did was a Connect or a refit, and succeeded.
  bool is_whole_ = false;
  Deadline deadline_;  // of the refit

  std::mutex mutex_;
  std::condition_variable changed_;
  // All below is guarded by mutex_.
  uint64_t step_ = 0;           // this rank is in
  bool between_steps_ = false;  // nobody may fail then
  absl::Status failure_;        // of the step
  // All ranks are asked whether the refit is over: what they answer together is
  // how it ended, whoever fails meanwhile.
  bool deciding_ = false;
  int telling_ = 0;  // threads that are telling the others
  // What the control plane said last; it may be ahead of step_.
  uint64_t heard_step_ = 0;
  absl::Status heard_;

  // Destroyed before anything that its callback touches.
  Meeting meeting_;
};

absl::Status UcxTransport::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

// A failure is told in the step that it is of.
void UcxTransport::BeginStep(StepPurpose purpose) {
  {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return telling_ == 0; });
    between_steps_ = true;
  }
  const uint64_t step = control().BeginStep(purpose);
  {
    std::lock_guard lock(mutex_);
    step_ = step;
    between_steps_ = false;
    failure_ = heard_step_ == step ? heard_ : absl::OkStatus();
  }
  changed_.notify_all();
}

void UcxTransport::Hear(uint64_t step, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    heard_step_ = step;
    heard_ = status;
    // A later step's is taken up by BeginStep.
    if (step == step_ && !between_steps_ && !deciding_ && failure_.ok()) {
      failure_ = status;
    }
  }
  changed_.notify_all();
  wake_->Set();
}

void UcxTransport::Tell(Lock& lock, const absl::Status& status) {
  ++telling_;
  lock.unlock();
  control().Abort(status);
  lock.lock();
  --telling_;
  changed_.notify_all();
}

void UcxTransport::Abort(const absl::Status& status) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !between_steps_; });
  // The control plane's word counts for all ranks, here too.
  if (!deciding_) {
    if (!failure_.ok()) return;
    failure_ = status;
    wake_->Set();
  }
  Tell(lock, status);
}

// The refit ends here: the others are told, and nothing of it is under way
// after that. The first failure of a step counts, and is what this returns.
absl::Status UcxTransport::Fail(const absl::Status& status) {
  Lock lock(mutex_);
  if (failure_.ok()) {
    failure_ = status;
    Tell(lock, status);
  }
  const absl::Status failure = failure_;
  lock.unlock();
  if (worker_ != nullptr && !worker_->End()) worker_.reset();
  return failure;
}

absl::Status UcxTransport::FailByUcx(const absl::Status& status) {
  Lock lock(mutex_);
  if (absl::IsUnavailable(status)) {
    changed_.wait_for(lock, kOthersWord, [&] { return !failure_.ok(); });
  }
  lock.unlock();
  return Fail(status);
}

absl::Status UcxTransport::Connect(const HandshakeRecord& record,
                                   absl::Span<const Edge> edges,
                                   Deadline deadline) {
  absl::Status status = meeting_.Meet(deadline);
  if (!status.ok()) return status;
  is_whole_ = false;
  // A worker whose peers may not have met it has to go.
  if (!is_met_) worker_.reset();
  status = Handshake(record, deadline);
  if (!status.ok()) return status;
  std::set<int32_t> distinct;
  for (const Edge& edge : edges) distinct.insert(edge.peer);
  const std::vector<int32_t> peers(distinct.begin(), distinct.end());
  status = CheckEdges(edges);
  if (!status.ok()) return Fail(status);
  status = AgreeOnVersion(!peers.empty(), deadline);
  if (!status.ok()) return status;
  status = MeetPeers(peers, deadline);
  if (!status.ok()) return Fail(status);
  status = TouchEdges(edges, deadline);
  if (!status.ok()) return status;
  status = CompareServing("touching the edges", deadline);
  if (!status.ok()) return Fail(status);
  is_whole_ = is_met_ = true;
  return absl::OkStatus();
}

absl::Status UcxTransport::CheckEdges(absl::Span<const Edge> edges) const {
  for (const Edge& edge : edges) {
    if (edge.peer >= 0 && edge.peer < world_size()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "peer ", edge.peer, " is not one of the ", world_size(), " ranks"));
  }
  return absl::OkStatus();
}

// Loads UCX on the ranks that take part, and compares its versions there.
absl::Status UcxTransport::AgreeOnVersion(bool takes_part, Deadline deadline) {
  if (takes_part && !api_.has_value()) {
    absl::StatusOr<ucx::Api> api = ucx::Load();
    if (!api.ok()) return Fail(api.status());
    api_ = *std::move(api);
  }
  const uint32_t mine = takes_part ? api_->version : 0;
  auto versions = CompareStructs(control(), mine, "loading UCX", deadline);
  if (!versions.ok()) return Fail(versions.status());
  std::erase_if(*versions, [](const auto& v) { return v.value == 0; });
  if (versions->size() <= 1) return absl::OkStatus();
  const auto text = [](const OfRank<uint32_t>& version) {
    return absl::StrCat(ucx::VersionText(version.value), " on rank ",
                        version.rank);
  };
  return Fail(absl::FailedPreconditionError(
      absl::StrCat("UCX version differs: ", text((*versions)[0]), ", ",
                   text((*versions)[1]))));
}

absl::Status UcxTransport::MeetPeers(const std::vector<int32_t>& peers,
                                     Deadline deadline) {
  std::string mine;
  if (peers.empty()) {
    worker_.reset();
  } else {
    if (worker_ == nullptr) {
      absl::StatusOr<std::unique_ptr<UcxWorker>> worker =
          UcxWorker::Create(*api_, peers.size());
      if (!worker.ok()) return worker.status();
      worker_ = *std::move(worker);
    }
    is_met_ = false;
    absl::StatusOr<std::string> told = worker_->Introduce(rank(), *wake_);
    if (!told.ok()) return told.status();
    mine = *std::move(told);
  }
  const absl::StatusOr<std::vector<std::string>> introductions =
      control().Exchange(mine, peers, peers, "UCX addresses", deadline);
  if (!introductions.ok() || worker_ == nullptr) return introductions.status();
  return worker_->Meet(peers, *introductions);
}

void UcxTransport::TakeLinks(Transport& earlier) {
  auto* const ucx = dynamic_cast<UcxTransport*>(&earlier);
  if (ucx == nullptr) return;
  worker_ = std::move(ucx->worker_);
  is_met_ = ucx->is_met_;
}

// UCX connects an edge when it is first used.
absl::Status UcxTransport::TouchEdges(absl::Span<const Edge> edges,
                                      Deadline deadline) {
  if (edges.empty()) return absl::OkStatus();
  std::byte sent{};
  std::vector<std::byte> received(edges.size());
  std::vector<Operation> operations;
  for (size_t i = 0; i < edges.size(); ++i) {
    const bool send = edges[i].kind == fb::MessageKind::kSend;
    operations.push_back({.kind = edges[i].kind,
                          .peer = edges[i].peer,
                          .data = send ? &sent : &received[i],
                          .size_bytes = 1});
  }
  const auto interruption = [this] { return failure(); };
  const UcxWorker::Failure touched =
      worker_->Exchange(operations, deadline, interruption);
  if (!touched.status.ok()) {
    const Operation& operation = operations[touched.operation];
    return FailByUcx(InPlace(
        touched.status,
        absl::StrCat("touching the edge ",
                     operation.kind == fb::MessageKind::kSend ? "to" : "from",
                     " rank ", operation.peer)));
  }
  const absl::Status status = worker_->Flush(deadline, interruption);
  return status.ok() ? status : FailByUcx(status);
}

absl::Status UcxTransport::Handshake(const HandshakeRecord& record,
                                     Deadline deadline) {
  BeginStep(PurposeOf(record.stage));
  const auto records =
      CompareStructs(control(), record, NameOf(record.stage), deadline);
  return records.ok() ? CompareRecords(*records) : records.status();
}

absl::StatusOr<std::vector<std::string>> UcxTransport::ExchangeBytes(
    std::string_view mine, absl::Span<const int32_t> to,
    absl::Span<const int32_t> from, Deadline deadline) {
  BeginStep();
  return control().Exchange(mine, to, from, "sharing", deadline);
}

absl::Status UcxTransport::BeginRefit(Deadline deadline, bool) {
  BeginStep(StepPurpose::kRefit);
  deadline_ = deadline;
  if (!is_whole_) {
    return absl::FailedPreconditionError(
        "the transport is not connected, or a refit failed since: Connect "
        "makes it whole");
  }
  is_whole_ = false;
  const absl::Status status = failure();
  return status.ok() ? status : Fail(status);
}

absl::Status UcxTransport::Exchange(const ExchangeRound& round, Stream) {
  if (round.operations.empty()) return absl::OkStatus();
  const auto in_place = [&](const absl::Status& status, size_t operation) {
    return InPlace(status,
                   OperationText(round.index, round.operations[operation]));
  };
  if (worker_ == nullptr) {
    return Fail(in_place(
        absl::FailedPreconditionError("Connect was given no edge to this rank"),
        0));
  }
  const UcxWorker::Failure failed = worker_->Exchange(
      round.operations, deadline_, [this] { return failure(); });
  if (failed.status.ok()) return absl::OkStatus();
  const absl::Status mine = in_place(failed.status, failed.operation);
  const absl::Status status = FailByUcx(mine);
  // Another's words, with where this rank was.
  return status == mine ? status : in_place(status, failed.operation);
}

absl::Status UcxTransport::EndRefit(Stream) {
  absl::Status status = failure();
  if (status.ok() && worker_ != nullptr) {
    status = worker_->Flush(deadline_, [this] { return failure(); });
  }
  if (!status.ok()) return FailByUcx(status);
  {
    std::lock_guard lock(mutex_);
    deciding_ = true;
  }
  status = CompareServing("end of refit", Later(deadline_, kLastWords));
  {
    std::lock_guard lock(mutex_);
    deciding_ = false;
  }
  if (!status.ok()) return Fail(status);
  is_whole_ = true;
  return absl::OkStatus();
}

// Waits for all ranks, and answers peers meanwhile.
absl::Status UcxTransport::CompareServing(const char* what, Deadline deadline) {
  const auto compare = [&] {
    return control().Compare("", what, deadline).status();
  };
  return worker_ == nullptr ? compare() : worker_->ServeDuring(compare);
}

absl::StatusOr<std::unique_ptr<Transport>> CreateUcxTransport(Meeting meeting) {
  absl::StatusOr<std::unique_ptr<WakeSignal>> wake = WakeSignal::Create();
  if (!wake.ok()) return wake.status();
  return std::make_unique<UcxTransport>(std::move(meeting), *std::move(wake));
}

}  // namespace refit
