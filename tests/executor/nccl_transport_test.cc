#include "refit/nccl_transport.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "refit/worker.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/forwarding_control.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/transport_conformance.h"

namespace refit {
namespace {

// What the ends of one world are made on.
struct OneHost {
  OneHost() { fake_nccl_reset(); }
  HostDevice device;
};

TransportWorld MakeNcclWorld(int32_t world_size) {
  auto host = std::make_shared<OneHost>();
  TransportWorld world;
  world.ends =
      MakeNcclTransports(host->device, std::vector<uint32_t>(world_size, 0));
  world.shared = host;
  return world;
}

INSTANTIATE_TEST_SUITE_P(Nccl, TransportConformance,
                         testing::Values(TransportFactory(MakeNcclWorld)));
INSTANTIATE_TEST_SUITE_P(Nccl, FenceConformance,
                         testing::Values(TransportFactory(MakeNcclWorld)));

// Ends of a world on `hosts`, connected with edges of the test's choice.
class NcclTransportTest : public testing::Test {
 protected:
  NcclTransportTest() { fake_nccl_reset(); }

  void MakeWorld(const std::vector<uint32_t>& hosts) {
    ends_ = MakeNcclTransports(device_, hosts);
  }
  std::vector<absl::Status> OnAllRanks(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(ends_.size());
    EXPECT_TRUE(
        RunRankThreads(static_cast<int32_t>(ends_.size()), [&](int32_t rank) {
          fake_nccl_set_rank(rank);
          statuses[rank] = body(rank);
        }).ok());
    return statuses;
  }
  std::vector<absl::Status> Connect() {
    edges_.resize(ends_.size());
    return OnAllRanks([&](int32_t rank) {
      return ends_[rank]->Connect({}, edges_[rank], Ample());
    });
  }
  // `from` sends to `to`.
  void AddEdge(int32_t from, int32_t to, fb::Route route,
               fb::Mechanism mechanism = fb::Mechanism::kStaged) {
    edges_.resize(ends_.size());
    edges_[from].push_back({to, fb::MessageKind::kSend, route, mechanism});
    edges_[to].push_back({from, fb::MessageKind::kRecv, route, mechanism});
  }
  static Deadline Ample() {
    return std::chrono::steady_clock::now() + std::chrono::minutes(1);
  }

