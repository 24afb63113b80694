// Load looks at the whole process, so every fact has a process of its own.
#include "executor/transport/nccl_api.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include "tests/executor/fake_nccl/fake_nccl.h"

namespace refit::nccl {
namespace {

constexpr char kFake[] = FAKE_NCCL_LIBRARY;

// What a fresh process with REFIT_NCCL_LIBRARY as given says of Load.
void LoadAndPrint(
    const char* library, const std::function<void()>& before = [] {}) {
  setenv("REFIT_NCCL_LIBRARY", library, 1);
  before();
  const absl::StatusOr<Api> api = Load();
  const std::string text =
      api.ok() ? VersionText(api->version) + " from " + api->library
               : api.status().ToString();
  std::fprintf(stderr, "Load: %s\n", text.c_str());
  std::_Exit(0);
}

template <typename Function>
Function* Control(const char* name) {
  void* fake = dlopen(kFake, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(fake, name));
}

class NcclApiTest : public testing::Test {
 protected:
  void ExpectLoad(
      const char* library, const std::string& text,
      const std::function<void()>& before = [] {}) {
    EXPECT_EXIT(LoadAndPrint(library, before), testing::ExitedWithCode(0),
                "Load: " + text);
  }
};

TEST_F(NcclApiTest, TheVariableNamesTheFile) {
  ExpectLoad(kFake, std::string("2.28.9 from ") + kFake);
}

TEST_F(NcclApiTest, FileOfTheVariableThatIsNotThereIsNotFound) {
  ExpectLoad("/nowhere/libnccl.so.2",
             "NOT_FOUND: no libnccl: none is loaded in this process, and the "
             "file that REFIT_NCCL_LIBRARY names cannot be: "
             "/nowhere/libnccl.so.2: cannot open shared object file");
}

TEST_F(NcclApiTest, TooOldAVersionIsRefused) {
  ExpectLoad(kFake,
             std::string("UNIMPLEMENTED: ") + kFake +
                 ": NCCL 2.17.1, but 2.18.0 or later is needed",
             [] { Control<void(int)>("fake_nccl_set_version")(21701); });
}

TEST_F(NcclApiTest, LibraryWithoutTheFunctionsIsRefused) {
  ExpectLoad("libm.so.6", "UNIMPLEMENTED: .*libm.so.6 has no ncclGetVersion");
}

TEST_F(NcclApiTest, CopyInTheGlobalScopeComesFirst) {
  ExpectLoad("/nowhere/libnccl.so.2", std::string("2.28.9 from ") + kFake,
             [] { dlopen(kFake, RTLD_NOW | RTLD_GLOBAL); });
}

// As PyTorch loads it.
TEST_F(NcclApiTest, CopyLoadedLocallyComesFirst) {
  const auto folder = std::filesystem::path(testing::TempDir()) /
                      ("nccl_api_test." + std::to_string(getpid()));
  const std::string link = folder / "libnccl.so.2";
  std::filesystem::create_directories(folder);
  std::filesystem::create_symlink(kFake, link);
  ExpectLoad("/nowhere/libnccl.so.2", "2.28.9 from " + link,
             [&] { dlopen(link.c_str(), RTLD_NOW | RTLD_LOCAL); });
  std::filesystem::remove_all(folder);
}

// The library of this machine, if it has one.
void MakeRealId() {
  unsetenv("REFIT_NCCL_LIBRARY");
  const absl::StatusOr<Api> api = Load();
  UniqueId id = {};
  const Result result = api.ok() ? api->GetUniqueId(&id) : kInternalError;
  bool has_content = false;
  for (char byte : id.internal) has_content |= byte != 0;
  std::fprintf(stderr, "%s, id: %d %d\n",
               api.ok() ? VersionText(api->version).c_str()
                        : api.status().ToString().c_str(),
               result, has_content);
  std::_Exit(0);
}

bool LoaderFindsNccl() {
  // In another process, for here it would stay loaded.
  const pid_t child = fork();
  if (child == 0) std::_Exit(dlopen("libnccl.so.2", RTLD_LAZY) == nullptr);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0;
}

TEST_F(NcclApiTest, RealLibraryMakesAnId) {
  if (!LoaderFindsNccl()) GTEST_SKIP() << "the loader finds no libnccl.so.2";
  EXPECT_EXIT(MakeRealId(), testing::ExitedWithCode(0),
              "^2\\.[0-9]+\\.[0-9]+, id: 0 1");
}

TEST_F(NcclApiTest, NothingAnywhereIsNotFound) {
  if (LoaderFindsNccl()) GTEST_SKIP() << "the loader finds libnccl.so.2";
  ExpectLoad(
      "",
      "NOT_FOUND: no libnccl: none is loaded in this process, "
      "REFIT_NCCL_LIBRARY is not set, and the loader says: libnccl.so.2");
}

TEST(NcclVersionTest, TextOfOldAndNewNumbers) {
  EXPECT_EQ(VersionText(22809), "2.28.9");
  EXPECT_EQ(VersionText(21800), "2.18.0");
  EXPECT_EQ(VersionText(23107), "2.31.7");
  EXPECT_EQ(VersionText(2708), "2.7.8");
}

class NcclStatusTest : public testing::Test {
 protected:
  NcclStatusTest() {
    api_.GetErrorString = [](Result) { return "what went wrong"; };
    api_.GetLastError = [](Comm) { return "why"; };
  }
  Api api_;
  const Comm comm_ = reinterpret_cast<Comm>(&api_);
};

TEST_F(NcclStatusTest, SuccessAndProgressAreOk) {
  EXPECT_TRUE(StatusOf(api_, kSuccess, "ncclSend", comm_).ok());
  EXPECT_TRUE(StatusOf(api_, kInProgress, "ncclSend", comm_).ok());
}

TEST_F(NcclStatusTest, NamesCallResultAndLastError) {
  const absl::Status status =
      StatusOf(api_, kInvalidUsage, "ncclGroupEnd", comm_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(),
            "ncclGroupEnd: NCCL error 5, what went wrong: why");
}

TEST_F(NcclStatusTest, WithoutACommunicatorThereIsNoLastError) {
  EXPECT_EQ(
      StatusOf(api_, kInternalError, "ncclGetUniqueId", nullptr).message(),
      "ncclGetUniqueId: NCCL error 3, what went wrong");
}

TEST_F(NcclStatusTest, RemoteAndSystemErrorsAreUnavailable) {
  for (Result result : {kRemoteError, kSystemError}) {
    EXPECT_EQ(StatusOf(api_, result, "ncclRecv", comm_).code(),
              absl::StatusCode::kUnavailable);
  }
}

TEST_F(NcclStatusTest, CodesOfLaterVersionsAreErrors) {
  EXPECT_EQ(StatusOf(api_, static_cast<Result>(8), "ncclRecv", comm_).code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace refit::nccl
