// Two ranks share a GPU, and a refit of theirs fails: whatever happens, it ends
// on the rank that is left, and that rank's stream drains. One GPU is enough.
//
// The driver reads CUDA_DEVICE_MAX_CONNECTIONS once, and a stream that is stuck
// stays so: each case runs in processes of its own, this program started anew.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "runner/rank_threads.h"
#include "runner/world_rank.h"
#include "tests/executor/plan_builder.h"
#include "tests/gpu/spin.h"

namespace refit {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kTimeout(20);  // of what goes well
constexpr milliseconds kDeadline(1000);       // of the refit that fails
// From the start of that refit until the stream is drained.
constexpr milliseconds kDrained(4000);
constexpr milliseconds kLate(2500);
// A child that runs longer hangs.
constexpr std::chrono::seconds kChildTime(25);
// The exit code of a child whose ranks are refused.
constexpr int kRefused = 3;

enum class Failure {
  kNone,      // refits that go well
  kLate,      // the peer comes when the deadline has passed
  kKilled,    // the peer's process is killed
  kLeaves,    // the peer closes its executor instead of running
  kCloses,    // this rank closes its executor instead of waiting
  kFrees,     // this rank frees memory between Run and Wait
  kCaptures,  // nothing fails, but a thread captures a graph meanwhile
  kChecked,   // the same in a refit that is checked
};

constexpr const char* kNames[] = {"None",   "Late",  "Killed",   "Leaves",
                                  "Closes", "Frees", "Captures", "Checked"};

const PlanFile& Plan() {
  static const PlanFile plan = ReshardPlan({.source_ranks = 1,
                                            .destination_ranks = 1,
                                            .layers = 3,
                                            .rows = 512,
                                            .columns = 1024,
                                            .mechanism = fb::Mechanism::kDirect,
                                            .route = fb::Route::kLocal})
                                   .Open();
  return plan;
}

// What a child is told through its environment.
struct Role {
  Failure failure = Failure::kNone;
  int32_t victim = 1;        // the rank that the failure is of
  bool works_ahead = false;  // both streams have work before the refit

  bool ReadFrom(const char* text) {
    int kind = 0;
    int works = 0;
    if (std::sscanf(text, "%d %d %d", &kind, &victim, &works) != 3) {
      return false;
    }
    failure = static_cast<Failure>(kind);
    works_ahead = works != 0;
    return true;
  }
  std::string Text() const {
    return absl::StrCat(static_cast<int>(failure), " ", victim, " ",
                        works_ahead ? 1 : 0);
  }
};

// One rank in a child.
class RankOfChild {
 public:
  RankOfChild(int32_t rank, const Role& role) : rank_(rank), role_(role) {}

  // The child's exit code.
  int Run(TcpRendezvous meeting) {
    meeting.rank = rank_;
    auto control = ConnectTcp(meeting, Clock::now() + kTimeout);
    if (!Succeeds(control.status(), "ConnectTcp")) return 1;
    auto device = CreateCudaDevice(0);
    if (!Succeeds(device.status(), "CreateCudaDevice")) return 1;
    auto made = WorldRank::Create(Plan(), *std::move(control),
                                  *std::move(device), kTimeout);
    if (!Succeeds(made.status(), "WorldRank::Create")) return kRefused;
    world_rank_ = *std::move(made);
    for (int i = 0; i < 3; ++i) RefitWell();
    const bool is_victim = rank_ == role_.victim;
    switch (role_.failure) {
      case Failure::kNone:
        break;
      case Failure::kCaptures:
      case Failure::kChecked:
        is_victim ? RefitLate() : RefitBesideACapture();
        break;
      default:
        is_victim ? Fail() : Survive();
    }
    if (role_.failure == Failure::kLate || role_.failure == Failure::kFrees) {
      Succeeds(executor().Connect(kTimeout), "Connect");
      RefitWell();
    }
    world_rank_.reset();
    return is_right_ ? 0 : 1;
  }

 private:
  Executor& executor() { return world_rank_->executor(); }
  cudaStream_t stream() {
    return static_cast<cudaStream_t>(world_rank_->stream());
  }

