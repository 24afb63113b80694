// UTF-8, the encoding of all text in a plan and in a job.
#ifndef REFIT_PLAN_UTF8_H_
#define REFIT_PLAN_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace refit {

// The offset of the first byte that begins no UTF-8 sequence; npos if all is
// UTF-8. NUL is.
size_t FirstNotUtf8(std::string_view text);

// With U+FFFD for each byte that is not UTF-8.
std::string AsUtf8(std::string_view text);

}  // namespace refit

#endif  // REFIT_PLAN_UTF8_H_
