#include "executor/delta/refit_versions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "control/payload.h"
#include "executor/agreement.h"

namespace refit {
namespace {

absl::Status Unreadable(size_t rank) {
  return absl::InternalError(
      absl::StrCat("what rank ", rank, " says of its version cannot be read"));
}

}  // namespace

absl::Status RefitVersions::Agree(bool wants_dense, absl::StatusOr<size_t> rung,
                                  Transport& transport, Deadline deadline) {
  absl::StatusOr<std::string> mine =
      PayloadWriter()
          .Bool(base_.has_value())
          .U64(base_.value_or(0))
          .U8(static_cast<uint8_t>(why_))
          .Bool(wants_dense)
          .U64(version_)
          .U8(static_cast<uint8_t>(rung.value_or(0)))
          .Take();
  if (!rung.ok()) mine = rung.status();
  Forget(DenseReason::kFailed);
  const absl::StatusOr<std::string> decided = ThroughRankZero(
      transport, deadline, mine,
      [&](absl::Span<const std::string> by_rank) { return Decide(by_rank); });
  // What failed here first, and not that others did not come to hear of it.
  if (!rung.ok()) return rung.status();
  if (!decided.ok()) return decided.status();
  PayloadReader reader(*decided);
  reason_ = static_cast<DenseReason>(reader.U8());
  because_of_ = static_cast<int32_t>(reader.U32());
  agreed_base_ = reader.U64();
  version_ = reader.U64();
  rung_ = reader.U8();
  if (!reader.Complete() || reason_ > DenseReason::kAsked) {
    const absl::Status status = Unreadable(0);
    transport.Abort(status);
    return status;
  }
  since_dense_ = is_delta() ? since_dense_ + 1 : 0;
  return absl::OkStatus();
}

// The reason that is told: a rank's loss rather than what it makes of others'.
absl::StatusOr<std::string> RefitVersions::Decide(
    absl::Span<const std::string> by_rank) {
  DenseReason reason = DenseReason::kNone;
  uint32_t because_of = 0;
  const auto say = [&](DenseReason why, size_t rank) {
    if (reason != DenseReason::kNone) return;
    reason = why;
    because_of = static_cast<uint32_t>(rank);
  };
  std::optional<uint64_t> base;
  std::optional<size_t> other, asked;
  uint64_t newest = 0;
  uint8_t rung = 0;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    PayloadReader reader(by_rank[rank]);
    const bool has_base = reader.Bool();
    const uint64_t of_rank = reader.U64();
    const auto why = static_cast<DenseReason>(reader.U8());
    if (reader.Bool() && !asked.has_value()) asked = rank;
    newest = std::max(newest, reader.U64());
    rung = std::max(rung, reader.U8());
    if (!reader.Complete() || why > DenseReason::kFailed) {
      return Unreadable(rank);
    }
    if (!has_base) {
      say(why, rank);
    } else if (base.value_or(of_rank) != of_rank) {
      if (!other.has_value()) other = rank;
    } else {
      base = of_rank;
    }
  }
  if (other.has_value()) say(DenseReason::kOtherBase, *other);
  if (asked.has_value()) say(DenseReason::kAsked, *asked);
  if (IsDenseByInterval()) say(DenseReason::kInterval, 0);
  return PayloadWriter()
      .U8(static_cast<uint8_t>(reason))
      .U32(because_of)
      .U64(reason == DenseReason::kNone ? base.value_or(0) : 0)
      .U64(newest + 1)
      .U8(rung)
      .Take();
}

std::string RefitVersions::why_dense() const {
  switch (reason_) {
    case DenseReason::kNone:
      return "";
    case DenseReason::kConnected:
      return absl::StrCat("rank ", because_of_,
                          " connected since its last refit");
    case DenseReason::kBound:
      return absl::StrCat("rank ", because_of_, " bound since its last refit");
    case DenseReason::kFailed:
      return absl::StrCat("the last refit failed, or rank ", because_of_,
                          " did not wait for it");
    case DenseReason::kOtherBase:
      return absl::StrCat("rank ", because_of_,
                          " holds another version than the others");
    case DenseReason::kInterval:
      return absl::StrCat("every refit of ", dense_every_, " is");
    case DenseReason::kAsked:
      return absl::StrCat("rank ", because_of_, " asked for it");
  }
  return "";
}

}  // namespace refit
