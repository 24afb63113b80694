// The post-hooks that a plan may name. docs/plan-format.md says what each of
// them asks for.
#ifndef REFIT_PLAN_POST_HOOKS_H_
#define REFIT_PLAN_POST_HOOKS_H_

#include <string_view>
#include <utility>

namespace refit {

// The compiler can name no other, and a caller of Bind may name these for
// whatever plan.
inline constexpr std::string_view kPostHookNames[] = {
    "add-one",
    "subtract-one",
    "negative-exp",
    "log-of-negative",
    "derive-latent-projections",
    "drop-router-copy",
    "derive-attention-sinks",
    "derive-scale-copies",
    "derive-hyper-broadcast",
};

void IsNoneOfPostHookNames();  // defined nowhere: what a wrong name calls

// One of kPostHookNames; another does not compile.
class PostHookName {
 public:
  consteval PostHookName(const char* text) : text_(text) {
    for (const std::string_view known : kPostHookNames) {
      if (known == text_) return;
    }
    IsNoneOfPostHookNames();
  }

  std::string_view text() const { return text_; }

  friend bool operator==(const PostHookName&, const PostHookName&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const PostHookName& name) {
    return H::combine(std::move(h), name.text_);
  }

 private:
  std::string_view text_;
};

}  // namespace refit

#endif  // REFIT_PLAN_POST_HOOKS_H_
