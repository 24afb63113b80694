#include "executor/post_hooks.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/device/cast.h"
#include "plan/enum_text.h"
#include "refit/host_device.h"
#include "tests/executor/local_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kHookTimeout(60);
constexpr int32_t kWorker = 2;  // the first destination rank of ReshardPlan

using Performed = std::vector<std::pair<std::string, std::string>>;

class HookedWorld : public LocalWorld {
 public:
  using LocalWorld::LocalWorld;

  // Binds all ranks, `hooks` on every destination's.
  std::vector<absl::Status> BindWith(
      const std::vector<PostHookPerformer>& hooks) {
    return OnAllRanks([&](int32_t rank) {
      const absl::Status status = executor(rank).Connect(kHookTimeout);
      return status.ok()
                 ? executor(rank).Bind(tensors[rank], kHookTimeout, hooks)
                 : status;
    });
  }

  // One refit, of sources whose elements are all `value`; the statuses.
  std::vector<absl::Status> RefitOf(float value) {
    for (int32_t rank = 0; rank < kWorker; ++rank) {
      for (BoundTensor& tensor : tensors[rank]) {
        auto* const elements = static_cast<uint16_t*>(tensor.data);
        std::fill_n(elements, tensor.size_bytes / 2,
                    Bf16FromFp32(std::bit_cast<uint32_t>(value)));
      }
    }
    RunOptions options;
    options.timeout = kHookTimeout;
    return RefitAll(options);
  }

  // The elements of the worker's tensors; they must all be one.
  float Element(int32_t rank = kWorker) const {
    const auto element = [](const BoundTensor& tensor, uint64_t i) {
      return std::bit_cast<float>(
          Fp32FromBf16(static_cast<const uint16_t*>(tensor.data)[i]));
    };
    const float first = element(tensors[rank][0], 0);
    for (const BoundTensor& tensor : tensors[rank]) {
      for (uint64_t i = 0; i < tensor.size_bytes / 2; ++i) {
        EXPECT_EQ(element(tensor, i), first) << tensor.name << " " << i;
      }
    }
    return first;
  }
};

// The destination ranks' buffer has `hooks`.
PlanFile PlanWith(std::vector<std::string> hooks, ReshardOptions options = {}) {
  PlanBuilder plan = ReshardPlan(options);
  for (size_t rank = kWorker; rank < plan.ranks.size(); ++rank) {
    plan.buffers[plan.ranks[rank].buffers[0]].post_hooks = hooks;
  }
  return plan.Open();
}

TEST(PostHooksTest, ArithmeticOnesAreDoneOnceInEveryRefit) {
  for (const fb::Mechanism mechanism : fb::EnumValuesMechanism()) {
    SCOPED_TRACE(EnumText(mechanism));
    const PlanFile plan =
        PlanWith({"add-one"}, {.layers = 3, .mechanism = mechanism});
    HookedWorld world(plan);
    ASSERT_TRUE(AllOk(world.BindWith({})));
    EXPECT_EQ(world.executor(kWorker).refits(), 0);
    for (uint64_t refit = 1; refit <= 3; ++refit) {
      ASSERT_TRUE(AllOk(world.RefitOf(static_cast<float>(refit))));
      EXPECT_EQ(world.Element(), static_cast<float>(refit) + 1);
      EXPECT_EQ(world.executor(kWorker).refits(), refit);
      for (const TensorPostHook& hook : world.executor(kWorker).post_hooks()) {
        EXPECT_TRUE(hook.by_executor);
        EXPECT_EQ(hook.refit, refit);
      }
    }
  }
}

TEST(PostHooksTest, OnesOfATensorAreDoneInThePlansOrder) {
  const PlanFile plan = PlanWith({"add-one", "negative-exp"});
  HookedWorld world(plan);
  ASSERT_TRUE(AllOk(world.BindWith({})));
  ASSERT_TRUE(AllOk(world.RefitOf(1)));
  EXPECT_EQ(world.Element(), -7.375f);  // -exp(2) = -7.389 in bf16
}

TEST(PostHooksTest, ARelayPassesOnWhatItWasSent) {
  PlanBuilder builder = RelayPlan({.replicas = 3, .layers = 5});
  builder.buffers.push_back(builder.buffers[0]);
  builder.buffers[1].post_hooks = {"add-one"};
  for (size_t rank = 1; rank < 4; ++rank) builder.ranks[rank].buffers = {1};
  const PlanFile plan = builder.Open();
  HookedWorld world(plan);
  ASSERT_TRUE(AllOk(world.BindWith({})));
  for (int refit = 0; refit < 20; ++refit) {
    for (BoundTensor& tensor : world.tensors[0]) {
      std::fill_n(static_cast<uint16_t*>(tensor.data), tensor.size_bytes / 2,
                  Bf16FromFp32(std::bit_cast<uint32_t>(1.0f * refit)));
    }
    ASSERT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
      return world.Refit(rank, {.timeout = kHookTimeout, .addresses = {}});
    })));
    for (int32_t rank = 1; rank < 4; ++rank) {
      EXPECT_EQ(world.Element(rank), refit + 1.0f) << rank;
    }
  }
}

