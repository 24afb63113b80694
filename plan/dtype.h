// The element types of a plan: names and sizes.
#ifndef REFIT_PLAN_DTYPE_H_
#define REFIT_PLAN_DTYPE_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "plan/element_types.h"
#include "plan_generated.h"

namespace refit {

// The name used in jobs, texts and messages: "bf16", "fp32", "int8" …
std::string_view DTypeName(DType dtype);

// The inverse of DTypeName; nullopt for an unknown name.
std::optional<DType> ParseDType(std::string_view name);

// The name safetensors uses: "BF16", "F32", "I8" …
std::string_view SafetensorsDTypeName(DType dtype);
std::optional<DType> ParseSafetensorsDType(std::string_view name);

// Bytes of one element; 0 for kUnspecified and for values a newer format may
// add.
int64_t DTypeBytes(DType dtype);

// Whether the executor converts `from` to `to`: any pair of distinct bf16, fp16
// and fp32.
bool IsSupportedCast(DType from, DType to);

}  // namespace refit

#endif  // REFIT_PLAN_DTYPE_H_
