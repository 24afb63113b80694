// One HTML page that shows a plan: what moves where, how long it takes, and
// why.
//
// The page has two parts: data, which is JSON, and a page that draws it. The
// page loads nothing: no font, no script, no image. docs/report.md tells what
// it shows and what each key of the data means.
#ifndef REFIT_REPORT_REPORT_H_
#define REFIT_REPORT_REPORT_H_

#include <optional>
#include <string>
#include <string_view>

#include "plan/diff/diff.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "report/job_text.h"
#include "report/measured_run.h"
#include "simulator/simulation.h"

namespace refit::report {

// Another plan, and what changes from it to the plan of the page.
struct Comparison {
  std::string path;  // of the other plan's file
  std::string digest;
  PlanDifference difference;
};

// All references outlive the call.
struct ReportInputs {
  std::string path;  // of the plan's file
  const PlanFile& plan;
  const ProofResult& proof;                 // valid
  const simulator::Simulation& simulation;  // with record_rates
  std::optional<JobText> job = std::nullopt;
  std::optional<MeasuredRun> measured = std::nullopt;
  std::optional<Comparison> against = std::nullopt;
};

// The data as one JSON object. Deterministic. Text that is not UTF-8 has
// U+FFFD in its place.
std::string ReportData(const ReportInputs& inputs);

// The page with this data. Whatever text the data has, a browser runs none of
// it.
std::string ReportPage(std::string_view data);

}  // namespace refit::report

#endif  // REFIT_REPORT_REPORT_H_
