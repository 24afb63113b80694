#include "report/report.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "report/data_writer.h"
#include "report/page.h"
#include "tests/compiler/compile_testing.h"
#include "tests/compiler/make_compact.h"
#include "tests/plan/plan_spec.h"

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
  data.OpenObject();
  data.FileName("file", "folder/a\xff\xc3\xa4\xc3.refit");
  data.FileName("stream", "-");
  data.CloseObject();
  EXPECT_EQ(data.Take(),
            "{\"file\":\"a\xef\xbf\xbd\xc3\xa4\xef\xbf\xbd.refit\","
            "\"stream\":\"standard input\"}");
}

TEST(DataWriterTest, NamesStandOnce) {
  DataWriter data;
  data.OpenObject();
  data.Name("a", "x");
  data.Names("b", {"y", "x"});
  data.Real("nothing", 1.0 / 0.0);
  data.WriteNames("names");
  data.CloseObject();
  EXPECT_EQ(data.Take(),
            R"({"a":0,"b":[1,0],"nothing":null,"names":["x","y"]})");
}

std::string DataOf(const PlanFile& plan, bool folds_equal_ranks) {
  const ProofResult proof = Prove(plan);
  EXPECT_TRUE(proof.valid) << proof.violation;
  simulator::Options options;
  options.record_rates = true;
  options.folds_equal_ranks = folds_equal_ranks;
  const auto simulation = simulator::Simulate(plan, options);
  EXPECT_TRUE(simulation.ok()) << simulation.status();
  return ReportData({.path = "plan.refit",
                     .plan = plan,
                     .proof = proof,
                     .simulation = *simulation});
}

std::string DataOf(const PlanSpec& spec) {
  return DataOf(OpenSpec(spec), /*folds_equal_ranks=*/false);
}

void ExpectHas(const std::string& data, const std::string& part) {
  EXPECT_NE(data.find(part), std::string::npos) << part << " in\n" << data;
}

// Each source sends two layers of half a projection, [2, 8] in bf16, to both
// destinations, and the norm of 8 to its first.
TEST(ReportDataTest, TrafficHasThePayloadOfEachPair) {
  ExpectHas(DataOf(SampleSpec()),
            R"("senders":[0,1],"receivers":[2,3],"values":[0,64,80],)"
            R"("row_of":[0,1],"rows":["2 1","1 2"])");
}

// The source sends rank 1 two halves of 16 bytes each. Rank 1 deals one to
// rank 2.
TEST(ReportDataTest, TrafficHasWhatARankDealsOut) {
  ExpectHas(DataOf(DealtSpec()),
            R"("senders":[0,1],"receivers":[1,2],"values":[0,16,32],)"
            R"("row_of":[0,1],"rows":["2 0","0 1"])");
}

TEST(ReportDataTest, SaysWhatIsDealtAndWhatTheTimeGoesTo) {
  const std::string data = DataOf(DealtSpec());
  ExpectHas(data, R"("relayed":16,"dealt":16},"dealt":{"ranks":1,"busiest":1,)"
                  R"("busiest_bytes":16,"receivers":"2"})");
  ExpectHas(data, R"("idle":[{"during":"starts of rounds")");
}

TEST(ReportDataTest, CoverageAddsUpToWhatIsProved) {
  const std::string data = DataOf(SampleSpec());
  // Of each of two destinations: two layers of [4, 8], and the norm of 8.
  ExpectHas(data, R"("written":144,)");
  // A row of padding in each layer.
  ExpectHas(data, R"("filled":32,)");
  ExpectHas(data, R"("proved_elements":176,)");
  ExpectHas(data,
            R"("unmoved_params":[{"name":"lm_head.weight","reason":"tied")");
}

TEST(ReportDataTest, RanksThatHoldTheSameAreOneShard) {
  ExpectHas(DataOf(SampleSpec()), R"("shard":[0,1,0,0])");
}

// Two trainers of two ranks, each of which feeds an engine of four: the longest
// operations are those of all ranks.
TEST(ReportDataTest, EqualRanksThatAreSimulatedOnceAreAllShown) {
  const auto side = [](int shards) {
    return R"({"layout": "generic", "meshes": {"m": {"axes": {"dp": 2, "tp": )" +
           std::to_string(shards) +
           R"x(}}}, "tensors": [{"match": "*", "mesh": "m",
              "placements": ["Replicate", "Shard(0)"]}]})x";
  };
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [960, 640], "dtype": "bf16"},
                    {"name": "v", "shape": [240, 33], "dtype": "fp32"})",
                 side(2), side(4),
                 R"(, "topology": {"hosts": [0,0, 2,2, 1,1,1,1, 3,3,3,3]},
                     "options": {"bucket_bytes": 65536})"),
      MakeCompact);
  const std::string data = DataOf(plan, /*folds_equal_ranks=*/true);
  EXPECT_EQ(data, DataOf(plan, /*folds_equal_ranks=*/false));
  ExpectHas(data, R"("rank":3)");
}

TEST(RefitReportTest, APlanThatIsNotValidGetsNoPage) {
  PlanSpec spec = SampleSpec();
  for (PlanSpec::Program& program : spec.programs) program.messages.clear();
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / "refit-report-not-valid";
  std::filesystem::create_directories(folder);
  const std::vector<uint8_t> bytes = BuildPlan(spec);
  std::ofstream(folder / "plan.refit", std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  const std::string command = "cd " + folder.string() +
                              " && " REFIT_REPORT_TOOL
                              " plan.refit -o page.html 2>said";
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 1);
  std::string said;
  std::getline(std::ifstream(folder / "said"), said);
  EXPECT_EQ(said.find("refit-report: error: plan.refit: not valid; "), 0u)
      << said;
  EXPECT_FALSE(std::filesystem::exists(folder / "page.html"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace refit::report
