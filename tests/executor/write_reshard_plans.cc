// Writes the plans that c_api_test replays: what it does in C needs files.
//
// usage: write_reshard_plans STAGED.refit DIRECT.refit MARKED.refit
#include <fstream>

#include "tests/executor/plan_builder.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const auto write = [](const refit::PlanBuilder& plan, const char* path) {
    const std::vector<uint8_t> bytes = plan.Bytes();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return static_cast<bool>(file.flush());
  };
  for (const refit::fb::Mechanism mechanism :
       refit::fb::EnumValuesMechanism()) {
    refit::PlanBuilder plan = refit::ReshardPlan({.mechanism = mechanism});
    plan.buffers.back().post_hooks = {"add-one", "publish"};
    if (!write(plan, argv[1 + static_cast<int>(mechanism)])) return 2;
  }
  refit::PlanBuilder marked = refit::ReshardPlan({});
  marked.delta = refit::fb::DeltaChanges::kBitmap;
  return write(marked, argv[3]) ? 0 : 2;
}
