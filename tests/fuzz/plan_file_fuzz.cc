// Bytes must not crash the loader, nor the proof or the simulation of what the
// loader lets in.
#include <cstdint>
#include <vector>

#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "simulator/simulation.h"

namespace refit {
namespace {

void OpenAndProve(std::vector<uint8_t> bytes) {
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
  if (!plan.ok()) return;
  Prove(*plan);
  (void)simulator::Simulate(*plan, {});
}

// The input as the body of a plan, so that the digest does not keep the fuzzer
// away from the checks behind it.
std::vector<uint8_t> PlanAround(const std::vector<uint8_t>& body) {
  flatbuffers::FlatBufferBuilder builder;
  builder.ForceVectorAlignment(body.size(), 1, 16);
  const auto vector = builder.CreateVector(body);
  const fb::Digest digest = DigestOf(body);
  builder.Finish(
      fb::CreatePlan(builder, kFormatMajor << 16 | kFormatMinor,
                     /*required_features=*/0, &digest, &digest, vector),
      fb::PlanIdentifier());
  return {builder.GetBufferPointer(),
          builder.GetBufferPointer() + builder.GetSize()};
}

}  // namespace
}  // namespace refit

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> bytes(data, data + size);
  refit::OpenAndProve(bytes);
  refit::OpenAndProve(refit::PlanAround(bytes));
  return 0;
}
