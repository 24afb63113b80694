// RefitVersions: which version of the weights the ranks hold, and whether the
// next refit may be a delta to it.
//
// A rank's base is the version of the last refit that was over on all ranks. It
// loses the base when the next refit begins, and gets the new one when that is
// over, so that whatever happens in between leaves it without: then the next
// refit is dense. So the snapshot may change while a refit is under way.
#ifndef REFIT_EXECUTOR_DELTA_REFIT_VERSIONS_H_
#define REFIT_EXECUTOR_DELTA_REFIT_VERSIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/transport.h"

namespace refit {

// Why a refit is dense.
enum class DenseReason : uint8_t {
  kNone = 0,  // it is not
  // A rank has no base, since
  kConnected = 1,  // it connected after its last refit, or never had one
  kBound = 2,      // it bound other tensors
  kFailed = 3,     // its last refit failed, or was not waited for
  kOtherBase = 4,  // a rank has another base than rank 0
  kInterval = 5,   // the plan's dense_every
  kAsked = 6,      // by a caller
};

class RefitVersions {
 public:
  explicit RefitVersions(const PlanFile& plan)
      : dense_every_(plan.body().delta()->dense_every()) {}

  // The rank has no base any more.
  void Forget(DenseReason why) {
    base_ = std::nullopt;
    why_ = why;
  }

  // Whether the next refit may be a delta, as far as this rank knows.
  bool MayBeDelta() const { return base_.has_value() && !IsDenseByInterval(); }
  // What all ranks do next; none of them has a base afterwards. `rung`: the
  // first, as a position in the plan's, on which this rank can send; their
  // number if there is none. The ranks take the highest of theirs.
  // Collective.
  absl::Status Agree(bool wants_dense, absl::StatusOr<size_t> rung,
                     Transport& transport, Deadline deadline);
  // The refit that was agreed on is over on all ranks.
  void Commit() { base_ = version_; }

  // Of the last Agree.
  bool is_delta() const { return reason_ == DenseReason::kNone; }
  uint64_t base() const { return agreed_base_; }  // of a delta
  uint64_t version() const { return version_; }
  size_t rung() const { return rung_; }  // of a delta
  // Why it is dense, a clause; "" for a delta.
  std::string why_dense() const;

 private:
  bool IsDenseByInterval() const {
    return dense_every_ > 0 && since_dense_ + 1 >= dense_every_;
  }
  absl::StatusOr<std::string> Decide(absl::Span<const std::string> by_rank);

  const uint32_t dense_every_;
  std::optional<uint64_t> base_;
  DenseReason why_ = DenseReason::kConnected;  // there is none
  uint64_t version_ = 0;                       // the last that was agreed on
  uint64_t agreed_base_ = 0;
  size_t rung_ = 0;
  uint32_t since_dense_ = 0;  // delta refits
  DenseReason reason_ = DenseReason::kConnected;
  int32_t because_of_ = 0;  // the rank
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_REFIT_VERSIONS_H_
