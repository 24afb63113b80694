// Plans as stable text and JSON: one printer for refit-dump, goldens and
// reviews.
#ifndef REFIT_PLAN_TEXT_TEXT_H_
#define REFIT_PLAN_TEXT_TEXT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "plan/plan_file.h"

namespace refit {

struct TextOptions {
  // Only this rank's buffers and program.
  std::optional<int32_t> rank = std::nullopt;
  // Only params, buffers and copies that match; "": all.
  std::string tensor_glob = {};
};

// Whether the plan has a param, a buffer or a skip whose name matches.
bool HasTensor(const PlanFile& plan, std::string_view glob);

// One fact a line, lists in id order, two-space indent, no time, host name or
// path: the same plan always prints the same bytes.
std::string PlanText(const PlanFile& plan, const TextOptions& options);

// The same facts as JSON.
std::string PlanJson(const PlanFile& plan, const TextOptions& options);

// What `refitc --stats` prints: bytes by route, per sender and receiver with
// their imbalance, lower bound, predicted time, binding link, operations,
// rounds, staging.
std::string StatsText(const PlanFile& plan);

// The same facts as one JSON object: bytes and counts as numbers, seconds as
// doubles (null if not finite).
std::string StatsJson(const PlanFile& plan);

// "machine hgx-h200 hosts_per_nvlink_domain 1 …": all fields, on one line.
std::string TopologyText(const fb::Topology& topology);

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_TEXT_H_
