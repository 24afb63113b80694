#include "refit/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plan/enum_text.h"
#include "plan/schedule/rank_schedule.h"
#include "refit/host_device.h"
#include "runner/checked_run.h"
#include "runner/rank_threads.h"
#include "runner/value_check.h"
#include "tests/executor/local_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kTimeout(60);

void ExpectEveryElementRight(const PlanFile& plan, int refits = 2) {
  const auto result =
      RunChecked(plan, {.iterations = refits, .timeout = kTimeout});
  ASSERT_TRUE(result.ok()) << result.status();
  for (const std::string& mismatch : result->check.mismatches) {
    ADD_FAILURE() << mismatch;
  }
  EXPECT_EQ(result->check.checked_bytes, result->destination_bytes);
  EXPECT_EQ(result->refits.size(), refits);
}

void ExpectEveryElementRight(ReshardOptions options) {
  for (const fb::Mechanism mechanism : fb::EnumValuesMechanism()) {
    SCOPED_TRACE(EnumText(mechanism));
    options.mechanism = mechanism;
    ExpectEveryElementRight(ReshardPlan(options).Open());
  }
}

TEST(ExecutorTest, RowsBecomeColumns) {
  ExpectEveryElementRight({.source_ranks = 3,
                           .destination_ranks = 5,
                           .layers = 4,
                           .rows = 12,
                           .columns = 40});
}

TEST(ExecutorTest, OneRankFeedsOneRank) {
  ExpectEveryElementRight({.source_ranks = 1,
                           .destination_ranks = 1,
                           .layers = 1,
                           .rows = 1,
                           .columns = 1});
}

TEST(ExecutorTest, ReplicasRelayToEachOther) {
  for (const uint32_t replicas : {2, 3, 7}) {
    ExpectEveryElementRight(
        RelayPlan({.replicas = replicas, .layers = 9}).Open(), 20);
  }
}

TEST(ExecutorTest, PaddingIsZeroAndWhatIsSkippedKeepsItsValues) {
  for (const auto kind : {fb::RegionKind::kFill, fb::RegionKind::kSkip}) {
    ExpectEveryElementRight(
        {.rows = 16, .columns = 6, .padding = 3, .padding_kind = kind});
  }
}

TEST(ExecutorTest, EverySupportedCastIsRight) {
  const DType floats[] = {DType::kBf16, DType::kFp16, DType::kFp32};
  for (const DType from : floats) {
    for (const DType to : floats) {
      ExpectEveryElementRight({.source_ranks = 2,
                               .destination_ranks = 3,
                               .rows = 20,
                               .columns = 99,
                               .padding = 1,
                               .source_dtype = from,
                               .destination_dtype = to});
    }
  }
}

TEST(ExecutorTest, EveryElementSizeIsRight) {
  for (const DType dtype : {DType::kFp8E4m3, DType::kBool, DType::kInt16,
                            DType::kInt32, DType::kInt64, DType::kFp64}) {
    ExpectEveryElementRight({.source_ranks = 2,
                             .destination_ranks = 3,
                             .rows = 6,
                             .columns = 21,
                             .padding = 2,
                             .source_dtype = dtype,
                             .destination_dtype = dtype});
  }
}

// One rank has another plan than the others.
class TwoPlansWorld : public LocalWorld {
 public:
  TwoPlansWorld(const PlanFile& plan, const PlanFile& other, int32_t other_rank)
      : LocalWorld(plan.world_size()) {
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      AddLocalRank(rank == other_rank ? other : plan);
    }
  }
};

TEST(ExecutorTest, RanksWithDifferentPlansRefuseToConnect) {
  const PlanFile plan = ReshardPlan({.rows = 8}).Open();
  const PlanFile other = ReshardPlan({.rows = 16}).Open();
  TwoPlansWorld world(plan, other, 3);
  for (const absl::Status& status : world.ConnectAll()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("plan digest differs: "), std::string::npos)
        << status;
    EXPECT_NE(status.message().find(DigestText(*other.plan().body_digest()) +
                                    " on rank 3"),
              std::string::npos)
        << status;
  }
}

