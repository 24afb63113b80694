// Collects differences and folds those that say the same of many tensors,
// ranks or pairs into one line.
#ifndef REFIT_PLAN_DIFF_REPORT_H_
#define REFIT_PLAN_DIFF_REPORT_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/diff/diff.h"
#include "plan/diff/facts.h"

namespace refit {

// What a plan says under a name. More than one fact may have the same name.
using NamedFacts = std::map<std::string, std::set<std::string>>;

class DiffReport {
 public:
  explicit DiffReport(const NameTable& names) : names_(names) {}

  // A difference that stands alone.
  void Add(DifferenceClass kind, const std::string& rule,
           const std::string& text);
  // RULE_REMOVED "name: was fact", RULE_ADDED "name: fact", or RULE_CHANGED
  // "name: fact -> fact" where each plan has one fact that the other lacks.
  void AddFacts(DifferenceClass kind, const std::string& rule,
                const NamedFacts& a, const NamedFacts& b);
  // "param "…": change" or "buffer "…" of rank 3: change".
  void AddParam(const std::string& rule, NameId param,
                const std::string& change);
  void AddBuffer(DifferenceClass kind, const std::string& rule, int32_t rank,
                 NameId tensor, const std::string& change);
  // "buffer "…" of the source: change", where ranks cannot be told apart.
  void AddSideBuffer(const std::string& rule, fb::Side side, NameId tensor,
                     const std::string& change);
  // "rank 3: change".
  void AddRank(DifferenceClass kind, const std::string& rule, int32_t rank,
               const std::string& change);
  // "0 -> 8: change".
  void AddPair(DifferenceClass kind, const std::string& rule, RankPair pair,
               const std::string& change);

  // All differences, sorted by class, rule, text. Call once.
  std::vector<Difference> Finish();

 private:
  struct Change {
    DifferenceClass kind;
    std::string rule;
    std::string change;

    friend auto operator<=>(const Change&, const Change&) = default;
  };
  void FinishBuffers(
      const Change& change,
      const std::map<int32_t, std::vector<NameId>>& tensors_by_rank);

  const NameTable& names_;
  std::vector<Difference> differences_;
  std::map<Change, std::vector<NameId>> params_;
  std::map<Change, std::map<int32_t, std::vector<NameId>>> buffers_;
  std::map<std::pair<Change, fb::Side>, std::vector<NameId>> side_buffers_;
  std::map<Change, std::vector<int32_t>> ranks_;
  std::map<Change, std::vector<RankPair>> pairs_;
};

}  // namespace refit

#endif  // REFIT_PLAN_DIFF_REPORT_H_
