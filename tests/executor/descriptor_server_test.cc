#include "executor/device/descriptor_server.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "refit/interruption.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

std::chrono::steady_clock::time_point Soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

// A file that holds `request`.
absl::StatusOr<FileDescriptor> OpenText(std::string_view request) {
  FileDescriptor file(memfd_create("text", MFD_CLOEXEC));
  if (pwrite(file.fd(), request.data(), request.size(), 0) !=
      static_cast<ssize_t>(request.size())) {
    return absl::InternalError("pwrite");
  }
  return file;
}

std::string TextIn(const FileDescriptor& file) {
  char text[2 * DescriptorServer::kRequestBytesMax];
  const ssize_t size = pread(file.fd(), text, sizeof(text), 0);
  return std::string(text, size > 0 ? static_cast<size_t>(size) : 0);
}

int64_t OpenDescriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

TEST(DescriptorServerTest, EachClientGetsTheFileThatItAskedFor) {
  auto server = *DescriptorServer::Start(OpenText);
  std::vector<std::thread> clients;
  for (uint64_t client = 0; client < 8; ++client) {
    clients.emplace_back([&, client] {
      for (uint64_t i = 0; i < 100; ++i) {
        const std::string wanted = absl::StrCat(client, " ", i);
        auto file = FetchDescriptor(server->name(), wanted, Soon());
        ASSERT_TRUE(file.ok()) << file.status();
        EXPECT_EQ(TextIn(*file), wanted);
      }
    });
  }
  for (std::thread& client : clients) client.join();
}

TEST(DescriptorServerTest, NoDescriptorIsLeftOpen) {
  const int64_t before = OpenDescriptors();
  {
    auto server = *DescriptorServer::Start(OpenText);
    for (uint64_t i = 0; i < 10; ++i) {
      ASSERT_TRUE(
          FetchDescriptor(server->name(), absl::StrCat(i), Soon()).ok());
    }
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(DescriptorServerTest, WhatCannotBeOpenedIsTheClientsError) {
  auto server = *DescriptorServer::Start([](std::string_view request) {
    return absl::NotFoundError("nothing at " + std::string(request));
  });
  EXPECT_EQ(FetchDescriptor(server->name(), "7", Soon()).status(),
            absl::FailedPreconditionError("nothing at 7"));
}

TEST(DescriptorServerTest, RequestIsCutToItsLimit) {
  auto server = *DescriptorServer::Start(OpenText);
  constexpr size_t kMax = DescriptorServer::kRequestBytesMax;
  auto file =
      FetchDescriptor(server->name(), std::string(kMax + 1, 'x'), Soon());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(TextIn(*file), std::string(kMax, 'x'));
}

TEST(DescriptorServerTest, ServerThatIsGoneIsNamed) {
  const std::string name = (*DescriptorServer::Start(OpenText))->name();
  EXPECT_LE(name.size(), DescriptorServer::kNameBytesMax);
  EXPECT_EQ(
      FetchDescriptor(name, "7", Soon()).status(),
      absl::FailedPreconditionError(absl::StrCat(
          "the Unix socket @", name, " was not reached (Connection refused)")));
}

TEST(DescriptorServerTest, AChildOfTheServersProcessDoesNotHideItsEnd) {
  std::unique_ptr<DescriptorServer> server = *DescriptorServer::Start(OpenText);
  const std::string name = server->name();
  int runs[2];
  ASSERT_EQ(pipe(runs), 0);
  const pid_t child = fork();
  if (child == 0) {
    (void)!write(runs[1], "", 1);
    pause();
    _exit(0);
  }
  // The child has the listening socket until its first instructions drop it.
  // A client that connects before that is told of a reset instead.
  char byte;
  ASSERT_EQ(read(runs[0], &byte, 1), 1);
  server.reset();
  const auto in_two_seconds =
      std::chrono::steady_clock::now() + std::chrono::seconds(2);
  EXPECT_EQ(
      FetchDescriptor(name, "7", in_two_seconds).status(),
      absl::FailedPreconditionError(absl::StrCat(
          "the Unix socket @", name, " was not reached (Connection refused)")));
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  for (const int end : runs) close(end);
}

// As a profiler does, or a timer of the caller's.
class PeriodicSignals {
 public:
  PeriodicSignals() {
    struct sigaction action = {};
    action.sa_handler = [](int) { ++handled; };
    action.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &action, &before_);
    Set(2000);
  }
  ~PeriodicSignals() {
    Set(0);
    sigaction(SIGALRM, &before_, nullptr);
  }
  static inline std::atomic<int> handled = 0;

 private:
  static void Set(suseconds_t microseconds) {
    const itimerval timer = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &timer, nullptr);
  }
  struct sigaction before_ = {};
};

