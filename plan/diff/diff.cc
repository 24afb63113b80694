#include "plan/diff/diff.h"

#include <algorithm>
#include <array>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "plan/diff/facts.h"
#include "plan/diff/report.h"
#include "plan/diff/stages.h"
#include "plan/features.h"
#include "plan/text/json_writer.h"
#include "plan/text/plan_view.h"
#include "plan/text/stats.h"

namespace refit {
namespace {

// How many lines of one rule the text shows; the JSON shows all.
constexpr size_t kLinesPerRule = 20;

PlanTotals PlanTotalsOf(const PlanFile& plan) {
  const PlanStats stats = StatsOf(plan);
  return {.moved_bytes = stats.totals.moved_bytes(),
          .rounds = plan.body().rounds()->size(),
          .peak_staging_bytes = stats.largest_staging_bytes};
}

constexpr DifferenceClass kClasses[] = {DifferenceClass::kContract,
                                        DifferenceClass::kTraffic,
                                        DifferenceClass::kSchedule};

std::string SummaryText(const PlanDifference& difference) {
  std::string text = "summary:";
  for (const DifferenceClass kind : kClasses) {
    absl::StrAppend(&text, kind == DifferenceClass::kContract ? " " : ", ",
                    difference.Count(kind), " ", ClassText(kind));
  }
  const PlanTotals& a = difference.totals_a;
  const PlanTotals& b = difference.totals_b;
  absl::StrAppend(&text, "; moved bytes ", a.moved_bytes, " -> ",
                  b.moved_bytes);
  absl::StrAppend(&text, "; rounds ", a.rounds, " -> ", b.rounds);
  absl::StrAppend(&text, "; peak staging bytes ", a.peak_staging_bytes, " -> ",
                  b.peak_staging_bytes);
  return text;
}

bool SameDigest(const PlanFile& a, const PlanFile& b) {
  const fb::Digest* digest_a = a.plan().body_digest();
  const fb::Digest* digest_b = b.plan().body_digest();
  return digest_a != nullptr && digest_b != nullptr &&
         digest_a->low() == digest_b->low() &&
         digest_a->high() == digest_b->high();
}

// The file says it outside the body, so the body's digest does not tell.
// Executors read any minor version, but refuse features that they do not know.
void CompareFormats(const fb::Plan& a, const fb::Plan& b, DiffReport& report) {
  const std::string format_a = FormatText(a);
  const std::string format_b = FormatText(b);
  if (format_a == format_b) return;
  std::string text = absl::StrCat(format_a, " -> ", format_b);
  const std::vector<std::string> added =
      FeatureNames(b.required_features() & ~a.required_features());
  if (!added.empty()) {
    absl::StrAppend(&text, "; executors must also know ",
                    absl::StrJoin(added, ", "));
  }
  report.Add(
      added.empty() ? DifferenceClass::kSchedule : DifferenceClass::kContract,
      std::string(kFormatChanged), text);
}

// Nothing if the plan is of an earlier build, which did not write it.
std::map<std::string, std::string> JobOf(const fb::Plan& plan) {
  std::map<std::string, std::string> facts;
  if (plan.provenance() == nullptr || plan.provenance()->job() == nullptr) {
    return facts;
  }
  for (const fb::JobFact* fact : *plan.provenance()->job()) {
    facts[fact->key()->str()] = fact->value()->str();
  }
  return facts;
}

std::vector<JobDifference> CompareJobs(const fb::Plan& a, const fb::Plan& b) {
  const std::map<std::string, std::string> facts_a = JobOf(a);
  const std::map<std::string, std::string> facts_b = JobOf(b);
  if (facts_a.empty() || facts_b.empty()) return {};
  std::map<std::string, JobDifference> found;
  for (const auto& [key, value] : facts_a) found[key].a = value;
  for (const auto& [key, value] : facts_b) found[key].b = value;
  std::vector<JobDifference> job;
  for (auto& [key, difference] : found) {
    if (difference.a == difference.b) continue;
    job.push_back({.key = key, .a = difference.a, .b = difference.b});
  }
  return job;
}

}  // namespace

const char* ClassText(DifferenceClass kind) {
  switch (kind) {
    case DifferenceClass::kContract:
      return "contract";
    case DifferenceClass::kTraffic:
      return "traffic";
    case DifferenceClass::kSchedule:
      return "schedule";
  }
  return "unknown";
}

int64_t PlanDifference::Count(DifferenceClass kind) const {
  return std::count_if(
      differences.begin(), differences.end(),
      [kind](const Difference& entry) { return entry.kind == kind; });
}

PlanDifference ComparePlans(const PlanFile& a, const PlanFile& b) {
  PlanDifference difference;
  NameTable names;
  DiffReport report(names);
  CompareFormats(a.plan(), b.plan(), report);
  if (!SameDigest(a, b)) {
    PlanFacts facts_a(a, names);
    PlanFacts facts_b(b, names);
    // When the source grew or shrank, the same number is another rank.
    const int32_t common_ranks = a.source_ranks() == b.source_ranks()
                                     ? std::min(a.world_size(), b.world_size())
                                     : 0;
    const ChangedTensors changed =
        CompareContracts(facts_a, facts_b, common_ranks, report);
    CompareQuantization(a.body(), b.body(), common_ranks, changed, report);
    CompareTraffic(facts_a, facts_b, names, common_ranks, changed, report);
    if (a.source_ranks() != b.source_ranks()) {
      report.Add(DifferenceClass::kTraffic, "RANKS_NOT_COMPARED",
                 absl::StrCat("messages, rounds and staging of single ranks: "
                              "with ",
                              a.source_ranks(), " -> ", b.source_ranks(),
                              " source ranks, a number names another rank"));
    }
  }
  difference.differences = report.Finish();
  difference.job = CompareJobs(a.plan(), b.plan());
  difference.totals_a = PlanTotalsOf(a);
  difference.totals_b = PlanTotalsOf(b);
  difference.summary = SummaryText(difference);
  return difference;
}

std::string DifferenceText(const PlanDifference& difference) {
  std::string text;
  if (!difference.job.empty()) text = "job\n";
  for (const JobDifference& entry : difference.job) {
    const auto shown = [](const std::string& value) {
      return value.empty() ? "not said" : value;
    };
    absl::StrAppend(&text, "  ", entry.key, ": ", shown(entry.a), " -> ",
                    shown(entry.b), "\n");
  }
  const std::vector<Difference>& all = difference.differences;
  for (size_t begin = 0; begin < all.size();) {
    const Difference& first = all[begin];
    if (begin == 0 || all[begin - 1].kind != first.kind) {
      absl::StrAppend(&text, ClassText(first.kind), "\n");
    }
    size_t end = begin;
    for (; end < all.size() && all[end].kind == first.kind &&
           all[end].rule == first.rule;
         ++end) {
      if (end - begin < kLinesPerRule) {
        absl::StrAppend(&text, "  ", first.rule, " ", all[end].text, "\n");
      }
    }
    if (end - begin > kLinesPerRule) {
      absl::StrAppend(&text, "  ", first.rule, " and ",
                      end - begin - kLinesPerRule, " more\n");
    }
    begin = end;
  }
  absl::StrAppend(&text, difference.summary, "\n");
  return text;
}

std::string DifferenceJson(const PlanDifference& difference) {
  JsonWriter json;
  json.OpenObject();
  json.Bool("same", difference.same());
  json.OpenObject("counts");
  for (const DifferenceClass kind : kClasses) {
    json.Number(ClassText(kind), difference.Count(kind));
  }
  json.CloseObject();
  // Of the first plan, then of the second.
  const auto add_totals = [&](const char* key, uint64_t PlanTotals::*total) {
    json.Line(key, std::array{difference.totals_a.*total,
                              difference.totals_b.*total});
  };
  add_totals("moved_bytes", &PlanTotals::moved_bytes);
  add_totals("rounds", &PlanTotals::rounds);
  add_totals("peak_staging_bytes", &PlanTotals::peak_staging_bytes);
  json.Objects("job", difference.job, [&](const JobDifference& entry) {
    json.Text("key", entry.key);
    if (!entry.a.empty()) json.Text("first", entry.a);
    if (!entry.b.empty()) json.Text("second", entry.b);
  });
  json.Objects("differences", difference.differences,
               [&](const Difference& entry) {
                 json.Text("class", ClassText(entry.kind));
                 json.Text("rule", entry.rule);
                 json.Text("text", entry.text);
                 if (!entry.ranks.empty()) json.Line("ranks", entry.ranks);
                 if (!entry.pairs.empty()) {
                   json.OpenLine("pairs");
                   for (const auto& [src, dst] : entry.pairs) {
                     json.OpenArray();
                     json.Number(src);
                     json.Number(dst);
                     json.CloseArray();
                   }
                   json.CloseLine();
                 }
               });
  json.Text("summary", difference.summary);
  json.CloseObject();
  return json.Take();
}

}  // namespace refit