TEST(ExecutorTest, LoadRefusesWhatDoesNotFitThePlan) {
  const PlanFile plan = ReshardPlan({}).Open();
  HostDevice device;
  LocalFabric fabric(5);
  const auto made = *fabric.CreateTransport(4);
  Transport* const transport = made.get();
  for (const auto& [options, refusal] :
       {std::pair(ExecutorOptions{.device = &device, .transport = transport},
                  "the transport is rank 4 of 5, the executor is rank 0 of 4"),
        {{.rank = 4, .device = &device, .transport = transport},
         "rank 4 is not one of the plan's 4 ranks"},
        {{.transport = transport}, "device is null, an executor needs one"},
        {{.device = &device}, "transport is null, an executor needs one"}}) {
    const absl::Status status = Executor::Load(plan, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), refusal);
  }
}

TEST(ExecutorTest, RankThatRefusesItsTensorsStopsAllOthers) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  std::vector<BoundTensor> kept = world.tensors[1];
  world.tensors[1].clear();
  world.ConnectAll();
  const std::vector<absl::Status> refused = world.BindAll();
  EXPECT_EQ(refused[0].message(),
            "rank 0: rank 1 cannot go on; its own error says why");
  EXPECT_EQ(refused[1].message().find("rank 1 cannot bind, 2 problems"), 0)
      << refused[1];
  EXPECT_EQ(world.executor(0).state(), ExecutorState::kConnected);
  world.tensors[1] = kept;
  EXPECT_TRUE(AllOk(world.BindAll()));
}

TEST(ExecutorTest, StepsOutOfOrderAreRefused) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  EXPECT_EQ(world.executor(0).Run(nullptr, {}).message(),
            "rank 0: Run while loaded: connect and bind first");
  EXPECT_EQ(world.executor(0).Bind({}).message(),
            "rank 0: Bind while loaded: connect first");
  world.executor(0).Close();
  EXPECT_EQ(world.executor(0).Connect(kTimeout).message(),
            "rank 0: Connect while closed: make a new executor");
}

TEST(ExecutorTest, FailedRefitLeavesAllRanksTornUntilOneSucceeds) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  world.Bind();
  // Rank 0's first tensor is elsewhere than at Bind.
  std::vector<const void*> moved;
  for (const BoundTensor& tensor : world.tensors[0]) {
    moved.push_back(tensor.data);
  }
  moved[0] = &moved;
  const auto failed = world.OnAllRanks([&](int32_t rank) {
    RunOptions options;
    options.timeout = kTimeout;
    if (rank == 0) options.addresses = moved;
    return world.Refit(rank, options);
  });
  EXPECT_EQ(failed[0].message(), "rank 0: a tensor moved since Bind");
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    EXPECT_FALSE(failed[rank].ok());
    EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
  }
  world.ExpectEveryElementRight(plan);
  EXPECT_EQ(world.executor(0).state(), ExecutorState::kBound);
}

// Drivers call all ranks in step, and wait for all of them. So a rank that was
// not called once would stay one call behind.
TEST(ExecutorTest, RanksThatWereNotCalledJoinAtConnect) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  world.Bind();
  RunOptions soon;
  soon.timeout = std::chrono::milliseconds(200);
  for (int alone = 0; alone < 3; ++alone) {
    EXPECT_FALSE(world.Refit(0, soon).ok());
  }
  // The others hear of it at once, and rank 0 waits for them alone.
  for (const int32_t rank : {1, 2, 3, 0}) {
    EXPECT_FALSE(world.Refit(rank, soon).ok());
  }
  EXPECT_TRUE(AllOk(world.ConnectAll()));
  EXPECT_EQ(world.executor(1).state(), ExecutorState::kTorn);
  world.ExpectEveryElementRight(plan);
}

