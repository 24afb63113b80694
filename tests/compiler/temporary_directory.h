// Files that live as long as a test.
#ifndef REFIT_TESTS_COMPILER_TEMPORARY_DIRECTORY_H_
#define REFIT_TESTS_COMPILER_TEMPORARY_DIRECTORY_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace refit {

class TemporaryDirectory {
 public:
  TemporaryDirectory() : path_(::testing::TempDir() + "refit-XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }

  std::string Path(std::string_view name) const {
    return path_ + "/" + std::string(name);
  }

  // Returns the path.
  std::string Write(std::string_view name, std::string_view content) const {
    const std::string path = Path(name);
    std::filesystem::create_directories(
        std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

  // `text` without this directory's name, which differs from run to run.
  std::string Relative(std::string text) const {
    const std::string prefix = path_ + "/";
    for (size_t at; (at = text.find(prefix)) != std::string::npos;) {
      text.erase(at, prefix.size());
    }
    return text;
  }

 private:
  std::string path_;
};

}  // namespace refit

#endif  // REFIT_TESTS_COMPILER_TEMPORARY_DIRECTORY_H_
