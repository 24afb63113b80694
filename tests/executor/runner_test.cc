#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "runner/available_memory.h"
#include "runner/checked_run.h"
#include "runner/rank_report.h"
#include "runner/safetensors.h"
#include "runner/safetensors_run.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

std::string FirstMismatch(const PlanBuilder& builder) {
  const PlanFile plan = builder.Open();
  const auto result = RunChecked(plan, {});
  EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->check.wrong_elements, 0);
  return result->check.mismatches.empty() ? "" : result->check.mismatches[0];
}

RankReport SampleReport() {
  RankReport report;
  report.refit.seconds = 1.5;
  report.refit.host_seconds = 0.25;
  report.refit.counters.bytes_sent = uint64_t{1} << 40;
  report.refit.counters.unpack_seconds = 0.125;
  report.refit.counters.fused_elements = 11;
  report.refit.counters.by(fb::Route::kNetwork, fb::Mechanism::kStaged)
      .bytes_received = 9;
  report.refit.rounds = {{.round = 7,
                          .route = fb::Route::kPeer,
                          .mechanism = fb::Mechanism::kDirect,
                          .bytes_sent = 3,
                          .bytes_received = 4,
                          .seconds = 0.5,
                          .pack = {.begin = 1, .end = 2},
                          .move = {.begin = 2, .end = 4},
                          .unpack = {.begin = 4, .end = 5}}};
  report.check.wrong_elements = 2;
  return report;
}

