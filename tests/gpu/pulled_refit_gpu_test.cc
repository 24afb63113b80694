// Direct refits between processes, into memory that no process can map: the
// receivers read their senders'. Sources are this process; the destinations are
// the death test's child, which runs the test anew up to the statement.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "runner/world_rank.h"
#include "tests/executor/plan_builder.h"
#include "tests/gpu/mapped_segment.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kTimeout(30);
constexpr std::chrono::seconds kShort(2);

// One rank of a plan, with what all ranks do at once.
class PulledRank {
 public:
  PulledRank(const PlanFile& plan, TcpRendezvous meeting, int device)
      : plan_(plan), rank_(meeting.rank), device_(device) {
    auto control =
        ConnectTcp(meeting, std::chrono::steady_clock::now() + kTimeout);
    status_ = control.status();
    if (!status_.ok()) return;
    auto gpu = CreateCudaDevice(device);
    status_ = gpu.status();
    if (!status_.ok()) return;
    auto made =
        WorldRank::Create(plan, *std::move(control), *std::move(gpu), kTimeout);
    status_ = made.status();
    if (made.ok()) gpu_ = *std::move(made);
  }
  ~PulledRank() {
    if (gpu_ == nullptr) return;
    // Together: no rank leaves while others map its memory.
    (void)gpu_->transport().ExchangeBytes(
        "", AllRanks(plan_), AllRanks(plan_),
        std::chrono::steady_clock::now() + kTimeout);
    gpu_.reset();
  }

  const absl::Status& status() const { return status_; }

  // A destination's tensors go where nobody can map them, or back.
  void Bind(bool is_private) {
    if (!status_.ok()) return;
    if (first_.empty()) {
      for (const BoundTensor& tensor : gpu_->tensors()) {
        first_.push_back(tensor.data);
      }
    }
    std::vector<void*> addresses = first_;
    if (is_private && IsDestination()) addresses = PrivateAddresses();
    status_ = gpu_->BindAt(addresses);
    if (!status_.ok()) return;
    const bool pulls = !gpu_->executor().pulls_from().empty();
    Expect(pulls == (is_private && IsDestination()), "who pulls");
  }

  void Refit() {
    if (status_.ok()) status_ = gpu_->FillSources();
    if (status_.ok()) status_ = gpu_->PoisonDestinations();
    if (status_.ok()) status_ = gpu_->Refit().status();
    if (!status_.ok()) return;
    auto check = gpu_->Check();
    status_ = check.status();
    if (!check.ok()) return;
    Expect(check->wrong_elements == 0,
           check->mismatches.empty() ? "" : check->mismatches.front());
  }

  // Sources, or destinations, come to a refit when the others have given up.
  void FailWithout(fb::Side late) {
    if (!status_.ok()) return;
    if (plan_.side(rank_) == late) std::this_thread::sleep_for(2 * kShort);
    Executor& executor = gpu_->executor();
    absl::Status refit =
        executor.Run(gpu_->stream(), {.timeout = kShort, .addresses = {}});
    if (refit.ok()) refit = executor.Wait();
    Expect(!refit.ok(), "a refit without all ranks");
    if (status_.ok()) status_ = executor.Connect(kTimeout);
  }

 private:
  bool IsDestination() const {
    return plan_.side(rank_) == fb::Side::kDestination;
  }
  void Expect(bool holds, const std::string& what) {
    if (!holds) {
      status_ = absl::InternalError(absl::StrCat("rank ", rank_, ": ", what));
    }
  }