  HostDevice device_;
  std::vector<std::unique_ptr<Transport>> ends_;
  std::vector<std::vector<Edge>> edges_;  // by rank
};

TEST_F(NcclTransportTest, PlanWithoutStagedRoundsNeedsNoCommunicator) {
  MakeWorld({0, 0});
  EXPECT_TRUE(AllOk(Connect()));
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
}

TEST_F(NcclTransportTest, OneCommunicatorPerDomainThatStagesInside) {
  MakeWorld({0, 1, 0, 1, 2, 2});
  AddEdge(0, 2, fb::Route::kPeer);
  AddEdge(1, 3, fb::Route::kLocal);
  ASSERT_TRUE(AllOk(Connect()));
  EXPECT_EQ(fake_nccl_live_communicators(), 4);
  EXPECT_EQ(fake_nccl_lazy_connects(), 2);
}

TEST_F(NcclTransportTest, OneCommunicatorOverAllRanksForTheNetwork) {
  MakeWorld({0, 1, 0});
  AddEdge(0, 1, fb::Route::kNetwork);
  ASSERT_TRUE(AllOk(Connect()));
  EXPECT_EQ(fake_nccl_live_communicators(), 3);
  EXPECT_EQ(fake_nccl_lazy_connects(), 1);
}

TEST_F(NcclTransportTest, EdgesAreTouchedInTurnsThatNobodyWaitsInForEver) {
  constexpr int32_t kRanks = 9;
  MakeWorld(std::vector<uint32_t>(kRanks, 0));
  fake_nccl_set_connect_delay(1000);
  int32_t edges = 0;
  for (int32_t from = 0; from < kRanks; ++from) {
    for (int32_t to = 0; to < kRanks; ++to) {
      if (from == to || (from + 2 * to) % 3 == 0) continue;
      AddEdge(from, to, fb::Route::kPeer);
      ++edges;
    }
  }
  ASSERT_TRUE(AllOk(Connect()));
  EXPECT_EQ(fake_nccl_lazy_connects(), edges);
  EXPECT_EQ(fake_nccl_violations(), 0) << fake_nccl_first_violation();
}

TEST_F(NcclTransportTest, ConnectAgainLeavesNoOldCommunicator) {
  MakeWorld({0, 0, 1});
  AddEdge(0, 1, fb::Route::kPeer);
  AddEdge(1, 2, fb::Route::kNetwork);
  for (int times = 0; times < 3; ++times) {
    ASSERT_TRUE(AllOk(Connect()));
    EXPECT_EQ(fake_nccl_live_communicators(), 5);
  }
  ends_.clear();
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
}

// REFIT_NCCL_ENCRYPTION as `value`, for a scope.
class EncryptionVariable {
 public:
  explicit EncryptionVariable(const char* value) {
    setenv("REFIT_NCCL_ENCRYPTION", value, /*overwrite=*/1);
  }
  ~EncryptionVariable() { unsetenv("REFIT_NCCL_ENCRYPTION"); }
};

TEST_F(NcclTransportTest, KeyForEncryptionIsGivenOnlyWhereItIsWanted) {
  fake_nccl_set_version(23203);
  for (const char* value : {"0", "1"}) {
    const EncryptionVariable variable(value);
    MakeWorld({0, 0, 1});
    AddEdge(0, 1, fb::Route::kPeer);
    AddEdge(1, 2, fb::Route::kNetwork);
    for (int times = 0; times < 2; ++times) {
      EXPECT_TRUE(AllOk(Connect()));
    }
    EXPECT_EQ(std::string(fake_nccl_key()).size(), *value == '1' ? 64u : 0u);
    ends_.clear();
    edges_.clear();
    fake_nccl_reset();
    fake_nccl_set_version(23203);
  }
}

TEST_F(NcclTransportTest, EncryptionThatCannotBeHadIsAnError) {
  const auto expect = [&](absl::StatusCode code, const std::string& part) {
    AddEdge(0, 1, fb::Route::kNetwork);
    const std::vector<absl::Status> statuses = Connect();
    EXPECT_EQ(statuses.front().code(), code) << statuses.front();
    for (const absl::Status& status : statuses) {
      EXPECT_FALSE(status.ok());
      EXPECT_NE(status.message().find(part), std::string::npos) << status;
    }
    EXPECT_EQ(fake_nccl_live_communicators(), 0);
    ends_.clear();
    edges_.clear();
  };
  {
    const EncryptionVariable variable("yes");
    MakeWorld({0, 1});
    expect(absl::StatusCode::kInvalidArgument,
           "REFIT_NCCL_ENCRYPTION is \"yes\", it should be 0 or 1");
  }
  const EncryptionVariable variable("1");
  MakeWorld({0, 1});
  expect(absl::StatusCode::kUnimplemented,
         "REFIT_NCCL_ENCRYPTION is 1, but NCCL 2.28.9 (");
  fake_nccl_set_version(23203);
  ends_ = MakeNcclTransports(device_, {0, 1}, nullptr, /*has_secret=*/false);
  expect(absl::StatusCode::kFailedPrecondition,
         "REFIT_NCCL_ENCRYPTION is 1, but the ranks have met without a "
         "secret");
}

// Also of a rank without edges: it is in the world's communicator.
TEST_F(NcclTransportTest, VersionsOfNcclThatDifferAreNamedWithTheirRanks) {
  MakeWorld({0, 1, 2});
  AddEdge(0, 1, fb::Route::kNetwork);
  fake_nccl_set_rank_version(2, 22703);
  for (const absl::Status& status : Connect()) {
    EXPECT_EQ(status,
              absl::FailedPreconditionError("NCCL version differs: 2.28.9 on "
                                            "rank 0, 2.27.3 on rank 2"));
  }
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
}

TEST_F(NcclTransportTest, VersionOfARankThatStagesNothingDoesNotMatter) {
  MakeWorld({0, 0, 2});
  AddEdge(0, 1, fb::Route::kPeer);
  fake_nccl_set_rank_version(2, 22703);
  EXPECT_TRUE(AllOk(Connect()));
}

TEST_F(NcclTransportTest, TooOldALibraryOnOneRankFailsOnAllRanks) {
  MakeWorld({0, 0, 0});
  AddEdge(0, 1, fb::Route::kPeer);
  fake_nccl_set_rank_version(1, 21600);
  const auto statuses = Connect();
  for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(statuses[0].message().find("aborted by rank 1: "),
            std::string::npos);
  EXPECT_NE(
      statuses[2].message().find("NCCL 2.16.0, but 2.18.0 or later is needed"),
      std::string::npos)
      << statuses[2];
}

TEST_F(NcclTransportTest, RouteInsideADomainCannotCrossHosts) {
  MakeWorld({0, 0, 1});
  AddEdge(0, 2, fb::Route::kPeer);
  const auto statuses = Connect();
  for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(statuses[0].message(),
            "rank 0 is on host 0 and rank 2 on host 1, but the plan's route "
            "between them stays inside a host");
}

// A device that is not the one of any other rank.
class ManyGpus : public HostDevice {
 public:
  std::string Identity() override {
    return absl::StrCat("GPU-", identities_++);
  }

