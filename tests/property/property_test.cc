// Random meshes, placements and schedules through the whole product, every
// destination byte compared with the oracle's. What frameworks make of models
// is the second opinion's.
//
//   REFIT_SEED=N             replays one draw; a failure names its seed
//   REFIT_PROPERTY_CASES=N   draws per test instead of the default
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/ir/module.h"
#include "plan/group_limit.h"
#include "plan/plan_file.h"
#include "tests/compiler/make_compact.h"
#include "tests/property/chain.h"
#include "tests/property/draw.h"
#include "tests/property/generic_side.h"
#include "tests/property/oracle.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

// Together some seconds of one core without a sanitizer, half a minute with
// one.
constexpr int64_t kGenericCases = kSanitized ? 30 : 1000;
constexpr int64_t kReplicaCases = kSanitized ? 20 : 400;
constexpr int64_t kTreeCases = kSanitized ? 10 : 100;
constexpr int64_t kBoundCases = kSanitized ? 30 : 600;

const std::vector<std::string> kCastable = {"bf16", "fp16", "fp32"};

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

// A job and what the test knows of it.
struct DrawnJob {
  std::string model;  // the job's value
  std::vector<LogicalTensor> tensors;
  std::string source;
  std::string destination;
  PhysicalSide source_side;
  PhysicalSide destination_side;
};

// What changes the plan of a job but not what it does.
struct Schedule {
  std::string keys;  // of the job; they end in options that are not closed
  std::function<void(Limits&)> change_limits = {};
};

Schedule DrawSchedule(Draw& draw, const DrawnJob& job) {
  const auto sources = static_cast<int64_t>(job.source_side.size());
  const auto destinations = static_cast<int64_t>(job.destination_side.size());
  std::vector<std::string> options;
  int64_t slots = kStagingSlots;
  if (draw.Chance(80)) {
    const int64_t bucket = draw.Chance(50) ? 4096 : draw.Between(4096, 20000);
    slots = draw.Between(1, 4);
    const int64_t arena = (bucket + 15) / 16 * 16 * slots;
    options.push_back(absl::StrFormat("\"bucket_bytes\": %d", bucket));
    options.push_back(absl::StrFormat("\"staging_bytes\": %d",
                                      arena + draw.Between(0, 2) * bucket));
  }
  if (draw.Chance(60)) options.push_back("\"peer\": \"staged\"");
  const int64_t operations = draw.Chance(60)
                                 ? draw.Pick<int64_t>({1, 2, 3, 5, 32})
                                 : kGroupOperationsMax;
  const bool relays = !draw.Chance(15);
  const bool is_compact = draw.Chance(30);
  const auto change_limits = [=](Limits& limits) {
    limits.slots = static_cast<int32_t>(slots);
    limits.operations_per_round = static_cast<int32_t>(operations);
    limits.relays = relays;
    if (is_compact) MakeCompact(limits);
  };
  std::string text =
      absl::StrFormat("\"options\": {%s", absl::StrJoin(options, ", "));
  std::string before;
  const bool colocated = destinations <= sources && draw.Chance(30);
  if (colocated) before = "\"colocated\": true, ";
  std::vector<std::string> topology;
  if (draw.Chance(30)) {
    topology.push_back(
        absl::StrFormat("\"gpus_per_host\": %d", draw.Between(1, 4)));
  } else if (!colocated && draw.Chance(40)) {
    std::vector<int64_t> hosts(sources + destinations);
    for (int64_t& host : hosts) host = draw.Between(0, 3);
    topology.push_back(
        absl::StrFormat("\"hosts\": [%s]", absl::StrJoin(hosts, ", ")));
  }
  // Links so slow that what is relayed is worth many steps.
  if (draw.Chance(60)) {
    topology.push_back(
        absl::StrFormat("\"peer_gigabytes_per_second\": %g, "
                        "\"network_gigabytes_per_second\": 1e-6",
                        draw.Pick<double>({1e-4, 1e-3, 1e-2})));
  }
  if (draw.Chance(30)) {
    topology.push_back(
        absl::StrFormat("\"hosts_per_nvlink_domain\": %d, \"gpus_per_nic\": %d",
                        draw.Between(1, 3), draw.Between(1, 3)));
  }
  if (draw.Chance(30)) {
    topology.push_back(
        absl::StrFormat("\"hosts_per_leaf\": %d, \"rails\": %s, "
                        "\"spine_oversubscription\": %g",
                        draw.Between(1, 3), draw.Chance(50) ? "true" : "false",
                        draw.Pick<double>({1, 1.5, 4})));
  }
  if (!topology.empty()) {
    absl::StrAppendFormat(&before, "\"topology\": {%s}, ",
                          absl::StrJoin(topology, ", "));
  }
  return {.keys = before + text + (options.empty() ? "" : ", "),
          .change_limits = change_limits};
}