  void Say(const std::string& text) const {
    std::fprintf(stderr, "rank %d: %s\n", rank_, text.c_str());
  }
  bool Expect(bool is_right, const std::string& text) {
    if (!is_right) Say("WRONG: " + text);
    is_right_ &= is_right;
    return is_right;
  }
  bool Succeeds(const absl::Status& status, const char* call) {
    return Expect(status.ok(), absl::StrCat(call, ": ", status.ToString()));
  }

  void WorkAhead() {
    if (!role_.works_ahead) return;
    Expect(LaunchSpin(kDeadline / 2, stream()) == cudaSuccess, "LaunchSpin");
  }

  void RefitWell() {
    Succeeds(world_rank_->FillSources(), "FillSources");
    Succeeds(world_rank_->PoisonDestinations(), "PoisonDestinations");
    WorkAhead();
    Succeeds(world_rank_->Refit().status(), "Refit");
    CheckValues();
  }
  // Unlike WorldRank::Refit, this lets the peer begin alone.
  void RefitLate() {
    Succeeds(world_rank_->FillSources(), "FillSources");
    Succeeds(world_rank_->PoisonDestinations(), "PoisonDestinations");
    std::this_thread::sleep_for(kLate / 4);
    WorkAhead();
    absl::Status status = executor().Run(world_rank_->stream(), Ample());
    if (status.ok()) status = executor().Wait();
    if (Succeeds(status, "Run")) CheckValues();
  }
  RunOptions Ample() const {
    RunOptions options = {.timeout = kTimeout};
    options.check = role_.failure == Failure::kChecked;
    return options;
  }
  void CheckValues() {
    const auto check = world_rank_->Check();
    if (!Succeeds(check.status(), "Check")) return;
    Expect(check->wrong_elements == 0, "elements are wrong");
  }

  // The rank whose fault it is.
  void Fail() {
    switch (role_.failure) {
      case Failure::kKilled:
        kill(getpid(), SIGKILL);
        break;
      case Failure::kLeaves:
        world_rank_.reset();
        break;
      default: {
        std::this_thread::sleep_for(kLate);
        WorkAhead();
        absl::Status status =
            executor().Run(world_rank_->stream(), {.timeout = kDeadline});
        if (status.ok()) status = executor().Wait();
        Say(status.ToString());
        Expect(!status.ok(), "a refit that comes too late succeeds");
        Expect(cudaStreamSynchronize(stream()) == cudaSuccess,
               "cudaStreamSynchronize");
      }
    }
  }

  // The other one.
  void Survive() {
    void* memory = nullptr;
    Expect(cudaMalloc(&memory, 1 << 20) == cudaSuccess, "cudaMalloc");
    cudaStream_t const drained = stream();
    WorkAhead();
    const Clock::time_point start = Clock::now();
    const auto passed = [&] {
      return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
    };
    absl::Status status =
        executor().Run(world_rank_->stream(), {.timeout = kDeadline});
    if (role_.failure == Failure::kFrees) {
      Expect(cudaFree(memory) == cudaSuccess, "cudaFree");
      Say(absl::StrCat("cudaFree returned after ", passed().count(), " ms"));
    }
    if (role_.failure == Failure::kCloses) {
      executor().Close();
      Say(absl::StrCat("Close returned after ", passed().count(), " ms"));
    } else {
      if (status.ok()) status = executor().Wait();
      Say(absl::StrCat(status.ToString(), " after ", passed().count(), " ms"));
      Expect(!status.ok(), "a refit without its peer succeeds");
      // A peer that goes is known before the deadline.
      if (role_.failure == Failure::kLate || role_.failure == Failure::kFrees) {
        Expect(absl::StrContains(status.message(),
                                 absl::StrCat("rank ", role_.victim)),
               "the message does not name the rank that is missing");
      }
    }
    Expect(cudaStreamSynchronize(drained) == cudaSuccess,
           "cudaStreamSynchronize");
    Say(absl::StrCat("drained after ", passed().count(), " ms"));
    Expect(passed() < kDrained, "the stream drains too late");
  }