 private:
  std::atomic<int> identities_ = 0;
};

TEST_F(NcclTransportTest, RanksThatThePlanHasOnOneGpuAreToldWhereTheyRun) {
  ManyGpus device;
  ends_ = MakeNcclTransports(device, {0, 0, 0});
  AddEdge(0, 1, fb::Route::kLocal, fb::Mechanism::kDirect);
  AddEdge(1, 2, fb::Route::kPeer);
  ASSERT_TRUE(AllOk(Connect()));
  ASSERT_EQ(ends_[0]->notices().size(), 1);
  EXPECT_NE(ends_[0]->notices()[0].find(
                "the plan has rank 0 and rank 1 on one GPU, but rank 0 runs "
                "on GPU-"),
            std::string::npos)
      << ends_[0]->notices()[0];
  EXPECT_EQ(ends_[1]->notices().size(), 1);
  EXPECT_EQ(ends_[2]->notices().size(), 0);
  ends_.clear();  // before their device
}

// The one of all ranks.
class OneGpu : public HostDevice {
 public:
  std::string Identity() override { return "GPU-0"; }
};

// The plan has them on one GPU, or on several.
TEST_F(NcclTransportTest, ThreadsThatShareAGpuNeedTwoConnectionsToIt) {
  OneGpu device;
  for (const fb::Route route : {fb::Route::kLocal, fb::Route::kPeer}) {
    for (const char* connections : {"1", "8"}) {
      ASSERT_EQ(setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1), 0);
      ends_ = MakeNcclTransports(device, {0, 0, 0});
      edges_.clear();
      AddEdge(1, 0, route, fb::Mechanism::kDirect);
      AddEdge(0, 2, fb::Route::kPeer);
      const auto statuses = Connect();
      EXPECT_EQ(unsetenv("CUDA_DEVICE_MAX_CONNECTIONS"), 0);
      for (const absl::Status& status : statuses) {
        SCOPED_TRACE(status);
        ASSERT_EQ(status.ok(), *connections == '8');
        if (status.ok()) continue;
        EXPECT_TRUE(absl::StrContains(
            status.message(),
            "ranks 0 and 1 share a GPU and are threads of one process, where "
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: what one of them waits for "
            "would stand behind its wait. Unset it (CUDA's default is 8), or "
            "give each rank a process or a GPU of its own"));
      }
    }
  }
  ends_.clear();  // before their device
}

class NcclAbortTest : public NcclTransportTest {
 protected:
  static constexpr char kLeftBehind[] =
      "; ncclCommAbort did not return within 0.2 s and its communicator is "
      "left behind: destroy graphs that captured a refit, if there are any, "
      "and else restart the process";

