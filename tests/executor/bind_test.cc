#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "executor/binding.h"
#include "executor/post_hooks.h"
#include "plan/post_hooks.h"
#include "runner/checked_run.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

// One source rank with a stack of two matrices, one destination rank with a
// tensor that is skipped as a whole, a filled one and an empty one.
PlanFile BindPlan() {
  PlanBuilder plan;
  plan.source_ranks = 1;
  plan.buffers = {
      {.name = "layers.{0}.w",
       .index = {2},
       .shape = {2, 3},
       .fragments = {},
       .regions = {}},
      {.name = "rotary",
       .shape = {4},
       .dtype = DType::kFp32,
       .fragments = {},
       .regions = {{fb::RegionKind::kSkip, 0, {4}, {1}}}},
      {.name = "bias",
       .shape = {4},
       .fragments = {},
       .regions = {{fb::RegionKind::kSkip, 0, {2}, {1}},
                   {fb::RegionKind::kFill, 2, {2}, {1}}}},
      {.name = "empty", .shape = {0, 3}, .fragments = {}, .regions = {}},
  };
  plan.ranks = {
      {.buffers = {0}, .messages = {}, .fills = {}},
      {.buffers = {1, 2, 3},
       .messages = {},
       .fills = {{.slot = 1, .offset = 2, .loops = {fb::Loop(2, 1)}}}}};
  return plan.Open();
}

class BindTest : public testing::Test {
 protected:
  // The rank's tensors as the plan wants them, in memory of the test's.
  std::vector<BoundTensor> Good(int32_t rank) {
    std::vector<BoundTensor> tensors = TensorsOfRank(plan_, rank);
    std::byte* next = memory_.data();
    for (BoundTensor& tensor : tensors) {
      if (tensor.size_bytes > 0) tensor.data = next;
      next += tensor.size_bytes;
    }
    return tensors;
  }

  std::string Refusal(int32_t rank, const std::vector<BoundTensor>& tensors) {
    const auto bound =
        BindTensors(TensorTable(plan_, rank), rank, tensors, true);
    EXPECT_FALSE(bound.ok());
    return std::string(bound.status().message());
  }

  PlanFile plan_ = BindPlan();
  std::vector<std::byte> memory_ = std::vector<std::byte>(4096);
};

TEST(PostHookTest, NamesThatAreNoneAreRefused) {
  PlanBuilder plan = ReshardPlan({});
  plan.buffers[2].post_hooks = {"rotate-rows"};
  const PlanFile file = plan.Open();
  const auto problems = [&](int32_t rank, std::string name) {
    return AssignPostHooks(TensorTable(file, rank),
                           {{{.name = "rotate-rows", .perform = nullptr},
                             {.name = std::move(name), .perform = nullptr}}})
        .problems;
  };
  using Problems = std::vector<std::string>;
  for (const int32_t rank : {0, 2}) {
    EXPECT_EQ(problems(rank, "rotate-row"),
              Problems({"unknown: post-hook \"rotate-row\", which bind was "
                        "given, is none; did you mean \"rotate-rows\"?"}));
    EXPECT_EQ(problems(rank, "derive-latent-projection").size(), 1);
    EXPECT_EQ(problems(rank, "xyz"),
              Problems({"unknown: post-hook \"xyz\", which bind was given, is "
                        "none"}));
    // Of other ranks and other plans.
    for (const std::string_view known : kPostHookNames) {
      EXPECT_EQ(problems(rank, std::string(known)), Problems());
    }
  }
}

TEST(PostHookTest, AreThoseOfTheTensorsThatTheRefitWrites) {
  PlanBuilder plan = ReshardPlan({.layers = 2});
  PlanBuilder::Buffer skipped = {
      .name = "rotary",
      .shape = {4},
      .fragments = {},
      .regions = {{fb::RegionKind::kSkip, 0, {4}, {1}}},
      .post_hooks = {"add-one"}};
  plan.buffers[2].post_hooks = {"add-one", "negative-exp"};
  plan.ranks[2].buffers.push_back(4);
  plan.buffers.push_back(skipped);
  const PlanFile file = plan.Open();
  const auto hook = [](std::string tensor, std::string name) {
    return TensorPostHook{.tensor = std::move(tensor),
                          .name = std::move(name),
                          .detail = "for the test",
                          .by_executor = true};
  };
  EXPECT_EQ(AssignPostHooks(TensorTable(file, 2), {}).hooks,
            (std::vector<TensorPostHook>{
                hook("model.layers.0.weight", "add-one"),
                hook("model.layers.0.weight", "negative-exp"),
                hook("model.layers.1.weight", "add-one"),
                hook("model.layers.1.weight", "negative-exp")}));
  EXPECT_TRUE(AssignPostHooks(TensorTable(file, 3), {}).hooks.empty());
}

