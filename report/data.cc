#include <algorithm>
#include <array>
#include <map>

#include "report/sections.h"

namespace refit::report {
namespace {

constexpr size_t kMostDifferences = 40;  // of one rule

}  // namespace

void WriteMeasured(const MeasuredRun& run, const PlanFile& plan,
                   DataWriter& data) {
  std::vector<uint64_t> numbers;
  std::vector<double> seconds, packing, wire, unpacking;
  const MeasuredRefit* timed = nullptr;  // the fastest with timed rounds
  for (const MeasuredRefit& refit : run.refits) {
    numbers.push_back(refit.number);
    seconds.push_back(refit.seconds);
    packing.push_back(refit.pack_seconds);
    wire.push_back(refit.wire_seconds);
    unpacking.push_back(refit.unpack_seconds);
    if (!refit.round_seconds.empty() &&
        (timed == nullptr || refit.seconds < timed->seconds)) {
      timed = &refit;
    }
  }
  data.OpenObject("measured");
  data.FileName("name", run.path);
  data.Number("delta_refits", run.delta_refits);
  data.Line("refits", numbers);
  data.Line("seconds", seconds);
  data.Line("pack_seconds", packing);
  data.Line("wire_seconds", wire);
  data.Line("unpack_seconds", unpacking);
  if (timed != nullptr) {
    const uint32_t rounds_per_group = RoundsPerGroup(plan);
    std::vector<double> rounds;
    for (size_t i = 0; i < timed->round_seconds.size(); ++i) {
      if (i % rounds_per_group == 0) rounds.push_back(0);
      rounds.back() += timed->round_seconds[i];
    }
    data.Line("rounds", rounds);
  }
  data.CloseObject();
}

void WriteComparison(const Comparison& against, DataWriter& data) {
  const PlanDifference& difference = against.difference;
  data.OpenObject("against");
  data.FileName("name", against.path);
  data.Text("digest", against.digest);
  data.Text("summary", difference.summary);
  const PlanTotals& a = difference.totals_a;
  const PlanTotals& b = difference.totals_b;
  data.Line("moved_bytes", std::array{a.moved_bytes, b.moved_bytes});
  data.Line("rounds", std::array{a.rounds, b.rounds});
  data.Line("peak_staging_bytes",
            std::array{a.peak_staging_bytes, b.peak_staging_bytes});
  std::map<std::string, size_t> of_rule;
  data.OpenArray("differences");
  for (const Difference& entry : difference.differences) {
    if (++of_rule[entry.rule] > kMostDifferences) continue;
    data.OpenObject();
    data.Text("class", ClassText(entry.kind));
    data.Text("rule", entry.rule);
    data.Text("text", entry.text);
    data.CloseObject();
  }
  data.CloseArray();
  data.OpenArray("left_out");
  for (const auto& [rule, count] : of_rule) {
    if (count <= kMostDifferences) continue;
    data.OpenObject();
    data.Text("rule", rule);
    data.Number("count", count - kMostDifferences);
    data.CloseObject();
  }
  data.CloseArray();
  data.CloseObject();
}

std::string ReportData(const ReportInputs& inputs) {
  DataWriter data;
  data.OpenObject();
  WritePlan(inputs, data);
  WriteTimes(inputs, data);
  WriteCoverage(inputs, data);
  WriteRanks(inputs.plan, data);
  WriteTraffic(inputs.plan, data);
  WriteLinks(inputs.simulation, data);
  WriteRounds(inputs, data);
  WriteMemory(inputs.plan, data);
  WriteSlowest(inputs, data);
  WriteCriticalPath(inputs, data);
  if (inputs.measured.has_value()) {
    WriteMeasured(*inputs.measured, inputs.plan, data);
  }
  if (inputs.against.has_value()) WriteComparison(*inputs.against, data);
  data.WriteNames("names");
  data.CloseObject();
  return data.Take();
}

}  // namespace refit::report
