#include "tools/args.h"

#include <gtest/gtest.h>

#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace refit {
namespace {

// The flags of an imaginary tool, and what it printed.
struct Invocation {
  std::string output = "none";
  int64_t rank = -1;
  int64_t seconds = 1;
  int64_t count = 1;
  bool json = false;
  std::optional<std::string> stats;
  ParsedArgs args;
  std::string out;
  std::string err;
};

Invocation Invoke(std::vector<std::string> arguments) {
  Invocation run;
  const ToolInfo tool = {
      .name = "refit-test",
      .usage = "refit-test PLAN [-o FILE]",
      .summary = "Tests.",
      .flags = {{"--output", "-o", "FILE", "where to write", &run.output},
                {"--rank", "", "N", "a rank", &run.rank},
                {"--seconds", "", "N", "a time", &run.seconds, 1, 60},
                {"--count", "", "N", "a number", &run.count, 1},
                {"--json", "", "", "as JSON", &run.json},
                {"--stats", "", "[=FORM]", "numbers", &run.stats}},
      .positional_min = 1,
      .positional_max = 2};
  arguments.insert(arguments.begin(), "refit-test");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  run.args = ParseArgs(tool, static_cast<int>(argv.size()), argv.data());
  run.out = testing::internal::GetCapturedStdout();
  run.err = testing::internal::GetCapturedStderr();
  return run;
}

TEST(ArgsTest, FlagsTakeValuesInAllForms) {
  const Invocation run = Invoke({"--rank=7", "a", "-o", "x", "--json", "b"});
  EXPECT_FALSE(run.args.done);
  EXPECT_EQ(run.rank, 7);
  EXPECT_EQ(run.output, "x");
  EXPECT_TRUE(run.json);
  EXPECT_EQ(run.args.positional, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(Invoke({"a", "--output", "-"}).output, "-");
  EXPECT_EQ(Invoke({"a", "--rank", "-3"}).rank, -3);
}

TEST(ArgsTest, AnOptionalValueStandsAfterAnEqualsSignAlone) {
  EXPECT_FALSE(Invoke({"a"}).stats.has_value());
  const Invocation alone = Invoke({"--stats", "a"});
  EXPECT_EQ(alone.stats, "");
  EXPECT_EQ(alone.args.positional, std::vector<std::string>{"a"});
  EXPECT_EQ(Invoke({"--stats=json", "a"}).stats, "json");
}

TEST(ArgsTest, DashIsAFileAndTwoDashesEndFlags) {
  const Invocation run = Invoke({"-", "--", "--json"});
  EXPECT_FALSE(run.json);
  EXPECT_EQ(run.args.positional, (std::vector<std::string>{"-", "--json"}));
}

TEST(ArgsTest, HelpGoesToStdoutWithStatusZero) {
  const Invocation run = Invoke({"--help"});
  EXPECT_TRUE(run.args.done);
  EXPECT_EQ(run.args.exit_status, kExitSuccess);
  EXPECT_EQ(run.err, "");
  EXPECT_EQ(run.out,
            "Usage: refit-test PLAN [-o FILE]\n"
            "\n"
            "Tests.\n"
            "\n"
            "Options:\n"
            "  -o, --output FILE   where to write\n"
            "      --rank N        a rank\n"
            "      --seconds N     a time\n"
            "      --count N       a number\n"
            "      --json          as JSON\n"
            "      --stats[=FORM]  numbers\n"
            "  -h, --help          show this help\n"
            "      --version       show the version\n");
}

TEST(ArgsTest, ShortFormOfHelp) {
  const Invocation run = Invoke({"-h"});
  EXPECT_EQ(run.args.exit_status, kExitSuccess);
  EXPECT_EQ(run.out, Invoke({"--help"}).out);
}

TEST(ArgsTest, VersionNamesTheTool) {
  const Invocation run = Invoke({"--version"});
  EXPECT_EQ(run.args.exit_status, kExitSuccess);
  EXPECT_EQ(run.out.substr(0, 11), "refit-test ");
}

TEST(ArgsTest, UnknownFlagNamesTheNearest) {
  const Invocation run = Invoke({"a", "--jsno"});
  EXPECT_TRUE(run.args.done);
  EXPECT_EQ(run.args.exit_status, kExitError);
  EXPECT_EQ(run.err,
            "refit-test: error: unknown option --jsno; did you mean --json?\n");
  EXPECT_EQ(Invoke({"a", "--frobnicate"}).err,
            "refit-test: error: unknown option --frobnicate; see refit-test "
            "--help\n");
}

TEST(ArgsTest, MistakesInValuesAreOneLine) {
  EXPECT_EQ(Invoke({"a", "--rank", "3x"}).err,
            "refit-test: error: --rank wants an integer, not '3x'\n");
  EXPECT_EQ(Invoke({"a", "--rank"}).err,
            "refit-test: error: --rank needs a value: N\n");
  EXPECT_EQ(Invoke({"a", "--output", ""}).err,
            "refit-test: error: --output is \"\"; wanted FILE\n");
  EXPECT_EQ(Invoke({"a", "--output="}).err,
            "refit-test: error: --output is \"\"; wanted FILE\n");
  EXPECT_EQ(Invoke({"a", "--json=1"}).err,
            "refit-test: error: --json takes no value\n");
}

TEST(ArgsTest, IntegersHaveRanges) {
  EXPECT_EQ(Invoke({"a", "--seconds", "60"}).seconds, 60);
  EXPECT_EQ(Invoke({"a", "--seconds", "0"}).err,
            "refit-test: error: --seconds is 0; wanted an integer from 1 to "
            "60\n");
  EXPECT_EQ(Invoke({"a", "--count", "-1"}).err,
            "refit-test: error: --count is -1; wanted an integer of at least "
            "1\n");
  EXPECT_EQ(Invoke({"a", "--rank", "99999999999999999999"}).err,
            "refit-test: error: --rank is 99999999999999999999; wanted an "
            "integer of 64 bits\n");
}

TEST(ArgsTest, AFlagIsGivenOnce) {
  const Invocation run = Invoke({"a", "-o", "x", "--output=y"});
  EXPECT_EQ(run.args.exit_status, kExitError);
  EXPECT_EQ(run.err, "refit-test: error: --output is given twice\n");
  EXPECT_EQ(Invoke({"a", "--json", "--json"}).err,
            "refit-test: error: --json is given twice\n");
}

TEST(ArgsTest, TellsWhichFlagsWereGiven) {
  EXPECT_EQ(Invoke({"a", "-o", "none", "--json"}).args.flags,
            (std::vector<std::string_view>{"--output", "--json"}));
}

TEST(ArgsTest, ArgumentsAreCounted) {
  EXPECT_EQ(Invoke({}).err,
            "refit-test: error: missing argument; usage: refit-test PLAN [-o "
            "FILE]\n");
  EXPECT_EQ(Invoke({"a", "b", "c"}).err,
            "refit-test: error: unexpected argument 'c'; usage: refit-test "
            "PLAN [-o FILE]\n");
}

int ThrowNothing(int, char**) { return 1; }
int ThrowBadAlloc(int, char**) { throw std::bad_alloc(); }
int ThrowError(int, char**) { throw std::runtime_error("no such thing"); }
int ThrowInt(int, char**) { throw 7; }
int ThrowInThread(int, char**) {
  std::thread([] { throw std::bad_alloc(); }).join();
  return 0;
}

TEST(RunToolTest, WhatAMainThrowsIsAnErrorLikeOthers) {
  const auto run = [](int (*body)(int, char**)) {
    testing::internal::CaptureStderr();
    const int status = RunTool("refit-test", body, 0, nullptr);
    return std::to_string(status) + testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(run(ThrowNothing), "1");
  EXPECT_EQ(run(ThrowBadAlloc), "2refit-test: error: out of memory\n");
  EXPECT_EQ(run(ThrowError), "2refit-test: error: no such thing\n");
  EXPECT_EQ(run(ThrowInt), "2refit-test: error: unknown exception\n");
}

TEST(RunToolDeathTest, WhatAThreadThrowsEndsTheProcessLikewise) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(RunTool("refit-test", ThrowInThread, 0, nullptr),
              testing::ExitedWithCode(2), "refit-test: error: out of memory");
}

}  // namespace
}  // namespace refit