  // Two ranks, of which the first one's aborts do not return from now on.
  void MakeWorldOfHangingAborts() {
    ends_ = MakeNcclTransports(device_, {0, 0}, /*port=*/nullptr,
                               /*has_secret=*/true, /*real=*/{},
                               /*abort_time=*/std::chrono::milliseconds(200));
    AddEdge(0, 1, fb::Route::kPeer);
    fake_nccl_hang_abort(0);
  }
  // Threads that were left behind leave the fake.
  ~NcclAbortTest() override {
    ends_.clear();
    EXPECT_LT(std::chrono::steady_clock::now() - start_,
              std::chrono::seconds(30));
    fake_nccl_release();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }

  const Deadline start_ = std::chrono::steady_clock::now();
};

TEST_F(NcclAbortTest, WhatItAbortsIsLeftBehind) {
  MakeWorldOfHangingAborts();
  ASSERT_TRUE(AllOk(Connect()));
  ASSERT_TRUE(ends_[0]->BeginRefit(Ample(), /*is_captured=*/false).ok());
  ASSERT_TRUE(ends_[0]->EndRefit(nullptr).ok());
  ends_[0]->Abort(absl::CancelledError("enough"));
  EXPECT_TRUE(absl::StrContains(ends_[0]->Wait().message(),
                                absl::StrCat("enough", kLeftBehind)));
  // Connect cannot make anything anew either, and says so.
  const auto statuses = OnAllRanks([&](int32_t rank) {
    return ends_[rank]->Connect(
        {}, edges_[rank],
        std::chrono::steady_clock::now() + std::chrono::milliseconds(500));
  });
  EXPECT_EQ(
      statuses[0].message(),
      "ncclCommAbort of the last connections has not returned, which it "
      "does not while a graph that captured a refit still exists: destroy "
      "the graph first; if there is none, restart the process");
  EXPECT_FALSE(statuses[1].ok());
}

TEST_F(NcclAbortTest, ConnectThatFailsDoesNotWaitForIt) {
  MakeWorldOfHangingAborts();
  fake_nccl_hang_at(1, 0);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    return ends_[rank]->Connect(
        {}, edges_[rank],
        std::chrono::steady_clock::now() + std::chrono::milliseconds(500));
  });
  EXPECT_FALSE(statuses[1].ok());
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), "touching the edge"))
      << statuses[0];
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), kLeftBehind))
      << statuses[0];
}

// A device on which nothing waits.
class FencelessDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<DeviceFence>> CreateFence(
      int32_t, int32_t, absl::Span<const int32_t>) override {
    return absl::UnimplementedError("the device has no fence");
  }
};

TEST_F(NcclTransportTest, DirectEdgesWithoutAFenceFailOnAllRanks) {
  FencelessDevice device;
  ends_ = MakeNcclTransports(device, {0, 0, 0});
  AddEdge(0, 1, fb::Route::kPeer, fb::Mechanism::kDirect);
  AddEdge(1, 2, fb::Route::kPeer);
  const auto statuses = Connect();
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kUnimplemented);
  for (const absl::Status& status : statuses) {
    EXPECT_NE(status.message().find("the device has no fence"),
              std::string::npos)
        << status;
  }
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
  ends_.clear();  // before their device
}

TEST_F(NcclTransportTest, FailureWhileConnectingLeavesNoCommunicator) {
  MakeWorld({0, 0, 0, 0});
  for (int32_t to = 1; to < 4; ++to) AddEdge(0, to, fb::Route::kPeer);
  // The second edge that rank 0 touches.
  fake_nccl_fail_at(0, 1, 3);
  const auto statuses = Connect();
  for (const absl::Status& status : statuses) {
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("touching the edge to rank 2"),
              std::string::npos)
        << status;
  }
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
  EXPECT_TRUE(AllOk(Connect()));
}

