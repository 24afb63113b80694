// What the loader's checks are made of (plan/body_check.cc,
// plan/stack_check.cc).
#ifndef REFIT_PLAN_CHECK_H_
#define REFIT_PLAN_CHECK_H_

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/dtype.h"
#include "plan/utf8.h"
#include "plan_generated.h"

namespace refit {

// Byte counts and element counts stay representable as int64_t.
inline constexpr uint64_t kLargestSize = std::numeric_limits<int64_t>::max();
// No rank has as much memory. Executors take a small multiple of their staging
// and add to it, which then stays far from overflow.
inline constexpr uint64_t kLargestStaging = uint64_t{1} << 48;

inline absl::Status Bad(std::string message) {
  return absl::InvalidArgumentError(message);
}
// As absl::StrFormat.
template <typename First, typename... Rest>
absl::Status Bad(const absl::FormatSpec<First, Rest...>& format,
                 const First& first, const Rest&... rest) {
  return Bad(absl::StrFormat(format, first, rest...));
}

// `status` with its place in front. Places are put together on failure only.
inline absl::Status At(const std::string& place, const absl::Status& status) {
  return Bad(absl::StrCat(place, ": ", status.message()));
}

// What is no UTF-8 cannot be shown, nor be a name in a worker's program. `what`
// is the field; `text` may be absent.
inline absl::Status CheckUtf8(std::string_view what,
                              const flatbuffers::String* text) {
  if (text == nullptr) return absl::OkStatus();
  const size_t bad = FirstNotUtf8(text->string_view());
  if (bad == std::string_view::npos) return absl::OkStatus();
  return Bad("%s is not UTF-8: byte 0x%02x at offset %u", what,
             text->Data()[bad], bad);
}

// The FlatBuffers verifier checks the alignment of a vector's length, not of
// its elements. Writers do not align a vector that has none.
template <typename T>
bool IsAligned(const flatbuffers::Vector<T>* vector) {
  return vector == nullptr || vector->size() == 0 ||
         reinterpret_cast<uintptr_t>(vector->Data()) % alignof(uint64_t) == 0;
}

inline bool IsKnown(DType dtype) { return DTypeBytes(dtype) != 0; }

inline bool IsKnown(fb::SkipReason reason) {
  return reason <= fb::SkipReason::kUnread;
}

// Multiplies `product`; false when it exceeds kLargestSize.
inline bool Multiply(uint64_t factor, uint64_t& product) {
  return !__builtin_mul_overflow(product, factor, &product) &&
         product <= kLargestSize;
}

}  // namespace refit

#endif  // REFIT_PLAN_CHECK_H_
