// Workers that go on with another plan: without an engine that was lost, with
// one that has come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "refit/host_device.h"
#include "refit/worker.h"
#include "runner/rank_threads.h"
#include "runner/value_check.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/forwarding_control.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr seconds kAmple{60};

// Counts what is shown and mapped, and can say that memory was freed.
class WatchedDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<ExportedMemory>> Export(
      absl::Span<const MemoryRange> ranges) override {
    ++exports;
    return HostDevice::Export(ranges);
  }
  absl::StatusOr<std::unique_ptr<MappedMemory>> Import(
      std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
      std::chrono::steady_clock::time_point deadline) override {
    ++imports;
    return HostDevice::Import(exported, sizes_bytes, deadline);
  }
  absl::StatusOr<std::unique_ptr<MemoryWatch>> Watch(
      absl::Span<const MemoryRange>) override {
    return std::make_unique<SaidToBeGone>(*this);
  }

  std::atomic<int> exports = 0;
  std::atomic<int> imports = 0;
  std::atomic<bool> is_first_gone = false;

 private:
  class SaidToBeGone : public MemoryWatch {
   public:
    explicit SaidToBeGone(const WatchedDevice& device) : device_(device) {}
    std::optional<size_t> FirstGone() override {
      return device_.is_first_gone ? std::optional<size_t>(0) : std::nullopt;
    }

   private:
    const WatchedDevice& device_;
  };
};

// Two trainers with the rows of `w`, and engines that want all of it.
std::shared_ptr<const PlanFile> PlanFor(int engines) {
  const auto side = [](int ranks, const char* placement) {
    return absl::StrCat(
        R"({"layout": "generic", "meshes": {"m": {"axes": {"x": )", ranks,
        R"(}}}, "tensors": [{"match": "*", "mesh": "m", "placements": [")",
        placement, R"("]}]})");
  };
  return std::make_shared<PlanFile>(CompiledPlan(absl::StrCat(
      R"({"model": {"parameters": [{"name": "w", "shape": [64, 32], )",
      R"("dtype": "bf16"}]}, "source": )", side(2, "Shard(0)"),
      R"(, "destination": )", side(engines, "Replicate"), "}")));
}

// A process of a job: its worker, and the tensors that it has whatever the plan
// is.
struct Member {
  WatchedDevice* device = nullptr;  // the worker's
  std::unique_ptr<Worker> worker;
  std::vector<BoundTensor> tensors;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
};

class ReplaceTest : public ::testing::Test {
 protected:
  // With another plan: members that have a worker replace its plan, others
  // join. By rank.
  std::vector<absl::Status> Place(const std::shared_ptr<const PlanFile>& plan,
                                  seconds timeout = kAmple) {
    const auto fabric = std::make_shared<LocalFabric>(plan->world_size());
    return OnAll([&](int32_t rank) {
      return PlaceOne(members_[static_cast<size_t>(rank)], plan, rank, fabric,
                      timeout);
    });
  }

  void ExpectPlaced(const std::shared_ptr<const PlanFile>& plan) {
    ASSERT_TRUE(AllOk(Place(plan)));
  }

  // A refit with every element checked.
  void ExpectRefit(const PlanFile& plan) {
    TensorsByRank tensors;
    for (const Member& member : members_) tensors.push_back(member.tensors);
    const ValueCheck check(plan);
    check.FillSources(tensors);
    check.PoisonDestinations(tensors);
    const auto statuses = OnAll([&](int32_t rank) {
      Executor& executor =
          members_[static_cast<size_t>(rank)].worker->executor();
      const absl::Status run = executor.Run(nullptr, {});
      return run.ok() ? executor.Wait() : run;
    });
    ASSERT_TRUE(AllOk(statuses));
    const CheckResult result = check.Check(tensors);
    EXPECT_GT(result.checked_bytes, 0u);
    EXPECT_EQ(result.wrong_elements, 0u);
  }

