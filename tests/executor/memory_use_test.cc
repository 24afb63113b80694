#include "executor/transport/memory_use.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "refit/interruption.h"

namespace refit {
namespace {

using std::chrono::milliseconds;

MemoryUse::Deadline In(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}
MemoryUse::Deadline WithinTenSeconds() { return In(std::chrono::seconds(10)); }

// Rank 0 is this process. Rank 1, which uses its memory, is a child.
class MemoryUseTest : public testing::Test {
 protected:
  ~MemoryUseTest() override { EndUser(); }

  // Returns what `use` does, once it has; the child lives on. -1: it could not.
  int StartUser(const std::function<int(MemoryUse&)>& use) {
    const std::string exported = *owner_->Export();
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) return -1;
    user_ = fork();
    if (user_ == 0) {
      auto user = *MemoryUse::Create(1, 2);
      const absl::Status connected =
          user->Connect({0}, {exported}, WithinTenSeconds());
      const int did = connected.ok() ? use(*user) : -1;
      (void)!write(pipe_ends[1], &did, sizeof(did));
      while (true) pause();
    }
    int did = -1;
    (void)!read(pipe_ends[0], &did, sizeof(did));
    for (const int end : pipe_ends) close(end);
    return did;
  }
  void EndUser() {
    if (user_ <= 0) return;
    kill(user_, SIGKILL);
    waitpid(user_, nullptr, 0);
    user_ = 0;
  }

  const std::unique_ptr<MemoryUse> owner_ = *MemoryUse::Create(0, 2);
  pid_t user_ = 0;
};

TEST_F(MemoryUseTest, AnotherProcessIsWaitedForUntilItIsGone) {
  ASSERT_EQ(
      StartUser([](MemoryUse& use) { return use.Begin().has_value() ? 1 : 0; }),
      0);
  EXPECT_EQ(owner_->AwaitUnused(In(milliseconds(20))), std::vector<int32_t>{1});
  EndUser();
  EXPECT_TRUE(owner_->AwaitUnused(WithinTenSeconds()).empty());
}

TEST_F(MemoryUseTest, AnotherProcessThatHasEndedItsUseIsNotWaitedFor) {
  ASSERT_EQ(StartUser([](MemoryUse& use) {
              const bool began = !use.Begin().has_value();
              use.End();
              return began ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(owner_->AwaitUnused(In(milliseconds(0))).empty());
}

TEST_F(MemoryUseTest, AnotherProcessDoesNotUseWhatIsRevoked) {
  owner_->Revoke();
  ASSERT_EQ(StartUser([](MemoryUse& use) { return use.Begin().value_or(7); }),
            0);
  EXPECT_TRUE(owner_->AwaitUnused(In(milliseconds(0))).empty());
}

TEST_F(MemoryUseTest, AnInterruptedWaitLeavesUsersTimeToStop) {
  ASSERT_EQ(
      StartUser([](MemoryUse& use) { return use.Begin().has_value() ? 1 : 0; }),
      0);
  std::thread ending([&] {
    std::this_thread::sleep_for(milliseconds(100));
    EndUser();
  });
  const ScopedInterruption interruption(
      [] { return absl::CancelledError("the user's wish"); });
  EXPECT_TRUE(owner_->AwaitUnused(WithinTenSeconds()).empty());
  ending.join();
}

// A child of the user lives on, which has its parent's files.
TEST_F(MemoryUseTest, AChildOfAUserUsesNothing) {
  ASSERT_EQ(StartUser([](MemoryUse& use) {
              const pid_t parent = getpid();
              if (use.Begin().has_value() || fork() != 0) return 0;
              while (getppid() == parent) usleep(1000);
              sleep(1);
              _exit(0);
            }),
            0);
  EndUser();
  EXPECT_TRUE(owner_->AwaitUnused(In(milliseconds(500))).empty());
}

}  // namespace
}  // namespace refit
