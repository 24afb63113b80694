#include "files/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace {

int umask_calls = 0;

}  // namespace

// In place of the C library's.
extern "C" mode_t umask(mode_t mask) noexcept {
  ++umask_calls;
  return static_cast<mode_t>(syscall(SYS_umask, mask));
}

namespace refit {
namespace {

constexpr std::array<uint8_t, 3> kBytes = {1, 2, 3};

class AtomicFileTest : public testing::Test {
 protected:
  AtomicFileTest() {
    std::string folder = testing::TempDir() + "atomic_file_XXXXXX";
    folder_ = mkdtemp(folder.data());
  }
  ~AtomicFileTest() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_;
};

// Files that other threads make meanwhile would be open to everybody.
TEST_F(AtomicFileTest, WritingLeavesTheUmaskOfTheProcessAlone) {
  const mode_t before = umask(027);
  umask_calls = 0;
  ASSERT_TRUE(WriteFileAtomically(folder_ / "new", kBytes).ok());
  EXPECT_EQ(umask_calls, 0);
  umask(before);
  struct stat made;
  ASSERT_EQ(stat((folder_ / "new").c_str(), &made), 0);
  EXPECT_EQ(made.st_mode & 0777, 0640U);
}

TEST_F(AtomicFileTest, TemporaryFilesOfOthersAreLeftAlone) {
  // The names that this process takes first.
  const std::string name = folder_ / "plan";
  for (int i = 0; i < 20; ++i) {
    std::ofstream(name + "." + std::to_string(getpid()) + "-" +
                  std::to_string(i))
        << "other";
  }
  ASSERT_TRUE(WriteFileAtomically(name, kBytes).ok());
  EXPECT_EQ(std::filesystem::file_size(name), kBytes.size());
  int others = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    if (entry.path() == name) continue;
    EXPECT_EQ(entry.file_size(), 5U) << entry.path();
    ++others;
  }
  EXPECT_EQ(others, 20);
}

size_t FilesIn(const std::filesystem::path& folder) {
  return static_cast<size_t>(
      std::distance(std::filesystem::directory_iterator(folder),
                    std::filesystem::directory_iterator()));
}

TEST_F(AtomicFileTest, AReaderSeesNoPieceBeforeTheLast) {
  const std::string name = folder_ / "trace";
  std::ofstream(name) << "older";
  {
    absl::StatusOr<AtomicFile> file = AtomicFile::Create(name);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Write(kBytes).ok());
    ASSERT_TRUE(file->Write(kBytes).ok());
    EXPECT_EQ(std::filesystem::file_size(name), 5U);
    ASSERT_TRUE(file->Commit().ok());
  }
  EXPECT_EQ(std::filesystem::file_size(name), 2 * kBytes.size());
  EXPECT_EQ(FilesIn(folder_), 1U);
}

TEST_F(AtomicFileTest, WhatIsNotCommittedLeavesNothing) {
  const std::string name = folder_ / "trace";
  std::ofstream(name) << "older";
  {
    absl::StatusOr<AtomicFile> file = AtomicFile::Create(name);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(file->Write(kBytes).ok());
    EXPECT_EQ(FilesIn(folder_), 2U);
  }
  EXPECT_EQ(std::filesystem::file_size(name), 5U);
  EXPECT_EQ(FilesIn(folder_), 1U);
}

}  // namespace
}  // namespace refit