TEST_F(NcclTransportTest, EdgeThatHangsEndsConnectAtItsDeadline) {
  MakeWorld({0, 0, 0});
  AddEdge(0, 1, fb::Route::kPeer);
  AddEdge(1, 2, fb::Route::kPeer);
  fake_nccl_hang_at(1, 0);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    return ends_[rank]->Connect(
        {}, edges_[rank],
        std::chrono::steady_clock::now() + std::chrono::milliseconds(300));
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_NE(status.message().find("touching the edge"), std::string::npos)
        << status;
  }
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
  EXPECT_TRUE(AllOk(Connect()));
}

TEST_F(NcclTransportTest, RoundOfARouteWithoutEdgesIsRefused) {
  MakeWorld({0, 0});
  AddEdge(0, 1, fb::Route::kPeer);
  ASSERT_TRUE(AllOk(Connect()));
  std::byte byte{};
  const auto statuses = OnAllRanks([&](int32_t rank) {
    absl::Status status = ends_[rank]->BeginRefit(Ample(), false);
    if (!status.ok()) return status;
    const Operation operation = {fb::MessageKind::kSend, 1 - rank, &byte, 1};
    return ends_[rank]->Exchange({2, fb::Route::kNetwork, {&operation, 1}},
                                 nullptr);
  });
  // One may be told of it before it comes to the round itself.
  for (const absl::Status& status : statuses) {
    EXPECT_NE(status.message().find("round 2: send of 1 bytes to rank "),
              std::string::npos)
        << status;
  }
}

// Whether it is of this refit or came before: either all ranks fail, or none.
TEST_F(NcclTransportTest, AbortWhileARefitBeginsIsNotHalfHeard) {
  MakeWorld({0, 0});
  AddEdge(0, 1, fb::Route::kPeer);
  ASSERT_TRUE(AllOk(Connect()));
  for (int times = 0; times < 50; ++times) {
    std::thread user(
        [&] { ends_[1]->Abort(absl::CancelledError("the user's wish")); });
    const auto statuses = OnAllRanks([&](int32_t rank) {
      absl::Status status = ends_[rank]->BeginRefit(Ample(), false);
      if (status.ok()) status = ends_[rank]->EndRefit(nullptr);
      return status.ok() ? ends_[rank]->Wait() : status;
    });
    user.join();
    EXPECT_EQ(statuses[0].ok(), statuses[1].ok()) << statuses[0] << statuses[1];
    if (!statuses[0].ok()) {
      ASSERT_TRUE(AllOk(Connect()));
    }
  }
}

// A device whose work never ends, but may fail. It counts who asks about that.
class EndlessDevice : public HostDevice {
 public:
  absl::Status MakeCurrent() override {
    current_ = this;
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return std::make_unique<Event>(*this);
  }

  std::atomic<bool> fails = false;
  std::atomic<int> asked = 0;
  // By threads that have not made it current.
  std::atomic<int> asked_elsewhere = 0;

 private:
  class Event : public DeviceEvent {
   public:
    explicit Event(EndlessDevice& device) : device_(device) {}
    absl::Status Record(Stream) override { return absl::OkStatus(); }
    absl::Status Await(Stream) override { return absl::OkStatus(); }
    absl::StatusOr<bool> Reached() override {
      ++device_.asked;
      if (current_ != &device_) ++device_.asked_elsewhere;
      if (device_.fails) return absl::InternalError("the device is broken");
      return false;
    }

   private:
    EndlessDevice& device_;
  };

  static thread_local EndlessDevice* current_;
};

thread_local EndlessDevice* EndlessDevice::current_ = nullptr;

// On a GPU that is not the current one, CUDA's calls of a thread end with
// another GPU current, and make a context there.
TEST_F(NcclTransportTest, TheSupervisorsThreadMakesItsDeviceCurrent) {
  EndlessDevice device;
  ends_ = MakeNcclTransports(device, {0, 0});
  EXPECT_TRUE(AllOk(Connect()));
  const auto begun = OnAllRanks([&](int32_t rank) {
    absl::Status status = ends_[rank]->BeginRefit(Ample(), false);
    if (status.ok()) status = ends_[rank]->EndRefit(nullptr);
    return status;
  });
  EXPECT_TRUE(AllOk(begun));
  // No rank waits for the refit, so the supervisors' threads alone ask.
  while (device.asked < 4) std::this_thread::yield();
  EXPECT_EQ(device.asked_elsewhere, 0);
  ends_.clear();
}

