#include <utility>

#include "refit/control_plane.h"

namespace refit {

Meeting::Meeting(std::unique_ptr<ControlPlane> control)
    : control_(std::move(control)) {
  rendezvous_.rank = control_->rank();
  rendezvous_.world_size = control_->world_size();
}

void Meeting::OnAbort(AbortCallback callback) {
  if (control_ != nullptr) return control_->OnAbort(std::move(callback));
  on_abort_ = std::move(callback);
}

absl::Status Meeting::Meet(ControlPlane::Deadline deadline) {
  if (control_ != nullptr) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<ControlPlane>> control =
      ConnectTcp(rendezvous_, deadline);
  if (!control.ok()) return control.status();
  control_ = *std::move(control);
  control_->OnAbort(std::exchange(on_abort_, nullptr));
  return absl::OkStatus();
}

}  // namespace refit
