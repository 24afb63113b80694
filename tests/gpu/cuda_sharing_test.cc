// Memory shared between processes: the death tests' children are processes of
// their own that run the test anew up to the statement, where they map what the
// parent exported. One GPU is enough.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "refit/cuda_device.h"
#include "tests/gpu/mapped_segment.h"

namespace refit {
namespace {

constexpr auto kNoDeadline = std::chrono::steady_clock::time_point::max();

bool AllBytesAre(const MemoryRange& range, int value) {
  std::vector<std::byte> bytes(range.size_bytes);
  EXPECT_EQ(cudaMemcpy(bytes.data(), range.data, bytes.size(),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  for (const std::byte byte : bytes) {
    if (byte != std::byte(value)) return false;
  }
  return true;
}

void Fill(const MemoryRange& range, int value) {
  EXPECT_EQ(cudaMemset(range.data, value, range.size_bytes), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// In the child: maps what the environment holds and sets every byte of its
// ranges to `value`. Ends the process.
[[noreturn]] void FillAsAnotherProcess(const char* variable,
                                       const std::vector<size_t>& sizes,
                                       int value) {
  auto device = *CreateCudaDevice(0);
  auto mapped = device->Import(
      absl::HexStringToBytes(std::getenv(variable)),
      std::vector<uint64_t>(sizes.begin(), sizes.end()), kNoDeadline);
  if (!mapped.ok()) {
    fprintf(stderr, "%s\n", mapped.status().ToString().c_str());
    exit(1);
  }
  bool filled = (*mapped)->addresses().size() == sizes.size();
  for (size_t i = 0; filled && i < sizes.size(); ++i) {
    filled =
        cudaMemset((*mapped)->addresses()[i], value, sizes[i]) == cudaSuccess;
  }
  filled &= cudaDeviceSynchronize() == cudaSuccess;
  mapped->reset();
  exit(filled ? 0 : 2);
}

class CudaSharingTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  // What the parent exported, in the child too.
  void Show(const char* variable, const std::vector<MemoryRange>& ranges) {
    auto exported = device_->Export(ranges);
    ASSERT_TRUE(exported.ok()) << exported.status();
    setenv(variable, absl::BytesToHexString((*exported)->bytes()).c_str(),
           /*overwrite=*/0);
    shown_.push_back(*std::move(exported));
  }

  std::unique_ptr<Device> device_ = *CreateCudaDevice(0);
  std::vector<std::unique_ptr<ExportedMemory>> shown_;
};

TEST_F(CudaSharingTest, AnotherProcessWritesATensorInsideAnAllocation) {
  auto memory = *device_->Allocate(1 << 20);
  Fill({memory->data(), 1 << 20}, 1);
  Show("REFIT_TEST_INSIDE", {{memory->data() + 512, 1024}});
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_INSIDE", {1024}, 7),
              testing::ExitedWithCode(0), "");
  EXPECT_TRUE(AllBytesAre({memory->data() + 512, 1024}, 7));
  EXPECT_TRUE(AllBytesAre({memory->data(), 512}, 1));
  EXPECT_TRUE(AllBytesAre({memory->data() + 1536, 512}, 1));
}

TEST_F(CudaSharingTest, AnotherProcessWritesATensorAcrossPages) {
  MappedSegment segment(3);
  for (size_t page = 0; page < 3; ++page) segment.Map(page);
  const size_t page_bytes = segment.page_bytes();
  Fill(segment.Range(0, 3 * page_bytes), 1);
  // From the last bytes of the first page to the first of the third.
  const size_t size_bytes = page_bytes + 2 * 256;
  const MemoryRange tensor = segment.Range(page_bytes - 256, size_bytes);
  Show("REFIT_TEST_ACROSS", {tensor});
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_ACROSS", {size_bytes}, 7),
              testing::ExitedWithCode(0), "");
  EXPECT_TRUE(AllBytesAre(tensor, 7));
  EXPECT_TRUE(AllBytesAre(segment.Range(0, page_bytes - 256), 1));
  EXPECT_TRUE(
      AllBytesAre(segment.Range(2 * page_bytes + 256, page_bytes - 256), 1));
}

TEST_F(CudaSharingTest, PagesWithAGapAndAnAllocationAreSharedAtOnce) {
  MappedSegment segment(3);
  segment.Map(0);
  segment.Map(2);
  const size_t page_bytes = segment.page_bytes();
  auto memory = *device_->Allocate(4096);
  const std::vector<MemoryRange> ranges = {segment.Range(2 * page_bytes, 512),
                                           {memory->data(), 4096},
                                           segment.Range(page_bytes - 512, 512),
                                           segment.Range(0, 512)};
  for (const MemoryRange& range : ranges) Fill(range, 1);
  Show("REFIT_TEST_GAP", ranges);
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_GAP", {512, 4096, 512, 512}, 7),
              testing::ExitedWithCode(0), "");
  for (const MemoryRange& range : ranges) EXPECT_TRUE(AllBytesAre(range, 7));
}

TEST_F(CudaSharingTest, PagesThatWereMappedAnewAreExportedAnew) {
  MappedSegment segment(2);
  segment.Map(0);
  segment.Map(1);
  const size_t size_bytes = 2 * segment.page_bytes();
  Fill(segment.Range(0, size_bytes), 1);
  Show("REFIT_TEST_OLD", {segment.Range(0, size_bytes)});
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_OLD", {size_bytes}, 7),
              testing::ExitedWithCode(0), "");
  EXPECT_TRUE(AllBytesAre(segment.Range(0, size_bytes), 7));
  segment.Unmap(1);
  segment.Map(1);
  Fill(segment.Range(0, size_bytes), 1);
  Show("REFIT_TEST_NEW", {segment.Range(0, size_bytes)});
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_NEW", {size_bytes}, 9),
              testing::ExitedWithCode(0), "");
  EXPECT_TRUE(AllBytesAre(segment.Range(0, size_bytes), 9));
}