// A device that knows which one is current where NCCL is called.
class CurrentDevice : public HostDevice {
 public:
  absl::Status MakeCurrent() override {
    current_ = this;
    return absl::OkStatus();
  }
  absl::Status WhileCurrent(absl::FunctionRef<absl::Status()> body) override {
    ++made_current;
    const CurrentDevice* const before = std::exchange(current_, this);
    const absl::Status status = body();
    current_ = before;
    return status;
  }
  static const CurrentDevice* current() { return current_; }

  std::atomic<int> made_current = 0;

 private:
  static thread_local const CurrentDevice* current_;
};

thread_local const CurrentDevice* CurrentDevice::current_ = nullptr;

// A trainer may use another GPU on the same thread.
TEST_F(NcclTransportTest, CallersKeepTheirCurrentDevice) {
  CurrentDevice device, another;
  ends_ = MakeNcclTransports(device, {0, 0});
  AddEdge(0, 1, fb::Route::kPeer);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    EXPECT_EQ(another.MakeCurrent(), absl::OkStatus());
    absl::Status status = ends_[rank]->Connect({}, edges_[rank], Ample());
    EXPECT_EQ(CurrentDevice::current(), &another);
    char byte = 0;
    const std::vector<Operation> one = {
        {.kind = rank == 0 ? fb::MessageKind::kSend : fb::MessageKind::kRecv,
         .peer = 1 - rank,
         .data = reinterpret_cast<std::byte*>(&byte),
         .size_bytes = 1}};
    if (status.ok()) status = ends_[rank]->BeginRefit(Ample(), false);
    if (status.ok()) {
      status = ends_[rank]->Exchange({0, fb::Route::kPeer, one}, nullptr);
    }
    EXPECT_EQ(CurrentDevice::current(), &another);
    if (status.ok()) status = ends_[rank]->EndRefit(nullptr);
    return status.ok() ? ends_[rank]->Wait() : status;
  });
  for (const absl::Status& s : statuses) EXPECT_TRUE(s.ok()) << s;
  // To connect, and for the round.
  EXPECT_EQ(device.made_current, 2 * 2);
  ends_.clear();
}

// A control plane that says when it ends.
class FarewellControl : public ForwardingControl {
 public:
  FarewellControl(std::unique_ptr<ControlPlane> inner, std::string& log)
      : ForwardingControl(std::move(inner)), log_(log) {}
  ~FarewellControl() override { log_ += "left;"; }

 private:
  std::string& log_;
};

// Its memory says when it is freed.
class FreeingDevice : public HostDevice {
 public:
  explicit FreeingDevice(std::string& log) : log_(log) {}
  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
      uint64_t size_bytes) override {
    auto memory = HostDevice::Allocate(size_bytes);
    if (!memory.ok()) return memory.status();
    return std::make_unique<Memory>(*std::move(memory), log_);
  }

 private:
  class Memory : public DeviceMemory {
   public:
    Memory(std::unique_ptr<DeviceMemory> inner, std::string& log)
        : DeviceMemory(inner->data(), inner->size_bytes()),
          inner_(std::move(inner)),
          log_(log) {}
    ~Memory() override { log_ += "freed;"; }

   private:
    const std::unique_ptr<DeviceMemory> inner_;
    std::string& log_;
  };

  std::string& log_;
};