TEST(ExecutorTest, AddressesOfAnotherNumberAreRefusedOnThatRankAlone) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  world.Bind();
  const std::vector<const void*> more(world.tensors[0].size() + 1);
  for (const size_t count : {size_t{0}, more.size()}) {
    RunOptions options;
    options.addresses.emplace(more.data(), count);
    const absl::Status status = world.executor(0).Run(nullptr, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(),
              "rank 0: Run was given " + std::to_string(count) +
                  " addresses, Bind " +
                  std::to_string(world.tensors[0].size()) + " tensors");
    EXPECT_EQ(world.executor(0).state(), ExecutorState::kBound);
  }
  // The others know nothing of it.
  world.ExpectEveryElementRight(plan);
}

// "Records" by keeping what enqueues, and launches by calling it.
class RecordingDevice : public HostDevice {
 public:
  bool IsHost() const override { return false; }
  absl::StatusOr<std::unique_ptr<DeviceGraph>> Record(
      const std::function<absl::Status(Stream)>& enqueue) override {
    ++recordings;
    if (refuses) return absl::InternalError("cannot be recorded");
    class Graph : public DeviceGraph {
     public:
      explicit Graph(std::function<absl::Status(Stream)> enqueue)
          : enqueue_(std::move(enqueue)) {}
      absl::Status Launch(Stream stream) override { return enqueue_(stream); }

     private:
      const std::function<absl::Status(Stream)> enqueue_;
    };
    return std::make_unique<Graph>(enqueue);
  }

  std::atomic<int> recordings = 0;
  std::atomic<bool> refuses = false;
};

// Of four ranks, as ReshardPlan has them.
class RecordingWorld : public LocalWorld {
 public:
  explicit RecordingWorld(const PlanFile& plan, ExecutorOptions options = {})
      : LocalWorld(plan.world_size()) {
    if (options.device == nullptr) options.device = &recording;
    AddLocalRanks(plan, [&](int32_t) { return options; });
  }

  // How many ranks launched a graph, in each of so many refits.
  std::vector<uint64_t> LaunchesOf(const PlanFile& plan, int refits) {
    std::vector<uint64_t> launches;
    for (int i = 0; i < refits; ++i) {
      ExpectEveryElementRight(plan);
      RunCounters all;
      for (int32_t rank = 0; rank < world_size(); ++rank) {
        all += executor(rank).counters();
      }
      launches.push_back(all.graph_launches);
    }
    return launches;
  }

  RecordingDevice recording;
};

using Launches = std::vector<uint64_t>;

PlanFile DirectPlan() {
  return ReshardPlan({.mechanism = fb::Mechanism::kDirect}).Open();
}

TEST(ExecutorTest, DirectRefitsAreAGraphAfterBind) {
  const PlanFile plan = DirectPlan();
  RecordingWorld world(plan);
  world.Bind();
  EXPECT_EQ(world.recording.recordings, plan.world_size());
  EXPECT_EQ(world.LaunchesOf(plan, 4), (Launches{4, 4, 4, 4}));
  EXPECT_EQ(world.recording.recordings, plan.world_size());
  // What was counted is as without.
  LocalWorld direct(plan);
  direct.Bind();
  direct.ExpectEveryElementRight(plan);
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const RunCounters& graph = world.executor(rank).counters();
    const RunCounters& one_by_one = direct.executor(rank).counters();
    EXPECT_EQ(graph.rounds, one_by_one.rounds);
    EXPECT_EQ(graph.messages_sent, one_by_one.messages_sent);
    EXPECT_EQ(graph.bytes_received, one_by_one.bytes_received);
  }
}

TEST(ExecutorTest, RelaysInDirectRoundsAreAGraph) {
  const PlanFile relays = RelayPlan({.replicas = 3, .layers = 4}).Open();
  RecordingWorld many(relays);
  many.Bind();
  // The source has no part in the last round.
  EXPECT_EQ(many.LaunchesOf(relays, 3), (Launches{4, 4, 4}));
}

