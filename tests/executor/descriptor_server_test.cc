#include "executor/device/descriptor_server.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

// A file that holds `request`.
absl::StatusOr<FileDescriptor> OpenNumber(uint64_t request) {
  FileDescriptor file(memfd_create("number", MFD_CLOEXEC));
  if (pwrite(file.fd(), &request, sizeof(request), 0) != sizeof(request)) {
    return absl::InternalError("pwrite");
  }
  return file;
}

uint64_t NumberIn(const FileDescriptor& file) {
  uint64_t number = 0;
  EXPECT_EQ(pread(file.fd(), &number, sizeof(number), 0), sizeof(number));
  return number;
}

int64_t OpenDescriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

TEST(DescriptorServerTest, EachClientGetsTheFileThatItAskedFor) {
  auto server = *DescriptorServer::Start(OpenNumber);
  std::vector<std::thread> clients;
  for (uint64_t client = 0; client < 8; ++client) {
    clients.emplace_back([&, client] {
      for (uint64_t i = 0; i < 100; ++i) {
        auto file = FetchDescriptor(server->name(), client << 32 | i);
        ASSERT_TRUE(file.ok()) << file.status();
        EXPECT_EQ(NumberIn(*file), client << 32 | i);
      }
    });
  }
  for (std::thread& client : clients) client.join();
}

TEST(DescriptorServerTest, NoDescriptorIsLeftOpen) {
  const int64_t before = OpenDescriptors();
  {
    auto server = *DescriptorServer::Start(OpenNumber);
    for (uint64_t i = 0; i < 10; ++i) {
      ASSERT_TRUE(FetchDescriptor(server->name(), i).ok());
    }
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(DescriptorServerTest, WhatCannotBeOpenedIsTheClientsError) {
  auto server = *DescriptorServer::Start([](uint64_t request) {
    return absl::NotFoundError(absl::StrCat("nothing at ", request));
  });
  EXPECT_EQ(FetchDescriptor(server->name(), 7).status(),
            absl::FailedPreconditionError("nothing at 7"));
}

TEST(DescriptorServerTest, ServerThatIsGoneIsNamed) {
  const std::string name = (*DescriptorServer::Start(OpenNumber))->name();
  EXPECT_LE(name.size(), DescriptorServer::kNameBytesMax);
  EXPECT_EQ(
      FetchDescriptor(name, 7).status(),
      absl::FailedPreconditionError(absl::StrCat(
          "the Unix socket @", name, " was not reached (Connection refused)")));
}

TEST(DescriptorServerTest, ProcessWithoutRoomForTheDescriptorIsToldSo) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  auto server = *DescriptorServer::Start([&](uint64_t request) {
    auto file = OpenNumber(request);
    rlimit none = limit;
    none.rlim_cur = 3;  // standard input, output and error
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    return file;
  });
  const absl::Status status = FetchDescriptor(server->name(), 7).status();
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(status, absl::ResourceExhaustedError(
                        "this process can have no more file descriptors"));
}

}  // namespace
}  // namespace refit
