// Writes the plans that c_api_test replays: what it does in C needs files.
//
// usage: write_reshard_plans STAGED.refit DIRECT.refit
#include <fstream>

#include "tests/executor/plan_builder.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  for (const refit::fb::Mechanism mechanism :
       refit::fb::EnumValuesMechanism()) {
    refit::PlanBuilder plan = refit::ReshardPlan({.mechanism = mechanism});
    plan.buffers.back().post_hooks = {"add-one", "publish"};
    const std::vector<uint8_t> bytes = plan.Bytes();
    std::ofstream file(argv[1 + static_cast<int>(mechanism)], std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) return 2;
  }
  return 0;
}
