// A pass that breaks what it ensures is named.
#include "tests/property/module_check.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compiler/compile.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// What the module is after each pass: four trainers of a host feed two engines
// of two ranks on another, which pass on to each other what both want.
std::map<std::string, Module, std::less<>> ModulesByPass() {
  std::map<std::string, Module, std::less<>> modules;
  const auto file = std::make_shared<SourceFile>();
  file->path = "job.json";
  file->text = R"job({
    "model": {"parameters": [
      {"name": "w", "shape": [4096, 4096], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 4}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(0)"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"x": 4}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "topology": {"gpus_per_host": 4}, "options": {"peer": "staged"}})job";
  Diagnostics diagnostics;
  const std::optional<Job> job = ReadJobText(file, "", diagnostics, "refitc");
  EXPECT_TRUE(job.has_value()) << diagnostics.Render();
  const auto bytes =
      Compile(*job,
              {.passed =
                   [&](std::string_view pass, const Module& module) {
                     modules.try_emplace(std::string(pass), module);
                   }},
              diagnostics);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  return modules;
}

// What is found if the module is changed after `broken`.
std::string MistakeAfter(
    const std::map<std::string, Module, std::less<>>& modules,
    std::string_view broken, const std::function<void(Module&)>& change) {
  ModuleCheck check;
  for (const PassInfo& pass : Pipeline()) {
    Module module = modules.find(pass.name)->second;
    if (pass.name == broken) change(module);
    check.After(pass.name, module);
  }
  return check.mistake();
}

TEST(ModuleCheckTest, APassThatBreaksWhatItEnsuresIsNamed) {
  const auto modules = ModulesByPass();
  EXPECT_EQ(MistakeAfter(modules, "", [](Module&) {}), "");
  const auto expect = [&](const std::string& pass, const std::string& text,
                          const std::function<void(Module&)>& change) {
    const std::string mistake = MistakeAfter(modules, pass, change);
    EXPECT_EQ(mistake.rfind("after " + pass + ": ", 0), 0u) << mistake;
    EXPECT_NE(mistake.find(text), std::string::npos) << mistake;
  };
  expect("intersect-layouts", "ranks are missing",
         [](Module& module) { module.pieces.front().sources.clear(); });
  expect("route-flows", "is fed twice, or by one that is not fed",
         [](Module& module) {
           std::vector<Relay>& relays = module.pieces.front().relays;
           relays.push_back(relays.back());
         });
  expect("fan-out", "elements and wants",
         [](Module& module) { module.pieces.pop_back(); });
  expect("choose-sources", "transfers,",
         [](Module& module) { module.transfers.pop_back(); });
  expect("choose-sources", "by a rank that does not hold it, or twice",
         [](Module& module) {
           module.transfers.back() = module.transfers.end()[-2];
         });
  expect("form-buckets", "is too large",
         [](Module& module) { module.messages.front().size_bytes = 0; });
  expect("form-buckets", "elements and wants",
         [](Module& module) { module.messages.back().is_unpacked = false; });
  expect("form-buckets", "passes on what did not come", [](Module& module) {
    for (Message& message : module.messages) message.fed_by = {};
  });
  expect("schedule-rounds", "has no round",
         [](Module& module) { module.messages.front().round = -1; });
  expect("schedule-rounds", "goes before what feeds it", [](Module& module) {
    for (Message& message : module.messages) message.round = 0;
  });
  expect("schedule-rounds", "of its staging twice", [](Module& module) {
    for (Message& message : module.messages) {
      message.destination_staging_offset = 0;
    }
  });
  expect("schedule-rounds", "operations in round",
         [](Module& module) { module.limits.operations_per_round = 1; });
  expect("schedule-rounds", "order of programs",
         [](Module& module) { module.message_order.pop_back(); });
}

}  // namespace
}  // namespace refit
