// What a user who mistyped a word probably meant.
#ifndef REFIT_PLAN_NEAREST_WORD_H_
#define REFIT_PLAN_NEAREST_WORD_H_

#include <string>
#include <string_view>
#include <vector>

namespace refit {

// The candidate closest to `word` by edit distance, upper and lower case being
// the same, or "" when none is near enough to be a plausible slip.
std::string NearestWord(std::string_view word,
                        const std::vector<std::string_view>& candidates);

// The same for a mistyped glob: the candidate that it would match with the
// fewest letters changed.
std::string NearestMatch(std::string_view glob,
                         const std::vector<std::string_view>& candidates);

}  // namespace refit

#endif  // REFIT_PLAN_NEAREST_WORD_H_