// To free waits for all work of a GPU, which may take long, or for ever where
// an abort was left behind: the others do not wait for that.
TEST_F(NcclTransportTest, CloseSaysGoodbyeBeforeItFrees) {
  const PlanFile plan = CompiledPlan(ReshardJob(1, 1, R"("peer": "staged")"));
  const TcpRendezvous meeting = *LoopbackRendezvous(2);
  EXPECT_TRUE(RunRankThreads(2, [&](int32_t rank) {
                fake_nccl_set_rank(rank);
                std::string log;
                TcpRendezvous mine = meeting;
                mine.rank = rank;
                WorkerOptions options;
                options.plan = std::shared_ptr<const PlanFile>(
                    std::shared_ptr<void>(), &plan);
                options.device = std::make_shared<FreeingDevice>(log);
                options.meeting = Meeting(std::make_unique<FarewellControl>(
                    *ConnectTcp(mine, Ample()), log));
                options.wire = Wire::kNccl;
                options.executor.rank = rank;
                const auto worker = *Worker::Create(std::move(options));
                const absl::Status status =
                    worker->executor().Connect(std::chrono::minutes(1));
                ASSERT_TRUE(status.ok()) << status;
                log.clear();
                worker->Close();
                EXPECT_EQ(log.substr(0, 11), "left;freed;");
              }).ok());
}

// A device on which the work of a stream has ended when the flag that stands
// for the stream says so.
class FlaggedDevice : public HostDevice {
 public:
  using Flag = std::atomic<bool>;

  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    return std::make_unique<Event>();
  }

 private:
  class Event : public DeviceEvent {
   public:
    absl::Status Record(Stream stream) override {
      flag_ = static_cast<Flag*>(stream);
      return absl::OkStatus();
    }
    absl::Status Await(Stream) override { return absl::OkStatus(); }
    absl::StatusOr<bool> Reached() override {
      return flag_ == nullptr || *flag_;
    }

   private:
    std::atomic<Flag*> flag_ = nullptr;
  };
};

// Rank 0 stores into the memory of rank 1, which is a thread of the same
// process: nothing but rank 0 keeps what it has begun from going on.
class NcclMemoryUseTest : public NcclTransportTest {
 protected:
  NcclMemoryUseTest() { fake_nccl_reset(); }
  ~NcclMemoryUseTest() override { ends_.clear(); }  // before their device

  void MakeWorld(std::chrono::milliseconds abort_time) {
    ends_ = MakeNcclTransports(flagged_, {0, 0}, nullptr, true, {}, abort_time);
    AddEdge(0, 1, fb::Route::kPeer, fb::Mechanism::kDirect);
    ASSERT_TRUE(AllOk(Connect()));
  }
  absl::Status Begin(int32_t rank) {
    return ends_[rank]->BeginRefit(Ample(), false);
  }
  void BeginAndEnd(int32_t rank) {
    absl::Status status = Begin(rank);
    if (status.ok()) status = ends_[rank]->EndRefit(&is_over_[rank]);
    ASSERT_TRUE(status.ok()) << status;
  }
  // Rank 0's work ends a while after this.
  std::thread EndsLater() {
    return std::thread([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      is_over_[0] = true;
    });
  }

  static constexpr std::chrono::seconds kAmpleAbort{60};
  FlaggedDevice flagged_;
  FlaggedDevice::Flag is_over_[2] = {false, true};
};

TEST_F(NcclMemoryUseTest, CloseReturnsWhenPeersHaveStopped) {
  MakeWorld(kAmpleAbort);
  for (const int32_t rank : {0, 1}) BeginAndEnd(rank);
  std::thread other = EndsLater();
  EXPECT_TRUE(ends_[1]->Leave().ok());
  EXPECT_TRUE(is_over_[0]);
  other.join();
}

TEST_F(NcclMemoryUseTest, AFailedWaitReturnsWhenPeersHaveStopped) {
  MakeWorld(kAmpleAbort);
  for (const int32_t rank : {0, 1}) BeginAndEnd(rank);
  std::thread other = EndsLater();
  ends_[1]->Abort(absl::CancelledError("the user's wish"));
  EXPECT_EQ(ends_[1]->Wait().message(), "the user's wish");
  EXPECT_TRUE(is_over_[0]);
  other.join();
}

