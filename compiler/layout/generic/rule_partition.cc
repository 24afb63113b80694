#include "compiler/layout/generic/rule_partition.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "plan/glob.h"

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

struct Candidate {
  std::string_view glob;
  int32_t rule;
};

using RuleOf = absl::FunctionRef<int32_t(absl::Span<const int32_t>)>;

// The parts of the members whose first positions are `member`, over the dims
// that follow.
std::vector<RulePart> Partition(const Param& param, RuleOf rule_of,
                                std::vector<int32_t>& member) {
  const size_t dim = member.size();
  if (dim == param.index.size()) {
    return {{.rule = rule_of(member), .positions = {}}};
  }
  // Positions with equal parts stay together.
  struct Equal {
    std::vector<RulePart> parts;
    std::vector<int32_t> positions;
  };
  std::vector<Equal> groups;
  for (size_t i = 0; i < param.index[dim].numbers.size(); ++i) {
    member.push_back(static_cast<int32_t>(i));
    std::vector<RulePart> parts = Partition(param, rule_of, member);
    member.pop_back();
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const Equal& e) { return e.parts == parts; });
    if (group == groups.end()) {
      group =
          groups.insert(group, {.parts = std::move(parts), .positions = {}});
    }
    group->positions.push_back(static_cast<int32_t>(i));
  }
  std::vector<RulePart> result;
  for (const Equal& group : groups) {
    for (const RulePart& part : group.parts) {
      RulePart& whole =
          result.emplace_back(RulePart{.rule = part.rule, .positions = {}});
      whole.positions.push_back(group.positions);
      whole.positions.insert(whole.positions.end(), part.positions.begin(),
                             part.positions.end());
    }
  }
  return result;
}

RulePart WholeStack(const Param& param, int32_t rule) {
  RulePart part = {.rule = rule, .positions = {}};
  for (const IndexDim& dim : param.index) {
    std::vector<int32_t>& positions = part.positions.emplace_back(dim.extent());
    std::iota(positions.begin(), positions.end(), 0);
  }
  return part;
}

}  // namespace

std::vector<RulePart> PartitionByRule(
    const Param& param, absl::Span<const std::string_view> globs) {
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < globs.size(); ++i) {
    const Match match = MatchStack(globs[i], param);
    if (match == Match::kNone) continue;
    if (match == Match::kAll && candidates.empty()) {
      return {WholeStack(param, static_cast<int32_t>(i))};
    }
    candidates.push_back({globs[i], static_cast<int32_t>(i)});
    if (match == Match::kAll) break;
  }
  if (candidates.empty()) return {WholeStack(param, -1)};
  return PartitionMembers(param, [&](absl::Span<const int32_t> member) {
    std::vector<int32_t> numbers;
    for (size_t dim = 0; dim < member.size(); ++dim) {
      numbers.push_back(param.index[dim].numbers[member[dim]]);
    }
    const std::string name = ExpandName(param.name, numbers);
    const auto first = std::find_if(
        candidates.begin(), candidates.end(),
        [&](const Candidate& c) { return GlobMatches(c.glob, name); });
    return first == candidates.end() ? -1 : first->rule;
  });
}

std::vector<RulePart> PartitionMembers(
    const Param& param,
    absl::FunctionRef<int32_t(absl::Span<const int32_t>)> rule_of) {
  std::vector<int32_t> member;
  return Partition(param, rule_of, member);
}

}  // namespace refit
