#include "refit/state_digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/digest/param_box.h"
#include "runner/fragment_walk.h"
#include "tests/executor/local_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kDigestTimeout(60);
constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

using Digests = std::map<std::pair<std::string, DType>, StateDigest>;

std::vector<int32_t> Side(const PlanFile& plan, fb::Side side) {
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    if (plan.side(rank) == side) ranks.push_back(rank);
  }
  return ranks;
}

Digests Sum(LocalWorld& world, const std::vector<int32_t>& ranks) {
  Digests sum;
  for (const int32_t rank : ranks) {
    const auto digests = world.executor(rank).Digest(nullptr, {.among = ranks});
    EXPECT_TRUE(digests.ok()) << digests.status();
    for (const ParamDigest& digest : *digests) {
      sum[{digest.param, digest.dtype}] += digest.digest;
    }
  }
  return sum;
}

// By the formula, from the params' bytes as the fragments of all `ranks` place
// them.
Digests Expected(const PlanFile& plan, const LocalWorld& world,
                 const std::vector<int32_t>& ranks) {
  std::map<std::pair<std::string, DType>, std::map<uint64_t, uint64_t>> bits;
  const fb::Body& body = plan.body();
  for (const int32_t rank : ranks) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    size_t first_tensor = 0;
    for (const uint32_t number : *program.buffers()) {
      const fb::Buffer& buffer = *body.buffers()->Get(number);
      const uint64_t size = DTypeBytes(buffer.dtype());
      for (const fb::Fragment* fragment : *buffer.fragments()) {
        const fb::Param& param = *body.params()->Get(fragment->param());
        FragmentWalk(*fragment, param, buffer)
            .Visit(0, 1, [&](const WalkRow& row) {
              const auto& tensor =
                  world.tensors[rank][first_tensor + row.buffer.tensor];
              auto& elements =
                  bits[{TensorName(param, row.param.tensor), buffer.dtype()}];
              for (uint64_t i = 0; i < row.count; ++i) {
                std::memcpy(
                    &elements[row.param.element + i * row.param_stride],
                    static_cast<const std::byte*>(tensor.data) +
                        (row.buffer.element + i * row.buffer_stride) * size,
                    size);
              }
            });
      }
      first_tensor += StackTensors(buffer);
    }
  }
  constexpr uint64_t kMasks[4] = {0x243f6a8885a308d3u, 0x13198a2e03707344u,
                                  0xa4093822299f31d0u, 0x082efa98ec4e6c89u};
  Digests digests;
  for (const auto& [key, elements] : bits) {
    const auto& [name, dtype] = key;
    const uint64_t param_key =
        DigestOf({reinterpret_cast<const uint8_t*>(name.data()), name.size()})
            .low();
    for (const auto& [element, value] : elements) {
      const uint64_t place = element * DTypeBytes(dtype);
      const uint64_t x = param_key + place / 16 * 0x9e3779b97f4a7c15u;
      const auto product =
          static_cast<unsigned __int128>(x) * (x ^ 0x452821e638d01377u);
      const uint64_t r =
          static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
      const uint64_t c =
          ((r ^ kMasks[place / 4 % 4]) & ((uint64_t{1} << 58) - 1)) | 1;
      digests[key] +=
          {.sum = static_cast<uint64_t>(
               static_cast<unsigned __int128>(value << 8 * (place % 4)) * c %
               kPrime),
           .elements = 1};
    }
  }
  return digests;
}

std::vector<PlanBuilder> CopyingPlans() {
  return {ReshardPlan({}),
          ReshardPlan({.source_ranks = 3,
                       .destination_ranks = 2,
                       .layers = 3,
                       .rows = 12,
                       .columns = 10,
                       .padding = 3}),
          ReshardPlan(
              {.rows = 64, .columns = 96, .mechanism = fb::Mechanism::kDirect}),
          RelayPlan({}),
          ReshardPlan({.source_dtype = DType::kFp32,
                       .destination_dtype = DType::kFp32})};
}

TEST(StateDigestTest, SidesAndTheFormulaGiveTheSameDigests) {
  for (const PlanBuilder& builder : CopyingPlans()) {
    const PlanFile plan = builder.Open();
    LocalWorld world(plan);
    world.Bind();
    world.ExpectEveryElementRight(plan);
    const std::vector<int32_t> source = Side(plan, fb::Side::kSource);
    const std::vector<int32_t> destination = Side(plan, fb::Side::kDestination);
    const Digests of_source = Sum(world, source);
    EXPECT_FALSE(of_source.empty());
    EXPECT_EQ(of_source, Sum(world, destination));
    EXPECT_EQ(of_source, Expected(plan, world, source));
  }
}