  std::vector<void*> PrivateAddresses() {
    constexpr size_t kAlignmentBytes = 256;
    const auto aligned = [](size_t size_bytes) {
      return (size_bytes + kAlignmentBytes - 1) / kAlignmentBytes *
             kAlignmentBytes;
    };
    if (private_ == nullptr) {
      size_t total_bytes = 0;
      for (const BoundTensor& tensor : gpu_->tensors()) {
        total_bytes += aligned(tensor.size_bytes);
      }
      EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
      constexpr size_t kPageBytes = 2 << 20;
      const size_t pages = total_bytes / kPageBytes + 1;
      private_ = std::make_unique<MappedSegment>(pages, CU_MEM_HANDLE_TYPE_NONE,
                                                 device_);
      Expect(private_->page_bytes() == kPageBytes, "pages of 2 MiB");
      for (size_t page = 0; page < pages; ++page) private_->Map(page);
    }
    std::vector<void*> addresses;
    size_t offset = 0;
    for (const BoundTensor& tensor : gpu_->tensors()) {
      addresses.push_back(private_->Range(offset, tensor.size_bytes).data);
      offset += aligned(tensor.size_bytes);
    }
    return addresses;
  }

  const PlanFile& plan_;
  const int32_t rank_;
  const int device_;
  absl::Status status_;
  std::unique_ptr<MappedSegment> private_;
  std::vector<void*> first_;
  std::unique_ptr<WorldRank> gpu_;
};

// One rank of `side`; both processes come here.
absl::Status RunRank(const PlanFile& plan, const TcpRendezvous& meeting,
                     fb::Side side, int device) {
  TcpRendezvous mine = meeting;
  mine.rank = side == fb::Side::kSource ? 0 : 1;
  PulledRank rank(plan, mine, device);
  rank.Bind(/*is_private=*/true);
  for (int refit = 0; refit < 5; ++refit) rank.Refit();
  // As after a sleep, and where the worker allocates otherwise.
  for (const bool is_private : {true, false, true}) {
    rank.Bind(is_private);
    rank.Refit();
  }
  for (const fb::Side late : {fb::Side::kSource, fb::Side::kDestination}) {
    rank.FailWithout(late);
    rank.Refit();
  }
  return rank.status();
}

// The child's.
[[noreturn]] void RunDestination(const PlanFile& plan,
                                 const TcpRendezvous& meeting, int device) {
  const absl::Status status =
      RunRank(plan, meeting, fb::Side::kDestination, device);
  if (!status.ok()) fprintf(stderr, "%s\n", status.ToString().c_str());
  exit(status.ok() ? 0 : 1);
}

// The child finds the port of the meeting in the variable.
void ExpectPulledRefits(const char* variable, fb::Route route,
                        int destination_device) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const PlanFile plan = ReshardPlan({.source_ranks = 1,
                                     .destination_ranks = 1,
                                     .layers = 6,
                                     .rows = 512,
                                     .columns = 1024,
                                     .padding = 8,
                                     .source_dtype = DType::kFp32,
                                     .mechanism = fb::Mechanism::kDirect,
                                     .route = route})
                            .Open();
  TcpRendezvous meeting = *LoopbackRendezvous(2);
  meeting.secret = "known to both processes";
  std::thread source;
  absl::Status status;
  if (const char* port = std::getenv(variable)) {
    meeting.port = static_cast<uint16_t>(std::atoi(port));
  } else {
    setenv(variable, absl::StrCat(meeting.port).c_str(), /*overwrite=*/0);
    source = std::thread(
        [&] { status = RunRank(plan, meeting, fb::Side::kSource, 0); });
  }
  EXPECT_EXIT(RunDestination(plan, meeting, destination_device),
              testing::ExitedWithCode(0), "");
  if (source.joinable()) source.join();
  unsetenv(variable);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PulledRefitGpuTest, RanksShareOneGpu) {
  if (CudaDeviceCount() < 1) GTEST_SKIP() << "needs a GPU";
  ExpectPulledRefits("REFIT_TEST_ONE_GPU", fb::Route::kLocal, 0);
}

TEST(PulledRefitGpuTest, RanksHaveAGpuEach) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  ExpectPulledRefits("REFIT_TEST_TWO_GPUS", fb::Route::kPeer, 1);
}

}  // namespace
}  // namespace refit
