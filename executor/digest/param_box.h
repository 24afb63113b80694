// Boxes of a param's virtual tensor: what fragments hold of it.
#ifndef REFIT_EXECUTOR_DIGEST_PARAM_BOX_H_
#define REFIT_EXECUTOR_DIGEST_PARAM_BOX_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "plan/plan_file.h"

namespace refit {

// By dimension of the virtual tensor: the index dimensions, then the shape.
struct ParamBox {
  using Numbers = absl::InlinedVector<uint64_t, 6>;
  Numbers lo;
  Numbers extent;

  friend bool operator==(const ParamBox&, const ParamBox&) = default;
};

ParamBox BoxOf(const fb::Fragment& fragment);
uint64_t ElementsOf(const ParamBox& box);

// What both hold; nullopt if that is nothing. Both are of one param.
std::optional<ParamBox> Meet(const ParamBox& a, const ParamBox& b);

// What is left of disjoint `boxes` without `taken`: disjoint boxes again.
std::vector<ParamBox> Without(const std::vector<ParamBox>& boxes,
                              const ParamBox& taken);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DIGEST_PARAM_BOX_H_
