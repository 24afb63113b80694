// Plans and what they say of a rank.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "executor/c_api/objects.h"
#include "executor/c_api/status.h"
#include "plan/schedule/tensor_table.h"

namespace refit {

static_assert(REFIT_DTYPE_BF16 == static_cast<int>(DType::kBf16));
static_assert(REFIT_DTYPE_FP32 == static_cast<int>(DType::kFp32));
static_assert(REFIT_DTYPE_FP8_E5M2 == static_cast<int>(DType::MAX));

absl::Status CheckRank(const refit_plan& plan, int32_t rank) {
  if (rank >= 0 && rank < plan.file->world_size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " is not one of the plan's ",
                   plan.file->world_size(), " ranks"));
}

namespace {

absl::Status OpenPlan(const char* path, refit_plan*& plan) {
  absl::StatusOr<PlanFile> file = PlanFile::Open(path);
  if (!file.ok()) return file.status();
  auto made = std::make_unique<refit_plan>();
  made->file = std::make_shared<const PlanFile>(*std::move(file));
  if (const fb::Digest* digest = made->file->plan().body_digest()) {
    made->digest = DigestText(*digest);
  }
  plan = made.release();
  return absl::OkStatus();
}

void VisitTensors(const PlanFile& plan, int32_t rank,
                  refit_tensor_visitor visit, void* context) {
  const TensorTable table(plan, rank);
  for (size_t slot = 0; slot < table.workers_stacks(); ++slot) {
    const fb::Buffer& buffer = table.buffer(slot);
    std::vector<uint64_t> shape;
    if (buffer.shape() != nullptr) {
      shape.assign(buffer.shape()->begin(), buffer.shape()->end());
    }
    refit_tensor tensor = {};
    tensor.struct_size = sizeof(tensor);
    tensor.size_bytes = TensorElements(buffer) * DTypeBytes(buffer.dtype());
    tensor.shape = shape.data();
    tensor.dimensions = shape.size();
    tensor.dtype = static_cast<refit_dtype>(buffer.dtype());
    const uint64_t tensors = table.begin(slot + 1) - table.begin(slot);
    for (uint64_t ordinal = 0; ordinal < tensors; ++ordinal) {
      const std::string name = table.Name(slot, ordinal);
      tensor.name = name.c_str();
      visit(&tensor, context);
    }
  }
}

}  // namespace
}  // namespace refit

using refit::Guarded;

refit_status* refit_plan_open(const char* path, refit_plan** plan) {
  return Guarded(plan, "plan", {{"path", path}},
                 [&] { return refit::OpenPlan(path, *plan); });
}

void refit_plan_free(refit_plan* plan) { delete plan; }

int32_t refit_plan_world_size(const refit_plan* plan) {
  return plan->file->world_size();
}

int32_t refit_plan_source_ranks(const refit_plan* plan) {
  return plan->file->source_ranks();
}

const char* refit_plan_digest(const refit_plan* plan) {
  return plan->digest.c_str();
}

refit_status* refit_plan_staging_bytes(const refit_plan* plan, int32_t rank,
                                       uint64_t* staging_bytes) {
  return Guarded({{"plan", plan}, {"staging_bytes", staging_bytes}}, [&] {
    const absl::Status status = refit::CheckRank(*plan, rank);
    if (status.ok()) {
      *staging_bytes =
          plan->file->body().programs()->Get(rank)->staging_bytes();
    }
    return status;
  });
}

refit_status* refit_plan_visit_tensors(const refit_plan* plan, int32_t rank,
                                       refit_tensor_visitor visit,
                                       void* context) {
  return Guarded(
      {{"plan", plan}, {"visit", reinterpret_cast<const void*>(visit)}}, [&] {
        const absl::Status status = refit::CheckRank(*plan, rank);
        if (status.ok()) refit::VisitTensors(*plan->file, rank, visit, context);
        return status;
      });
}