TEST_F(CudaSharingTest, PagesWithoutAHandleAreRefused) {
  MappedSegment segment(1, CU_MEM_HANDLE_TYPE_NONE);
  segment.Map(0);
  Show("REFIT_TEST_NONE", {segment.Range(0, 512)});
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_NONE", {512}, 7),
              testing::ExitedWithCode(1),
              "FAILED_PRECONDITION: memory of cuMemCreate without a handle for "
              "other processes");
}

TEST_F(CudaSharingTest, PagesThatAreGoneAreRefused) {
  MappedSegment segment(1);
  segment.Map(0);
  Show("REFIT_TEST_GONE", {segment.Range(0, 512)});
  segment.Unmap(0);
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_GONE", {512}, 7),
              testing::ExitedWithCode(1),
              "FAILED_PRECONDITION: memory of cuMemMap that process [0-9]+ "
              "shares: no memory of cuMemMap at address 0x");
}

// The owner's server opens what is exported, not what it is asked for.
TEST_F(CudaSharingTest, PagesThatAreShownNoLongerAreRefused) {
  MappedSegment segment(1);
  segment.Map(0);
  Show("REFIT_TEST_UNSHOWN", {segment.Range(0, 512)});
  shown_.clear();
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_UNSHOWN", {512}, 7),
              testing::ExitedWithCode(1),
              "its owner shows no such memory any more");
}

TEST_F(CudaSharingTest, AnotherProcessChecksSizes) {
  auto memory = *device_->Allocate(4096);
  Show("REFIT_TEST_SIZE", {{memory->data(), 512}});
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_SIZE", {1024}, 7),
              testing::ExitedWithCode(1),
              "shows tensor 0 with 512 bytes when it should have 1024");
}

TEST_F(CudaSharingTest, ExportsLeaveNoDescriptorOpenAndKeepNoMemory) {
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto free_bytes = [] {
    size_t free = 0;
    size_t total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
  };
  constexpr size_t kPages = 16;
  MappedSegment segment(kPages);
  for (size_t page = 0; page < kPages; ++page) segment.Map(page);
  const size_t size_bytes = kPages * segment.page_bytes();
  Show("REFIT_TEST_MANY", {segment.Range(0, size_bytes)});
  const auto before = descriptors();
  const size_t free_before = free_bytes();
  EXPECT_EXIT(FillAsAnotherProcess("REFIT_TEST_MANY", {size_bytes}, 7),
              testing::ExitedWithCode(0), "");
  EXPECT_TRUE(AllBytesAre(segment.Range(0, size_bytes), 7));
  EXPECT_EQ(descriptors(), before);
  for (size_t page = 0; page < kPages; ++page) segment.Unmap(page);
  EXPECT_GT(free_bytes(), free_before + size_bytes / 2);
}

TEST_F(CudaSharingTest, ExportThatWasCutIsRefused) {
  MappedSegment segment(1);
  segment.Map(0);
  const MemoryRange range = segment.Range(0, 512);
  const auto shown = *device_->Export({&range, 1});
  const std::string& exported = shown->bytes();
  EXPECT_TRUE(device_->Import(exported, {512}, kNoDeadline).ok());
  for (size_t size = 0; size < exported.size(); ++size) {
    EXPECT_EQ(
        device_->Import(exported.substr(0, size), {512}, kNoDeadline).status(),
        absl::InvalidArgumentError("not memory exported by a CUDA device"));
  }
}

// Ranks that are threads: peer access alone does not reach pages.
TEST_F(CudaSharingTest, AnotherDeviceOfThisProcessReachesPages) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  MappedSegment segment(2);
  segment.Map(0);
  segment.Map(1);
  const MemoryRange tensor = segment.Range(0, 2 * segment.page_bytes());
  Fill(tensor, 1);
  auto other = *CreateCudaDevice(1);
  auto shown = *device_->Export({&tensor, 1});
  auto mapped = other->Import(shown->bytes(), {tensor.size_bytes}, kNoDeadline);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  // A copy kernel of the other device stores there.
  auto source = *other->Allocate(tensor.size_bytes);
  const std::vector<std::byte> sevens(tensor.size_bytes, std::byte{7});
  ASSERT_EQ(cudaMemcpy(source->data(), sevens.data(), sevens.size(),
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  CopyBatch batch;
  batch.loops.push_back({.extent = tensor.size_bytes / 4,
                         .from = {.bytes = 4},
                         .to = {.bytes = 4}});
  batch.copies.push_back({.from = {0, 0, DType::kFp32},
                          .to = {1, 0, DType::kFp32},
                          .loops_count = 1});
  std::byte* const table[] = {source->data(), (*mapped)->addresses()[0]};
  auto prepared = *other->Prepare(table, {&batch, 1});
  auto stream = *other->CreateStream();
  ASSERT_TRUE(prepared->Enqueue(0, stream->get()).ok());
  ASSERT_TRUE(other->Synchronize(stream->get()).ok());
  EXPECT_TRUE(AllBytesAre(tensor, 7));
}

}  // namespace
}  // namespace refit
