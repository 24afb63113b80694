#include "executor/meeting_transport.h"

#include <utility>

#include "refit/nccl_transport.h"
#include "refit/ucx_transport.h"

namespace refit {
namespace {

class MeetingTransport : public Transport {
 public:
  MeetingTransport(TcpRendezvous rendezvous, Wire wire, Device* device,
                   std::vector<uint32_t> hosts)
      : rendezvous_(std::move(rendezvous)),
        wire_(wire),
        device_(device),
        hosts_(std::move(hosts)) {}

  int32_t rank() const override { return rendezvous_.rank; }
  int32_t world_size() const override { return rendezvous_.world_size; }

  absl::Status Connect(const HandshakeRecord& record,
                       absl::Span<const Edge> edges,
                       Deadline deadline) override {
    if (absl::Status s = Meet(deadline); !s.ok()) return s;
    return met_->Connect(record, edges, deadline);
  }

  // An executor calls these only after a Connect.
  absl::Status Handshake(const HandshakeRecord& record,
                         Deadline deadline) override {
    return met_->Handshake(record, deadline);
  }
  absl::StatusOr<std::vector<std::string>> Share(std::string_view mine,
                                                 absl::Span<const int32_t> to,
                                                 absl::Span<const int32_t> from,
                                                 Deadline deadline) override {
    return met_->Share(mine, to, from, deadline);
  }
  // Asked before the ranks meet.
  bool ReachesPeerMemory() const override { return wire_ == Wire::kNccl; }
  Fence* fence() override { return met_->fence(); }
  std::vector<std::string> notices() const override {
    return met_ == nullptr ? std::vector<std::string>() : met_->notices();
  }
  void BeginRecording() override { met_->BeginRecording(); }
  void BeginCapture() override { met_->BeginCapture(); }
  void OnBreak(std::function<void()> callback) override {
    on_break_ = std::move(callback);
  }
  absl::Status BeginRefit(Deadline deadline) override {
    return met_->BeginRefit(deadline);
  }
  absl::Status Exchange(const ExchangeRound& round, Stream stream) override {
    return met_->Exchange(round, stream);
  }
  void Replay() override { met_->Replay(); }
  absl::Status EndRefit(Stream stream) override {
    return met_->EndRefit(stream);
  }
  absl::Status AwaitOwnEnd() override { return met_->AwaitOwnEnd(); }
  absl::Status Wait() override { return met_->Wait(); }
  void Abort(const absl::Status& status) override { met_->Abort(status); }

 private:
  absl::Status Meet(Deadline deadline) {
    if (met_ != nullptr) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<ControlPlane>> control =
        ConnectTcp(rendezvous_, deadline);
    if (!control.ok()) return control.status();
    absl::StatusOr<std::unique_ptr<Transport>> met =
        wire_ == Wire::kUcx
            ? CreateUcxTransport(*std::move(control))
            : CreateNcclTransport({.device = device_,
                                   .control = *std::move(control),
                                   .hosts = hosts_});
    if (!met.ok()) return met.status();
    met_ = *std::move(met);
    met_->OnBreak(on_break_);
    return absl::OkStatus();
  }

  const TcpRendezvous rendezvous_;
  const Wire wire_;
  Device* const device_;
  const std::vector<uint32_t> hosts_;
  std::function<void()> on_break_;
  std::unique_ptr<Transport> met_;
};

}  // namespace

std::unique_ptr<Transport> CreateMeetingTransport(TcpRendezvous rendezvous,
                                                  Wire wire, Device* device,
                                                  std::vector<uint32_t> hosts) {
  return std::make_unique<MeetingTransport>(std::move(rendezvous), wire, device,
                                            std::move(hosts));
}

}  // namespace refit
