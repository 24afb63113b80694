// RankDigest: one rank's digests, ready to be taken again and again, all at
// once or beside a refit.
#ifndef REFIT_EXECUTOR_DIGEST_RANK_DIGEST_H_
#define REFIT_EXECUTOR_DIGEST_RANK_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/digest/arrivals.h"
#include "executor/digest/digest_parts.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/state_digest.h"

namespace refit {

class RankDigest {
 public:
  // `addresses`: of the rank's tensors, by entry of its TensorTable. Their
  // memory, plan and device must outlive the result. `arrivals`, unless null:
  // for EnqueueArrived.
  static absl::StatusOr<std::unique_ptr<RankDigest>> Create(
      const PlanFile& plan, int32_t rank, Device& device,
      absl::Span<std::byte* const> addresses, std::vector<DigestBox> boxes,
      const Arrivals* arrivals = nullptr);

  const std::vector<DigestBox>& boxes() const { return boxes_; }
  const std::vector<DigestPart>& parts() const { return parts_; }

  // Enqueues the digests of what the tensors hold when `stream` comes to this
  // point.
  absl::Status Enqueue(Stream stream);

  // The same in steps, beside a refit: first Restart, then EnqueueArrived as
  // bytes come, then EnqueueRest.
  absl::Status Restart(Stream stream);
  // By step: after how many arrivals it may begin, ascending.
  absl::Span<const size_t> due() const { return begins_after_; }
  // Enqueues the steps that are whole after so many arrivals and were not
  // enqueued, on a part of a GPU.
  absl::Status EnqueueArrived(size_t arrivals, Stream stream);
  // Enqueues what is not begun then, on all of the GPU. `stream` may be another
  // than that of the steps; Read comes after both.
  absl::Status EnqueueRest(Stream stream);

  // The sum of each part, of the digests enqueued last. Their stream is at its
  // end.
  absl::StatusOr<std::vector<uint64_t>> Read();

 private:
  RankDigest(Device& device, std::vector<DigestBox> boxes)
      : device_(device), boxes_(std::move(boxes)) {}

  Device& device_;
  const std::vector<DigestBox> boxes_;
  std::vector<DigestPart> parts_;
  std::vector<size_t> begins_after_;  // due()
  size_t enqueued_ = 0;               // steps, since Restart
  // DigestSum by part, then what is begun by step.
  std::unique_ptr<DeviceMemory> sums_;
  std::unique_ptr<DeviceStream> stream_;  // that reads them
  std::unique_ptr<PreparedCopies> batches_;
};

// The sums of `digest` by param and dtype, in the plan's order.
std::vector<ParamDigest> ParamDigests(const PlanFile& plan,
                                      const RankDigest& digest,
                                      absl::Span<const uint64_t> sums);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DIGEST_RANK_DIGEST_H_
