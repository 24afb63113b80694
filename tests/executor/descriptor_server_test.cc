#include "executor/device/descriptor_server.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

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
        auto file = FetchDescriptor(server->name(), wanted);
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
      ASSERT_TRUE(FetchDescriptor(server->name(), absl::StrCat(i)).ok());
    }
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(DescriptorServerTest, WhatCannotBeOpenedIsTheClientsError) {
  auto server = *DescriptorServer::Start([](std::string_view request) {
    return absl::NotFoundError("nothing at " + std::string(request));
  });
  EXPECT_EQ(FetchDescriptor(server->name(), "7").status(),
            absl::FailedPreconditionError("nothing at 7"));
}

TEST(DescriptorServerTest, RequestIsCutToItsLimit) {
  auto server = *DescriptorServer::Start(OpenText);
  constexpr size_t kMax = DescriptorServer::kRequestBytesMax;
  auto file = FetchDescriptor(server->name(), std::string(kMax + 1, 'x'));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(TextIn(*file), std::string(kMax, 'x'));
}

TEST(DescriptorServerTest, ServerThatIsGoneIsNamed) {
  const std::string name = (*DescriptorServer::Start(OpenText))->name();
  EXPECT_LE(name.size(), DescriptorServer::kNameBytesMax);
  EXPECT_EQ(
      FetchDescriptor(name, "7").status(),
      absl::FailedPreconditionError(absl::StrCat(
          "the Unix socket @", name, " was not reached (Connection refused)")));
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
  const absl::Status status = FetchDescriptor(server->name(), "7").status();
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(status, absl::ResourceExhaustedError(
                        "this process can have no more file descriptors"));
}

}  // namespace
}  // namespace refit
