// A proof that would take too long for a sanitizer.
#include <gtest/gtest.h>

#include <cstdint>

#include "plan/proof/proof.h"
#include "tests/plan/plan_spec.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

// The parts of a frame that turns like a pinwheel, around very many columns: no
// plane separates them.
TEST(ProofTest, APlanThatTakesFarTooManyStepsIsRefused) {
  if (kSanitized) GTEST_SKIP() << "a billion steps take minutes then";
  constexpr uint64_t kColumns = 60000;
  constexpr uint64_t kSide = kColumns + 2;
  PlanSpec spec = SampleSpec();
  PlanSpec::Buffer& buffer =
      spec.buffers.emplace_back(PlanSpec::Buffer{.name = "b",
                                                 .index = {},
                                                 .shape = {kSide, kSide},
                                                 .fragments = {},
                                                 .regions = {}});
  const auto add = [&](uint64_t row, uint64_t column, uint64_t rows,
                       uint64_t columns) {
    buffer.regions.push_back({.kind = fb::RegionKind::kSkip,
                              .reason = fb::SkipReason::kUnread,
                              .offset = row * kSide + column,
                              .extent = {rows, columns},
                              .stride = {kSide, 1},
                              .detail = {}});
  };
  add(0, 0, 1, kSide - 1);
  add(0, kSide - 1, kSide - 1, 1);
  add(kSide - 1, 1, 1, kSide - 1);
  add(1, 0, kSide - 1, 1);
  for (uint64_t column = 1; column <= kColumns; ++column) {
    add(1, column, kColumns, 1);
  }
  spec.programs[2].buffers.push_back(5);
  EXPECT_EQ(Prove(OpenSpec(spec)).violation,
            "cannot be proved in 1073741824 steps; wanted parts and messages "
            "that share fewer copies, or boxes that planes separate");
  buffer.regions.resize(5);
  EXPECT_NE(Prove(OpenSpec(spec))
                .violation.find("is neither of a param nor of a region"),
            std::string::npos);
}

}  // namespace
}  // namespace refit