// Excludes some tensors of the job; returns the globs.
std::vector<std::string> DrawExcludes(Draw& draw,
                                      const std::vector<LogicalTensor>& tensors,
                                      std::vector<bool>& excluded) {
  std::vector<std::string> globs;
  if (draw.Chance(75)) return globs;
  for (int64_t i = draw.Between(1, 2); i > 0; --i) {
    const std::string& name = draw.Pick(tensors).name;
    globs.push_back(draw.Chance(50) ? name : StarPattern(name));
    for (size_t t = 0; t < tensors.size(); ++t) {
      if (StarMatches(globs.back(), tensors[t].name)) excluded[t] = true;
    }
  }
  // A job that moves nothing is an error.
  if (std::find(excluded.begin(), excluded.end(), false) == excluded.end()) {
    excluded.assign(excluded.size(), false);
    globs.clear();
  }
  return globs;
}

std::string Quoted(const std::vector<std::string>& words) {
  std::vector<std::string> quoted;
  for (const std::string& word : words) {
    quoted.push_back(absl::StrCat("\"", word, "\""));
  }
  return absl::StrJoin(quoted, ", ");
}

// Finishes, runs and checks a job.
ChainFacts RunJob(Draw& draw, uint64_t seed, const DrawnJob& job,
                  const Schedule& schedule) {
  std::vector<bool> excluded(job.tensors.size(), false);
  const std::vector<std::string> globs =
      DrawExcludes(draw, job.tensors, excluded);
  ChainCase chain;
  chain.job = absl::StrFormat(
      "{\"model\": %s,\n\"source\": %s,\n\"destination\": %s,\n%s\"exclude\": "
      "[%s]}}\n",
      job.model, job.source, job.destination, schedule.keys, Quoted(globs));
  chain.change_limits = schedule.change_limits;
  FillTensors(seed, job.source_side, job.destination_side, excluded, chain);
  ChainFacts facts;
  const std::string error = RunChain(chain, facts);
  if (error.empty()) return facts;
  ADD_FAILURE() << "seed=" << seed << " (replay with REFIT_SEED=" << seed
                << ")\n"
                << error << "\n"
                << chain.job;
  return facts;
}

ChainFacts RunJob(Draw& draw, uint64_t seed, const DrawnJob& job) {
  return RunJob(draw, seed, job, DrawSchedule(draw, job));
}

void ForEachSeed(int64_t default_cases,
                 const std::function<void(uint64_t)>& run) {
  const int64_t one = FromEnvironment("REFIT_SEED", -1);
  if (one >= 0) {
    run(static_cast<uint64_t>(one));
    return;
  }
  const int64_t cases = FromEnvironment("REFIT_PROPERTY_CASES", default_cases);
  for (int64_t seed = 1; seed <= cases; ++seed) {
    run(static_cast<uint64_t>(seed));
    // One failure says more than the hundred that follow from the same bug.
    if (::testing::Test::HasFailure()) return;
  }
}

std::vector<int64_t> DrawShape(Draw& draw) {
  const std::vector<int64_t> extents = {1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33};
  std::vector<int64_t> shape(draw.Between(0, 4));
  for (int64_t& extent : shape) extent = draw.Pick(extents);
  while (Product(shape) > 3000)
    *std::max_element(shape.begin(), shape.end()) /= 2;
  // Now and then a tensor that fills several buckets.
  if (shape.size() == 2 && draw.Chance(15)) {
    shape = {draw.Between(50, 90), draw.Between(60, 130)};
  }
  return shape;
}

