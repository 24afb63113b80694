#include "report/report.h"

#include <gtest/gtest.h>

#include <string>

#include "report/data_writer.h"
#include "report/page.h"

namespace refit::report {
namespace {

TEST(ReportPageTest, DataStandsWhereTheMarkIsAndEndsNoScript) {
  const std::string page = ReportPage(R"({"a":"</script><!-- & -->"})");
  EXPECT_NE(
      page.find(
          R"(>{"a":"\u003c/script\u003e\u003c!-- \u0026 --\u003e"}</script>)"),
      std::string::npos);
  EXPECT_EQ(page.find(kDataMark), std::string::npos);
}

TEST(ReportPageTest, ThePageAsksForNothing) {
  const std::string page = ReportPage("{}");
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  for (const char* word : {"http:", "https:", "src=", "@import", "url(",
                           "innerHTML", "insertAdjacentHTML", "eval("}) {
    EXPECT_EQ(page.find(word), std::string::npos) << word;
  }
}

TEST(DataWriterTest, TextThatIsNotUtf8GetsReplacements) {
  DataWriter data;
  data.Open();
  data.FileName("file", "folder/a\xff\xc3\xa4\xc3.refit");
  data.FileName("stream", "-");
  data.Close();
  EXPECT_EQ(data.Take(),
            "{\"file\":\"a\xef\xbf\xbd\xc3\xa4\xef\xbf\xbd.refit\","
            "\"stream\":\"standard input\"}");
}

TEST(DataWriterTest, NamesStandOnce) {
  DataWriter data;
  data.Open();
  data.Name("a", "x");
  data.Names("b", {"y", "x"});
  data.Real("nothing", 1.0 / 0.0);
  data.WriteNames("names");
  data.Close();
  EXPECT_EQ(data.Take(),
            R"({"a":0,"b":[1,0],"nothing":null,"names":["x","y"]})");
}

}  // namespace
}  // namespace refit::report
