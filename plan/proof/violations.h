// Keeps the first violation of a proof, in order of rank, round, buffer, index.
#ifndef REFIT_PLAN_PROOF_VIOLATIONS_H_
#define REFIT_PLAN_PROOF_VIOLATIONS_H_

#include <compare>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "plan/proof/proof.h"
#include "plan/proof/steps.h"

namespace refit::proof {

// Where a violation is. Parts that do not apply stay unset.
struct Site {
  static constexpr int64_t kBeforeRounds = -1;
  static constexpr int64_t kAfterRounds = std::numeric_limits<int64_t>::max();

  int64_t rank = -1;  // -1: the plan as a whole
  int64_t round = kBeforeRounds;
  int64_t buffer_slot = -1;
  int64_t offset = -1;  // virtual, in the buffer

  friend auto operator<=>(const Site&, const Site&) = default;
};

class Violations {
 public:
  // `steps`, if given, must outlive it. Once they are used up a proof sees only
  // a part of the plan, so what it reports then is not kept.
  explicit Violations(const fb::Body& body, const Steps* steps = nullptr)
      : body_(body), steps_(steps) {}

  // `text` is called only when the violation comes before all others so far.
  void Report(const Site& site, Invariant invariant,
              absl::FunctionRef<std::string()> text);
  // The same with what absl::StrFormat takes.
  template <typename... Args>
  void Report(const Site& site, Invariant invariant,
              const absl::FormatSpec<Args...>& format, const Args&... args) {
    Report(site, invariant, [&] { return absl::StrFormat(format, args...); });
  }

  bool empty() const { return !first_.has_value(); }
  // How often Report was called.
  int64_t reports() const { return reports_; }
  Invariant invariant() const { return invariant_; }
  // "rank 5, round 0, buffer w, index [3]: holds … (invariant 2: right
  // element)"
  const std::string& text() const { return text_; }

 private:
  std::string SiteText(const Site& site) const;

  const fb::Body& body_;
  const Steps* steps_;
  int64_t reports_ = 0;
  std::optional<Site> first_;
  Invariant invariant_ = Invariant::kWrittenOnce;
  std::string text_;
};

// "name[3, 17]": the element at `offset` of a stack of params or buffers.
std::string ElementText(const fb::Param& param, int64_t offset);
std::string ElementText(const fb::Buffer& buffer, int64_t offset);

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_VIOLATIONS_H_
