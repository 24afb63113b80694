#include "plan/glob.h"

#include <cstddef>

namespace refit {

bool GlobMatches(std::string_view glob, std::string_view name) {
  size_t g = 0;
  size_t n = 0;
  // Where to resume when a guess for the last '*' turns out too short.
  size_t star = std::string_view::npos;
  size_t star_end = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      star_end = n;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == name[n])) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++star_end;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

}  // namespace refit