TEST(ExecutorTest, BindAndConnectMakeAnotherGraph) {
  const PlanFile plan = DirectPlan();
  RecordingWorld world(plan);
  world.Bind();
  EXPECT_EQ(world.LaunchesOf(plan, 2), (Launches{4, 4}));
  EXPECT_TRUE(AllOk(world.BindAll()));
  EXPECT_EQ(world.recording.recordings, 2 * plan.world_size());
  EXPECT_EQ(world.LaunchesOf(plan, 2), (Launches{4, 4}));
  EXPECT_EQ(world.recording.recordings, 2 * plan.world_size());
  EXPECT_TRUE(AllOk(world.ConnectAll()));
  EXPECT_EQ(world.LaunchesOf(plan, 2), (Launches{4, 4}));
  EXPECT_EQ(world.recording.recordings, 3 * plan.world_size());
}

// A graph holds the kernels of the number that it was recorded for.
TEST(ExecutorTest, AnotherNumberOfMultiprocessorsIsRecordedAnew) {
  const PlanFile plan = DirectPlan();
  RecordingWorld world(plan);
  world.Bind();
  const auto refit = [&](uint32_t of_rank_1) {
    EXPECT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
      RunOptions options = {.timeout = kTimeout};
      options.direct_multiprocessors = rank == 1 ? of_rank_1 : 0;
      return world.Refit(rank, options);
    })));
    return world.recording.recordings - plan.world_size();
  };
  EXPECT_EQ(refit(0), 0);
  EXPECT_EQ(refit(8), 1);
  EXPECT_EQ(refit(8), 1);
  EXPECT_EQ(refit(0), 2);
}

TEST(ExecutorTest, RefitsThatCannotBeRecordedGoOnWithout) {
  const PlanFile plan = DirectPlan();
  RecordingWorld world(plan);
  world.recording.refuses = true;
  world.Bind();
  EXPECT_EQ(world.LaunchesOf(plan, 3), (Launches{0, 0, 0}));
  EXPECT_EQ(world.recording.recordings, plan.world_size());
  const std::vector<Notice> noticed = {
      {.kind = NoticeKind::kNotRecorded,
       .text = "the rounds are enqueued one by one, since they could not be "
               "recorded as a graph: cannot be recorded"}};
  EXPECT_EQ(world.executor(1).notices(), noticed);
  // Another Connect tries again.
  world.recording.refuses = false;
  EXPECT_TRUE(AllOk(world.ConnectAll()));
  EXPECT_EQ(world.LaunchesOf(plan, 1), (Launches{4}));
  EXPECT_TRUE(world.executor(1).notices().empty());
}

// Remembers which event was recorded or awaited on which stream.
class LoggingDevice : public HostDevice {
 public:
  struct Entry {
    const void* event = nullptr;
    bool awaits = false;
    Stream stream = nullptr;
  };

  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    class Event : public DeviceEvent {
     public:
      explicit Event(std::vector<Entry>& log) : log_(log) {}
      absl::Status Record(Stream stream) override {
        log_.push_back({this, false, stream});
        return absl::OkStatus();
      }
      absl::Status Await(Stream stream) override {
        log_.push_back({this, true, stream});
        return absl::OkStatus();
      }
      absl::StatusOr<bool> Reached() override { return true; }

     private:
      std::vector<Entry>& log_;
    };
    return std::make_unique<Event>(log);
  }

  std::vector<Entry> log;  // of the one rank that uses the device
};

TEST(ExecutorTest, RefitOnAnotherStreamStartsAfterTheOneBefore) {
  const PlanFile plan = ReshardPlan({}).Open();
  LoggingDevice logging;
  LocalWorld world(plan, [&](int32_t rank) -> ExecutorOptions {
    return {.device = rank == 0 ? &logging : nullptr, .graph = false};
  });
  world.Bind();
  const auto first = reinterpret_cast<Stream>(8);
  const auto second = reinterpret_cast<Stream>(16);
  const auto run = [&](Stream stream) {
    logging.log.clear();
    ASSERT_TRUE(AllOk(world.OnAllRanks(
        [&](int32_t rank) { return world.executor(rank).Run(stream, {}); })));
  };
  run(first);
  const LoggingDevice::Entry end = logging.log.back();
  EXPECT_FALSE(end.awaits);
  EXPECT_EQ(end.stream, first);
  run(second);
  const LoggingDevice::Entry begin = logging.log.front();
  EXPECT_EQ(begin.event, end.event);
  EXPECT_TRUE(begin.awaits);
  EXPECT_EQ(begin.stream, second);
  EXPECT_TRUE(world.executor(0).Wait().ok());
  // Nothing to wait for any more.
  run(first);
  EXPECT_FALSE(logging.log.front().awaits);
}

