#include <string>

#include "absl/strings/str_cat.h"
#include "plan/enum_text.h"
#include "plan/text/json_writer.h"
#include "plan/text/plan_view.h"
#include "plan/text/stats.h"
#include "plan/text/text.h"

namespace refit {
namespace {

void AddBalance(const std::string& key, const Balance& balance,
                JsonWriter& json) {
  json.OpenObject(key);
  json.Number("rank", balance.busiest);
  json.Number("max_bytes", balance.max_bytes);
  json.Real("mean_bytes", balance.mean_bytes);
  json.Real("imbalance", balance.imbalance());
  json.CloseObject();
}

void AddScratch(const std::string& key, const ScratchUse& scratch,
                JsonWriter& json) {
  if (scratch.bytes == 0) return;
  json.OpenObject(key);
  json.Number("rank", scratch.rank);
  json.Number("bytes", scratch.bytes);
  json.Number("waves", scratch.waves.count);
  json.Number("largest_wave_bytes", scratch.waves.largest_bytes);
  json.CloseObject();
}

}  // namespace

std::string StatsJson(const PlanFile& plan) {
  const PlanStats stats = StatsOf(plan);
  const Totals& totals = stats.totals;
  const fb::Body& body = plan.body();
  const auto route_bytes = [&](fb::Route route) {
    return totals.route_bytes[static_cast<size_t>(route)];
  };
  JsonWriter json;
  json.OpenObject();
  json.Number("source_ranks", plan.source_ranks());
  json.Number("destination_ranks", plan.world_size() - plan.source_ranks());
  json.Number("hosts", stats.hosts);
  json.Number("moved_bytes", totals.moved_bytes());
  json.Number("local_bytes", route_bytes(fb::Route::kLocal));
  json.Number("peer_bytes", route_bytes(fb::Route::kPeer));
  json.Number("network_bytes", route_bytes(fb::Route::kNetwork));
  json.Number("direct_bytes", totals.direct_bytes);
  json.Number("relayed_bytes", totals.relayed_bytes);
  json.Number("dealt_bytes", stats.dealt.bytes);
  json.Number("dealing_ranks", stats.dealt.ranks);
  AddBalance("sent_by_source_ranks", stats.sent, json);
  AddBalance("received_by_destination_ranks", stats.received, json);
  const Estimates estimates = EstimatesOf(plan);
  json.Real("lower_bound_seconds", estimates.lower_bound_seconds);
  json.Real("predicted_seconds", estimates.predicted_seconds);
  json.Text("binding_link", estimates.binding_link);
  json.Number("messages", totals.messages);
  json.Number("largest_staged_bytes", totals.largest_message_bytes);
  json.Number("rounds", body.rounds()->size());
  json.Number("operations_max", totals.most_operations);
  json.Number("network_peers_max", stats.most_network_peers);
  json.Number("staging_bytes_max", stats.largest_staging_bytes);
  AddScratch("source_scratch",
             stats.scratch[static_cast<size_t>(fb::Side::kSource)], json);
  AddScratch("destination_scratch",
             stats.scratch[static_cast<size_t>(fb::Side::kDestination)], json);
  if (const fb::Delta* const delta = body.delta()) {
    json.OpenObject("delta");
    json.Text("changes", EnumText(delta->changes()));
    json.Number("dense_every", delta->dense_every());
    json.Number("snapshot_bytes_max", stats.snapshot_bytes);
    if (delta->rungs() != nullptr) {
      json.OpenLine("rungs");
      for (const uint8_t rung : *delta->rungs()) json.Number(rung);
      json.CloseLine();
    }
    json.CloseObject();
  }
  json.Number("params", stats.params);
  json.Number("param_stacks", body.params()->size());
  json.Number("tensors", stats.tensors);
  json.Number("buffers", body.buffers()->size());
  json.Number("fragments", stats.fragments);
  json.Number("copies", body.copies()->size());
  json.Number("copy_lists", body.copy_lists()->size());
  json.Number("skips", stats.skips);
  json.OpenObject("post_hooks");
  for (const auto& [name, count] : stats.post_hooks) json.Number(name, count);
  json.CloseObject();
  json.Number("file_bytes", plan.bytes().size());
  json.CloseObject();
  return json.Take();
}

}  // namespace refit