// A rank alone counts all it holds; among a side, replicas count once.
TEST(StateDigestTest, ReplicasCountWhatNoLowerRankHolds) {
  const PlanFile plan = RelayPlan({.replicas = 3}).Open();
  LocalWorld world(plan);
  world.Bind();
  world.ExpectEveryElementRight(plan);
  const Digests one = Sum(world, {1});
  for (const int32_t rank : {0, 2, 3}) EXPECT_EQ(Sum(world, {rank}), one);
  EXPECT_EQ(Sum(world, {1, 2, 3}), one);
  EXPECT_TRUE(world.executor(3).Digest(nullptr, {.among = {1, 3}})->empty());
}

// What the lowest replica's hooks change is counted by the next.
TEST(StateDigestTest, ReplicasCountWhatAHookChangedOnTheLowest) {
  PlanBuilder builder = RelayPlan({.replicas = 3, .layers = 2});
  builder.buffers.push_back(builder.buffers[0]);
  builder.buffers[1].post_hooks = {"add-one"};
  builder.ranks[1].buffers = {1};
  const PlanFile plan = builder.Open();
  LocalWorld world(plan);
  world.Bind();
  ValueCheck(plan).FillSources(world.tensors);
  ASSERT_TRUE(AllOk(world.CheckedRefit()));
  EXPECT_EQ(Sum(world, {1, 2, 3}), Sum(world, {0}));
  EXPECT_FALSE(Sum(world, {0}).empty());
}

TEST(StateDigestTest, WhoAsksInVainIsTold) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  EXPECT_EQ(world.executor(1).Digest().status().message(),
            "rank 1: Digest while loaded: connect and bind first");
  world.Bind();
  EXPECT_EQ(
      world.executor(1).Digest(nullptr, {.among = {0, 2}}).status().message(),
      "rank 1: the digest is to be among ranks 0, 2; this rank has to be "
      "one of them");
  EXPECT_EQ(
      world.executor(1).Digest(nullptr, {.among = {1, 9}}).status().message(),
      "rank 1: the digest is to be among rank 9, which is not one of the "
      "plan's "
      "4 ranks");
}

TEST(StateCheckTest, RefitsThatAreRightPass) {
  std::vector<PlanBuilder> plans = CopyingPlans();
  for (const auto& [from, to] :
       std::vector<std::pair<DType, DType>>{{DType::kFp32, DType::kBf16},
                                            {DType::kBf16, DType::kFp32},
                                            {DType::kFp32, DType::kFp16}}) {
    for (const auto mechanism :
         {fb::Mechanism::kStaged, fb::Mechanism::kDirect}) {
      plans.push_back(ReshardPlan({.padding = 1,
                                   .source_dtype = from,
                                   .destination_dtype = to,
                                   .mechanism = mechanism}));
    }
  }
  for (const PlanBuilder& builder : plans) {
    const PlanFile plan = builder.Open();
    LocalWorld world(plan);
    world.Bind();
    world.ExpectCheckedRefitsRight(plan);
    EXPECT_TRUE(world.executor(0).notices().empty());
    world.Bind();  // what was prepared for the old addresses is gone
    ASSERT_TRUE(AllOk(world.CheckedRefit()));
  }
}

// Bind is local to the rank where rounds are staged.
TEST(StateCheckTest, ARankMayBindAnewAloneBetweenCheckedRefits) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  world.Bind();
  const ValueCheck values(plan);
  values.FillSources(world.tensors);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(AllOk(world.CheckedRefit()));
    ASSERT_TRUE(world.executor(1).Bind(world.tensors[1], kDigestTimeout).ok());
  }
}

void ExpectDataLoss(LocalWorld& world, const std::string& what) {
  const std::vector<absl::Status> statuses = world.CheckedRefit();
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(
        statuses[rank].message(),
        "rank " + std::to_string(rank) +
            ": after the refit the destination does not hold what the source "
            "holds: " +
            what);
    EXPECT_EQ(world.executor(static_cast<int32_t>(rank)).state(),
              ExecutorState::kTorn);
  }
}

// The plan leaves a message of rank 2 in staging, so that it keeps what it had.
TEST(StateCheckTest, AStaleDestinationIsNamedAndTornOnAllRanks) {
  PlanBuilder builder = ReshardPlan({});
  builder.ranks[2].messages[0].copies.clear();
  const PlanFile plan = builder.Open();
  LocalWorld world(plan);
  world.Bind();
  const ValueCheck values(plan);
  values.FillSources(world.tensors);
  values.PoisonDestinations(world.tensors);
  ExpectDataLoss(world, "\"model.layers.0.weight\" on rank 2");
  // Had it held those values, nothing would be wrong.
  const PlanFile whole_plan = ReshardPlan({}).Open();
  LocalWorld whole(whole_plan);
  whole.Bind();
  whole.ExpectEveryElementRight(whole_plan);
  for (size_t i = 0; i < world.tensors[2].size(); ++i) {
    std::memcpy(world.tensors[2][i].data, whole.tensors[2][i].data,
                world.tensors[2][i].size_bytes);
  }
  EXPECT_TRUE(AllOk(world.CheckedRefit()));
  EXPECT_EQ(world.executor(2).state(), ExecutorState::kBound);
}