  std::vector<absl::Status> OnAll(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(members_.size());
    EXPECT_TRUE(RunRankThreads(static_cast<int32_t>(members_.size()),
                               [&](int32_t rank) {
                                 statuses[static_cast<size_t>(rank)] =
                                     body(rank);
                               })
                    .ok());
    return statuses;
  }

  int Exports() const { return Sum(&WatchedDevice::exports); }
  int Imports() const { return Sum(&WatchedDevice::imports); }

  std::vector<Member> members_;

 private:
  static absl::Status PlaceOne(Member& member,
                               const std::shared_ptr<const PlanFile>& plan,
                               int32_t rank,
                               const std::shared_ptr<LocalFabric>& fabric,
                               seconds timeout) {
    if (member.worker != nullptr) {
      return member.worker->Replace(
          {.plan = plan, .rank = rank, .fabric = fabric}, timeout);
    }
    auto device = std::make_shared<WatchedDevice>();
    member.device = device.get();
    member.tensors = TensorsOfRank(*plan, rank);
    for (BoundTensor& tensor : member.tensors) {
      member.memory.push_back(*device->Allocate(tensor.size_bytes));
      tensor.data = member.memory.back()->data();
    }
    auto made = Worker::Create({.plan = plan,
                                .device = std::move(device),
                                .fabric = fabric,
                                .executor = {.rank = rank}});
    if (!made.ok()) return made.status();
    member.worker = *std::move(made);
    absl::Status status = member.worker->executor().Connect(timeout);
    return status.ok() ? member.worker->executor().Bind(member.tensors, timeout)
                       : status;
  }

  int Sum(std::atomic<int> WatchedDevice::*count) const {
    int sum = 0;
    for (const Member& member : members_) sum += member.device->*count;
    return sum;
  }
};

TEST_F(ReplaceTest, AnEngineIsLostAndAnotherComes) {
  const auto three = PlanFor(3);
  const auto two = PlanFor(2);
  members_.resize(5);
  ExpectPlaced(three);
  ExpectRefit(*three);

  members_.erase(members_.begin() + 3);
  const int exports = Exports();
  const int imports = Imports();
  ExpectPlaced(two);
  EXPECT_EQ(members_[3].worker->executor().state(), ExecutorState::kBound);
  ExpectRefit(*two);
  EXPECT_EQ(Exports(), exports) << "what peers map stays shown";
  EXPECT_EQ(Imports(), imports) << "and mapped";

  members_.emplace_back();
  ExpectPlaced(three);
  ExpectRefit(*three);
  EXPECT_EQ(Exports() - exports, 1) << "of the newcomer";
  EXPECT_EQ(Imports() - imports, 2) << "each trainer maps it";
}

TEST_F(ReplaceTest, WhatIsBoundAnewIsShownAnew) {
  const auto plan = PlanFor(2);
  members_.resize(4);
  ExpectPlaced(plan);
  const int exports = Exports();
  ASSERT_EQ(exports, 2);
  ASSERT_TRUE(AllOk(OnAll([&](int32_t rank) {
    Member& member = members_[static_cast<size_t>(rank)];
    return member.worker->executor().Bind(member.tensors, kAmple);
  })));
  // The memory behind an address may be another than it was.
  EXPECT_EQ(Exports(), 2 * exports);
}

TEST_F(ReplaceTest, OneThatFailsIsTriedAgain) {
  const auto two = PlanFor(2);
  const auto one = PlanFor(1);
  members_.resize(4);
  ExpectPlaced(two);
  // The last one does not come.
  Member lost = std::move(members_.back());
  members_.pop_back();
  for (const absl::Status& status : Place(two, seconds(1))) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
  EXPECT_EQ(members_[0].worker->executor().state(), ExecutorState::kLoaded);
  const int exports = Exports();
  ExpectPlaced(one);
  EXPECT_EQ(Exports(), exports) << "of what was bound before both";
  ExpectRefit(*one);
}

