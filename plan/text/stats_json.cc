#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "plan/enum_text.h"
#include "plan/text/plan_view.h"
#include "plan/text/stats.h"
#include "plan/text/text.h"

namespace refit {
namespace {

class StatsWriter {
 public:
  StatsWriter() : writer_(buffer_) { writer_.SetIndent(' ', 2); }

  void Open(const std::string& key = "") {
    if (!key.empty()) Key(key);
    writer_.StartObject();
  }
  void Close() { writer_.EndObject(); }
  void Number(const std::string& key, uint64_t value) {
    Key(key);
    writer_.Uint64(value);
  }
  // JSON has no word for what is not finite.
  void Real(const std::string& key, double value) {
    Key(key);
    if (std::isfinite(value)) {
      writer_.Double(value);
    } else {
      writer_.Null();
    }
  }
  void Text(const std::string& key, const std::string& value) {
    Key(key);
    writer_.String(value.data(),
                   static_cast<rapidjson::SizeType>(value.size()));
  }
  std::string Take() { return absl::StrCat(buffer_.GetString(), "\n"); }

 private:
  void Key(const std::string& key) {
    writer_.Key(key.data(), static_cast<rapidjson::SizeType>(key.size()));
  }

  rapidjson::StringBuffer buffer_;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> writer_;
};

void AddBalance(const std::string& key, const Balance& balance,
                StatsWriter& json) {
  json.Open(key);
  json.Number("rank", balance.busiest);
  json.Number("max_bytes", balance.max_bytes);
  json.Real("mean_bytes", balance.mean_bytes);
  json.Real("imbalance", balance.imbalance());
  json.Close();
}

void AddScratch(const std::string& key, const ScratchUse& scratch,
                StatsWriter& json) {
  if (scratch.bytes == 0) return;
  json.Open(key);
  json.Number("rank", scratch.rank);
  json.Number("bytes", scratch.bytes);
  json.Number("waves", scratch.waves.count);
  json.Number("largest_wave_bytes", scratch.waves.largest_bytes);
  json.Close();
}

}  // namespace

std::string StatsJson(const PlanFile& plan) {
  const PlanStats stats = StatsOf(plan);
  const Totals& totals = stats.totals;
  const fb::Body& body = plan.body();
  const auto route_bytes = [&](fb::Route route) {
    return totals.route_bytes[static_cast<size_t>(route)];
  };
  StatsWriter json;
  json.Open();
  json.Number("moved_bytes", totals.moved_bytes());
  json.Number("local_bytes", route_bytes(fb::Route::kLocal));
  json.Number("peer_bytes", route_bytes(fb::Route::kPeer));
  json.Number("network_bytes", route_bytes(fb::Route::kNetwork));
  json.Number("direct_bytes", totals.direct_bytes);
  json.Number("relayed_bytes", totals.relayed_bytes);
  AddBalance("sent_by_source_ranks", stats.sent, json);
  AddBalance("received_by_destination_ranks", stats.received, json);
  json.Real("lower_bound_seconds", body.stats()->lower_bound_seconds());
  json.Real("predicted_seconds", body.stats()->predicted_seconds());
  json.Text("binding_link", body.stats()->binding_link() == nullptr
                                ? ""
                                : body.stats()->binding_link()->str());
  json.Number("messages", totals.messages);
  json.Number("largest_staged_bytes", totals.largest_message_bytes);
  json.Number("rounds", body.rounds()->size());
  json.Number("operations_max", totals.most_operations);
  json.Number("staging_bytes_max", stats.largest_staging_bytes);
  AddScratch("source_scratch",
             stats.scratch[static_cast<size_t>(fb::Side::kSource)], json);
  AddScratch("destination_scratch",
             stats.scratch[static_cast<size_t>(fb::Side::kDestination)], json);
  if (const fb::Delta* const delta = body.delta()) {
    json.Open("delta");
    json.Text("changes", EnumText(delta->changes()));
    json.Number("dense_every", delta->dense_every());
    json.Number("snapshot_bytes_max", stats.snapshot_bytes);
    json.Close();
  }
  json.Number("params", stats.params);
  json.Number("param_stacks", body.params()->size());
  json.Number("tensors", stats.tensors);
  json.Number("buffers", body.buffers()->size());
  json.Number("fragments", stats.fragments);
  json.Number("copies", body.copies()->size());
  json.Number("copy_lists", body.copy_lists()->size());
  json.Number("skips", stats.skips);
  json.Open("post_hooks");
  for (const auto& [name, count] : stats.post_hooks) json.Number(name, count);
  json.Close();
  json.Number("file_bytes", plan.bytes().size());
  json.Close();
  return json.Take();
}

}  // namespace refit
