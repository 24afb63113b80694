// StateCheck: whether every destination rank holds after a refit what the
// source holds.
//
//   each rank    digests the regions that it holds        on its device:
//                a source beside the rounds, a destination what has arrived
//                beside later rounds, scratch when that is quantized
//   all to 0     a sum for each region                    sources' parts add up
//   0 to all     which destination ranks' regions differ
//   only if any: the same again by param, so that the error can name these
//
// A region is a box of a param that some destination rank holds. Replicas are
// compared one by one, because each has sums of its own. What a source
// quantizes is compared as it is afterwards, what a destination quantizes as it
// arrives.
#ifndef REFIT_EXECUTOR_DIGEST_STATE_CHECK_H_
#define REFIT_EXECUTOR_DIGEST_STATE_CHECK_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/digest/rank_digest.h"
#include "executor/time_sum.h"
#include "plan/plan_file.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/steps.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

class StateCheck {
 public:
  // As RankDigest::Create. `schedule`: of the rank. `arrivals`: ListArrivals'.
  static absl::StatusOr<std::unique_ptr<StateCheck>> Create(
      const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
      Device& device, absl::Span<std::byte* const> addresses,
      Arrivals arrivals);

  // What a refit does of the check beside its rounds. Valid as long as this.
  StepDigests digests() const {
    return {.reports = arrivals_.reports, .due = due_};
  }
  // The lane of these digests.
  Stream stream() const { return stream_->get(); }
  // First Begin on the stream of the refit, then EnqueueArrived as bytes come,
  // behind them, then EnqueueRest on the stream of the refit: all of the GPU
  // does what is not begun then. Tensors may change behind both.
  absl::Status Begin(Stream stream);
  absl::Status EnqueueArrived(size_t arrivals);
  absl::Status EnqueueRest(Stream stream);
  // Whether any rank quantizes, so that scratch is digested between rounds.
  bool DigestsScratch() const;
  // Enqueues the digests of the scratch of quantize launch `launch`, behind it.
  absl::Status EnqueueScratch(size_t launch, Stream stream) {
    return scratch_[launch]->Enqueue(stream);
  }

  // Collective, after the last refit that was enqueued with these. Error on all
  // ranks alike: kDataLoss, with the params that differ and the ranks that hold
  // them.
  absl::Status Compare(Transport& transport, Deadline deadline);

  // What the last of these took: the tensors' digests, and Compare. After it.
  absl::StatusOr<double> Seconds() const;

  // After Compare: the params, by their stacks' names, that no source rank
  // holds, because destinations make them of others.
  const std::vector<std::string>& not_compared() const { return not_compared_; }

 private:
  // A destination rank's region that differs.
  struct Difference {
    int32_t rank = 0;
    uint32_t region = 0;
  };
  struct Comparison {
    std::vector<Difference> differences;
    std::vector<uint32_t> not_compared;  // params
  };

  StateCheck(const PlanFile& plan, Arrivals arrivals)
      : plan_(plan),
        arrivals_(std::move(arrivals)),
        regions_(RegionsOf(plan)) {}

  // A part of the rank, with its sum.
  struct PartSum {
    size_t box = 0;  // over all digests
    uint32_t region = 0;
    DigestPart part;
    uint64_t sum = 0;
  };
  absl::Status CompareSums(Transport& transport, Deadline deadline);
  absl::StatusOr<std::vector<PartSum>> ReadSums();
  std::string RegionSums(absl::Span<const PartSum> sums) const;
  absl::StatusOr<std::string> CompareRegions(
      absl::Span<const std::string> by_rank) const;
  absl::StatusOr<Comparison> ReadComparison(const std::string& bytes) const;
  static std::set<uint32_t> FirstRegions(const Comparison& comparison,
                                         size_t count);
  std::string ParamSums(absl::Span<const PartSum> sums,
                        const Comparison& comparison) const;
  absl::StatusOr<std::string> CompareParams(
      absl::Span<const std::string> by_rank, bool is_part) const;

  const PlanFile& plan_;
  const Arrivals arrivals_;
  const std::vector<DigestRegion> regions_;
  std::unique_ptr<DeviceStream> stream_;   // of tensors' digests
  std::unique_ptr<DeviceEvent> digested_;  // up to there, before
  std::vector<size_t> due_;                // by step that may come before all
  std::unique_ptr<RankDigest> tensors_;    // the worker's
  std::vector<std::unique_ptr<RankDigest>> scratch_;  // by quantize launch
  TimeSum digest_time_;
  double compare_seconds_ = 0;
  std::vector<std::string> not_compared_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DIGEST_STATE_CHECK_H_
