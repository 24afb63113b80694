#include "plan/diff/report.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

// Lists of ranks or pairs longer than this are only counted.
constexpr size_t kLongestList = 60;

// "0..3" for ranks that are spread over 0..3.
std::string HullText(int32_t first, int32_t last) {
  return absl::StrCat(first, "..", last);
}

// "rank 3", "ranks 0..3, 8", or how many there are and where.
std::string RanksText(const std::vector<int32_t>& ranks) {
  const std::string text = NumberSetText(ranks);
  if (ranks.size() == 1) return absl::StrCat("rank ", text);
  if (text.size() <= kLongestList) return absl::StrCat("ranks ", text);
  return absl::StrCat(ranks.size(), " ranks of ",
                      HullText(ranks.front(), ranks.back()));
}

// "0..3 -> 8..11; 4 -> 12" for sorted pairs, or how many there are and where.
std::string PairsText(const std::vector<RankPair>& pairs) {
  std::map<int32_t, std::vector<int32_t>> destinations;
  for (const auto& [src, dst] : pairs) destinations[src].push_back(dst);
  std::map<std::vector<int32_t>, std::vector<int32_t>> sources;
  for (const auto& [src, dsts] : destinations) sources[dsts].push_back(src);
  // By their first source, which belongs to one group only.
  std::map<int32_t, std::string> groups;
  for (const auto& [dsts, srcs] : sources) {
    groups[srcs[0]] =
        absl::StrCat(NumberSetText(srcs), " -> ", NumberSetText(dsts));
  }
  std::string text;
  for (const auto& [src, group] : groups) {
    absl::StrAppend(&text, text.empty() ? "" : "; ", group);
  }
  if (text.size() <= kLongestList) return text;
  std::set<int32_t> dsts;
  for (const RankPair& pair : pairs) dsts.insert(pair.second);
  return absl::StrCat(pairs.size(), " pairs of ",
                      HullText(pairs.front().first, pairs.back().first), " -> ",
                      HullText(*dsts.begin(), *dsts.rbegin()));
}

}  // namespace

void DiffReport::Add(DifferenceClass kind, const std::string& rule,
                     const std::string& text) {
  differences_.push_back(
      {.kind = kind, .rule = rule, .text = text, .ranks = {}, .pairs = {}});
}

void DiffReport::AddFacts(DifferenceClass kind, const std::string& rule,
                          const NamedFacts& a, const NamedFacts& b) {
  // By name: what only the one plan says, and what only the other.
  std::map<std::string,
           std::pair<NamedFacts::mapped_type, NamedFacts::mapped_type>>
      own;
  for (const auto& [name, facts] : a) own[name].first = facts;
  for (const auto& [name, facts] : b) {
    auto& [of_a, of_b] = own[name];
    for (const std::string& fact : facts) {
      if (of_a.erase(fact) == 0) of_b.insert(fact);
    }
  }
  for (const auto& [name, both] : own) {
    const auto& [of_a, of_b] = both;
    if (of_a.size() == 1 && of_b.size() == 1) {
      Add(kind, absl::StrCat(rule, "_CHANGED"),
          absl::StrCat(name, ": ", *of_a.begin(), " -> ", *of_b.begin()));
      continue;
    }
    for (const std::string& fact : of_a) {
      Add(kind, absl::StrCat(rule, "_REMOVED"),
          absl::StrCat(name, ": was ", fact));
    }
    for (const std::string& fact : of_b) {
      Add(kind, absl::StrCat(rule, "_ADDED"), absl::StrCat(name, ": ", fact));
    }
  }
}

void DiffReport::AddParam(const std::string& rule, NameId param,
                          const std::string& change) {
  params_[{DifferenceClass::kContract, rule, change}].push_back(param);
}

void DiffReport::AddBuffer(DifferenceClass kind, const std::string& rule,
                           int32_t rank, NameId tensor,
                           const std::string& change) {
  buffers_[{kind, rule, change}][rank].push_back(tensor);
}

void DiffReport::AddSideBuffer(const std::string& rule, fb::Side side,
                               NameId tensor, const std::string& change) {
  side_buffers_[{{DifferenceClass::kContract, rule, change}, side}].push_back(
      tensor);
}

void DiffReport::AddRank(DifferenceClass kind, const std::string& rule,
                         int32_t rank, const std::string& change) {
  ranks_[{kind, rule, change}].push_back(rank);
}

void DiffReport::AddPair(DifferenceClass kind, const std::string& rule,
                         RankPair pair, const std::string& change) {
  pairs_[{kind, rule, change}].push_back(pair);
}

void DiffReport::FinishBuffers(
    const Change& change,
    const std::map<int32_t, std::vector<NameId>>& tensors_by_rank) {
  // One line for all ranks on which the same tensors of a pattern changed.
  std::map<std::pair<std::string, std::vector<NameId>>, std::vector<int32_t>>
      ranks_by_tensors;
  for (const auto& [rank, tensors] : tensors_by_rank) {
    for (auto& [pattern, ids] : names_.ByPattern(tensors)) {
      ranks_by_tensors[{pattern, ids}].push_back(rank);
    }
  }
  for (const auto& [tensors, ranks] : ranks_by_tensors) {
    Add(change.kind, change.rule,
        absl::StrCat("buffer ", names_.Text(tensors.second), " of ",
                     RanksText(ranks), ": ", change.change));
    differences_.back().ranks = ranks;
  }
}

std::vector<Difference> DiffReport::Finish() {
  for (const auto& [change, params] : params_) {
    for (const auto& [pattern, ids] : names_.ByPattern(params)) {
      Add(change.kind, change.rule,
          absl::StrCat("param ", names_.Text(ids), ": ", change.change));
    }
  }
  for (const auto& [change, tensors_by_rank] : buffers_)
    FinishBuffers(change, tensors_by_rank);
  for (const auto& [key, tensors] : side_buffers_) {
    const auto& [change, side] = key;
    for (const auto& [pattern, ids] : names_.ByPattern(tensors)) {
      Add(change.kind, change.rule,
          absl::StrCat("buffer ", names_.Text(ids), " of the ", EnumText(side),
                       ": ", change.change));
    }
  }
  for (const auto& [change, ranks] : ranks_) {
    Add(change.kind, change.rule,
        absl::StrCat(RanksText(ranks), ": ", change.change));
    differences_.back().ranks = ranks;
  }
  for (auto& [change, pairs] : pairs_) {
    std::sort(pairs.begin(), pairs.end());
    Add(change.kind, change.rule,
        absl::StrCat(PairsText(pairs), ": ", change.change));
    differences_.back().pairs = std::move(pairs);
  }
  std::sort(differences_.begin(), differences_.end(),
            [](const Difference& a, const Difference& b) {
              return std::tie(a.kind, a.rule, a.text, a.ranks, a.pairs) <
                     std::tie(b.kind, b.rule, b.text, b.ranks, b.pairs);
            });
  return std::move(differences_);
}

}  // namespace refit
