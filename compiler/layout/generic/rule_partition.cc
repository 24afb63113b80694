#include <algorithm>
#include <numeric>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/layout/generic/generic.h"
#include "plan/glob.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// How many of a stack's names a glob matches.
enum class Match : uint8_t { kNone, kSome, kAll };

// `name` with each "{i}" replaced.
std::string FillIn(const Param& param, const std::string& replacement) {
  std::string name = param.name;
  for (size_t dim = 0; dim < param.index.size(); ++dim) {
    name = absl::StrReplaceAll(name,
                               {{absl::StrFormat("{%d}", dim), replacement}});
  }
  return name;
}

// Whether some text matches both globs.
bool GlobsMeet(std::string_view a, std::string_view b) {
  // meets[j]: whether a[i..] and b[j..] have a text in common, i falling.
  std::vector<char> meets(b.size() + 1), next;
  for (size_t i = a.size() + 1; i-- > 0;) {
    next = meets;  // a[i + 1 ..]
    for (size_t j = b.size() + 1; j-- > 0;) {
      const bool a_star = i < a.size() && a[i] == '*';
      const bool b_star = j < b.size() && b[j] == '*';
      bool meet = i == a.size() && j == b.size();
      if (a_star) meet |= next[j] || (j < b.size() && meets[j + 1]);
      if (b_star) meet |= meets[j + 1] || (i < a.size() && next[j]);
      if (i < a.size() && j < b.size() && !a_star && !b_star) {
        meet = (a[i] == b[j] || a[i] == '?' || b[j] == '?') && next[j + 1];
      }
      meets[j] = meet;
    }
  }
  return meets[0];
}

// kSome also where the answer would take more than a look at the pattern.
Match MatchStack(std::string_view glob, const Param& param) {
  if (param.index.empty()) {
    return GlobMatches(glob, param.name) ? Match::kAll : Match::kNone;
  }
  // No name has a control character: only a '*' can match it (and '?', which
  // would match one digit alone).
  if (glob.find('?') == std::string_view::npos &&
      GlobMatches(glob, FillIn(param, "\x01"))) {
    return Match::kAll;
  }
  return GlobsMeet(glob, FillIn(param, "*")) ? Match::kSome : Match::kNone;
}

struct RuleGlob {
  std::string_view glob;
  int32_t rule;
};

RulePart WholeStack(const Param& param, int32_t rule) {
  RulePart part = {.rule = rule, .positions = {}};
  for (const IndexDim& dim : param.index) {
    std::vector<int32_t>& positions = part.positions.emplace_back(dim.extent());
    std::iota(positions.begin(), positions.end(), 0);
  }
  return part;
}

}  // namespace

std::vector<RulePart> PartitionByRule(const Param& param,
                                      absl::Span<const std::string_view> globs,
                                      const HeldMembers& held) {
  constexpr int32_t kHeld = -2;
  std::vector<RuleGlob> candidates;
  for (size_t i = 0; i < globs.size(); ++i) {
    const Match match = MatchStack(globs[i], param);
    if (match == Match::kNone) continue;
    candidates.push_back({globs[i], static_cast<int32_t>(i)});
    if (match == Match::kSome) continue;
    if (held.empty() && candidates.size() == 1) {
      return {WholeStack(param, static_cast<int32_t>(i))};
    }
    break;
  }
  if (held.empty() && candidates.empty()) return {WholeStack(param, -1)};
  const auto rule_of = [&](const std::string& name, size_t number) {
    if (!held.empty() && held[number] != DType::kUnspecified) return kHeld;
    const auto first = std::find_if(
        candidates.begin(), candidates.end(),
        [&](const RuleGlob& c) { return GlobMatches(c.glob, name); });
    return first == candidates.end() ? -1 : first->rule;
  };
  std::vector<RulePart> parts = PartitionMembers(param, rule_of);
  std::erase_if(parts,
                [&](const RulePart& part) { return part.rule == kHeld; });
  return parts;
}

}  // namespace refit
