// SupervisedTransport: what transports of ranks that are processes do alike.
#ifndef REFIT_EXECUTOR_TRANSPORT_SUPERVISED_TRANSPORT_H_
#define REFIT_EXECUTOR_TRANSPORT_SUPERVISED_TRANSPORT_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/compared_structs.h"
#include "executor/transport/handshake.h"
#include "executor/transport/refit_supervisor.h"
#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

// The ranks meet at a control plane, which says in which step they are, and the
// supervisor knows how this rank's refit is.
class SupervisedTransport : public Transport {
 public:
  int32_t rank() const override { return meeting_.rank(); }
  int32_t world_size() const override { return meeting_.world_size(); }
  absl::Status Handshake(const HandshakeRecord& record,
                         Deadline deadline) override {
    if (absl::Status s = supervisor_.Enter(deadline, PurposeOf(record.stage));
        !s.ok()) {
      return s;
    }
    const auto records =
        CompareStructs(control(), record, NameOf(record.stage), deadline);
    return records.ok() ? CompareRecords(*records) : records.status();
  }
  bool TakeMissedStep() override { return meeting_.TakeMissedStep(); }
  absl::StatusOr<std::vector<std::string>> ExchangeBytes(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, Deadline deadline) override {
    if (absl::Status s = supervisor_.Enter(deadline); !s.ok()) return s;
    return control().Exchange(mine, to, from, "sharing", deadline);
  }
  void Abort(const absl::Status& status) override { supervisor_.Abort(status); }

 protected:
  // `actions` without those of the control plane. Whoever derives from this
  // closes both, the supervisor first, before what the actions use is gone.
  SupervisedTransport(Meeting meeting, RefitSupervisor::Actions actions)
      : meeting_(std::move(meeting)), supervisor_([&] {
          actions.begin_step = [this](StepPurpose purpose) {
            return control().BeginStep(purpose);
          };
          actions.tell = [this](const absl::Status& s) { control().Abort(s); };
          return std::move(actions);
        }()) {
    meeting_.OnAbort([this](uint64_t step, const absl::Status& s) {
      supervisor_.Hear(step, s);
    });
  }

  ControlPlane& control() const { return meeting_.control(); }

  Meeting meeting_;
  RefitSupervisor supervisor_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_SUPERVISED_TRANSPORT_H_
