// Which rule of a list of globs applies to which members of a stack.
#ifndef REFIT_COMPILER_LAYOUT_GENERIC_RULE_PARTITION_H_
#define REFIT_COMPILER_LAYOUT_GENERIC_RULE_PARTITION_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "compiler/ir/module.h"

namespace refit {

// Members of a stack to which one rule applies: the product of `positions`.
struct RulePart {
  int32_t rule = -1;  // the first whose glob matches; -1: none does
  std::vector<std::vector<int32_t>> positions;  // ascending, per index dim

  friend bool operator==(const RulePart&, const RulePart&) = default;
};

// Disjoint parts that make up the whole of `param`, in order of their first
// member. Looks at single members only where a glob tells them apart.
std::vector<RulePart> PartitionByRule(const Param& param,
                                      absl::Span<const std::string_view> globs);

// The same for any rule of members: `rule_of` is given a member's position in
// each index dim.
std::vector<RulePart> PartitionMembers(
    const Param& param,
    absl::FunctionRef<int32_t(absl::Span<const int32_t>)> rule_of);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_GENERIC_RULE_PARTITION_H_
