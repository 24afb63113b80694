#include "simulator/output.h"

#include <gtest/gtest.h>
#include <rapidjson/document.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "tests/plan/plan_spec.h"
#include "tests/simulator/collected_text.h"

namespace refit::simulator {
namespace {

// One byte a microsecond, and rounds that cost a microsecond.
Options SlowLinks() {
  Options options;
  options.peer_bytes_per_second = 1e6;
  options.direct_round_seconds = 1e-6;
  options.peer_message_seconds = 1e-6;
  options.peer_round_seconds = 0;
  options.quantized_message_seconds = 1e-6;
  options.copy_bytes_per_second = 1e9;
  options.quantized_elements_per_second = 1e9;
  options.record_rates = true;
  options.has_plan_speeds = true;
  return options;
}

Simulation SimulatePlan(const PlanFile& plan) {
  absl::StatusOr<Simulation> simulation = Simulate(plan, SlowLinks());
  EXPECT_TRUE(simulation.ok()) << simulation.status();
  return simulation.ok() ? *std::move(simulation) : Simulation();
}

rapidjson::Document Parse(const std::string& text) {
  rapidjson::Document document;
  document.Parse(text.c_str());
  EXPECT_FALSE(document.HasParseError()) << text;
  return document;
}

// SampleSpec: rank 0 sends 80 bytes to 2, then 64 to 3; rank 1 the other way
// round. A round takes 1 us, then its bytes.
TEST(Output, TextSaysTimeLinkAndCriticalPath) {
  const PlanFile plan = OpenSpec(SampleSpec());
  EXPECT_EQ(
      SimulationText(plan, SimulatePlan(plan), /*rounds=*/true),
      R"(simulated      0.000146144 s, 0.146 x the lower bound, 0.058 x the prediction
links          peer 0.001 GB/s, network 50 GB/s, per rank and direction
binding link   peer egress of rank 0: 144 bytes take 0.144 ms, 98.5 % of the time
from the lower bound to the simulated time
      1.000 ms  lower bound
     -0.856 ms  bytes of the binding link: 0.144 ms
     +0.002 ms  starts of rounds, 2 parts, mostly rank 0
      0.146 ms  simulated
critical path
      0.144 ms   98.5 %  messages that wait for peer egress
      0.002 ms    1.4 %  start
      0.000 ms    0.1 %  pack
      0.000 ms    0.0 %  unpack
its longest messages
      0.080 ms  round 0 peer, rank 0 to 2, 80 bytes, by peer egress of rank 0
                decoder.layers.{0}.mlp.linear_fc1.weight and 1 more
      0.064 ms  round 1 peer, rank 1 to 2, 64 bytes, by peer egress of rank 1
                decoder.layers.{0}.mlp.linear_fc1.weight
rounds       begin ms      end ms  messages             bytes  route
     0          0.000       0.081         2               160  peer
     1          0.000       0.146         2               128  peer
)");
}

TEST(Output, TextAndJsonSayWhatIsDealt) {
  const PlanFile plan = OpenSpec(DealtSpec());
  const Simulation simulation = SimulatePlan(plan);
  const std::string text = SimulationText(plan, simulation, /*rounds=*/false);
  EXPECT_NE(text.find("\ndealt          16 bytes by rank 1 to 2\n"),
            std::string::npos)
      << text;
  const rapidjson::Document json = Parse(SimulationJson(plan, simulation));
  EXPECT_EQ(json["dealt_bytes"].GetUint64(), 16u);
  EXPECT_EQ(json["dealing_ranks"].GetUint64(), 1u);
}

TEST(Output, JsonHasTheSameAndTheLinks) {
  const PlanFile plan = OpenSpec(SampleSpec());
  const Simulation simulation = SimulatePlan(plan);
  const rapidjson::Document json = Parse(SimulationJson(plan, simulation));
  EXPECT_EQ(json["simulated_seconds"].GetDouble(), simulation.seconds);
  EXPECT_EQ(json["links"].Size(), 4u);
  EXPECT_EQ(json["rounds"].Size(), 2u);
  EXPECT_EQ(json["rounds"][1]["size_bytes"].GetUint64(), 128u);
  EXPECT_STREQ(json["binding_link"]["name"].GetString(),
               "peer egress of rank 0");
  EXPECT_STREQ(json["idle"][0]["during"].GetString(), "starts of rounds");
  EXPECT_EQ(json["idle"][0]["parts"].GetUint64(), 2u);
  EXPECT_EQ(json["critical_path"].Size(), simulation.critical_path.size());
  double end = 0;
  for (const auto& step : json["critical_path"].GetArray()) {
    EXPECT_DOUBLE_EQ(step["begin_seconds"].GetDouble(), end);
    end = step["end_seconds"].GetDouble();
  }
  EXPECT_DOUBLE_EQ(end, simulation.seconds);
}

TEST(Output, JsonSaysWhatWasAsked) {
  const PlanFile plan = OpenSpec(SampleSpec());
  Options options = SlowLinks();
  options.executor = Executor::kCpu;
  options.slow_ranks = {{1, 2}};
  options.slow_nics = {{0, 1.5}};
  options.dead_nics = {3};
  options.oversubscription = 4;
  const absl::StatusOr<Simulation> simulation = Simulate(plan, options);
  ASSERT_TRUE(simulation.ok()) << simulation.status();
  const rapidjson::Document json = Parse(SimulationJson(plan, *simulation));
  ASSERT_TRUE(json.HasMember("executor"));
  EXPECT_STREQ(json["executor"].GetString(), "cpu");
  EXPECT_EQ(json["slow_ranks"]["1"].GetDouble(), 2);
  EXPECT_EQ(json["slow_nics"]["0"].GetDouble(), 1.5);
  EXPECT_EQ(json["dead_nics"][0].GetInt(), 3);
  EXPECT_EQ(json["oversubscription"].GetDouble(), 4);
}

// The plan's bound and prediction are of the plan's links.
TEST(Output, TextComparesWithThePlanOnThePlansLinksAlone) {
  const PlanFile plan = OpenSpec(SampleSpec());
  Options options = SlowLinks();
  options.has_plan_speeds = false;
  const absl::StatusOr<Simulation> simulation = Simulate(plan, options);
  ASSERT_TRUE(simulation.ok()) << simulation.status();
  const std::string text = SimulationText(plan, *simulation, /*rounds=*/false);
  EXPECT_EQ(text.substr(0, text.find('\n')), "simulated      0.000146144 s");
  EXPECT_NE(text.find("from the bytes of the binding link to the simulated "
                      "time\n      0.144 ms  bytes of the binding link\n"),
            std::string::npos);
}

// A host that only receives has a downlink alone.
TEST(Output, ATraceNamesEveryHostWithACounterOnce) {
  PlanSpec spec = SampleSpec();
  for (size_t rank = 2; rank < 4; ++rank) spec.programs[rank].host = 1;
  for (fb::Route& route : spec.rounds) route = fb::Route::kNetwork;
  const PlanFile plan = OpenSpec(spec);
  Options options = SlowLinks();
  options.network_bytes_per_second = 1e6;
  options.oversubscription = 2;
  const absl::StatusOr<Simulation> simulation = Simulate(plan, options);
  ASSERT_TRUE(simulation.ok()) << simulation.status();
  const rapidjson::Document trace = Parse(TraceOf(plan, *simulation));
  std::map<int, int> named;
  for (const auto& event : trace["traceEvents"].GetArray()) {
    if (std::string(event["name"].GetString()) == "process_name") {
      ++named[event["pid"].GetInt()];
    }
  }
  for (const auto& event : trace["traceEvents"].GetArray()) {
    const int process = event["pid"].GetInt();
    EXPECT_EQ(named[process], 1) << "process " << process;
  }
}

// Whatever the width of a bin rounds to.
TEST(Output, ATracesCountersSumToTheTimeThatALinkWasBusy) {
  const PlanFile plan = OpenSpec(SampleSpec());
  for (int step = 1; step <= 300; ++step) {
    Simulation simulation;
    simulation.seconds = 0.001 * step;
    simulation.graph.links = {{.bytes_per_second = 1}};
    simulation.rates = {{.seconds = 0, .link = 0, .share = 1},
                        {.seconds = 0.7 * simulation.seconds, .share = 0.5}};
    const rapidjson::Document trace = Parse(TraceOf(plan, simulation));
    double busy = 0, since = 0, share = 0;
    for (const auto& event : trace["traceEvents"].GetArray()) {
      if (std::string(event["ph"].GetString()) != "C") continue;
      const double now = event["ts"].GetDouble() * 1e-6;
      busy += share * (now - since);
      since = now;
      share = event["args"]["share"].GetDouble();
    }
    EXPECT_NEAR(busy, 0.85 * simulation.seconds, 0.01 * simulation.seconds)
        << simulation.seconds;
  }
}

// Perfetto refuses slices of one track that overlap without one being in the
// other, spans that do not end, and arrows without an end.
TEST(Output, ATraceHasNoOverlapsOnATrackAndEndsWhatItBegins) {
  for (const PlanSpec& spec :
       {SampleSpec(), QuantizedSpec(), WindowedSpec(), DealtSpec()}) {
    const PlanFile plan = OpenSpec(spec);
    const rapidjson::Document trace = Parse(TraceOf(plan, SimulatePlan(plan)));
    std::map<std::pair<int, int>, std::multiset<std::pair<double, double>>>
        slices;
    std::map<std::string, int> open;
    std::map<std::string, int> kinds;
    for (const auto& event : trace["traceEvents"].GetArray()) {
      const std::string kind = event["ph"].GetString();
      ++kinds[kind];
      if (kind == "X") {
        const double begin = event["ts"].GetDouble();
        slices[{event["pid"].GetInt(), event["tid"].GetInt()}].emplace(
            begin, begin + event["dur"].GetDouble());
      } else if (kind == "b" || kind == "e") {
        open["span " + std::to_string(event["id"].GetInt())] +=
            kind == "b" ? 1 : -1;
      } else if (kind == "s" || kind == "f") {
        open["arrow " + std::to_string(event["id"].GetInt())] +=
            kind == "s" ? 1 : -1;
      } else if (kind == "C") {
        EXPECT_GE(event["args"]["share"].GetDouble(), 0);
        EXPECT_LE(event["args"]["share"].GetDouble(), 1.001);
      }
    }
    for (const auto& [name, count] : open) EXPECT_EQ(count, 0) << name;
    for (const auto& [track, of_track] : slices) {
      double end = 0;
      for (const auto& [begin, slice_end] : of_track) {
        EXPECT_GE(begin, end - 1e-3) << "track " << track.second;
        end = slice_end;
      }
    }
    for (const char* kind : {"X", "b", "s", "C", "M"}) {
      EXPECT_GT(kinds[kind], 0) << kind;
    }
  }
}

}  // namespace
}  // namespace refit::simulator
