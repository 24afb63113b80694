#include "simulator/delta_costs.h"

#include <gtest/gtest.h>

namespace refit::simulator {
namespace {

TEST(DeltaCosts, AreThoseThatWereMeasured) {
  const StagedDeltaCosts at =
      StagedDeltaCostsAt(Executor::kGpu, fb::DeltaChanges::kSnapshot, 0.01);
  EXPECT_NEAR(at.find * 4.294967296e9, 2.4e-3, 1e-9);
  EXPECT_NEAR(at.encode * 4.294967296e9, 0.95e-3, 1e-9);
  EXPECT_NEAR(at.apply * 4.294967296e9, 1.08e-3, 1e-9);
  EXPECT_NEAR(at.keep * 4.294967296e9, 1.35e-3, 1e-9);
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

// simulator/README.md computes the same by hand, for 30.5 GB.
TEST(DeltaCosts, OfDirectRoundsAreThoseOfTheFormulas) {
  const double bytes = 30.5e9;
  const auto seconds = [&](fb::DeltaChanges changes, double rate) {
    const DirectDeltaCosts costs = DirectDeltaCostsAt(changes, rate, 2, 365e9);
    return bytes * (costs.seconds + costs.stored / 365e9);
  };
  EXPECT_NEAR(seconds(fb::DeltaChanges::kSnapshot, 0.01), 22.4e-3, 0.1e-3);
  EXPECT_NEAR(seconds(fb::DeltaChanges::kBitmap, 0.01), 17.6e-3, 0.1e-3);
  EXPECT_NEAR(seconds(fb::DeltaChanges::kSnapshot, 0), 14.2e-3, 0.1e-3);
  // At most 3 % more than a dense refit.
  EXPECT_NEAR(seconds(fb::DeltaChanges::kSnapshot, 1), 1.03 * bytes / 365e9,
              1e-6);
}

// The rounds of Qwen3-30B-A3B, EP2 to TP2, on four H200s.
TEST(DeltaCosts, OfSnapshotsInDirectRoundsAreNearTheMeasured) {
  struct Measured {
    double rate, milliseconds;
  };
  for (const auto& [rate, milliseconds] :
       {Measured{0, 15.0}, Measured{0.001, 17.0}, Measured{0.01, 20.9},
        Measured{0.03, 44.5}, Measured{0.1, 85.5}}) {
    const DirectDeltaCosts costs =
        DirectDeltaCostsAt(fb::DeltaChanges::kSnapshot, rate, 2, 365e9);
    const double seconds = 30.54e9 * (costs.seconds + costs.stored / 365e9);
    EXPECT_NEAR(seconds / (milliseconds * 1e-3), 1, 0.08) << rate;
  }
}

// 24 layers of Qwen3-30B-A3B on two H100s, less what their ranks take to agree.
TEST(DeltaCosts, OfBitmapsInDirectRoundsAreNearTheMeasured) {
  struct Measured {
    double rate, milliseconds;
  };
  for (const auto& [rate, milliseconds] :
       {Measured{0.003, 8.2}, Measured{0.01, 18.1}, Measured{0.03, 47.0},
        Measured{0.1, 87.3}, Measured{0.3, 91.4}, Measured{0.6, 87.1}}) {
    const DirectDeltaCosts costs =
        DirectDeltaCostsAt(fb::DeltaChanges::kBitmap, rate, 2, 365e9);
    const double seconds =
        31.1e9 * (costs.seconds + costs.stored / 365e9) + kAgreeSeconds;
    EXPECT_NEAR(seconds / (milliseconds * 1e-3), 1, 0.07) << rate;
  }
}

TEST(DeltaCosts, WiderElementsMakeFewerUnitsThatAreStored) {
  EXPECT_DOUBLE_EQ(
      DirectDeltaCostsAt(fb::DeltaChanges::kSnapshot, 0.5, 8, 1).stored, 0.75);
  EXPECT_DOUBLE_EQ(
      DirectDeltaCostsAt(fb::DeltaChanges::kSnapshot, 0.5, 4, 1).stored,
      0.9375);
}

}  // namespace
}  // namespace refit::simulator
