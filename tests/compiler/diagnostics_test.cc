#include "compiler/diagnostics.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

Place At(std::string text, int64_t offset) {
  return {.file = std::make_shared<const SourceFile>(
              SourceFile{.path = "job.json", .text = std::move(text)}),
          .offset = offset};
}

std::string Render(const Place& place, std::string message) {
  Diagnostics diagnostics;
  diagnostics.Error(place, std::move(message));
  return diagnostics.Render();
}

TEST(DiagnosticsTest, ShowsTheSourceLineWithACaret) {
  EXPECT_EQ(Render(At("{\n  \"tp\": 3\n}\n", 10), "tp is 3; wanted 4"),
            "job.json:2:9: error: tp is 3; wanted 4\n"
            "    2 |   \"tp\": 3\n"
            "      |         ^\n");
}

TEST(DiagnosticsTest, RepeatsTabsBelowTabs) {
  EXPECT_EQ(Render(At("\t\"tp\":\t3", 7), "x"),
            "job.json:1:8: error: x\n"
            "    1 | \t\"tp\":\t3\n"
            "      | \t     \t^\n");
}

TEST(DiagnosticsTest, CountsColumnsInCharacters) {
  EXPECT_EQ(Render(At("\"ä€\": 3", 9), "x"),
            "job.json:1:7: error: x\n"
            "    1 | \"ä€\": 3\n"
            "      |       ^\n");
}

TEST(DiagnosticsTest, CutsALongLineAroundTheColumn) {
  const std::string text = std::string(500, 'a') + "!" + std::string(500, 'b');
  EXPECT_EQ(Render(At(text, 500), "x"),
            absl::StrCat("job.json:1:501: error: x\n    1 | …",
                         std::string(64, 'a'), "!", std::string(31, 'b'),
                         "…\n      |  ", std::string(64, ' '), "^\n"));
}

TEST(DiagnosticsTest, LeavesCarriageReturnsOut) {
  EXPECT_EQ(Render(At("{\r\n  3\r\n}", 5), "x"),
            "job.json:2:3: error: x\n"
            "    2 |   3\n"
            "      |   ^\n");
}

TEST(DiagnosticsTest, EndOfTextIsAPlace) {
  EXPECT_EQ(Render(At("{", 1), "x"),
            "job.json:1:2: error: x\n"
            "    1 | {\n"
            "      |  ^\n");
}

TEST(DiagnosticsTest, ControlCharactersDoNotReachTheTerminal) {
  EXPECT_EQ(Render(At("\x1b[2J", 1), "found \x1b[2J"),
            "job.json:1:2: error: found ?[2J\n"
            "    1 | ?[2J\n"
            "      |  ^\n");
}

TEST(DiagnosticsTest, FileWithoutTextIsNamedAlone) {
  EXPECT_EQ(Render(At("", 7), "file is truncated"),
            "job.json: error: file is truncated\n");
}

TEST(DiagnosticsTest, NoFileLeavesTheMessage) {
  EXPECT_EQ(Render({}, "x"), "error: x\n");
}

TEST(DiagnosticsTest, CountsErrorsBeyondTwenty) {
  Diagnostics diagnostics;
  for (int i = 0; i < 23; ++i) diagnostics.Error({}, "x");
  std::string expected;
  for (int i = 0; i < 20; ++i) expected += "error: x\n";
  EXPECT_EQ(diagnostics.Render(), expected + "… and 3 more errors\n");
  EXPECT_EQ(diagnostics.error_count(), 23);
}

TEST(NearestWordTest, FindsInsertedMissingWrongAndSwappedLetters) {
  EXPECT_EQ(NearestWord("tensor_paralel", {"data_parallel", "tensor_parallel"}),
            "tensor_parallel");
  EXPECT_EQ(NearestWord("modle", {"mtp", "model"}), "model");
  EXPECT_EQ(NearestWord("vlm", {"vllm", "fsdp"}), "vllm");
}

TEST(NearestWordTest, DoesNotGuessAtAnotherWord) {
  EXPECT_EQ(NearestWord("banana", {"vllm", "megatron"}), "");
  EXPECT_EQ(NearestWord("", {"a"}), "");
  EXPECT_EQ(NearestWord("x", {"a"}), "");
}

TEST(DiagnosticsTest, WarningsStandBesideErrorsAndAreNone) {
  Diagnostics diagnostics;
  diagnostics.Warning(At("{\n  \"tp\": 3\n}\n", 10), "tp is odd");
  EXPECT_TRUE(diagnostics.ok());
  EXPECT_EQ(diagnostics.Render(),
            "job.json:2:9: warning: tp is odd\n"
            "    2 |   \"tp\": 3\n"
            "      |         ^\n");
  diagnostics.Error({}, "x");
  diagnostics.Warning({}, "y");
  EXPECT_EQ(diagnostics.error_count(), 1);
  EXPECT_EQ(diagnostics.WarningLines(),
            std::vector<std::string>(
                {"job.json:2:9: warning: tp is odd", "warning: y"}));
}

TEST(DiagnosticsTest, WarningsCountAsErrorsWhereThatIsAsked) {
  Diagnostics diagnostics(/*warnings_are_errors=*/true);
  diagnostics.Warning({}, "tp is odd");
  EXPECT_FALSE(diagnostics.ok());
  EXPECT_EQ(diagnostics.Render(), "error: tp is odd\n");
  EXPECT_TRUE(diagnostics.WarningLines().empty());
}

TEST(DiagnosticsTest, ManyWarningsHideNoError) {
  Diagnostics diagnostics;
  for (int i = 0; i < 22; ++i) diagnostics.Warning({}, "w");
  diagnostics.Error({}, "e");
  std::string expected;
  for (int i = 0; i < 20; ++i) expected += "warning: w\n";
  EXPECT_EQ(diagnostics.Render(),
            expected + "error: e\n… and 2 more warnings\n");
}

}  // namespace
}  // namespace refit
