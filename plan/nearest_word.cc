#include "plan/nearest_word.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/ascii.h"

namespace refit {
namespace {

constexpr size_t kNearestWordSizeMax = 64;
constexpr size_t kNearestMatchSizeMax = 256;

// The number of letters to insert, remove, replace or swap with their
// neighbour to come from `given` to `wanted`, whatever their case.
size_t EditDistance(std::string_view given, std::string_view wanted) {
  const std::string a = absl::AsciiStrToLower({given.data(), given.size()});
  const std::string b = absl::AsciiStrToLower({wanted.data(), wanted.size()});
  std::vector<size_t> before_last(b.size() + 1);
  std::vector<size_t> last(b.size() + 1);
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before_last, last);
    std::swap(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

// The number of letters to insert, remove or replace in `glob` until it matches
// `name`.
size_t MatchDistance(std::string_view glob, std::string_view name) {
  std::vector<size_t> last(name.size() + 1);
  std::vector<size_t> row(name.size() + 1);
  for (size_t j = 0; j <= name.size(); ++j) last[j] = j;
  for (const char c : glob) {
    row[0] = last[0] + (c == '*' ? 0 : 1);
    for (size_t j = 1; j <= name.size(); ++j) {
      const bool equal = c == '?' || c == name[j - 1];
      row[j] = c == '*' ? std::min(last[j], row[j - 1])
                        : std::min({last[j] + 1, row[j - 1] + 1,
                                    last[j - 1] + (equal ? 0 : 1)});
    }
    std::swap(last, row);
  }
  return last[name.size()];
}

}  // namespace

std::string NearestWord(std::string_view word,
                        const std::vector<std::string_view>& candidates) {
  if (word.size() > kNearestWordSizeMax) return "";
  std::string_view nearest;
  // A third of the letters wrong is a slip; more is another word.
  size_t nearest_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string_view candidate : candidates) {
    if (candidate.size() > kNearestWordSizeMax) continue;
    const size_t distance = EditDistance(word, candidate);
    if (distance < nearest_distance && distance < candidate.size()) {
      nearest = candidate;
      nearest_distance = distance;
    }
  }
  return std::string(nearest);
}

std::string NearestMatch(std::string_view glob,
                         const std::vector<std::string_view>& candidates) {
  const auto letters = glob.size() - static_cast<size_t>(std::count(
                                         glob.begin(), glob.end(), '*'));
  if (glob.size() > kNearestMatchSizeMax) return "";
  std::string_view nearest;
  size_t nearest_distance = std::max<size_t>(1, letters / 3) + 1;
  for (const std::string_view candidate : candidates) {
    if (candidate.size() > kNearestMatchSizeMax) continue;
    const size_t distance = MatchDistance(glob, candidate);
    if (distance < nearest_distance) {
      nearest = candidate;
      nearest_distance = distance;
    }
  }
  return std::string(nearest);
}

}  // namespace refit