TEST_F(ReplaceTest, TornTensorsStayTornUntilARefitSucceeds) {
  const auto two = PlanFor(2);
  const auto one = PlanFor(1);
  members_.resize(4);
  ExpectPlaced(two);
  // The last one does not come to a refit.
  for (const absl::Status& status : OnAll([&](int32_t rank) {
         Executor& executor =
             members_[static_cast<size_t>(rank)].worker->executor();
         if (rank == 3) return absl::OkStatus();
         return executor.Run(nullptr, {.timeout = milliseconds(100)});
       })) {
    (void)status;
  }
  const auto state = [&] { return members_[2].worker->executor().state(); };
  ASSERT_EQ(state(), ExecutorState::kTorn);
  members_.pop_back();
  EXPECT_FALSE(Place(two, seconds(1))[2].ok());
  EXPECT_EQ(state(), ExecutorState::kLoaded);
  ExpectPlaced(one);
  EXPECT_EQ(state(), ExecutorState::kTorn);
  ExpectRefit(*one);
  EXPECT_EQ(state(), ExecutorState::kBound);
  ExpectPlaced(one);
  EXPECT_EQ(state(), ExecutorState::kBound);
}

TEST_F(ReplaceTest, WhileARefitIsUnderWayAllStaysAsItIs) {
  const auto two = PlanFor(2);
  members_.resize(4);
  ExpectPlaced(two);
  ASSERT_TRUE(AllOk(OnAll([&](int32_t rank) {
    return members_[static_cast<size_t>(rank)].worker->executor().Run(nullptr,
                                                                      {});
  })));
  const absl::Status refused = Place(two)[2];
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("rank 2: Replace while running: wait first"));
  EXPECT_TRUE(AllOk(OnAll([&](int32_t rank) {
    return members_[static_cast<size_t>(rank)].worker->executor().Wait();
  })));
}

TEST_F(ReplaceTest, TensorsWhoseMemoryWasFreedAreNotGoneOnWith) {
  const auto two = PlanFor(2);
  const auto one = PlanFor(1);
  members_.resize(4);
  ExpectPlaced(two);
  members_.pop_back();
  members_[1].device->is_first_gone = true;
  const std::vector<absl::Status> statuses = Place(one);
  EXPECT_THAT(std::string(statuses[1].message()),
              HasSubstr("the memory of \"w\" was freed since Bind"));
  for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
  members_[1].device->is_first_gone = false;
  ASSERT_TRUE(AllOk(OnAll([&](int32_t rank) {
    Member& member = members_[static_cast<size_t>(rank)];
    return member.worker->executor().Bind(member.tensors, kAmple);
  })));
  ExpectRefit(*one);
}

TEST_F(ReplaceTest, AClosedWorkerIsReplacedByNothing) {
  const auto one = PlanFor(1);
  members_.resize(3);
  ExpectPlaced(one);
  for (Member& member : members_) member.worker->Close();
  EXPECT_THAT(std::string(Place(one)[0].message()),
              HasSubstr("rank 0: Replace while closed: make a new worker"));
  EXPECT_EQ(members_[0].worker->Replace({.plan = nullptr}, kAmple).code(),
            absl::StatusCode::kInvalidArgument);
}

// A control plane of a rank that does not hear that a refit is over: rank 0's
// process died when it had told some of the others.
class DeafControl : public ForwardingControl {
 public:
  DeafControl(std::unique_ptr<ControlPlane> inner, const bool& is_deaf)
      : ForwardingControl(std::move(inner)), is_deaf_(is_deaf) {}
  absl::StatusOr<std::vector<OfRank<std::string>>> Compare(
      std::string_view mine, std::string_view what,
      Deadline deadline) override {
    auto heard = ForwardingControl::Compare(mine, what, deadline);
    if (!is_deaf_ || what != "end of refit") return heard;
    return absl::UnavailableError("rank 0 is gone: the connection was closed");
  }

 private:
  const bool& is_deaf_;
};

class HalfToldTest : public ReplaceTest {
 protected:
  static constexpr int32_t kDeaf = 2;