// What it has enqueued is followed by no EndRefit.
TEST_F(NcclMemoryUseTest, APeerThatIsStillEnqueuingIsWaitedForToo) {
  MakeWorld(kAmpleAbort);
  ASSERT_TRUE(Begin(0).ok());
  BeginAndEnd(1);
  std::thread enqueuing([&] {
    std::thread other = EndsLater();
    EXPECT_EQ(
        ends_[0]->Settle(absl::CancelledError("over"), &is_over_[0]).message(),
        "over");
    EXPECT_TRUE(is_over_[0]);
    other.join();
  });
  ends_[1]->Abort(absl::CancelledError("the user's wish"));
  EXPECT_FALSE(ends_[1]->Wait().ok());
  EXPECT_TRUE(is_over_[0]);
  enqueuing.join();
}

// Rank 1 has granted rank 0 its memory, and may free it from then on.
TEST_F(NcclMemoryUseTest, APeerThatComesLaterUsesNothing) {
  MakeWorld(kAmpleAbort);
  for (int times = 0; times < 20; ++times) {
    BeginAndEnd(1);
    ends_[1]->Abort(absl::CancelledError("the user's wish"));
    EXPECT_FALSE(ends_[1]->Wait().ok());
    EXPECT_EQ(Begin(0).message(), "aborted by rank 1: the user's wish");
    ASSERT_TRUE(AllOk(Connect()));
  }
  EXPECT_TRUE(ends_[1]->Leave().ok());
  EXPECT_EQ(Begin(0).message(), "rank 1 has closed its control plane");
}

TEST_F(NcclMemoryUseTest, APeerThatDoesNotStopIsNamed) {
  MakeWorld(std::chrono::milliseconds(100));
  for (const int32_t rank : {0, 1}) BeginAndEnd(rank);
  ends_[1]->Abort(absl::CancelledError("the user's wish"));
  const std::string named =
      "rank 0 did not stop within 0.1 s and may still use this rank's "
      "tensors: restart the process before you free them";
  EXPECT_EQ(ends_[1]->Wait().message(), "the user's wish; " + named);
  EXPECT_EQ(ends_[1]->Leave(), absl::FailedPreconditionError(named));
}

// Close would wait for it once more.
TEST_F(NcclMemoryUseTest, APeerThatWasNamedIsNotWaitedForAgain) {
  MakeWorld(std::chrono::seconds(3));
  ASSERT_TRUE(Begin(0).ok());
  BeginAndEnd(1);
  ends_[1]->Abort(absl::CancelledError("the user's wish"));
  EXPECT_TRUE(absl::StrContains(ends_[1]->Wait().message(), "did not stop"));
  std::promise<void> left;
  std::thread other([&] {
    left.get_future().wait_for(std::chrono::seconds(2));
    is_over_[0] = true;
    (void)ends_[0]->Settle(absl::CancelledError("over"), &is_over_[0]);
  });
  EXPECT_FALSE(ends_[1]->Leave().ok());
  EXPECT_FALSE(is_over_[0]);
  left.set_value();
  other.join();
}

TEST_F(NcclTransportTest, RanksThatThePlanHasTogetherAndTheWorldApart) {
  const std::vector<std::string> real = {"x", "y"};
  ends_ =
      MakeNcclTransports(device_, {0, 0}, nullptr, /*has_secret=*/true, real);
  AddEdge(0, 1, fb::Route::kPeer);
  ASSERT_TRUE(AllOk(Connect()));
  for (const auto& end : ends_) {
    ASSERT_EQ(end->notices().size(), 1);
    EXPECT_NE(
        end->notices()[0].find("the plan has these ranks on one host, but "
                               "they run on 2: rank 0 on "),
        std::string::npos)
        << end->notices()[0];
  }
  // What is stored directly cannot cross hosts.
  edges_.clear();
  AddEdge(0, 1, fb::Route::kPeer, fb::Mechanism::kDirect);
  const auto statuses = Connect();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("the plan stores directly between rank "),
              std::string::npos)
        << status;
    EXPECT_NE(status.message().find("Give the job a topology"),
              std::string::npos)
        << status;
  }
}

}  // namespace
}  // namespace refit