TEST(PostHooksTest, OneThatNobodyPerformsIsRefused) {
  const PlanFile plan = PlanWith({"derive-latent-projections"});
  HookedWorld world(plan);
  const std::vector<absl::Status> refused = world.BindWith({});
  EXPECT_EQ(refused[kWorker].code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused[kWorker].message(),
            "rank 2 cannot bind, 1 problem\n"
            "  not performed: post-hook \"derive-latent-projections\" of "
            "\"model.layers.0.weight\" and of 1 more tensor: for the test; a "
            "caller that does so after each refit names it at bind");
  EXPECT_FALSE(refused[0].ok());  // no rank is bound
  EXPECT_EQ(world.executor(kWorker).state(), ExecutorState::kConnected);
  ASSERT_TRUE(AllOk(
      world.BindWith({{.name = "derive-latent-projections", .perform = nullptr},
                      {.name = "derive-scale-copies", .perform = nullptr}})));
}

TEST(PostHooksTest, AnArithmeticOneThatTheCallerNamesIsTheCallers) {
  const PlanFile plan = PlanWith({"add-one"});
  HookedWorld world(plan);
  ASSERT_TRUE(AllOk(world.BindWith({{.name = "add-one", .perform = nullptr}})));
  ASSERT_TRUE(AllOk(world.RefitOf(4)));
  EXPECT_EQ(world.Element(), 4);
  EXPECT_FALSE(world.executor(kWorker).post_hooks()[0].by_executor);
  EXPECT_EQ(world.executor(kWorker).post_hooks()[0].refit, 0);
}

TEST(PostHooksTest, TheExecutorsMayNotFollowTheCallers) {
  const PlanFile plan = PlanWith({"add-one", "negative-exp"});
  HookedWorld world(plan);
  EXPECT_EQ(world.BindWith({{.name = "add-one", .perform = nullptr}})[kWorker]
                .message(),
            "rank 2 cannot bind, 1 problem\n"
            "  out of order: post-hook \"negative-exp\" of "
            "\"model.layers.0.weight\" and of 1 more tensor: it comes after "
            "\"add-one\", which the caller performs; name both");
  ASSERT_TRUE(
      AllOk(world.BindWith({{.name = "negative-exp", .perform = nullptr}})));
}

TEST(PostHooksTest, ATensorThatIsWrittenInPartIsNotChangedAgainAndAgain) {
  const PlanFile plan = PlanWith(
      {"add-one"}, {.padding = 3, .padding_kind = fb::RegionKind::kSkip});
  HookedWorld world(plan);
  EXPECT_EQ(
      world.BindWith({})[kWorker].message(),
      "rank 2 cannot bind, 1 problem\n"
      "  unsafe: post-hook \"add-one\" of \"model.layers.0.weight\" and of 1 "
      "more tensor: no refit writes all of the tensor, and what it leaves "
      "alone "
      "would be changed again each time; name the hook and perform it");
}

TEST(PostHooksTest, ADtypeThatNoDeviceComputesWithIsTheCallers) {
  const PlanFile plan = PlanWith(
      {"add-one"},
      {.source_dtype = DType::kInt32, .destination_dtype = DType::kInt32});
  HookedWorld world(plan);
  EXPECT_NE(world.BindWith({})[kWorker].message().find("not performed: "),
            std::string::npos);
}

TEST(PostHooksTest, TheCallersFunctionsAreCalledInWaitInThePlansOrder) {
  const PlanFile plan = PlanWith({"add-one", "publish", "count"});
  HookedWorld world(plan);
  Performed performed;
  float seen = 0;
  const auto note = [&](const TensorPostHook& hook, const BoundTensor& tensor) {
    EXPECT_EQ(hook.tensor, tensor.name);
    performed.emplace_back(hook.name, hook.tensor);
    seen = world.Element();
    return absl::OkStatus();
  };
  // On one rank; the other's only counts as performed.
  ASSERT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
    const absl::Status status = world.executor(rank).Connect(kHookTimeout);
    if (!status.ok()) return status;
    using Function = decltype(PostHookPerformer::perform);
    const Function perform = rank == kWorker ? Function(note) : nullptr;
    return world.executor(rank).Bind(world.tensors[rank], kHookTimeout,
                                     {{.name = "count", .perform = perform},
                                      {.name = "publish", .perform = perform}});
  })));
  ASSERT_TRUE(AllOk(world.RefitOf(1)));
  EXPECT_EQ(performed, (Performed{{"publish", "model.layers.0.weight"},
                                  {"count", "model.layers.0.weight"},
                                  {"publish", "model.layers.1.weight"},
                                  {"count", "model.layers.1.weight"}}));
  EXPECT_EQ(seen, 2);  // the arithmetic one was before
  for (const TensorPostHook& hook : world.executor(kWorker).post_hooks()) {
    EXPECT_EQ(hook.refit, 1);
  }
}

