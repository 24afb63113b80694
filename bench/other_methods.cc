#include "bench/other_methods.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

bool HasStagedRounds(const PlanFile& plan) {
  for (const fb::Round* round : *plan.body().rounds()) {
    if (round->mechanism() == fb::Mechanism::kStaged) return true;
  }
  return false;
}

absl::Status FindM2n(const PlanFile& plan, bool one_rank, OtherMethods& found) {
  if (!one_rank) {
    return absl::FailedPreconditionError(
        "nccl_m2n needs a process for each rank: start them with --one-rank");
  }
  absl::StatusOr<std::vector<M2nTensor>> tensors = M2nTensors(plan);
  if (!tensors.ok()) return tensors.status();
  found.m2n_tensors = *std::move(tensors);
  const absl::StatusOr<m2n::Api> api = m2n::Load(found.nccl);
  if (!api.ok()) return api.status();
  found.m2n = *api;
  return absl::OkStatus();
}

absl::Status FindWindows(const PlanFile& plan, OtherMethods& found) {
  if (!HasStagedRounds(plan)) {
    return absl::FailedPreconditionError(
        "the plan has no staged messages; \"options\": {\"peer\": \"staged\"} "
        "in the job makes some");
  }
  if (plan.body().colocated()) {
    return absl::UnimplementedError(
        "NCCL needs a GPU for each rank, and this plan's ranks share GPUs");
  }
  const absl::StatusOr<nccl::WindowApi> windows =
      nccl::LoadWindowApi(found.nccl);
  if (!windows.ok()) return windows.status();
  found.windows = *windows;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OtherMethods> FindOtherMethods(
    const PlanFile& plan, absl::Span<const std::string> names, bool one_rank) {
  const absl::StatusOr<nccl::Api> nccl = nccl::Load();
  if (!nccl.ok()) return nccl.status();
  OtherMethods found;
  found.nccl = *nccl;
  for (const std::string& name : names) {
    absl::Status status;
    if (name == "nccl_m2n" || name == "nccl_m2n_groups") {
      (name == "nccl_m2n" ? found.m2n_calls : found.m2n_groups) = true;
      status = FindM2n(plan, one_rank, found);
    } else if (name == "windows") {
      status = FindWindows(plan, found);
    } else {
      status = absl::InvalidArgumentError(
          absl::StrCat("no method \"", name,
                       "\"; wanted nccl_m2n, nccl_m2n_groups or windows"));
    }
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("--against: ", status.message()));
    }
  }
  return found;
}

}  // namespace refit