  void RefitBesideACapture() {
    Succeeds(world_rank_->FillSources(), "FillSources");
    Succeeds(world_rank_->PoisonDestinations(), "PoisonDestinations");
    cudaStream_t captured = nullptr;
    void* memory = nullptr;
    Expect(cudaMalloc(&memory, 1024) == cudaSuccess, "cudaMalloc");
    Expect(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking) ==
               cudaSuccess,
           "cudaStreamCreateWithFlags");
    WorkAhead();
    absl::Status status = executor().Run(world_rank_->stream(), Ample());
    std::thread capture([&] {
      std::this_thread::sleep_for(milliseconds(50));
      cudaGraph_t graph = nullptr;
      Expect(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal) ==
                 cudaSuccess,
             "cudaStreamBeginCapture");
      // The watchdog and Wait look meanwhile, and the peer is late.
      std::this_thread::sleep_for(kLate / 8);
      Expect(cudaMemsetAsync(memory, 1, 1024, captured) == cudaSuccess,
             "cudaMemsetAsync");
      const cudaError_t error = cudaStreamEndCapture(captured, &graph);
      Expect(error == cudaSuccess,
             absl::StrCat("cudaStreamEndCapture: ", cudaGetErrorName(error)));
      if (graph != nullptr) cudaGraphDestroy(graph);
    });
    if (status.ok()) status = executor().Wait();
    capture.join();
    Succeeds(status, "a refit beside a capture");
    if (status.ok()) CheckValues();
    cudaStreamDestroy(captured);
    cudaFree(memory);
  }

  const int32_t rank_;
  const Role role_;
  bool is_right_ = true;
  std::unique_ptr<WorldRank> world_rank_;
};

constexpr char kRole[] = "REFIT_TEST_ROLE";
constexpr char kRanks[] = "REFIT_TEST_RANKS";

// The main function of a child.
int RunChild() {
  Role role;
  if (!role.ReadFrom(std::getenv(kRole))) return 2;
  const bool are_threads = std::string(std::getenv(kRanks)) == "threads";
  absl::StatusOr<TcpRendezvous> meeting =
      are_threads ? LoopbackRendezvous(2) : RendezvousFromEnvironment();
  if (!meeting.ok()) return 2;
  if (!are_threads) return RankOfChild(meeting->rank, role).Run(*meeting);
  int codes[2] = {};
  if (!RunRankThreads(2, [&](int32_t rank) {
         codes[rank] = RankOfChild(rank, role).Run(*meeting);
       }).ok()) {
    return 2;
  }
  return std::max(codes[0], codes[1]);
}

