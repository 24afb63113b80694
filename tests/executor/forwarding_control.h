// A control plane that does what another one does, for tests to change a call.
#ifndef REFIT_TESTS_EXECUTOR_FORWARDING_CONTROL_H_
#define REFIT_TESTS_EXECUTOR_FORWARDING_CONTROL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "refit/control_plane.h"

namespace refit {

class ForwardingControl : public ControlPlane {
 public:
  explicit ForwardingControl(std::unique_ptr<ControlPlane> inner)
      : inner_(std::move(inner)) {}
  int32_t rank() const override { return inner_->rank(); }
  int32_t world_size() const override { return inner_->world_size(); }
  uint64_t BeginStep(StepPurpose purpose) override {
    return inner_->BeginStep(purpose);
  }
  bool TakeMissedStep() override { return inner_->TakeMissedStep(); }
  absl::StatusOr<std::vector<OfRank<std::string>>> Compare(
      std::string_view mine, std::string_view what,
      Deadline deadline) override {
    return inner_->Compare(mine, what, deadline);
  }
  absl::StatusOr<std::vector<std::string>> Exchange(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, std::string_view what,
      Deadline deadline) override {
    return inner_->Exchange(mine, to, from, what, deadline);
  }
  void Abort(const absl::Status& status) override { inner_->Abort(status); }
  void OnAbort(
      std::function<void(uint64_t, const absl::Status&)> callback) override {
    inner_->OnAbort(std::move(callback));
  }

 private:
  const std::unique_ptr<ControlPlane> inner_;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_FORWARDING_CONTROL_H_
