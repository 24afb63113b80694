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

  // Tensor parallelism (`tensor`) cuts whole attention heads. Key-value heads
  // are cut too, or (more ranks than heads) each is shared by a whole number of
  // ranks.
  void Heads(const Divisor& tensor);

  // `divisor` divides the rows of every param of `role`.
  void Rows(const Divisor& divisor, ParamRole role, std::string_view what);

  // `divisor` divides the columns of every param of `role`; its dimension
  // `dim`.
  void Columns(const Divisor& divisor, ParamRole role, std::string_view what);
  void Dim(const Divisor& divisor, ParamRole role, size_t dim,
           std::string_view what);

  // The model has experts if `asked`: `key` is a key of expert parallelism.
  void HasExperts(bool asked, const Place& place, std::string_view key);

  // Reports `message` unless it was reported before.
  void Report(const Place& place, std::string message);

  // Nothing was reported.
  bool ok() const { return reported_.empty(); }

 private:
  const LayoutContext& context_;
  const RoleTable& table_;
  std::vector<std::string> reported_;
};

// Tensor parallelism divides what it cuts of plain modules.
void CheckPlainModules(SizeChecks& checks, const SizeChecks::Divisor& tensor);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_SIZES_H_