TEST(ExecutorTest, NothingIsRecordedUnasked) {
  const PlanFile staged = ReshardPlan({}).Open();
  const PlanFile direct = DirectPlan();
  RecordingWorld sent(staged);  // NCCL would ask the peers meanwhile
  RecordingWorld refused(direct, {.graph = false});
  RecordingWorld timed(direct, {.time_rounds = true});
  for (auto& [world, plan] :
       {std::pair(&sent, &staged), std::pair(&refused, &direct),
        std::pair(&timed, &direct)}) {
    world->Bind();
    world->LaunchesOf(*plan, 3);
    EXPECT_EQ(world->recording.recordings, 0);
  }
}

TEST(ExecutorTest, RoundsAreMeasuredIfAsked) {
  for (const fb::Mechanism mechanism : fb::EnumValuesMechanism()) {
    const PlanFile plan =
        ReshardPlan({.layers = 3, .mechanism = mechanism}).Open();
    RecordingWorld world(plan, {.time_rounds = true});
    world.Bind();
    EXPECT_TRUE(world.executor(0).rounds().empty());
    world.ExpectEveryElementRight(plan);
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      const RunCounters& counters = world.executor(rank).counters();
      const std::vector<RoundMeasurement>& rounds =
          world.executor(rank).rounds();
      ASSERT_EQ(rounds.size(), counters.rounds);
      uint64_t sent = 0, received = 0;
      for (size_t i = 0; i < rounds.size(); ++i) {
        EXPECT_EQ(rounds[i].mechanism, mechanism);
        EXPECT_TRUE(i == 0 || rounds[i].round > rounds[i - 1].round);
        // A receiver of stores is told of the last round alone.
        const bool is_told =
            mechanism == fb::Mechanism::kStaged || rank < plan.source_ranks();
        EXPECT_EQ(rounds[i].seconds > 0, is_told);
        EXPECT_LT(rounds[i].seconds, 60);
        sent += rounds[i].bytes_sent;
        received += rounds[i].bytes_received;
      }
      EXPECT_EQ(sent, counters.bytes_sent);
      EXPECT_EQ(received, counters.bytes_received);
    }
  }
}

// Its timers fail if they are told to.
class BrokenTimerDevice : public RecordingDevice {
 public:
  absl::StatusOr<std::unique_ptr<DeviceTimer>> CreateTimer() override {
    class Timer : public DeviceTimer {
     public:
      explicit Timer(const std::atomic<bool>& fails) : fails_(fails) {}
      absl::Status Start(Stream) override { return absl::OkStatus(); }
      absl::Status Stop(Stream) override { return absl::OkStatus(); }
      absl::StatusOr<double> Seconds() override {
        if (fails_) return absl::InternalError("the timer is broken");
        return 1.0;
      }
      absl::StatusOr<double> SecondsAfter(const DeviceTimer&) override {
        return 1.0;
      }

     private:
      const std::atomic<bool>& fails_;
    };
    return std::make_unique<Timer>(fails);
  }

  std::atomic<bool> fails = true;
};

TEST(ExecutorTest, MeasurementThatFailsLeavesTheRefitTorn) {
  const PlanFile plan = ReshardPlan({}).Open();
  BrokenTimerDevice broken;
  RecordingWorld world(plan, {.device = &broken, .time_rounds = true});
  world.Bind();
  for (const absl::Status& status : world.RefitAll()) {
    EXPECT_NE(status.message().find("the timer is broken"), std::string::npos)
        << status;
  }
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
  }
  broken.fails = false;
  world.ExpectEveryElementRight(plan);
  EXPECT_EQ(world.executor(0).state(), ExecutorState::kBound);
}