// Replicas are compared one by one.
TEST(StateCheckTest, OneWrongReplicaIsNamedAlone) {
  PlanBuilder builder = RelayPlan({.replicas = 3, .layers = 2});
  // In the last round rank 3 takes each of two stripes in place of the other.
  std::vector<PlanBuilder::Message*> last;
  for (PlanBuilder::Message& message : builder.ranks[3].messages) {
    if (message.round + 1 == builder.rounds &&
        message.kind == fb::MessageKind::kRecv) {
      last.push_back(&message);
    }
  }
  ASSERT_EQ(last.size(), 2);
  std::swap(last[0]->copies[0].offset, last[1]->copies[0].offset);
  const PlanFile plan = builder.Open();
  LocalWorld world(plan);
  world.Bind();
  const ValueCheck values(plan);
  values.FillSources(world.tensors);
  values.PoisonDestinations(world.tensors);
  ExpectDataLoss(world, "\"layers.1.weight\" on rank 3");
}

// Only the first four regions are looked into; each destination rank has one.
TEST(StateCheckTest, ParamsOfFurtherRegionsAreNotPassedOverInSilence) {
  for (const uint32_t layers : {2, 8}) {
    PlanBuilder builder = ReshardPlan(
        {.source_ranks = 1, .destination_ranks = 8, .layers = layers});
    for (uint32_t rank = 1; rank <= 8; ++rank) {
      for (PlanBuilder::Message& message : builder.ranks[rank].messages) {
        message.copies.clear();
      }
    }
    const PlanFile plan = builder.Open();
    LocalWorld world(plan);
    world.Bind();
    const ValueCheck values(plan);
    values.FillSources(world.tensors);
    values.PoisonDestinations(world.tensors);
    std::string text;
    for (uint32_t layer = 0; layer < std::min(layers, 5u); ++layer) {
      absl::StrAppend(&text, layer > 0 ? "; " : "", "\"model.layers.", layer,
                      ".weight\" on ranks 1, 2, 3, 4");
    }
    ExpectDataLoss(world, text + (layers > 5 ? "; and at least 3 more params"
                                             : "; and perhaps more"));
  }
}

TEST(StateCheckTest, ManyParamsThatDifferAreCounted) {
  PlanBuilder builder = ReshardPlan({.layers = 8});
  for (PlanBuilder::Message& message : builder.ranks[3].messages) {
    message.copies.clear();
  }
  const PlanFile plan = builder.Open();
  LocalWorld world(plan);
  world.Bind();
  const ValueCheck values(plan);
  values.FillSources(world.tensors);
  values.PoisonDestinations(world.tensors);
  ExpectDataLoss(world,
                 "\"model.layers.0.weight\" on rank 3; "
                 "\"model.layers.1.weight\" on rank 3; "
                 "\"model.layers.2.weight\" on rank 3; "
                 "\"model.layers.3.weight\" on rank 3; "
                 "\"model.layers.4.weight\" on rank 3; and 3 more params");
}

// The check comes before post-hooks, which make other values of what moved.
TEST(StateCheckTest, PostHooksComeBehindTheCheck) {
  PlanBuilder builder = ReshardPlan({});
  builder.buffers.back().post_hooks = {"add-one"};
  const PlanFile plan = builder.Open();
  LocalWorld world(plan);
  world.Bind();
  const ValueCheck values(plan);
  values.FillSources(world.tensors);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(AllOk(world.CheckedRefit()));
  }
  // What it holds now is not the source's.
  EXPECT_TRUE(world.executor(3).Digest()->empty());
}

TEST(ParamBoxTest, WhatIsLeftIsDisjointAndWhole) {
  std::mt19937 random(2);
  const auto draw = [&] {
    ParamBox box;
    for (int d = 0; d < 3; ++d) {
      box.lo.push_back(random() % 5);
      box.extent.push_back(1 + random() % 4);
    }
    return box;
  };
  const auto holds = [](const ParamBox& box, uint64_t x, uint64_t y,
                        uint64_t z) {
    const uint64_t at[] = {x, y, z};
    for (size_t d = 0; d < 3; ++d) {
      if (at[d] < box.lo[d] || at[d] >= box.lo[d] + box.extent[d]) return false;
    }
    return true;
  };
  for (int i = 0; i < 500; ++i) {
    const ParamBox whole = draw();
    const ParamBox taken[] = {draw(), draw()};
    const std::vector<ParamBox> left =
        Without(Without({whole}, taken[0]), taken[1]);
    for (uint64_t x = 0; x < 9; ++x) {
      for (uint64_t y = 0; y < 9; ++y) {
        for (uint64_t z = 0; z < 9; ++z) {
          int held = 0;
          for (const ParamBox& box : left) held += holds(box, x, y, z);
          EXPECT_EQ(held, holds(whole, x, y, z) && !holds(taken[0], x, y, z) &&
                              !holds(taken[1], x, y, z));
        }
      }
    }
  }
}

}  // namespace
}  // namespace refit
