// The element types of a plan, without its reader: nvcc parses what a kernel
// includes once for the host and once for each architecture, which is 14 s of
// CPU a kernel with plan_generated.h (nvcc 13.0).
#ifndef REFIT_PLAN_ELEMENT_TYPES_H_
#define REFIT_PLAN_ELEMENT_TYPES_H_

#include <cstdint>

namespace refit {

namespace fb {
// plan_generated.h defines them; dtype.cc holds the values below against it.
enum class DType : uint8_t;
enum class ScaleFormat : uint8_t;
}  // namespace fb

using DType = fb::DType;

// Those that kernels name.
namespace element {
inline constexpr DType kBf16{1};
inline constexpr DType kFp16{2};
inline constexpr DType kFp32{3};
inline constexpr DType kFp64{4};
inline constexpr DType kInt16{6};
inline constexpr DType kInt32{7};
inline constexpr DType kInt64{8};
}  // namespace element

namespace scale_format {
inline constexpr fb::ScaleFormat kUe8m0{2};
inline constexpr fb::ScaleFormat kE8m0{3};
}  // namespace scale_format

// What becomes of an element x (executor/device/element_function.h).
enum class ElementFunction : uint8_t {
  kAddOne,         // x + 1
  kSubtractOne,    // x - 1
  kNegativeExp,    // -exp(x)
  kLogOfNegative,  // log(-x)
};

}  // namespace refit

#endif  // REFIT_PLAN_ELEMENT_TYPES_H_