  Meeting MeetingOf(const TcpRendezvous& meeting, int32_t rank) {
    TcpRendezvous mine = meeting;
    mine.rank = rank;
    return Meeting(std::make_unique<DeafControl>(
        *ConnectTcp(mine, std::chrono::steady_clock::now() + kAmple),
        rank == kDeaf ? is_deaf_ : never_));
  }

  std::vector<absl::Status> Refit() {
    return OnAll([&](int32_t rank) {
      fake_nccl_set_rank(rank);
      Executor& executor = ExecutorOf(rank);
      const absl::Status run = executor.Run(nullptr, {});
      return run.ok() ? executor.Wait() : run;
    });
  }

  // A refit whose end one rank does not hear of, which it alone takes for
  // failed.
  void RefitHalfTold() {
    is_deaf_ = true;
    const auto statuses = Refit();
    is_deaf_ = false;
    for (int32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(statuses[static_cast<size_t>(rank)].ok(), rank != kDeaf);
    }
    ExpectTornAlone();
  }

  void ExpectTornAlone() {
    for (int32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ExecutorOf(rank).state(),
                rank == kDeaf ? ExecutorState::kTorn : ExecutorState::kBound);
    }
  }

  // The next refit takes them for unequal: it sends all.
  void ExpectWholeRefit() {
    for (const absl::Status& status : Refit()) {
      ASSERT_TRUE(status.ok()) << status;
    }
    for (int32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ExecutorOf(rank).state(), ExecutorState::kBound);
      EXPECT_FALSE(ExecutorOf(rank).delta_report()->is_delta);
    }
  }

  Executor& ExecutorOf(int32_t rank) {
    return members_[static_cast<size_t>(rank)].worker->executor();
  }

 private:
  bool is_deaf_ = false;
  const bool never_ = false;
};

TEST_F(HalfToldTest, ARankThatDidNotHearTheEndIsTornUntilAWholeRefit) {
  const auto plan = std::make_shared<PlanFile>(CompiledPlan(R"({
    "model": {"parameters": [
      {"name": "w", "shape": [64, 32], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"x": 2}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "topology": {"gpus_per_host": 1},
    "options": {"delta": {"dense_every": 0, "check": false}}})"));
  members_.resize(3);
  const TcpRendezvous first = *LoopbackRendezvous(3);
  for (const absl::Status& status : OnAll([&](int32_t rank) {
         fake_nccl_set_rank(rank);
         Member& member = members_[static_cast<size_t>(rank)];
         const auto device = std::make_shared<HostDevice>();
         member.tensors = TensorsOfRank(*plan, rank);
         for (BoundTensor& tensor : member.tensors) {
           member.memory.push_back(*device->Allocate(tensor.size_bytes));
           tensor.data = member.memory.back()->data();
         }
         member.worker = *Worker::Create({.plan = plan,
                                          .device = device,
                                          .meeting = MeetingOf(first, rank),
                                          .wire = Wire::kNccl,
                                          .executor = {.rank = rank}});
         const absl::Status status = ExecutorOf(rank).Connect(kAmple);
         return status.ok() ? ExecutorOf(rank).Bind(member.tensors, kAmple)
                            : status;
       })) {
    ASSERT_TRUE(status.ok()) << status;
  }
  ExpectWholeRefit();

  RefitHalfTold();
  for (const absl::Status& status : OnAll([&](int32_t rank) {
         fake_nccl_set_rank(rank);
         return ExecutorOf(rank).Connect(kAmple);
       })) {
    ASSERT_TRUE(status.ok()) << status;
  }
  ExpectTornAlone();
  ExpectWholeRefit();

  RefitHalfTold();
  const TcpRendezvous second = *LoopbackRendezvous(3);
  for (const absl::Status& status : OnAll([&](int32_t rank) {
         fake_nccl_set_rank(rank);
         return members_[static_cast<size_t>(rank)].worker->Replace(
             {.plan = plan, .rank = rank, .meeting = MeetingOf(second, rank)},
             kAmple);
       })) {
    ASSERT_TRUE(status.ok()) << status;
  }
  ExpectTornAlone();
  ExpectWholeRefit();
}

}  // namespace
}  // namespace refit
