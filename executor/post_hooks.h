// Who performs the post-hooks of a rank: the executor the arithmetic ones, the
// caller the others.
#ifndef REFIT_EXECUTOR_POST_HOOKS_H_
#define REFIT_EXECUTOR_POST_HOOKS_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "plan/schedule/copy_batch.h"
#include "plan/schedule/tensor_table.h"
#include "refit/executor.h"

namespace refit {

// The function of a hook that changes each element by itself; nullopt for a
// hook of another kind, and for a dtype that no device computes with.
std::optional<ElementFunction> FunctionOfHook(std::string_view name,
                                              DType dtype);

struct AssignedHooks {
  std::vector<TensorPostHook> hooks;  // in plan order
  // What the executor performs, over the entries of the table.
  CopyBatch batch;
  // Why the rank cannot be bound, a line each; empty if it can.
  std::vector<std::string> problems;
};

// The executor performs a hook that it has a function for, unless the caller
// names it. Every other hook must be named by the caller.
AssignedHooks AssignPostHooks(const TensorTable& table,
                              absl::Span<const PostHookPerformer> performers);

}  // namespace refit

#endif  // REFIT_EXECUTOR_POST_HOOKS_H_