TEST(DescriptorServerTest, SignalsDoNotEndARequest) {
  auto server = *DescriptorServer::Start([](std::string_view request) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    return OpenText(request);
  });
  const PeriodicSignals signals;
  const int before = PeriodicSignals::handled;
  auto file = FetchDescriptor(server->name(), "7", Soon());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(TextIn(*file), "7");
  EXPECT_GT(PeriodicSignals::handled - before, 10);
}

TEST(DescriptorServerTest, SignalsAreNotDeliveredToTheServersThread) {
  std::atomic<bool> is_blocked = false;
  auto server = *DescriptorServer::Start([&](std::string_view request) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    is_blocked = sigismember(&blocked, SIGPROF) == 1 &&
                 sigismember(&blocked, SIGTERM) == 1 &&
                 sigismember(&blocked, SIGSEGV) == 0;
    return OpenText(request);
  });
  ASSERT_TRUE(FetchDescriptor(server->name(), "7", Soon()).ok());
  EXPECT_TRUE(is_blocked);
  sigset_t mine;
  pthread_sigmask(SIG_SETMASK, nullptr, &mine);
  EXPECT_EQ(sigismember(&mine, SIGPROF), 0);
}

TEST(DescriptorServerTest, AClientWaitsUntilItsDeadline) {
  std::atomic<bool> goes_on = false;
  auto server = *DescriptorServer::Start([&](std::string_view request) {
    while (!goes_on) std::this_thread::yield();
    return OpenText(request);
  });
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(FetchDescriptor(server->name(), "7",
                            start + std::chrono::milliseconds(200))
                .status(),
            absl::DeadlineExceededError(
                absl::StrCat("the Unix socket @", server->name(),
                             ": no answer before the deadline")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  const ScopedInterruption interrupted(
      [] { return absl::CancelledError("enough"); });
  EXPECT_EQ(FetchDescriptor(server->name(), "7", Soon()).status(),
            absl::CancelledError(
                absl::StrCat("the Unix socket @", server->name(), ": enough")));
  goes_on = true;
}

// In a process of its own, which can have no memory for another stack.
[[noreturn]] void StartWithoutThreads() {
  rlimit limit = {};
  limit.rlim_cur = limit.rlim_max = 1;
  setrlimit(RLIMIT_AS, &limit);
  const absl::Status status = DescriptorServer::Start(OpenText).status();
  limit.rlim_cur = limit.rlim_max = RLIM_INFINITY;
  std::_Exit(status.code() == absl::StatusCode::kResourceExhausted &&
                     status.message().find("cannot start the thread that "
                                           "shares memory: ") == 0
                 ? 0
                 : 1);
}

TEST(DescriptorServerTest, AThreadThatCannotBeMadeIsAnError) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer ends where memory is limited";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(StartWithoutThreads(), testing::ExitedWithCode(0), "");
}

TEST(DescriptorServerTest, ProcessWithoutRoomForTheDescriptorIsToldSo) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  auto server = *DescriptorServer::Start([&](std::string_view request) {
    auto file = OpenText(request);
    rlimit none = limit;
    none.rlim_cur = 3;  // standard input, output and error
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    return file;
  });
  const absl::Status status =
      FetchDescriptor(server->name(), "7", Soon()).status();
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(status, absl::ResourceExhaustedError(
                        "this process can have no more file descriptors"));
}

}  // namespace
}  // namespace refit