// A few layer or expert numbers, ascending, perhaps with gaps.
std::vector<int64_t> DrawNumbers(Draw& draw) {
  std::vector<int64_t> numbers;
  const int64_t count = draw.Between(1, 4);
  for (int64_t number = draw.Between(0, 2);
       static_cast<int64_t>(numbers.size()) < count;
       number += draw.Chance(70) ? 1 : draw.Between(2, 4)) {
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<LogicalTensor> DrawTensors(Draw& draw, bool castable) {
  const std::vector<std::string> dtypes = {
      "bf16",  "fp16",  "fp32",  "fp64", "int8",     "int16",
      "int32", "int64", "uint8", "bool", "fp8_e4m3", "fp8_e5m2"};
  std::vector<LogicalTensor> tensors;
  const int64_t families = draw.Between(1, 5);
  for (int64_t family = 0; family < families; ++family) {
    LogicalTensor tensor = {.name = "",
                            .shape = DrawShape(draw),
                            .dtype = draw.Pick(castable ? kCastable : dtypes)};
    const int64_t kind = draw.Between(0, 2);
    const std::vector<int64_t> shared_experts = DrawNumbers(draw);
    const bool same_experts = draw.Chance(70);
    for (const int64_t layer :
         kind == 0 ? std::vector<int64_t>{0} : DrawNumbers(draw)) {
      LogicalTensor member = tensor;
      // A layer may be of another shape than its siblings.
      if (!member.shape.empty() && draw.Chance(5)) ++member.shape[0];
      const std::vector<int64_t> experts =
          kind < 2 ? std::vector<int64_t>{0}
                   : (same_experts ? shared_experts : DrawNumbers(draw));
      for (const int64_t expert : experts) {
        member.name = "net.";
        if (kind >= 1) absl::StrAppend(&member.name, "layers.", layer, ".");
        if (kind == 2) absl::StrAppend(&member.name, "experts.", expert, ".");
        absl::StrAppend(&member.name, "part", family, ".weight");
        tensors.push_back(member);
      }
    }
  }
  if (draw.Chance(30)) draw.Shuffle(tensors);
  return tensors;
}

std::string ParametersText(const std::vector<LogicalTensor>& tensors) {
  std::vector<std::string> parameters;
  for (const LogicalTensor& tensor : tensors) {
    parameters.push_back(absl::StrFormat(
        "{\"name\": \"%s\", \"shape\": [%s], \"dtype\": \"%s\"}", tensor.name,
        absl::StrJoin(tensor.shape, ", "), tensor.dtype));
  }
  return absl::StrFormat("{\"parameters\": [%s]}",
                         absl::StrJoin(parameters, ",\n  "));
}

// Requires: the tensors.
void SetSides(const GenericSide& source, const GenericSide& destination,
              DrawnJob& job) {
  job.source = SideText(source);
  job.destination = SideText(destination);
  job.source_side = LayOutSide(source, job.tensors);
  job.destination_side = LayOutSide(destination, job.tensors);
}

TEST(PropertyTest, GenericSidesReceiveEveryByte) {
  ForEachSeed(kGenericCases, [](uint64_t seed) {
    Draw draw(seed);
    const bool casts = draw.Chance(35);
    DrawnJob job;
    job.tensors = DrawTensors(draw, casts);
    job.model = ParametersText(job.tensors);
    const int64_t ranks_max = draw.Chance(80) ? 8 : 24;
    GenericSide source = DrawGenericSide(draw, job.tensors, ranks_max);
    GenericSide destination = DrawGenericSide(draw, job.tensors, ranks_max);
    if (casts) {
      if (draw.Chance(50)) source.dtype = draw.Pick(kCastable);
      destination.dtype = draw.Pick(kCastable);
      for (GenericRule& rule : destination.rules) {
        if (draw.Chance(30)) rule.dtype = draw.Pick(kCastable);
      }
    }
    SetSides(source, destination, job);
    RunJob(draw, seed, job);
  });
}

// A few ranks feed many, which want the same, whole or in shards.
TEST(PropertyTest, ReplicasThatRelayReceiveEveryByte) {
  int64_t cases = 0;
  int64_t relaying = 0;
  int64_t in_stages = 0;
  ForEachSeed(kReplicaCases, [&](uint64_t seed) {
    Draw draw(seed);
    DrawnJob job;
    job.tensors = DrawTensors(draw, false);
    job.model = ParametersText(job.tensors);
    const GenericSide source =
        DrawGenericSide(draw, job.tensors, draw.Between(1, 3));
    GenericSide destination = DrawGenericSide(draw, job.tensors, 8);
    for (GenericRule& rule : destination.rules) {
      for (GenericPlacement& placement : rule.placements) {
        if (draw.Chance(70)) placement = {};
      }
    }
    SetSides(source, destination, job);
    ++cases;
    const uint64_t features = RunJob(draw, seed, job).features;
    relaying += (features & kFeatureRelays) != 0 ? 1 : 0;
    in_stages += (features & kFeatureStagedRelays) != 0 ? 1 : 0;
  });
  std::cout << relaying << " of " << cases << " plans relay, " << in_stages
            << " in stages\n";
  if (cases > 1) {
    EXPECT_GT(relaying, cases / 20);
    EXPECT_GT(in_stages, cases / 20);
  }
}

// Ranks of a host hold for each other what others send. Links are so slow that
// little is worth it, and some hosts want more for one of their ranks.
TEST(PropertyTest, RanksThatAreDealtTheirBytesReceiveThemAll) {
  int64_t cases = 0;
  int64_t dealing = 0;
  ForEachSeed(kReplicaCases, [&](uint64_t seed) {
    Draw draw(seed);
    const bool casts = draw.Chance(20);
    DrawnJob job;
    job.tensors = DrawTensors(draw, casts);
    job.tensors.push_back({.name = "net.large",
                           .shape = {draw.Between(200, 600), 128},
                           .dtype = "bf16"});
    job.model = ParametersText(job.tensors);
    const GenericSide source =
        DrawGenericSide(draw, job.tensors, draw.Between(1, 6));
    GenericSide destination = DrawGenericSide(draw, job.tensors, 12);
    if (casts) destination.dtype = draw.Pick(kCastable);
    if (draw.Chance(40)) {
      for (GenericRule& rule : destination.rules) {
        for (GenericPlacement& placement : rule.placements) placement = {};
      }
    }
    SetSides(source, destination, job);
    std::vector<int64_t> hosts(job.source_side.size(), 0);
    const int64_t members = draw.Between(2, 8);
    for (int64_t i = 0; i < static_cast<int64_t>(job.destination_side.size());
         ++i) {
      hosts.push_back(1 + i / members);
    }
    const std::string schedule = absl::StrFormat(
        "\"topology\": {\"hosts\": [%s], \"peer_gigabytes_per_second\": %g, "
        "\"network_gigabytes_per_second\": 0.012},\n"
        "\"options\": {\"bucket_bytes\": %d, \"peer\": \"%s\", ",
        absl::StrJoin(hosts, ", "), draw.Pick<double>({0.04, 0.055, 0.08, 1}),
        draw.Pick<int64_t>({4096, 5000, 8192, 65536}),
        draw.Chance(80) ? "direct" : "staged");
    ++cases;
    const uint64_t features =
        RunJob(draw, seed, job, {.keys = schedule}).features;
    dealing += (features & kFeatureDealing) != 0 ? 1 : 0;
  });
  std::cout << dealing << " of " << cases << " plans deal\n";
  if (cases > 1) {
    EXPECT_GT(dealing, cases / 10);
  }
}

// One rank or few feed those of many hosts, and perhaps of their own.
TEST(PropertyTest, RanksFedByBroadcastsOrTreesReceiveEveryByte) {
  int64_t cases = 0;
  int64_t held = 0;
  int64_t broadcasting = 0;
  ForEachSeed(kTreeCases, [&](uint64_t seed) {
    Draw draw(seed);
    DrawnJob job;
    job.tensors = DrawTensors(draw, false);
    job.tensors.push_back({.name = "net.large",
                           .shape = {draw.Between(200, 900), 128},
                           .dtype = "bf16"});
    job.model = ParametersText(job.tensors);
    const GenericSide source =
        DrawGenericSide(draw, job.tensors, draw.Between(1, 3));
    GenericSide destination = DrawGenericSide(draw, job.tensors, 16);
    for (GenericRule& rule : destination.rules) {
      for (GenericPlacement& placement : rule.placements) placement = {};
    }
    SetSides(source, destination, job);
    std::vector<int64_t> hosts(job.source_side.size(), 0);
    const auto receivers = static_cast<int64_t>(job.destination_side.size());
    const int64_t near = draw.Chance(50) ? 0 : draw.Between(1, 3);
    const int64_t members = draw.Between(1, 4);
    for (int64_t i = 0; i < receivers; ++i) {
      hosts.push_back(i < near ? 0 : 1 + (i - near) / members);
    }
    const std::string schedule = absl::StrFormat(
        "\"topology\": {\"hosts\": [%s], \"hosts_per_nvlink_domain\": %d, "
        "\"peer_gigabytes_per_second\": %g, "
        "\"network_gigabytes_per_second\": 0.02, \"transport\": "
        "\"%s\"},\n"
        "\"options\": {\"peer\": \"%s\", \"bucket_bytes\": %d, "
        "\"staging_bytes\": %d, ",
        absl::StrJoin(hosts, ", "), draw.Pick<int64_t>({1, 1, 2, 8}),
        draw.Pick<double>({0.1, 0.4, 3}), draw.Chance(50) ? "nccl" : "ucx",
        draw.Chance(70) ? "direct" : "staged",
        draw.Pick<int64_t>({4096, 16384, 65536}),
        draw.Pick<int64_t>({1 << 18, 1 << 20}));
    ++cases;
    const ChainFacts facts = RunJob(draw, seed, job, {.keys = schedule});
    held += facts.holds_between_hosts ? 1 : 0;
    broadcasting += (facts.features & kFeatureBroadcasts) != 0 ? 1 : 0;
  });
  std::cout << held << " of " << cases << " plans hold between hosts, "
            << broadcasting << " broadcast\n";
  if (cases > 1) {
    EXPECT_GT(held, cases / 10);
    EXPECT_GT(broadcasting, cases / 20);
  }
}

// Plans of all kinds, on links and in staging of all kinds, with hosts of one
// side or of both, domains of several hosts, GPUs that share a NIC and leaves.
// One takes little more than the bound.
TEST(PropertyTest, NoPlanBeatsTheLowerBound) {
  int64_t cases = 0;
  double least = std::numeric_limits<double>::infinity();
  // What takes less is mostly what steps and messages cost to start, of which
  // the bound knows little.
  constexpr double kLongSeconds = 0.005;
  std::vector<std::pair<double, uint64_t>> of_long;  // with their seeds
  ForEachSeed(kBoundCases, [&](uint64_t seed) {
    Draw draw(seed);
    const int64_t sources = draw.Between(1, 8);
    const int64_t receivers =
        draw.Chance(50) ? draw.Pick<int64_t>({4, 8}) : draw.Between(1, 8);
    const int64_t sources_of_host = draw.Pick<int64_t>({1, 2, 4, 8});
    const int64_t members = draw.Pick<int64_t>({1, 2, 4, 8});
    std::vector<int64_t> hosts;
    const int64_t first = draw.Chance(70) ? 8 : draw.Between(0, 2);
    for (int64_t i = 0; i < sources; ++i) {
      hosts.push_back(first + i / sources_of_host);
    }
    for (int64_t i = 0; i < receivers; ++i) hosts.push_back(i / members);
    std::string fabric;
    if (draw.Chance(50)) {
      fabric = absl::StrFormat(
          ", \"hosts_per_nvlink_domain\": %d, \"gpus_per_nic\": %d, "
          "\"hosts_per_leaf\": %d, \"spine_oversubscription\": %d",
          draw.Pick<int64_t>({1, 1, 2}), draw.Pick<int64_t>({1, 2, 4}),
          draw.Pick<int64_t>({1, 2, 4}), draw.Pick<int64_t>({1, 2, 8}));
    }
    const auto side = [&](int64_t ranks, const std::string& placement) {
      // Copies of two ranks each.
      const bool in_pairs = ranks % 2 == 0 && draw.Chance(20);
      const std::string axes =
          in_pairs ? absl::StrFormat("\"d\": %d, \"x\": 2", ranks / 2)
                   : absl::StrFormat("\"x\": %d", ranks);
      return absl::StrFormat(
          "{\"layout\": \"generic\", \"meshes\": {\"m\": {\"axes\": {%s}}}, "
          "\"tensors\": [{\"match\": \"*\", \"mesh\": \"m\", "
          "\"placements\": [%s]}]}",
          axes,
          in_pairs ? R"x("Replicate", "Shard(0)")x"
                   : absl::StrCat("\"", placement, "\""));
    };
    const std::string source =
        side(sources, draw.Chance(50) ? "Shard(0)" : "Replicate");
    const std::string destination =
        side(receivers, draw.Chance(25) ? "Shard(1)" : "Replicate");
    const double network = draw.Pick<double>({1.25, 12.5, 25, 50});
    // In little staging rounds are many and small. The smallest messages that
    // are worth their start have 6 MB.
    const bool has_little = draw.Chance(30);
    const int64_t staging =
        has_little ? 67108864 : draw.Pick<int64_t>({536870912, 1073741824});
    const std::string buckets =
        has_little ? R"(, "bucket_bytes": 8388608)" : "";
    const std::string job = absl::StrFormat(
        "{\"model\": {\"parameters\": [{\"name\": \"w\", \"shape\": [%d, "
        "65536], "
        "\"dtype\": \"bf16\"}]},\n\"source\": %s,\n\"destination\": %s,\n"
        "\"topology\": {\"hosts\": [%s], \"peer_gigabytes_per_second\": %g, "
        "\"network_gigabytes_per_second\": %g%s},\n\"options\": {"
        "\"staging_bytes\": %d%s}}\n",
        draw.Chance(30) ? draw.Between(4096, 32768) : draw.Between(512, 8192),
        source, destination, absl::StrJoin(hosts, ", "),
        draw.Pick<double>({150, 350, 700}), network, fabric, staging, buckets);
    const TimeOverBound time = SimulateChain(job);
    ASSERT_EQ(time.error, "") << "seed=" << seed << "\n" << job;
    EXPECT_GE(time.ratio, 1 - 1e-6) << "seed=" << seed << "\n" << job;
    ++cases;
    least = std::min(least, time.ratio);
    if (time.bound_seconds >= kLongSeconds && !has_little) {
      of_long.emplace_back(time.ratio, seed);
    }
  });
  std::cout << least << " x the bound at least\n";
  if (cases > 1) {
    EXPECT_LT(least, 1.1);
    ASSERT_FALSE(of_long.empty());
    std::sort(of_long.begin(), of_long.end());
    std::cout << of_long.size()
              << " jobs with bounds of 5 ms and more, and with "
              << "staging; x the bound";
    // What is reached, for 600 draws and for 3,000; no plan may get worse. Few
    // draws say little.
    const bool holds = of_long.size() >= 300;
    const std::map<double, double> most = {
        {0.5, 1.04}, {0.9, 1.28}, {0.99, 1.8}, {1.0, 2.8}};
    for (const auto& [share, most_of_share] : most) {
      const auto [ratio, seed] = of_long[static_cast<size_t>(
          share * static_cast<double>(of_long.size() - 1))];
      std::cout << absl::StrFormat(", %g %%: %.3f (seed %d)", 100 * share,
                                   ratio, seed);
      if (holds) {
        EXPECT_LE(ratio, most_of_share);
      }
    }
    std::cout << "\n";
  }
}

}  // namespace
}  // namespace refit
