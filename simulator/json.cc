#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cmath>

#include "absl/strings/str_cat.h"
#include "plan/enum_text.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

class JsonPrinter {
 public:
  JsonPrinter(const PlanFile& plan, const Simulation& simulation)
      : plan_(plan), simulation_(simulation), graph_(simulation.graph) {
    writer_.SetIndent(' ', 1);
  }

  std::string Print();

 private:
  void PrintLink(const Link& link);
  void PrintCriticalPath();
  void PrintRounds();

  void Number(const char* key, uint64_t value) {
    writer_.Key(key);
    writer_.Uint64(value);
  }
  // JSON has no word for what is not finite.
  void Real(const char* key, double value) {
    writer_.Key(key);
    if (std::isfinite(value)) {
      writer_.Double(value);
    } else {
      writer_.Null();
    }
  }
  void Text(const char* key, const std::string& value) {
    writer_.Key(key);
    String(value);
  }
  void String(const std::string& value) {
    writer_.String(value.data(),
                   static_cast<rapidjson::SizeType>(value.size()));
  }

  const PlanFile& plan_;
  const Simulation& simulation_;
  const TaskGraph& graph_;
  rapidjson::StringBuffer buffer_;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> writer_{buffer_};
};

void JsonPrinter::PrintLink(const Link& link) {
  writer_.StartObject();
  Text("name", LinkText(link));
  Number("bytes", link.bytes);
  Real("bytes_per_second", link.bytes_per_second);
  Real("busy_seconds", link.BusySeconds());
  writer_.EndObject();
}

void JsonPrinter::PrintCriticalPath() {
  writer_.Key("critical_path");
  writer_.StartArray();
  for (const uint32_t number : simulation_.critical_path) {
    const Task& task = graph_.tasks[number];
    writer_.StartObject();
    Text("kind", TaskKindText(task.kind));
    Number("rank", static_cast<uint64_t>(task.rank));
    if (task.round != kNone) Number("round", task.round);
    Real("begin_seconds", simulation_.times[number].begin);
    Real("end_seconds", simulation_.times[number].end);
    if (task.kind == TaskKind::kMessage) {
      const Message& message = graph_.messages[task.message];
      Number("to_rank", static_cast<uint64_t>(message.destination));
      Number("size_bytes", message.size_bytes);
      if (const uint32_t link = simulation_.bottlenecks[task.message];
          link != kNone) {
        Text("held_by", LinkText(graph_.links[link]));
      }
      writer_.Key("tensors");
      writer_.StartArray();
      for (const std::string& name : TensorsOf(plan_, message)) String(name);
      writer_.EndArray();
    }
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintRounds() {
  writer_.Key("rounds");
  writer_.StartArray();
  for (uint32_t i = 0; i < simulation_.rounds.size(); ++i) {
    const RoundTimes& round = simulation_.rounds[i];
    writer_.StartObject();
    Number("round", i);
    Text("route", EnumText(round.route));
    Text("mechanism", EnumText(round.mechanism));
    Number("messages", round.messages);
    Number("size_bytes", round.size_bytes);
    Real("begin_seconds", round.begin);
    Real("end_seconds", round.end);
    writer_.EndObject();
  }
  writer_.EndArray();
}

std::string JsonPrinter::Print() {
  const fb::Stats* stats = plan_.body().stats();
  writer_.StartObject();
  Real("simulated_seconds", simulation_.seconds);
  Real("lower_bound_seconds",
       stats == nullptr ? 0 : stats->lower_bound_seconds());
  Real("predicted_seconds", stats == nullptr ? 0 : stats->predicted_seconds());
  Real("peer_bytes_per_second", simulation_.options.peer_bytes_per_second);
  Real("network_bytes_per_second",
       simulation_.options.network_bytes_per_second);
  if (const uint32_t busiest = simulation_.BusiestLink(); busiest != kNone) {
    writer_.Key("binding_link");
    PrintLink(graph_.links[busiest]);
  }
  PrintCriticalPath();
  PrintRounds();
  writer_.Key("links");
  writer_.StartArray();
  for (const Link& link : graph_.links) PrintLink(link);
  writer_.EndArray();
  writer_.EndObject();
  return absl::StrCat(buffer_.GetString(), "\n");
}

}  // namespace

std::string SimulationJson(const PlanFile& plan, const Simulation& simulation) {
  return JsonPrinter(plan, simulation).Print();
}

}  // namespace refit::simulator