TEST_F(BindTest, TensorsOfThePlanAreTakenInAnyOrder) {
  std::vector<BoundTensor> tensors = Good(0);
  std::swap(tensors[0], tensors[1]);
  const auto bound = BindTensors(TensorTable(plan_, 0), 0, tensors, true);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ((*bound)[0], tensors[1].data);
  EXPECT_EQ((*bound)[1], tensors[0].data);
}

TEST_F(BindTest, UnalignedTensorIsRefusedWhereTheDeviceCannot) {
  std::vector<BoundTensor> tensors = Good(0);
  ASSERT_GT(DTypeBytes(tensors[0].dtype), 1);
  tensors[0].data = memory_.data() + 2049;
  const TensorTable table(plan_, 0);
  EXPECT_TRUE(BindTensors(table, 0, tensors, true).ok());
  const absl::Status refused = BindTensors(table, 0, tensors, false).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("not aligned: \"" + tensors[0].name +
                                   "\" is at 0x"),
            std::string::npos)
      << refused;
}

TEST_F(BindTest, WhollySkippedTensorMayBeLeftOut) {
  std::vector<BoundTensor> tensors = Good(1);
  EXPECT_TRUE(BindTensors(TensorTable(plan_, 1), 1, tensors, true).ok());
  tensors.erase(tensors.begin());
  EXPECT_TRUE(BindTensors(TensorTable(plan_, 1), 1, tensors, true).ok());
}

TEST_F(BindTest, EmptyTensorIsWantedByName) {
  std::vector<BoundTensor> tensors = Good(1);
  tensors.pop_back();
  EXPECT_EQ(Refusal(1, tensors),
            "rank 1 cannot bind, 1 problem\n"
            "  missing: \"empty\" bf16 [0, 3]");
}

TEST_F(BindTest, AllProblemsAreInOneMessage) {
  std::vector<BoundTensor> tensors = Good(0);
  tensors[0].dtype = DType::kFp32;
  tensors[1].name = "layers.2.w";
  EXPECT_EQ(Refusal(0, tensors),
            "rank 0 cannot bind, 3 problems\n"
            "  wrong dtype: \"layers.0.w\" is fp32, the plan wants bf16\n"
            "  unexpected: \"layers.2.w\" bf16 [2, 3] is not in the plan\n"
            "  missing: \"layers.1.w\" bf16 [2, 3]");
}

TEST_F(BindTest, WrongShapeSizeAndAddressAreNamed) {
  std::vector<BoundTensor> tensors = Good(0);
  tensors[0].shape = {3, 2};
  tensors[1].size_bytes = 13;
  EXPECT_EQ(Refusal(0, tensors),
            "rank 0 cannot bind, 2 problems\n"
            "  wrong shape: \"layers.0.w\" is [3, 2], the plan wants [2, 3]\n"
            "  wrong size: \"layers.1.w\" has 13 bytes, the plan wants 12");
  tensors = Good(0);
  tensors[0].data = nullptr;
  EXPECT_EQ(Refusal(0, tensors),
            "rank 0 cannot bind, 1 problem\n"
            "  null pointer: \"layers.0.w\" has 12 bytes and no address");
}

TEST_F(BindTest, DuplicateNameIsNamed) {
  std::vector<BoundTensor> tensors = Good(0);
  tensors.push_back(tensors[0]);
  EXPECT_EQ(Refusal(0, tensors),
            "rank 0 cannot bind, 1 problem\n"
            "  duplicate: \"layers.0.w\" is given twice");
}

TEST_F(BindTest, OverlappingMemoryIsNamed) {
  std::vector<BoundTensor> tensors = Good(0);
  tensors[1].data = static_cast<std::byte*>(tensors[0].data) + 8;
  EXPECT_EQ(Refusal(0, tensors),
            "rank 0 cannot bind, 1 problem\n"
            "  overlap: \"layers.0.w\" and \"layers.1.w\" share 4 bytes");
}

TEST_F(BindTest, OnlyTheFirstTenProblemsAreSpeltOut) {
  std::vector<BoundTensor> tensors = Good(0);
  for (int i = 0; i < 12; ++i) {
    BoundTensor tensor = tensors[0];
    tensor.name = "x" + std::to_string(i);
    tensors.push_back(tensor);
  }
  const std::string message = Refusal(0, tensors);
  EXPECT_EQ(message.find("rank 0 cannot bind, 12 problems\n"), 0);
  EXPECT_NE(message.find("\"x9\""), std::string::npos);
  EXPECT_EQ(message.find("\"x10\""), std::string::npos);
  EXPECT_EQ(message.substr(message.rfind('\n')), "\n  and 2 more");
}

}  // namespace
}  // namespace refit