// A child that was started, whose output goes to a file.
class Child {
 public:
  explicit Child(const std::vector<std::string>& variables) {
    char name[] = "/tmp/refit-shared-gpu-XXXXXX";
    const int output = mkstemp(name);
    output_ = name;
    std::vector<std::string> all = variables;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      if (!absl::StartsWith(*variable, "CUDA_DEVICE_MAX_CONNECTIONS=")) {
        all.push_back(*variable);
      }
    }
    std::vector<char*> environment;
    for (std::string& variable : all) environment.push_back(variable.data());
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, output, STDERR_FILENO);
    char program[] = "/proc/self/exe";
    char* arguments[] = {program, nullptr};
    EXPECT_EQ(posix_spawn(&process_, program, &actions, nullptr, arguments,
                          environment.data()),
              0);
    posix_spawn_file_actions_destroy(&actions);
    close(output);
  }
  ~Child() { unlink(output_.c_str()); }

  // Its exit code; minus the signal that ended it, SIGALRM if it hangs.
  int Await(Clock::time_point deadline) {
    int status = 0;
    while (waitpid(process_, &status, WNOHANG) == 0) {
      if (Clock::now() > deadline) {
        kill(process_, SIGKILL);
        waitpid(process_, &status, 0);
        return -SIGALRM;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  std::string Output() const {
    std::ifstream file(output_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  pid_t process_ = 0;
  std::string output_;
};

// The failure, CUDA_DEVICE_MAX_CONNECTIONS, the victim, and whether streams
// have work ahead.
using Case = std::tuple<Failure, int, int32_t, bool>;

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const auto& [failure, connections, victim, works_ahead] = info.param;
  return absl::StrCat(kNames[static_cast<int>(failure)], "_Rank", victim, "_",
                      connections,
                      connections == 1 ? "Connection" : "Connections",
                      works_ahead ? "_WorkAhead" : "");
}

class SharedGpuTest : public testing::TestWithParam<Case> {
 protected:
  std::vector<std::string> Variables() const {
    const auto& [failure, connections, victim, works_ahead] = GetParam();
    return {
        absl::StrCat("CUDA_DEVICE_MAX_CONNECTIONS=", connections),
        absl::StrCat(kRole, "=", Role{failure, victim, works_ahead}.Text())};
  }
  static Clock::time_point Limit() { return Clock::now() + kChildTime; }
};

class ThreadsTest : public SharedGpuTest {};
class ProcessesTest : public SharedGpuTest {};

TEST_P(ThreadsTest, TheRankThatIsLeftEndsAndItsStreamDrains) {
  std::vector<std::string> variables = Variables();
  variables.push_back(absl::StrCat(kRanks, "=threads"));
  Child child(variables);
  EXPECT_EQ(child.Await(Limit()), 0) << child.Output();
}

// Whatever one of them waited for would stand behind its wait.
TEST(RefusedThreadsTest, OneConnectionIsTooFewForTwoRanksOfAProcess) {
  Child child({"CUDA_DEVICE_MAX_CONNECTIONS=1",
               absl::StrCat(kRole, "=", Role{}.Text()),
               absl::StrCat(kRanks, "=threads")});
  EXPECT_EQ(child.Await(Clock::now() + kChildTime), kRefused);
  EXPECT_TRUE(absl::StrContains(
      child.Output(),
      "ranks 0 and 1 share a GPU and are threads of one process, where "
      "CUDA_DEVICE_MAX_CONNECTIONS is 1: what one of them waits for would "
      "stand behind its wait. Unset it (CUDA's default is 8), or give each "
      "rank a process or a GPU of its own"))
      << child.Output();
}

TEST_P(ProcessesTest, TheRankThatIsLeftEndsAndItsStreamDrains) {
  const auto& [failure, connections, victim, works_ahead] = GetParam();
  const TcpRendezvous meeting = *LoopbackRendezvous(2);
  std::vector<std::unique_ptr<Child>> ranks;
  for (int32_t rank = 0; rank < 2; ++rank) {
    std::vector<std::string> variables = Variables();
    for (const std::string& variable :
         {absl::StrCat(kRanks, "=processes"), absl::StrCat("RANK=", rank),
          std::string("WORLD_SIZE=2"),
          absl::StrCat("MASTER_ADDR=", meeting.host),
          absl::StrCat("MASTER_PORT=", meeting.port),
          absl::StrCat("REFIT_SECRET=",
                       absl::BytesToHexString(meeting.secret))}) {
      variables.push_back(variable);
    }
    ranks.push_back(std::make_unique<Child>(variables));
  }
  const Clock::time_point limit = Limit();
  for (int32_t rank = 0; rank < 2; ++rank) {
    const bool is_killed = failure == Failure::kKilled && rank == victim;
    EXPECT_EQ(ranks[rank]->Await(limit), is_killed ? -SIGKILL : 0)
        << ranks[rank]->Output();
  }
}

constexpr Failure kAll[] = {
    Failure::kNone,   Failure::kLate,  Failure::kKilled,   Failure::kLeaves,
    Failure::kCloses, Failure::kFrees, Failure::kCaptures, Failure::kChecked};
constexpr Failure kOfThreads[] = {
    Failure::kNone,  Failure::kLate,     Failure::kLeaves, Failure::kCloses,
    Failure::kFrees, Failure::kCaptures, Failure::kChecked};

INSTANTIATE_TEST_SUITE_P(Failures, ProcessesTest,
                         testing::Combine(testing::ValuesIn(kAll),
                                          testing::Values(1, 8),
                                          testing::Values(0, 1),
                                          testing::Bool()),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Failures, ThreadsTest,
                         testing::Combine(testing::ValuesIn(kOfThreads),
                                          testing::Values(8),
                                          testing::Values(0, 1),
                                          testing::Bool()),
                         CaseName);

}  // namespace
}  // namespace refit

int main(int argc, char** argv) {
  if (std::getenv(refit::kRole) != nullptr) return refit::RunChild();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