TEST(RankReportTest, OtherRanksReadWhatARankWrote) {
  const absl::StatusOr<RankReport> read =
      ReadReport(WriteReport(SampleReport()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->refit.seconds, 1.5);
  EXPECT_EQ(read->refit.host_seconds, 0.25);
  EXPECT_EQ(read->refit.counters.bytes_sent, uint64_t{1} << 40);
  EXPECT_EQ(read->refit.counters.unpack_seconds, 0.125);
  EXPECT_EQ(read->refit.counters.fused_elements, 11);
  EXPECT_EQ(read->refit.counters.by(fb::Route::kNetwork, fb::Mechanism::kStaged)
                .bytes_received,
            9);
  ASSERT_EQ(read->refit.rounds.size(), 1);
  EXPECT_EQ(read->refit.rounds[0].round, 7);
  EXPECT_EQ(read->refit.rounds[0].route, fb::Route::kPeer);
  EXPECT_EQ(read->refit.rounds[0].mechanism, fb::Mechanism::kDirect);
  EXPECT_EQ(read->refit.rounds[0].bytes_received, 4);
  EXPECT_EQ(read->refit.rounds[0].seconds, 0.5);
  EXPECT_EQ(read->refit.rounds[0].pack.begin, 1);
  EXPECT_EQ(read->refit.rounds[0].move.end, 4);
  EXPECT_EQ(read->refit.rounds[0].unpack.end, 5);
  EXPECT_EQ(read->check.wrong_elements, 2);
}

TEST(RankReportTest, DeltasOfRanksAddUp) {
  RankReport report = SampleReport();
  report.refit.delta = {.is_delta = true,
                        .why_dense = "",
                        .base_version = 3,
                        .version = 4,
                        .elements = 100,
                        .changed_elements = 5,
                        .rung = 16,
                        .stored_bytes = 64,
                        .dense_bytes = 200,
                        .move_seconds = 0.5,
                        .keep_seconds = 0.25,
                        .find_seconds = 3,
                        .encode_seconds = 4,
                        .wire_seconds = 5,
                        .apply_seconds = 6,
                        .check_seconds = 7,
                        .agree_seconds = 8,
                        .total_seconds = 9};
  const absl::StatusOr<RankReport> read = ReadReport(WriteReport(report));
  ASSERT_TRUE(read.ok()) << read.status();
  RankReport all;
  AddReport(*read, all);
  report.refit.delta->move_seconds = 2;
  report.refit.delta->wire_seconds = 1;
  AddReport(report, all);
  ASSERT_TRUE(all.refit.delta.has_value());
  EXPECT_TRUE(all.refit.delta->is_delta);
  EXPECT_EQ(all.refit.delta->base_version, 3);
  EXPECT_EQ(all.refit.delta->version, 4);
  EXPECT_EQ(all.refit.delta->elements, 200);
  EXPECT_EQ(all.refit.delta->changed_elements, 10);
  EXPECT_EQ(all.refit.delta->rung, 16);
  EXPECT_EQ(all.refit.delta->stored_bytes, 128);
  EXPECT_EQ(all.refit.delta->dense_bytes, 400);
  EXPECT_EQ(all.refit.delta->move_seconds, 2);
  EXPECT_EQ(all.refit.delta->keep_seconds, 0.25);
  EXPECT_EQ(all.refit.delta->find_seconds, 3);
  EXPECT_EQ(all.refit.delta->encode_seconds, 4);
  EXPECT_EQ(all.refit.delta->wire_seconds, 5);
  EXPECT_EQ(all.refit.delta->apply_seconds, 6);
  EXPECT_EQ(all.refit.delta->check_seconds, 7);
  EXPECT_EQ(all.refit.delta->agree_seconds, 8);
  EXPECT_EQ(all.refit.delta->total_seconds, 9);
  RankReport dense;
  dense.refit.delta = DeltaReport{.why_dense = "rank 0 asked for it"};
  EXPECT_EQ(ReadReport(WriteReport(dense))->refit.delta->why_dense,
            "rank 0 asked for it");
}

TEST(RankReportTest, BytesThatAreNoReportAreRefused) {
  const std::string bytes = WriteReport(SampleReport());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(ReadReport(bytes.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(ReadReport(bytes + '\0').ok());
  std::string unknown_route = bytes;
  unknown_route[bytes.size() - 74] = 17;
  EXPECT_FALSE(ReadReport(unknown_route).ok());
}

// Text before the values, which no reader knows by heart.
std::string Place(const std::string& mismatch) {
  return mismatch.substr(0, mismatch.find(':'));
}

TEST(CheckTest, WrongSourceElementIsSeen) {
  PlanBuilder plan = ReshardPlan({});
  plan.ranks[0].messages[1].copies[0].offset -= 1;
  const std::string mismatch = FirstMismatch(plan);
  EXPECT_EQ(Place(mismatch),
            "rank 3, buffer \"model.layers.0.weight\", index 0");
  EXPECT_NE(mismatch.find("(element 4 of param \"model.layers.0.weight\")"),
            std::string::npos)
      << mismatch;
}

TEST(CheckTest, ElementThatIsNotWrittenIsSeen) {
  PlanBuilder plan = ReshardPlan({});
  plan.ranks[2].messages[0].copies.clear();
  const std::string mismatch = FirstMismatch(plan);
  EXPECT_EQ(Place(mismatch),
            "rank 2, buffer \"model.layers.0.weight\", index 0");
  EXPECT_NE(mismatch.find("found 0xffff"), std::string::npos) << mismatch;
}

TEST(CheckTest, PaddingThatIsNotZeroIsSeen) {
  PlanBuilder plan = ReshardPlan({.padding = 2});
  plan.ranks[3].fills.clear();
  EXPECT_EQ(FirstMismatch(plan),
            "rank 3, buffer \"model.layers.0.weight\", index 4: found 0xffff, "
            "expected 0x0000 (zero fill)");
}

TEST(CheckTest, WriteUnderASkipIsSeen) {
  PlanBuilder plan =
      ReshardPlan({.padding = 2, .padding_kind = fb::RegionKind::kSkip});
  plan.ranks[3].fills = {{.slot = 0, .offset = 5, .loops = {}}};
  EXPECT_EQ(FirstMismatch(plan),
            "rank 3, buffer \"model.layers.0.weight\", index 5: found 0x0000, "
            "expected 0xffff (a declared skip)");
}

TEST(CheckTest, ElementsThePlanSaysNothingAboutAreSeen) {
  PlanBuilder plan = ReshardPlan({.padding = 2});
  plan.buffers.back().regions.clear();
  EXPECT_EQ(FirstMismatch(plan),
            "rank 3, buffer \"model.layers.{0}.weight\": of 96 elements the "
            "plan says nothing about 32");
}

// Tensors of one stack may come in different dtypes.
TEST(CheckTest, EachTensorIsCastFromItsOwnDType) {
  PlanBuilder plan = ReshardPlan({});
  for (uint32_t rank = 0; rank < plan.source_ranks; ++rank) {
    // The source's layer 1 in fp32, in a buffer of its own.
    PlanBuilder::Buffer& layer0 = plan.buffers[rank];
    layer0.index = {1};
    layer0.fragments[0].extent[0] = 1;
    PlanBuilder::Buffer layer1 = layer0;
    layer1.name = "decoder.layers.1.weight";
    layer1.index = {};
    layer1.dtype = DType::kFp32;
    layer1.fragments[0].lo[0] = 1;
    plan.ranks[rank].buffers.push_back(
        static_cast<uint32_t>(plan.buffers.size()));
    plan.buffers.push_back(layer1);
    for (PlanBuilder::Message& message : plan.ranks[rank].messages) {
      if (message.round == 0) continue;
      message.copies[0].slot = 1;
      message.copies[0].offset -= 4 * 8;
    }
  }
  const PlanFile file = plan.Open();
  const auto result = RunChecked(file, {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->check.mismatches, std::vector<std::string>());
  EXPECT_EQ(result->check.wrong_elements, 0);
}

TEST(MemoryTest, PlanThatDoesNotFitIsRefusedUnallocated) {
  // 2 TiB on each side.
  const PlanFile plan = ReshardPlan({.layers = 1,
                                     .rows = uint64_t{1} << 20,
                                     .columns = uint64_t{1} << 20,
                                     .mechanism = fb::Mechanism::kDirect})
                            .Open();
  const absl::Status status = RunChecked(plan, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message().find(
                "needs 4398046511104 bytes (sources + destinations + staging + "
                "scratch), this machine has "),
            0)
      << status;
}

TEST(MemoryTest, LimitOfTheControlGroupCounts) {
  const std::filesystem::path root =
      std::filesystem::path(testing::TempDir()) /
      ("memory_test." + std::to_string(getpid()));
  EXPECT_EQ(AvailableMemoryBytes(root), std::nullopt);
  std::filesystem::create_directories(root / "proc");
  std::filesystem::create_directories(root / "sys/fs/cgroup");
  std::ofstream(root / "proc/meminfo")
      << "MemTotal:  9000 kB\nMemAvailable:  5000 kB\n";
  EXPECT_EQ(AvailableMemoryBytes(root), 5000 * 1024);
  std::ofstream(root / "sys/fs/cgroup/memory.max") << "max\n";
  EXPECT_EQ(AvailableMemoryBytes(root), 5000 * 1024);
  std::ofstream(root / "sys/fs/cgroup/memory.max") << "4096\n";
  EXPECT_EQ(AvailableMemoryBytes(root), 4096);
  std::filesystem::remove_all(root);
}

class SafetensorsRunTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(testing::TempDir()) /
            ("safetensors_run_test." + std::to_string(getpid()) + "." +
             testing::UnitTest::GetInstance()->current_test_info()->name());
    source_ = (root_ / "source").string();
    destination_ = (root_ / "destination").string();
    std::filesystem::create_directories(source_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // Files of the source ranks whose elements count up from rank * 1000.
  void WriteSources(const PlanFile& plan) {
    for (int32_t rank = 0; rank < plan.source_ranks(); ++rank) {
      auto writer = SafetensorsWriter::Create(
          (std::filesystem::path(source_) / RankFileName(rank)).string(),
          TensorsOfRank(plan, rank));
      ASSERT_TRUE(writer.ok()) << writer.status();
      uint16_t value = rank * 1000;
      for (const BoundTensor& tensor : writer->tensors()) {
        for (size_t at = 0; at < tensor.size_bytes; at += 2, ++value) {
          std::memcpy(static_cast<std::byte*>(tensor.data) + at, &value, 2);
        }
      }
      ASSERT_TRUE(writer->Finish().ok());
      ASSERT_TRUE(writer->Commit().ok());
    }
  }

  size_t DestinationFiles() const {
    if (!std::filesystem::exists(destination_)) return 0;
    return std::distance(std::filesystem::directory_iterator(destination_), {});
  }

  std::filesystem::path root_;
  std::string source_;
  std::string destination_;
};

TEST_F(SafetensorsRunTest, DestinationFilesHoldTheSourcesElements) {
  // Two rows of four become columns 0, 1 and 2, 3, with one column of padding.
  const PlanFile plan =
      ReshardPlan({.layers = 1, .rows = 2, .columns = 4, .padding = 1}).Open();
  WriteSources(plan);
  const auto result = RunSafetensors(plan, source_, destination_, {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(DestinationFiles(), 2);
  const auto reader = SafetensorsReader::Open(
      (std::filesystem::path(destination_) / "rank-00003.safetensors")
          .string());
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ(reader->tensors().size(), 1);
  EXPECT_EQ(reader->tensors()[0].name, "model.layers.0.weight");
  const std::vector<uint16_t> expected = {2, 3, 0, 1002, 1003, 0};
  EXPECT_EQ(std::memcmp(reader->tensors()[0].data, expected.data(), 12), 0);
}

TEST_F(SafetensorsRunTest, MissingSourceFileLeavesNothingBehind) {
  const PlanFile plan = ReshardPlan({}).Open();
  WriteSources(plan);
  const std::string missing =
      (std::filesystem::path(source_) / RankFileName(1)).string();
  std::filesystem::remove(missing);
  EXPECT_EQ(RunSafetensors(plan, source_, destination_, {}).status().message(),
            missing + ": No such file or directory");
  EXPECT_EQ(DestinationFiles(), 0);
}

TEST_F(SafetensorsRunTest, SourceFileOfAnotherPlanLeavesNothingBehind) {
  WriteSources(ReshardPlan({.rows = 16}).Open());
  const PlanFile plan = ReshardPlan({}).Open();
  EXPECT_EQ(
      RunSafetensors(plan, source_, destination_, {}).status().message(),
      (std::filesystem::path(source_) / RankFileName(0)).string() +
          ": rank 0 cannot bind, 2 problems\n"
          "  wrong shape: \"decoder.layers.0.weight\" is [8, 8], the plan "
          "wants [4, 8]\n"
          "  wrong shape: \"decoder.layers.1.weight\" is [8, 8], the plan "
          "wants [4, 8]");
  EXPECT_EQ(DestinationFiles(), 0);
}

TEST_F(SafetensorsRunTest, WhatThePlanDoesNotNameIsLeftAlone) {
  // The sources' files hold three layers, the plan moves two.
  WriteSources(ReshardPlan({.layers = 3}).Open());
  const auto result = RunSafetensors(ReshardPlan({.layers = 2}).Open(), source_,
                                     destination_, {});
  EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(DestinationFiles(), 2);
}

TEST_F(SafetensorsRunTest, TargetThatIsADirectoryChangesNothing) {
  const PlanFile plan = ReshardPlan({}).Open();
  WriteSources(plan);
  const std::filesystem::path destination = destination_;
  const auto older = destination / RankFileName(2);
  const auto taken = destination / RankFileName(3);
  std::filesystem::create_directories(taken);
  std::ofstream(older) << "older";
  EXPECT_EQ(RunSafetensors(plan, source_, destination_, {}).status().message(),
            taken.string() + ": Is a directory");
  EXPECT_EQ(std::filesystem::file_size(older), 5);
  EXPECT_EQ(DestinationFiles(), 2);
}

}  // namespace
}  // namespace refit