// Knows which range is gone because it is told.
class WatchingDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<MemoryWatch>> Watch(
      absl::Span<const MemoryRange>) override {
    class Told : public MemoryWatch {
     public:
      explicit Told(const std::optional<size_t>& gone) : gone_(gone) {}
      std::optional<size_t> FirstGone() override { return gone_; }
      std::vector<size_t> Unwatched() const override { return {1, 2}; }

     private:
      const std::optional<size_t>& gone_;
    };
    return std::make_unique<Told>(gone);
  }

  std::optional<size_t> gone;
};

TEST(ExecutorTest, FreedMemoryFailsTheRefitUntilItIsBound) {
  const PlanFile plan = ReshardPlan({.layers = 3}).Open();
  WatchingDevice watching;
  LocalWorld world(plan, [&](int32_t rank) -> ExecutorOptions {
    return {.device = rank == 1 ? &watching : nullptr};
  });
  world.Bind();
  world.ExpectEveryElementRight(plan);
  const std::vector<Notice> noticed = {
      {.kind = NoticeKind::kUnwatched,
       .text = "the memory of \"" + world.tensors[1][1].name +
               "\" and 1 more tensors is of a kind whose free Run does not "
               "notice"}};
  EXPECT_EQ(world.executor(1).notices(), noticed);
  EXPECT_TRUE(world.executor(0).notices().empty());
  watching.gone = 2;
  const auto failed = world.RefitAll();
  EXPECT_EQ(failed[1].code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(failed[1].message(), "rank 1: the memory of \"" +
                                     world.tensors[1][2].name +
                                     "\" was freed since Bind");
  EXPECT_FALSE(failed[0].ok());
  EXPECT_EQ(world.executor(1).state(), ExecutorState::kTorn);
  watching.gone = std::nullopt;
  EXPECT_TRUE(world.executor(1).Bind(world.tensors[1]).ok());
  world.ExpectEveryElementRight(plan);
}

TEST(ExecutorTest, MemoryIsNotWatchedIfRefused) {
  const PlanFile plan = ReshardPlan({.layers = 3}).Open();
  WatchingDevice watching;
  watching.gone = 2;
  LocalWorld world(plan, {.device = &watching, .watch_memory = false});
  world.Bind();
  world.ExpectEveryElementRight(plan);
}

// In the second direct round a sender waits for a receiver that still waits for
// the absent sender in the first.
TEST(ExecutorTest, RankThatDoesNotComeFailsTheOthersAtTheDeadline) {
  for (const fb::Mechanism mechanism : fb::EnumValuesMechanism()) {
    const PlanFile plan =
        ReshardPlan({.layers = 3, .mechanism = mechanism}).Open();
    LocalWorld world(plan);
    world.Bind();
    const auto statuses = world.OnAllRanks([&](int32_t rank) {
      RunOptions options;
      options.timeout = std::chrono::milliseconds(100);
      return rank == 0 ? absl::OkStatus() : world.Refit(rank, options);
    });
    for (int32_t rank = 1; rank < plan.world_size(); ++rank) {
      EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDeadlineExceeded)
          << statuses[rank];
      EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
    }
    const std::string place = mechanism == fb::Mechanism::kStaged
                                  ? "rank 2: round 0: recv of 32 bytes from "
                                    "rank 0: "
                                  : "rank 2: round ";
    EXPECT_EQ(statuses[2].message().find(place), 0u) << statuses[2];
  }
}

TEST(ExecutorTest, RankMayBindAgainAlone) {
  const PlanFile plan = ReshardPlan({}).Open();
  LocalWorld world(plan);
  world.Bind();
  // One that is refused keeps the earlier one.
  EXPECT_FALSE(world.executor(3).Bind({}).ok());
  EXPECT_EQ(world.executor(3).state(), ExecutorState::kBound);
  world.ExpectEveryElementRight(plan);
  std::vector<std::vector<std::byte>> elsewhere;
  for (BoundTensor& tensor : world.tensors[3]) {
    elsewhere.emplace_back(tensor.size_bytes);
    tensor.data = elsewhere.back().data();
  }
  ASSERT_TRUE(world.executor(3).Bind(world.tensors[3]).ok());
  world.ExpectEveryElementRight(plan);
}

