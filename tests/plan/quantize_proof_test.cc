// What the loader and the proof say of block quantization.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "tests/plan/plan_spec.h"

namespace refit {
namespace {

// "" for a valid plan.
std::string QuantizeViolationOf(const PlanSpec& spec) {
  return Prove(OpenSpec(spec)).violation;
}

std::string LoaderSays(const PlanSpec& spec) {
  return std::string(PlanFile::FromBytes(BuildPlan(spec)).status().message());
}

// The one operation, with another number in one place.
struct Operation {
  uint32_t input_slot = 0, output_slot = 1, scale_slot = 2;
  uint32_t loops_count = 1;
  uint64_t input_offset = 0, output_offset = 0, scale_offset = 0;
  uint64_t rows = 3, columns = 6;
  uint64_t input_row = 6, output_row = 6, scale_row = 2;
};

PlanSpec With(const Operation& op) {
  PlanSpec spec = QuantizedSpec();
  spec.programs[0].quantizes = {fb::Quantize(
      0, op.input_slot, op.output_slot, op.scale_slot, 0, op.loops_count,
      op.input_offset, op.output_offset, op.scale_offset, op.rows, op.columns,
      op.input_row, op.output_row, op.scale_row)};
  return spec;
}

TEST(QuantizeProofTest, TheSamplePlanIsValid) {
  const PlanFile plan = OpenSpec(QuantizedSpec());
  const ProofResult proof = Prove(plan);
  EXPECT_EQ(proof.violation, "");
  EXPECT_EQ(proof.moved_bytes, 36 + 32);
  EXPECT_EQ(proof.destination_elements, 36 + 8);
}

TEST(QuantizeProofTest, ScratchThatNobodyWritesIsNamed) {
  PlanSpec spec = QuantizedSpec();
  spec.programs[0].quantizes.clear();
  EXPECT_EQ(QuantizeViolationOf(spec),
            "rank 0, buffer scratch.fp8_e4m3, index [0]: "
            "is never written (invariant 1: written once)");
}

TEST(QuantizeProofTest, ALayerThatIsNotQuantizedIsNamed) {
  EXPECT_EQ(QuantizeViolationOf(With({.loops_count = 0})),
            "rank 0, buffer scratch.fp8_e4m3, index "
            "[18]: is never written (invariant 1: written once)");
}

TEST(QuantizeProofTest, ABlockThatIsNotWholeIsNamed) {
  EXPECT_EQ(QuantizeViolationOf(With({.columns = 5})),
            "rank 0, buffer decoder.layers.0.mlp.linear_fc1.weight, index [0, "
            "0]: what is quantized from "
            "model.layers.0.mlp.up_proj.weight[0, 0] on is not whole blocks of "
            "2 x 4 (invariant 2: right element)");
}

TEST(QuantizeProofTest, ABlockThatBeginsElsewhereIsNamed) {
  EXPECT_EQ(QuantizeViolationOf(
                With({.input_offset = 6, .output_offset = 6, .rows = 2})),
            "rank 0, buffer decoder.layers.0.mlp.linear_fc1.weight, index [1, "
            "0]: what is quantized from "
            "model.layers.0.mlp.up_proj.weight[1, 0] on is not whole blocks of "
            "2 x 4 (invariant 2: right element)");
}

TEST(QuantizeProofTest, ValuesAtAnotherOffsetAreNamed) {
  EXPECT_EQ(
      QuantizeViolationOf(With({.loops_count = 0, .output_offset = 18})),
      "rank 0, buffer scratch.fp8_e4m3, index [18]: holds values from "
      "model.layers.0.mlp.up_proj.weight[0, 0] on, quantized, when they should "
      "be from model.layers.1.mlp.up_proj.weight:fp8_e4m3[0, 0] on (invariant "
      "2: right element)");
}

TEST(QuantizeProofTest, ScalesAtAnotherOffsetAreNamed) {
  EXPECT_EQ(
      QuantizeViolationOf(With({.loops_count = 0, .scale_offset = 4})),
      "rank 0, buffer scratch.fp32, index [4]: holds scales from "
      "model.layers.0.mlp.up_proj.weight_scale_inv[0, 0] on when they should "
      "be from model.layers.1.mlp.up_proj.weight_scale_inv[0, 0] on (invariant "
      "2: right element)");
}

TEST(QuantizeProofTest, ScratchThatIsNotDeclaredIsTheSourcesOwn) {
  PlanSpec spec = QuantizedSpec();
  spec.programs[0].scratch_buffers = 1;
  EXPECT_EQ(QuantizeViolationOf(spec),
            "rank 0, buffer scratch.fp8_e4m3, index [0]: the output of a "
            "quantization begins here, in a tensor of the source (invariant 2: "
            "right element)");
}

TEST(QuantizeProofTest, ValuesThatAreWrittenTwiceAreNamed) {
  PlanSpec spec = QuantizedSpec();
  spec.programs[0].quantizes.push_back(spec.programs[0].quantizes[0]);
  EXPECT_EQ(QuantizeViolationOf(spec),
            "rank 0, buffer scratch.fp8_e4m3, index [0]: is written a second "
            "time, by a quantization (invariant 1: written once)");
}

// The windows are those of values and scales of layer 0, then of layer 1.
PlanSpec WithWindows(
    const std::vector<std::pair<size_t, fb::ScratchWindow>>& changed) {
  PlanSpec spec = WindowedSpec();
  PlanSpec::Program& program = spec.programs[0];
  for (const auto& [i, window] : changed) {
    program.scratch_windows[i] = window;
    const uint64_t size_bytes = i % 2 == 0 ? 18 : 16;
    program.scratch_arena_bytes =
        std::max(program.scratch_arena_bytes, window.offset() + size_bytes);
  }
  return spec;
}

TEST(WindowProofTest, TheSamplePlanIsValid) {
  const PlanFile plan = OpenSpec(WindowedSpec());
  const ProofResult proof = Prove(plan);
  EXPECT_EQ(proof.violation, "");
  EXPECT_EQ(proof.moved_bytes, 36 + 32);
  EXPECT_EQ(ScratchBytes(plan, 0), 144);
}

TEST(WindowProofTest, AWindowThatLastsIntoTheNextOfItsBytesIsNamed) {
  EXPECT_EQ(
      QuantizeViolationOf(WithWindows({{0, {0, 0, 2}}, {1, {128, 0, 2}}})),
      "rank 0, round 1, buffer scratch.1.fp8_e4m3: its window of rounds "
      "1 to 1 shares bytes with that of slot 1, of rounds 0 to 1 "
      "(invariant 3: in bounds)");
}

TEST(WindowProofTest, AWindowThatBeginsBeforeTheLastOfItsBytesIsOverIsNamed) {
  EXPECT_EQ(
      QuantizeViolationOf(WithWindows({{2, {0, 0, 2}}, {3, {128, 0, 2}}})),
      "rank 0, round 0, buffer scratch.1.fp8_e4m3: its window of rounds "
      "0 to 1 shares bytes with that of slot 1, of rounds 0 to 0 "
      "(invariant 3: in bounds)");
}

TEST(WindowProofTest, AWindowOverPartOfAnothersBytesIsNamed) {
  EXPECT_EQ(QuantizeViolationOf(WithWindows({{1, {0, 0, 1}}})),
            "rank 0, round 0, buffer scratch.0.fp32: its window of rounds 0 to "
            "0 shares bytes with that of slot 1, of rounds 0 to 0 (invariant "
            "3: in bounds)");
}

TEST(WindowProofTest, AMessageOutsideItsWindowIsNamed) {
  EXPECT_EQ(
      QuantizeViolationOf(WithWindows({{2, {256, 0, 1}}, {3, {384, 0, 1}}})),
      "rank 0, round 1, buffer scratch.1.fp8_e4m3, index [0]: the copy "
      "that begins here is not in the rounds of its scratch, 0 to 0 "
      "(invariant 3: in bounds)");
}

TEST(WindowProofTest, AnOperationInTwoWindowsIsNamed) {
  EXPECT_EQ(QuantizeViolationOf(WithWindows({{3, {256, 0, 2}}})),
            "rank 0, round 0, buffer scratch.1.fp32: a quantization works in "
            "scratch of rounds 1 to 1 and of rounds 0 to 1 (invariant 3: in "
            "bounds)");
}

TEST(WindowLoaderTest, WindowsStayInsideTheArenaAndTheRounds) {
  const auto says = [](const fb::ScratchWindow& window) {
    PlanSpec spec = WindowedSpec();
    spec.programs[0].scratch_windows[3] = window;
    return LoaderSays(spec);
  };
  const std::string place = "program of rank 0: scratch window 3: ";
  EXPECT_EQ(says({64, 1, 2}), place + "offset 64 is not a multiple of 128");
  EXPECT_EQ(says({256, 1, 2}),
            place + "16 bytes from 256 leave the arena of 144 bytes");
  EXPECT_EQ(says({128, 1, 3}), place + "rounds 1 to 3 of 2");
  EXPECT_EQ(says({128, 1, 1}), place + "rounds 1 to 1 of 2");
}

TEST(WindowLoaderTest, TheArenaIsNoLargerThanItsWindows) {
  PlanSpec spec = WindowedSpec();
  spec.programs[0].scratch_arena_bytes = 256;
  EXPECT_EQ(LoaderSays(spec),
            "program of rank 0: a scratch arena of 256 bytes when its windows "
            "end at 144");
}

TEST(WindowLoaderTest, EveryScratchBufferHasOne) {
  PlanSpec spec = WindowedSpec();
  spec.programs[0].scratch_windows.pop_back();
  EXPECT_EQ(LoaderSays(spec),
            "program of rank 0: 3 scratch windows of 4 scratch buffers");
  spec.programs[0].scratch_windows.clear();
  EXPECT_EQ(LoaderSays(spec),
            "program of rank 0: a scratch arena of 144 bytes for 0 windows");
}

TEST(QuantizeLoaderTest, MatricesStayInsideTheirTensors) {
  EXPECT_EQ(LoaderSays(With({.input_row = 7})),
            "program of rank 0: quantize 0: input: 6 strides of 1 leave the "
            "tensor");
  EXPECT_EQ(LoaderSays(With({.scale_offset = 16})),
            "program of rank 0: quantize 0: scales: offset 16 is not below the "
            "buffer's 16 elements");
  EXPECT_EQ(LoaderSays(With({.output_slot = 0})),
            "program of rank 0: quantize 0: bf16 to bf16 with scales of fp32 "
            "does not exist");
}

TEST(QuantizeLoaderTest, TheGridOfScalesFitsTheBlocks) {
  PlanSpec spec = QuantizedSpec();
  spec.quantizations[0].block_columns = 3;
  spec.quantizations[0].block_rows = 1;
  EXPECT_EQ(LoaderSays(spec),
            "quantization 0: the three params are no matrices of matching "
            "shapes");
}

TEST(QuantizeLoaderTest, UnknownScaleFormatsAreRefused) {
  PlanSpec spec = QuantizedSpec();
  spec.quantizations[0].format = static_cast<fb::ScaleFormat>(9);
  EXPECT_EQ(LoaderSays(spec), "quantization 0: unknown scale format 9");
}

}  // namespace
}  // namespace refit
