// The tensors of a layer in Megatron Core. rows.inc has the rows.
#ifndef REFIT_COMPILER_LAYOUT_MEGATRON_ROWS_H_
#define REFIT_COMPILER_LAYOUT_MEGATRON_ROWS_H_

#include <array>
#include <cstdint>
#include <string_view>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/model/model.h"

namespace refit::megatron {

// What a rank holds of the params of a row that no Cut describes.
using MakeTensor = TensorSpec (*)(absl::Span<const Param* const> params,
                                  const Architecture& architecture,
                                  EvenPart part);

struct Row {
  std::string_view name;
  std::array<ParamRole, 3> roles;  // kOther: none
  Cut cut;
  ParamRole beside = ParamRole::kOther;   // in layers that have it alone
  ParamRole without = ParamRole::kOther;  // in models that do not have it
  ValueForm form = ValueForm::kPlain;
  bool declared_fp32 = false;  // fp32 with "mamba_fp32"
  int64_t since = 0;           // minor releases of 0
  int64_t before = 0;          // 0: any
  MakeTensor make = nullptr;

  constexpr Row(std::string_view tensor, std::array<ParamRole, 3> of, Cut how)
      : name(tensor), roles(of), cut(how) {}
  template <typename Member, typename Value>
  constexpr Row With(Member Row::*member, Value value) const {
    Row row = *this;
    row.*member = value;
    return row;
  }
  constexpr Row Beside(ParamRole role) const {
    return With(&Row::beside, role);
  }
  constexpr Row Without(ParamRole role) const {
    return With(&Row::without, role);
  }
  constexpr Row WithForm(ValueForm own) const { return With(&Row::form, own); }
  constexpr Row DeclaredFp32() const { return With(&Row::declared_fp32, true); }
  constexpr Row Since(int64_t minor) const { return With(&Row::since, minor); }
  constexpr Row Before(int64_t minor) const {
    return With(&Row::before, minor);
  }
  constexpr Row By(MakeTensor function) const {
    return With(&Row::make, function);
  }
};

// In the order of the modules, those of experts last.
absl::Span<const Row> Rows();

// Whether expert tensor parallelism cuts the row.
bool IsOfExperts(const Row& row);

// Rows of the fused query, key and value of all heads.
int64_t FusedQkvRows(const Architecture& architecture);

// A rank's part of the rows of gate and up, in blocks of `interleave` rows that
// alternate: gate, up, gate, up …
TensorSpec InterleavedGateAndUp(absl::Span<const Param* const> params,
                                EvenPart part, int64_t interleave);

}  // namespace refit::megatron

#endif  // REFIT_COMPILER_LAYOUT_MEGATRON_ROWS_H_