TEST(ExecutorTest, DirectPlanBindsAgainOnAllRanksTogether) {
  const PlanFile plan = DirectPlan();
  LocalWorld world(plan);
  world.Bind();
  EXPECT_EQ(world.executor(3)
                .Bind(world.tensors[3], std::chrono::milliseconds(100))
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  std::vector<std::vector<std::byte>> elsewhere;
  for (BoundTensor& tensor : world.tensors[3]) {
    elsewhere.emplace_back(tensor.size_bytes);
    tensor.data = elsewhere.back().data();
  }
  // The failed step belongs to rank 3 alone, so the others make up for it.
  world.OnAllRanks([&](int32_t rank) {
    return rank == 3 ? absl::OkStatus()
                     : world.executor(rank).Bind(
                           world.tensors[rank], std::chrono::milliseconds(100));
  });
  ASSERT_TRUE(AllOk(world.BindAll()));
  world.ExpectEveryElementRight(plan);
}

// A staged round that follows direct ones reuses the staging of the last staged
// one, for which it must wait.
TEST(RankScheduleTest, StagedRoundReusesTheLastStagedOne) {
  PlanBuilder builder = ReshardPlan({.layers = 3});
  builder.mechanisms = {fb::Mechanism::kStaged, fb::Mechanism::kDirect,
                        fb::Mechanism::kStaged};
  for (PlanBuilder::Rank& rank : builder.ranks) {
    for (PlanBuilder::Message& message : rank.messages) {
      if (message.round == 1) message.staging_offset = 0;
    }
  }
  const PlanFile plan = builder.Open();
  const RankSchedule schedule(plan, 0);
  ASSERT_EQ(schedule.rounds().size(), 3);
  EXPECT_EQ(schedule.rounds()[0].reuses, std::nullopt);
  EXPECT_EQ(schedule.rounds()[1].reuses, std::nullopt);
  EXPECT_EQ(schedule.rounds()[2].reuses, 0);
}

// Rank 1 is given two layers, one a round, and passes each on.
PlanFile StagedRelays(bool says_what_feeds_them) {
  PlanBuilder builder = RelayPlan({.replicas = 2, .layers = 2});
  builder.rounds = 4;
  builder.mechanisms.clear();
  uint64_t staging = 0;
  for (PlanBuilder::Rank& rank : builder.ranks) {
    rank.staging_bytes = 4096;
    for (PlanBuilder::Message& message : rank.messages) {
      message.staging_offset = staging++ % 64 * 32;
      // Relays come two rounds after what feeds them.
      const uint32_t layer = message.copies[0].offset >= 32 ? 1 : 0;
      if (message.round != layer) message.round = layer + 2;
    }
  }
  if (says_what_feeds_them) {
    // Receives of rounds 0 and 1, then of each later round a receive and a
    // send.
    for (const size_t rank : {1, 2}) {
      builder.ranks[rank].relays = {fb::Relay(3, 0), fb::Relay(5, 1)};
    }
  }
  return builder.Open();
}

// In an older plan, for all that came.
TEST(RankScheduleTest, ARelayWaitsForTheMessageThatFeedsIt) {
  for (const bool says : {true, false}) {
    const PlanFile plan = StagedRelays(says);
    const RankSchedule schedule(plan, 1);
    ASSERT_EQ(schedule.rounds().size(), 4);
    EXPECT_EQ(schedule.rounds()[2].relays, says ? 0 : 1);
    EXPECT_EQ(schedule.rounds()[3].relays, says ? 1 : 2);
  }
}

TEST(RankScheduleTest, DirectMessagesThatAreSentAreCutAlikeAtBothEnds) {
  // A message is 4 rows of 4 bf16 elements.
  const PlanFile plan =
      ReshardPlan({.layers = 2, .mechanism = fb::Mechanism::kDirect}).Open();
  const RankSchedule sender(plan, 0, DirectRounds::kSent, 12);
  const RankSchedule receiver(plan, 2, DirectRounds::kSent, 12);
  for (const RankSchedule* schedule : {&sender, &receiver}) {
    ASSERT_EQ(schedule->rounds().size(), 6);
    std::vector<uint64_t> sizes;
    for (size_t i = 0; i < 6; ++i) {
      const RoundWork& work = schedule->rounds()[i];
      EXPECT_EQ(work.index, i / 3);
      EXPECT_EQ(work.mechanism, fb::Mechanism::kStaged);
      EXPECT_TRUE(work.receivers.empty() && work.senders.empty());
      ASSERT_EQ(work.operations_count, 2);
      for (uint32_t o = 0; o < 2; ++o) {
        const uint32_t number = work.operations_begin + o;
        EXPECT_EQ(schedule->parts()[number].begin_byte, i % 3 * 12);
        EXPECT_EQ(schedule->parts()[number].staging_offset, o * 16);
        EXPECT_EQ(schedule->operations()[number].size_bytes,
                  i % 3 == 2 ? 8 : 12);
      }
    }
    EXPECT_EQ(schedule->staging_bytes(), 32);
    for (const Edge& edge : schedule->Edges()) {
      EXPECT_EQ(edge.mechanism, fb::Mechanism::kStaged);
    }
  }
  // One part's staging is used again by the next.
  EXPECT_EQ(receiver.rounds()[1].reuses, 0);
  EXPECT_EQ(receiver.rounds()[1].reuses_unpacked, 0);
}

TEST(ExecutorTest, CountersTellHowBytesTravelled) {
  for (const fb::Mechanism mechanism : fb::EnumValuesMechanism()) {
    SCOPED_TRACE(EnumText(mechanism));
    const PlanFile plan =
        ReshardPlan({.layers = 3, .mechanism = mechanism}).Open();
    const fb::Route route = plan.body().rounds()->Get(0)->route();
    LocalWorld world(plan);
    world.Bind();
    // Twice: they are of the last refit.
    for (int i = 0; i < 2; ++i) {
      world.RefitAll();
    }
    RunCounters sum;
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      sum += world.executor(rank).counters();
    }
    EXPECT_EQ(sum.rounds, 4 * 3);
    EXPECT_EQ(sum.by(route, mechanism).bytes_sent, 12 * 32);
    EXPECT_EQ(sum.by(route, mechanism).bytes_received, 12 * 32);
    // And in no other way.
    uint64_t bytes = 0;
    for (const auto& of_route : sum.traffic) {
      for (const Traffic& traffic : of_route) {
        bytes += traffic.bytes_sent + traffic.bytes_received;
      }
    }
    EXPECT_EQ(bytes, sum.bytes_sent + sum.bytes_received);
  }
}

