#include "compiler/job/version.h"

#include <charconv>
#include <system_error>

namespace refit {

std::vector<int64_t> VersionNumbers(std::string_view version) {
  if (version.starts_with("v")) version.remove_prefix(1);
  std::vector<int64_t> numbers;
  const char* at = version.data();
  const char* const end = at + version.size();
  for (int64_t number = 0; at < end; ++at) {
    const auto [rest, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0) break;
    numbers.push_back(number);
    if (rest == end || *rest != '.') break;
    at = rest;
  }
  return numbers;
}

bool IsSince(const SideSpec& side, const std::vector<int64_t>& release) {
  const std::vector<int64_t> version = VersionNumbers(side.version.value);
  return version.empty() || version >= release;
}

}  // namespace refit
