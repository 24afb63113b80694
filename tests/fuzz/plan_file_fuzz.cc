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
  simulator::Options options;
  options.folds_equal_ranks = true;
  (void)simulator::Simulate(*plan, options);
}

// `body` in a plan that requires all features, so that the digest does not keep
// the fuzzer away from the checks behind it.
std::vector<uint8_t> PlanAround(const std::vector<uint8_t>& body) {
  flatbuffers::FlatBufferBuilder builder;
  builder.ForceVectorAlignment(body.size(), 1, 16);
  const auto vector = builder.CreateVector(body);
  const fb::Digest digest = DigestOf(body);
  builder.Finish(fb::CreatePlan(builder, kFormatMajor << 16 | kFormatMinor,
                                kKnownFeatures, &digest, &digest, vector),
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
  // The body of a plan, whatever its digests say.
  flatbuffers::Verifier::Options options;
  options.check_nested_flatbuffers = false;
  flatbuffers::Verifier verifier(data, size, options);
  if (!refit::fb::VerifyPlanBuffer(verifier)) return 0;
  const auto& body = *refit::fb::GetPlan(data)->body();
  refit::OpenAndProve(refit::PlanAround({body.begin(), body.end()}));
  return 0;
}
