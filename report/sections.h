// The parts of the data, in the order of the page.
#ifndef REFIT_REPORT_SECTIONS_H_
#define REFIT_REPORT_SECTIONS_H_

#include "report/data_writer.h"
#include "report/report.h"

namespace refit::report {

// Consecutive rounds that the page shows as one, where a plan has more than it
// can show: all rounds are cut into groups of so many.
uint32_t RoundsPerGroup(const PlanFile& plan);

// From the plan alone.
void WritePlan(const ReportInputs& inputs, DataWriter& data);
void WriteCoverage(const ReportInputs& inputs, DataWriter& data);
void WriteRanks(const PlanFile& plan, DataWriter& data);
void WriteTraffic(const PlanFile& plan, DataWriter& data);
void WriteMemory(const PlanFile& plan, DataWriter& data);

// From the simulation.
void WriteTimes(const ReportInputs& inputs, DataWriter& data);
void WriteLinks(const simulator::Simulation& simulation, DataWriter& data);
void WriteRounds(const ReportInputs& inputs, DataWriter& data);
void WriteSlowest(const ReportInputs& inputs, DataWriter& data);
void WriteCriticalPath(const ReportInputs& inputs, DataWriter& data);

void WriteMeasured(const MeasuredRun& run, const PlanFile& plan,
                   DataWriter& data);
void WriteComparison(const Comparison& against, DataWriter& data);

}  // namespace refit::report

#endif  // REFIT_REPORT_SECTIONS_H_