TEST(PostHooksTest, AFunctionThatFailsFailsTheRefitOnAllRanks) {
  const PlanFile plan = PlanWith({"add-one", "publish"});
  HookedWorld world(plan);
  bool fails = true;
  ASSERT_TRUE(AllOk(world.BindWith(
      {{.name = "publish",
        .perform = [&](const TensorPostHook& hook, const BoundTensor&) {
          if (hook.tensor != "model.layers.0.weight") return absl::OkStatus();
          return fails ? absl::InternalError("the disk is full")
                       : absl::OkStatus();
        }}})));
  const std::vector<absl::Status> statuses = world.RefitOf(1);
  EXPECT_EQ(statuses[kWorker].message(),
            "rank 2: post-hook \"publish\" of \"model.layers.0.weight\" "
            "failed: the disk is full");
  EXPECT_EQ(statuses[0].message(),
            "rank 0: rank 2 cannot go on: post-hook \"publish\" of "
            "\"model.layers.0.weight\" failed: the disk is full");
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
    EXPECT_EQ(world.executor(rank).refits(), 0);
    for (const TensorPostHook& hook : world.executor(rank).post_hooks()) {
      EXPECT_EQ(hook.refit, 0);
    }
  }
  fails = false;
  ASSERT_TRUE(AllOk(world.RefitOf(5)));
  EXPECT_EQ(world.executor(kWorker).state(), ExecutorState::kBound);
  EXPECT_EQ(world.executor(kWorker).refits(), 1);
  EXPECT_EQ(world.Element(), 6);  // once, not twice
}

TEST(PostHooksTest, AFunctionThatThrowsFailsTheRefitOnAllRanks) {
  const PlanFile plan = PlanWith({"publish"});
  HookedWorld world(plan);
  bool throws = true;
  ASSERT_TRUE(AllOk(world.BindWith(
      {{.name = "publish",
        .perform = [&](const TensorPostHook&, const BoundTensor&) {
          if (throws) throw std::runtime_error("the disk is full");
          return absl::OkStatus();
        }}})));
  ASSERT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
    const absl::Status run = world.executor(rank).Run(nullptr, {});
    if (!run.ok()) return run;
    if (rank < kWorker) {
      EXPECT_EQ(world.executor(rank).Wait().message(),
                absl::StrCat("rank ", rank,
                             ": rank 2 cannot go on: a "
                             "post-hook's function threw"));
      return absl::OkStatus();
    }
    EXPECT_THROW((void)world.executor(rank).Wait(), std::runtime_error);
    EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
    EXPECT_EQ(world.executor(rank).refits(), 0);
    return absl::OkStatus();
  })));
  throws = false;
  ASSERT_TRUE(AllOk(world.RefitOf(5)));
  EXPECT_EQ(world.executor(kWorker).state(), ExecutorState::kBound);
}

// What a refit that broke off left of its hooks is written over by the next.
TEST(PostHooksTest, ATornRefitDoesNotApplyTwice) {
  const PlanFile plan = PlanWith({"add-one"});
  HookedWorld world(plan);
  ASSERT_TRUE(AllOk(world.BindWith({})));
  ASSERT_TRUE(AllOk(world.RefitOf(1)));
  // The other source writes its rows before it hears of it, or does not.
  const void* const moved[] = {nullptr, nullptr};
  const std::vector<absl::Status> statuses =
      world.OnAllRanks([&](int32_t rank) {
        RunOptions options;
        options.timeout = kHookTimeout;
        if (rank == 0) options.addresses = moved;
        return world.Refit(rank, options);
      });
  EXPECT_FALSE(statuses[kWorker].ok());
  EXPECT_EQ(world.executor(kWorker).state(), ExecutorState::kTorn);
  EXPECT_EQ(world.executor(kWorker).refits(), 1);
  ASSERT_TRUE(AllOk(world.RefitOf(8)));
  EXPECT_EQ(world.Element(), 9);
  EXPECT_EQ(world.executor(kWorker).refits(), 2);
}

TEST(PostHooksTest, TwoRefitsInFlightCountAsTwo) {
  const PlanFile plan = PlanWith({"add-one"});
  HookedWorld world(plan);
  ASSERT_TRUE(AllOk(world.BindWith({})));
  ASSERT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
    absl::Status status = world.executor(rank).Run(nullptr, {});
    if (status.ok()) status = world.executor(rank).Run(nullptr, {});
    return status.ok() ? world.executor(rank).Wait() : status;
  })));
  EXPECT_EQ(world.executor(kWorker).refits(), 2);
  EXPECT_EQ(world.executor(kWorker).post_hooks()[0].refit, 2);
}

}  // namespace
}  // namespace refit