class CapturingDevice : public HostDevice {
 public:
  absl::StatusOr<bool> IsCapturing(Stream) override { return is_capturing; }
  bool is_capturing = false;
};

TEST(ExecutorTest, NoDigestIsCapturedAndNoRefitWhileOneIsUnderWay) {
  const PlanFile plan = ReshardPlan({}).Open();
  CapturingDevice device;
  LocalWorld world(plan, {.device = &device});
  world.Bind();
  device.is_capturing = true;
  EXPECT_EQ(world.executor(1).Digest().status(),
            absl::FailedPreconditionError(
                "rank 1: Digest on a stream that is captured: it reads its "
                "result at once; give it another stream, or call it when the "
                "capture has ended"));
  EXPECT_EQ(world.executor(1).state(), ExecutorState::kBound);
  device.is_capturing = false;
  const RunOptions options = {.timeout = ExecutorWorld::kTimeout};
  ASSERT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
    return world.executor(rank).Run(nullptr, options);
  })));
  device.is_capturing = true;
  // Wait would take the captured refit's end for that of the one under way.
  EXPECT_EQ(world.executor(0).Run(nullptr, options),
            absl::FailedPreconditionError(
                "rank 0: a refit is under way; Wait for it before one is "
                "captured"));
  EXPECT_TRUE(AllOk(world.OnAllRanks(
      [&](int32_t rank) { return world.executor(rank).Wait(); })));
}

}  // namespace
}  // namespace refit
