#include "refit/ucx_transport.h"

#include <algorithm>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/transport/last_words.h"
#include "executor/transport/supervised_transport.h"
#include "executor/transport/ucx_api.h"
#include "executor/transport/ucx_worker.h"

namespace refit {
namespace {

// An error of UCX is mostly a trace of what befell a peer. The control plane
// knows that better, and has so much time to tell.
constexpr std::chrono::milliseconds kOthersWord(1000);
constexpr std::chrono::milliseconds kWordPause(1);

}  // namespace

// The rank's thread does all the work, so that the supervisor needs none.
class UcxTransport : public SupervisedTransport {
 public:
  UcxTransport(Meeting meeting, std::unique_ptr<WakeSignal> wake)
      : SupervisedTransport(
            std::move(meeting),
            {.probe = [](bool is_enqueued) { return is_enqueued; },
             .stop =
                 [this](bool) {
                   EndWorker();
                   return absl::OkStatus();
                 },
             .device_failure = [] { return absl::OkStatus(); },
             // An abort may come before `wake_` is made.
             .wake = [signal = wake.get()] { signal->Set(); }}),
        wake_(std::move(wake)) {}
  ~UcxTransport() override { (void)UcxTransport::Leave(); }

  bool ReachesPeerMemory() const override { return false; }
  absl::Status Connect(const HandshakeRecord& record,
                       absl::Span<const Edge> edges,
                       Deadline deadline) override;
  Fence* fence() override { return nullptr; }
  absl::Status BeginRefit(Deadline deadline, bool is_captured) override;
  absl::Status Exchange(const ExchangeRound& round, Stream stream) override;
  absl::Status EndRefit(Stream stream) override;
  absl::Status Settle(const absl::Status& status, Stream) override {
    (void)supervisor_.Fail(status);
    return status;
  }
  // Every call above returns when its work is done.
  absl::Status Wait() override { return absl::OkStatus(); }
  void TakeLinks(Transport& earlier) override;
  absl::Status Leave() override {
    supervisor_.Close();
    meeting_.Close();
    return absl::OkStatus();
  }

 private:
  absl::Status AwaitOthersWord(const absl::Status& status);
  absl::Status CompareServing(const char* what, Deadline deadline);
  void EndWorker() {
    if (worker_ != nullptr && !worker_->End()) worker_.reset();
  }
  Interruption Failed() {
    return [this] { return supervisor_.failure(); };
  }

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
  Deadline deadline_;    // of the refit
};

// `status`, after which a failure of the step may be heard that says more.
absl::Status UcxTransport::AwaitOthersWord(const absl::Status& status) {
  const Deadline limit = std::chrono::steady_clock::now() + kOthersWord;
  while (absl::IsUnavailable(status) && supervisor_.failure().ok() &&
         std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(kWordPause);
  }
  const absl::Status failure = supervisor_.failure();
  return failure.ok() ? status : failure;
}

absl::Status UcxTransport::Connect(const HandshakeRecord& record,
                                   absl::Span<const Edge> edges,
                                   Deadline deadline) {
  absl::Status status = meeting_.Meet(deadline);
  if (status.ok()) status = supervisor_.Disconnect(deadline);
  if (!status.ok()) return status;
  // A worker whose peers may not have met it has to go.
  if (!is_met_) worker_.reset();
  status = Handshake(record, deadline);
  if (!status.ok()) return status;
  std::set<int32_t> distinct;
  for (const Edge& edge : edges) distinct.insert(edge.peer);
  const std::vector<int32_t> peers(distinct.begin(), distinct.end());
  status = CheckEdges(edges);
  if (status.ok()) status = AgreeOnVersion(!peers.empty(), deadline);
  if (status.ok()) status = MeetPeers(peers, deadline);
  if (status.ok()) status = TouchEdges(edges, deadline);
  if (status.ok()) status = CompareServing("touching the edges", deadline);
  if (!status.ok()) {
    status = AwaitOthersWord(status);
    if (supervisor_.failure().ok()) control().Abort(status);
    EndWorker();
    return status;
  }
  is_met_ = true;
  supervisor_.Connected();
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
    if (!api.ok()) return api.status();
    api_ = *std::move(api);
  }
  const uint32_t mine = takes_part ? api_->version : 0;
  auto versions = CompareStructs(control(), mine, "loading UCX", deadline);
  if (!versions.ok()) return versions.status();
  std::erase_if(*versions, [](const auto& v) { return v.value == 0; });
  if (versions->size() <= 1) return absl::OkStatus();
  const auto text = [](const OfRank<uint32_t>& version) {
    return absl::StrCat(ucx::VersionText(version.value), " on rank ",
                        version.rank);
  };
  return absl::FailedPreconditionError(
      absl::StrCat("UCX version differs: ", text((*versions)[0]), ", ",
                   text((*versions)[1])));
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
  const UcxWorker::Failure touched =
      worker_->Exchange(operations, deadline, Failed());
  if (!touched.status.ok()) {
    const Operation& operation = operations[touched.operation];
    return InPlace(
        touched.status,
        absl::StrCat("touching the edge ",
                     operation.kind == fb::MessageKind::kSend ? "to" : "from",
                     " rank ", operation.peer));
  }
  return worker_->Flush(deadline, Failed());
}

absl::Status UcxTransport::BeginRefit(Deadline deadline, bool) {
  return supervisor_.BeginRefit(/*is_captured=*/false,
                                [&] { deadline_ = deadline; });
}

absl::Status UcxTransport::Exchange(const ExchangeRound& round, Stream) {
  if (round.operations.empty()) return absl::OkStatus();
  const auto in_place = [&](const absl::Status& status, size_t operation) {
    return InPlace(status,
                   OperationText(round.index, round.operations[operation]));
  };
  if (worker_ == nullptr) {
    return supervisor_.Fail(in_place(
        absl::FailedPreconditionError("Connect was given no edge to this rank"),
        0));
  }
  const UcxWorker::Failure failed =
      worker_->Exchange(round.operations, deadline_, Failed());
  if (failed.status.ok()) return absl::OkStatus();
  const absl::Status mine = in_place(failed.status, failed.operation);
  const absl::Status status = supervisor_.Fail(AwaitOthersWord(mine));
  // Another's words, with where this rank was.
  return status == mine ? status : in_place(status, failed.operation);
}

absl::Status UcxTransport::EndRefit(Stream) {
  absl::Status status = supervisor_.failure();
  if (status.ok() && worker_ != nullptr) {
    status = worker_->Flush(deadline_, Failed());
  }
  if (!status.ok()) return supervisor_.Fail(AwaitOthersWord(status));
  status = supervisor_.EndRefit([] { return absl::OkStatus(); });
  if (!status.ok()) return status;
  return supervisor_.Wait([this] {
    return CompareServing("end of refit", Later(deadline_, kLastWords));
  });
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
