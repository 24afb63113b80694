// Checks that the sizes of a side fit its model.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_SIZES_H_
#define REFIT_COMPILER_LAYOUT_COMMON_SIZES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/layout.h"

namespace refit {

class SizeChecks {
 public:
  SizeChecks(const LayoutContext& context, const RoleTable& table);

  // A size as a message names it: "destination.tensor_parallel 3".
  struct Divisor {
    Place place;
    std::string text;
    int64_t value = 1;
  };
  Divisor Named(std::string_view key, const Located<int64_t>& size) const;

  // Reports "<divisor> does not divide <count> <what>", each sentence once.
  void Divides(const Divisor& divisor, int64_t count, std::string_view what);

  // `divisor`, the ranks that cut the role's params, divides what they cut of
  // them: heads, groups or features.
  void Parts(const Divisor& divisor, ParamRole role);

  // The model has experts if `asked`: `key` is a key of expert parallelism.
  void HasExperts(bool asked, const Place& place, std::string_view key);

  // Reports a size above 1: "<size>: <framework>'s <family> <why>".
  void WantsOne(std::string_view key, const Located<int64_t>& size,
                std::string_view framework, std::string_view why);

  // Reports `message` unless it was reported before.
  void Report(const Place& place, std::string message);
  template <typename... Args>
  void Report(const Place& place, const absl::FormatSpec<Args...>& format,
              const Args&... args) {
    Report(place, absl::StrFormat(format, args...));
  }

  // Nothing was reported.
  bool ok() const { return reported_.empty(); }

 private:
  // Key-value heads are cut, or (more ranks than heads) each is shared by a
  // whole number of ranks.
  void KeyValueHeads(const Divisor& divisor);

  const LayoutContext& context_;
  const RoleTable& table_;
  std::vector<std::string> reported_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_SIZES_H_
