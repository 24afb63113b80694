#include "simulator/delta_costs.h"

#include <gtest/gtest.h>

namespace refit::simulator {
namespace {

TEST(DeltaCosts, AreThoseThatWereMeasured) {
  const StagedDeltaCosts at =
      StagedDeltaCostsAt(Executor::kGpu, fb::DeltaChanges::kSnapshot, 0.01);
  EXPECT_NEAR(at.find * 4.294967296e9, 2.3e-3, 1e-9);
  EXPECT_NEAR(at.encode * 4.294967296e9, 0.99e-3, 1e-9);
  EXPECT_NEAR(at.apply * 4.294967296e9, 1.5e-3, 1e-9);
  EXPECT_NEAR(at.keep * 4.294967296e9, 2.1e-3, 1e-9);
}

TEST(DeltaCosts, GrowWithTheRate) {
  for (const Executor executor : {Executor::kGpu, Executor::kCpu}) {
    StagedDeltaCosts before;
    for (const double rate :
         {0.0, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2}) {
      const StagedDeltaCosts at =
          StagedDeltaCostsAt(executor, fb::DeltaChanges::kSnapshot, rate);
      EXPECT_GE(at.find, before.find) << rate;
      EXPECT_GT(at.encode, before.encode) << rate;
      EXPECT_GT(at.apply, before.apply) << rate;
      EXPECT_GT(at.keep, before.keep) << rate;
      before = at;
    }
  }
}

TEST(DeltaCosts, OfBitmapsAreLessToFindAndToEnd) {
  for (const Executor executor : {Executor::kGpu, Executor::kCpu}) {
    for (const double rate : {0.0, 0.001, 0.01, 0.1}) {
      const StagedDeltaCosts snapshot =
          StagedDeltaCostsAt(executor, fb::DeltaChanges::kSnapshot, rate);
      const StagedDeltaCosts bitmap =
          StagedDeltaCostsAt(executor, fb::DeltaChanges::kBitmap, rate);
      EXPECT_LT(bitmap.find, snapshot.find) << rate;
      EXPECT_EQ(bitmap.encode, snapshot.encode) << rate;
      EXPECT_EQ(bitmap.apply, snapshot.apply) << rate;
    }
    EXPECT_LT(
        StagedDeltaCostsAt(executor, fb::DeltaChanges::kBitmap, 0.1).keep,
        StagedDeltaCostsAt(executor, fb::DeltaChanges::kSnapshot, 0.1).keep);
  }
}

}  // namespace
}  // namespace refit::simulator
