#include "compiler/job/job.h"

#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/keys.h"
#include "tests/compiler/temporary_directory.h"
#include "topology/machines.h"

namespace refit {
namespace {

struct ReadResult {
  std::optional<Job> job;
  std::string errors;
};

ReadResult Read(std::string_view text) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("job.json", text);
  Diagnostics diagnostics;
  ReadResult result;
  result.job = ReadJob(path, diagnostics, "refitc");
  result.errors = directory.Relative(diagnostics.Render());
  return result;
}

// A job whose source is `source` and which is right otherwise.
std::string WithSource(const std::string& source) {
  return "{\"model\": \"config.json\",\n \"source\": " + source +
         ",\n \"destination\": {\"layout\": \"vllm\"}}";
}

TEST(JobTest, ReadsTheExampleOfTheInterface) {
  const ReadResult result = Read(R"({
      "model": "config.json",                     // a comment
      "source":      {"layout": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4, "data_parallel": 2},
      "destination": {"layout": "vllm", "tensor_parallel": 4, "replicas": 2, "dtype": "bf16"},
      "topology":    {"gpus_per_host": 8},        /* another */
      "options":     {"bucket_bytes": 268435456, "exclude": ["mtp.*"]}
    })");
  ASSERT_EQ(result.errors, "");
  const Job& job = *result.job;
  EXPECT_EQ(job.source.key, "source");
  EXPECT_EQ(job.source.layout.value, LayoutKind::kMegatron);
  EXPECT_EQ(job.source.tensor_parallel.value, 2);
  EXPECT_EQ(job.source.pipeline_parallel.value, 2);
  EXPECT_EQ(job.source.expert_parallel.value, 4);
  EXPECT_EQ(job.source.data_parallel.value, 2);
  EXPECT_EQ(job.source.make_vocab_size_divisible_by.value, 128);
  EXPECT_FALSE(job.source.dtype.given);
  EXPECT_EQ(job.destination.layout.value, LayoutKind::kVllm);
  EXPECT_EQ(job.destination.replicas.value, 2);
  EXPECT_EQ(job.destination.dtype.value, DType::kBf16);
  EXPECT_FALSE(job.destination.expert_parallel_enabled.value);
  EXPECT_EQ(job.topology.gpus_per_host.value, 8);
  EXPECT_EQ(job.options.exclude.value, std::vector<std::string>{"mtp.*"});
  EXPECT_FALSE(job.colocated.value);
}

TEST(JobTest, ModelPathsAreRelativeToTheJob) {
  const TemporaryDirectory directory;
  directory.Write("models/config.json", "{}");
  const std::string path =
      directory.Write("jobs/job.json",
                      R"({"model": "../models", "source": {"layout": "vllm"},
          "destination": {"layout": "vllm"}})");
  Diagnostics diagnostics;
  const std::optional<Job> job = ReadJob(path, diagnostics, "refitc");
  ASSERT_TRUE(job.has_value()) << diagnostics.Render();
  EXPECT_EQ(job->model.config_path,
            directory.Path("jobs/../models/config.json"));
}

TEST(JobTest, ReadsListedParameters) {
  const ReadResult result = Read(R"({
      "model": {"parameters": [{"name": "a", "shape": [2, 3], "dtype": "int8"}]},
      "source": {"layout": "vllm"}, "destination": {"layout": "vllm"}})");
  ASSERT_EQ(result.errors, "");
  const ParameterSpec& parameter = result.job->model.parameters->at(0);
  EXPECT_EQ(parameter.name, "a");
  EXPECT_EQ(parameter.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(parameter.dtype, DType::kInt8);
}

TEST(JobTest, ExpertParallelIsAFlagForVllm) {
  const ReadResult result =
      Read(WithSource(R"({"layout": "vllm", "expert_parallel": true})"));
  ASSERT_EQ(result.errors, "");
  EXPECT_TRUE(result.job->source.expert_parallel_enabled.value);
  EXPECT_EQ(result.job->source.expert_parallel.value, 1);
}

TEST(JobTest, ReadsThePlacementOfExperts) {
  const auto read = [](const std::string& experts) {
    const ReadResult result = Read(
        WithSource("{\"layout\": \"vllm\", \"experts\": " + experts + "}"));
    EXPECT_EQ(result.errors, "");
    return result.job->source.experts.value;
  };
  using Kind = ExpertPlacement::Kind;
  EXPECT_EQ(read(R"({})").kind, Kind::kLinear);
  EXPECT_EQ(read(R"({"placement": "round_robin"})").kind, Kind::kRoundRobin);
  EXPECT_EQ(read(R"({"num_redundant_experts": 4})").redundant_experts, 4);
  const ExpertPlacement table = read(R"({"physical_to_logical": [1, 0, 1]})");
  EXPECT_EQ(table.kind, Kind::kTable);
  EXPECT_EQ(table.physical_to_logical,
            (std::vector<std::vector<int64_t>>{{1, 0, 1}}));
  EXPECT_EQ(
      read(R"({"physical_to_logical": [[1, 0], [0, 1]]})").physical_to_logical,
      (std::vector<std::vector<int64_t>>{{1, 0}, {0, 1}}));
}

TEST(JobTest, PlacementOfExpertsIsSaidOnce) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "experts":
  {"placement": "linear", "physical_to_logical": [0]}})"))
          .errors,
      "job.json:3:50: error: source.experts.physical_to_logical says where "
      "every expert stands; wanted no key \"placement\" beside it\n"
      "    3 |   {\"placement\": \"linear\", \"physical_to_logical\": "
      "[0]}},\n"
      "      |                                                  ^\n");
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "experts":
  {"placement": "round_robin", "num_redundant_experts": 2}})"))
          .errors,
      "job.json:3:57: error: source.experts.num_redundant_experts is 2; "
      "placement \"round_robin\" has no redundant experts\n"
      "    3 |   {\"placement\": \"round_robin\", "
      "\"num_redundant_experts\": 2}},\n"
      "      |                                                         ^\n");
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "experts":
  {"placement": "round-robin"}})"))
          .errors,
      "job.json:3:17: error: unknown placement \"round-robin\"; did you mean "
      "\"round_robin\"?\n"
      "    3 |   {\"placement\": \"round-robin\"}},\n"
      "      |                 ^\n");
}

TEST(JobTest, EmbeddingOfSglangFollowsItsAttention) {
  const auto read = [](const std::string& keys) {
    const ReadResult result =
        Read(WithSource("{\"layout\": \"sglang\"" + keys + "}"));
    EXPECT_EQ(result.errors, "");
    return result.job->source.embedding.value;
  };
  EXPECT_EQ(read(""), EmbeddingCut::kTensor);
  EXPECT_EQ(read(R"(, "tensor_parallel": 4, "dp_attention": 2)"),
            EmbeddingCut::kAttention);
  EXPECT_EQ(read(R"(, "dp_attention": 2, "embedding": "replicated")"),
            EmbeddingCut::kReplicated);
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "sglang", "embedding": "rows"})")).errors,
      "job.json:2:46: error: source.embedding is \"rows\"; wanted tensor, "
      "attention or replicated\n"
      "    2 |  \"source\": {\"layout\": \"sglang\", \"embedding\": "
      "\"rows\"},\n"
      "      |                                              ^\n");
}

TEST(JobTest, DefaultsHaveThePlaceOfTheirSide) {
  const ReadResult result = Read(WithSource(R"({"layout": "megatron"})"));
  ASSERT_EQ(result.errors, "");
  EXPECT_FALSE(result.job->source.tensor_parallel.given);
  EXPECT_EQ(result.job->source.tensor_parallel.place.offset,
            result.job->source.place.offset);
  EXPECT_NE(result.job->source.layers_per_stage.place.file, nullptr);
}

TEST(JobTest, AnAxisOfOneIsRightForEveryLayout) {
  const ReadResult result = Read(WithSource(
      R"({"layout": "vllm", "context_parallel": 1,
          "virtual_pipeline_parallel": 1})"));
  EXPECT_EQ(result.errors, "");
}

TEST(JobTest, UnknownKeyNamesTheNearestKnownKey) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "megatron", "tensor_paralel": 2})")).errors,
      "job.json:2:35: error: unknown key \"tensor_paralel\" in source; did you "
      "mean \"tensor_parallel\"?\n"
      "    2 |  \"source\": {\"layout\": \"megatron\", \"tensor_paralel\": "
      "2},\n"
      "      |                                   ^\n");
}

TEST(JobTest, UnknownKeyUnlikeAnyNamesAllKnownKeys) {
  EXPECT_EQ(Read(R"({"model": "c", "source": {"layout": "vllm"},
 "destination": {"layout": "vllm"},
 "topology": {"racks": 2}})")
                .errors,
            "job.json:3:15: error: unknown key \"racks\" in topology; wanted "
            "gpus_per_host, hosts, peer_gigabytes_per_second, "
            "network_gigabytes_per_second, transport, machine, "
            "hosts_per_nvlink_domain, "
            "gpus_per_nic, hosts_per_leaf, rails or spine_oversubscription\n"
            "    3 |  \"topology\": {\"racks\": 2}}\n"
            "      |               ^\n");
}

TEST(JobTest, UnknownKeyUnlikeAnyNamesTheKeysOfItsLayoutAlone) {
  const std::string errors =
      Read(WithSource(R"({"layout": "fsdp", "shards": 2})")).errors;
  EXPECT_EQ(errors.substr(0, errors.find('\n')),
            "job.json:2:31: error: unknown key \"shards\" in source; wanted "
            "layout, tensor_parallel, data_parallel, replicas, "
            "expert_parallel, dtype, scale_fmt, version, fused_experts, "
            "expert_shard_dim, mtp or vision");
}

TEST(JobTest, AKeyShortenedAsFlagsAreNamesTheKey) {
  for (const auto& [layout, flag, key] :
       std::vector<std::array<std::string, 3>>{
           {"vllm", "tp", "tensor_parallel"},
           {"sglang", "dp_size", "data_parallel"},
           {"megatron", "etp_size", "expert_tensor_parallel"}}) {
    const std::string errors = Read(WithSource("{\"layout\": \"" + layout +
                                               "\", \"" + flag + "\": 2}"))
                                   .errors;
    EXPECT_NE(errors.find("unknown key \"" + flag +
                          "\" in source; did you mean \"" + key + "\"?\n"),
              std::string::npos)
        << errors;
  }
}

TEST(JobTest, KeyOfAnotherLayoutIsAnError) {
  EXPECT_EQ(Read(WithSource(R"({"layout": "vllm",
   "virtual_pipeline_parallel": 2})"))
                .errors,
            "job.json:3:4: error: source.virtual_pipeline_parallel is a key of "
            "layout megatron; source.layout is vllm\n"
            "    3 |    \"virtual_pipeline_parallel\": 2},\n"
            "      |    ^\n");
}

TEST(JobTest, KeyOfAnotherObjectSaysWhereItBelongs) {
  const std::string sides = R"("model": "c", "source": {"layout": "vllm"}, )";
  const std::string vllm = R"("destination": {"layout": "vllm"})";
  for (const auto& [job, error] : std::vector<std::array<std::string, 2>>{
           {vllm + R"(, "topology": {"peer": "staged"})",
            "topology.peer is a key of options"},
           {vllm + R"(, "topology": {"replicas": 2})",
            "topology.replicas is a key of source or destination"},
           {vllm + R"(, "exclude": [])", "\"exclude\" is a key of options"},
           {vllm + R"(, "hosts": [0, 0])", "\"hosts\" is a key of topology"},
           {vllm + R"(, "options": {"gpus_per_host": 8})",
            "options.gpus_per_host is a key of topology"},
           {R"("destination": {"layout": "vllm", "bucket_bytes": 4096})",
            "destination.bucket_bytes is a key of options"},
           {R"("destination": {"layout": "vllm", "colocated": true})",
            "destination.colocated is a key of the job itself, beside "
            "\"source\""}}) {
    const std::string errors = Read("{" + sides + job + "}").errors;
    EXPECT_NE(errors.find("error: " + error + "\n"), std::string::npos)
        << errors;
    EXPECT_EQ(errors.find("error: "), errors.rfind("error: ")) << errors;
  }
}

TEST(JobTest, AnyKeyOfAnotherObjectSaysWhereItBelongs) {
  const std::string errors =
      Read(R"({"model": "c", "source": {"layout": "vllm"},
 "destination": {"layout": "vllm"},
 "topology": {"router_dtype": "fp32"}})")
          .errors;
  EXPECT_EQ(errors.substr(0, errors.find('\n')),
            "job.json:3:15: error: topology.router_dtype is a key of source or "
            "destination");
}

// The rows of the tables between two headings of docs/jobs.md.
std::multiset<std::string> DocumentedRows(std::string_view from,
                                          std::string_view to) {
  std::ifstream file(REFIT_SOURCE_DIR "/docs/jobs.md");
  std::multiset<std::string> rows;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line == from) inside = true;
    if (line == to) inside = false;
    if (inside && line.starts_with("| `")) rows.insert(line);
  }
  return rows;
}

TEST(JobTest, TheDocsListEveryKeyAsItIsRead) {
  struct Table {
    JobObject object;
    std::string_view from, to;
  };
  for (const Table& table :
       {Table{JobObject::kRoot, "# The job file", "## `model`"},
        Table{JobObject::kModel, "### Keys of `model`",
              "### Rules of a family"},
        Table{JobObject::kSide, "## `source` and `destination`",
              "### Rank order"},
        Table{JobObject::kTopology, "## `topology`", "## `colocated`"},
        Table{JobObject::kOptions, "## `options`", "### `peer`"}}) {
    const std::vector<std::string> keys = DocumentedKeys(table.object);
    EXPECT_EQ(DocumentedRows(table.from, table.to),
              std::multiset<std::string>(keys.begin(), keys.end()));
  }
}

TEST(JobTest, ExpertParallelOfVllmIsNoNumber) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "expert_parallel": 4})")).errors,
      "job.json:2:50: error: source.expert_parallel is 4; wanted true or "
      "false\n"
      "    2 |  \"source\": {\"layout\": \"vllm\", \"expert_parallel\": "
      "4},\n"
      "      |                                                  ^\n");
}

TEST(JobTest, SizesAreAtLeastOne) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "tensor_parallel": 0})")).errors,
      "job.json:2:50: error: source.tensor_parallel is 0; wanted an "
      "integer from 1 to 1000000\n"
      "    2 |  \"source\": {\"layout\": \"vllm\", \"tensor_parallel\": "
      "0},\n"
      "      |                                                  ^\n");
}

TEST(JobTest, SizesAreIntegers) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "tensor_parallel": 2.0})")).errors,
      "job.json:2:50: error: source.tensor_parallel is 2.0; wanted an "
      "integer from 1 to 1000000\n"
      "    2 |  \"source\": {\"layout\": \"vllm\", \"tensor_parallel\": "
      "2.0},\n"
      "      |                                                  ^\n");
}

TEST(JobTest, UnknownLayoutNamesTheNearest) {
  EXPECT_EQ(Read(WithSource(R"({"layout": "megatorn"})")).errors,
            "job.json:2:23: error: unknown layout \"megatorn\"; did you mean "
            "\"megatron\"?\n"
            "    2 |  \"source\": {\"layout\": \"megatorn\"},\n"
            "      |                       ^\n");
}

TEST(JobTest, ALayoutInOtherLettersNamesTheLayout) {
  for (const auto& [found, layout] : std::vector<std::array<std::string, 2>>{
           {"vLLM", "vllm"}, {"SGLang", "sglang"}, {"FSDP", "fsdp"}}) {
    const std::string errors =
        Read(WithSource("{\"layout\": \"" + found + "\"}")).errors;
    EXPECT_NE(errors.find("unknown layout \"" + found + "\"; did you mean \"" +
                          layout + "\"?\n"),
              std::string::npos)
        << errors;
  }
}

TEST(JobTest, OtherDTypesAreNotSupportedYet) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "dtype": "int8"})")).errors,
      "job.json:2:40: error: source.dtype int8 is not supported yet; wanted "
      "bf16, fp16, fp32, fp8_e4m3_block128 or mxfp8_e4m3\n"
      "    2 |  \"source\": {\"layout\": \"vllm\", \"dtype\": "
      "\"int8\"},\n"
      "      |                                        ^\n");
}

TEST(JobTest, ASideMayBeQuantized) {
  const auto read =
      Read(WithSource(R"({"layout": "vllm", "dtype": "fp8_e4m3_block128",
                          "scale_fmt": "ue8m0"})"));
  ASSERT_EQ(read.errors, "");
  const SideSpec& source = read.job->source;
  EXPECT_FALSE(source.dtype.given);
  EXPECT_EQ(source.quantized.value.block_rows, 128);
  EXPECT_EQ(source.quantized.value.scale_format, fb::ScaleFormat::kUe8m0);
}

TEST(JobTest, ScaleFormatsAreThoseOfBlocks) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "scale_fmt": "ue8m0"})")).errors,
      "job.json:2:44: error: source.scale_fmt goes with dtype "
      "fp8_e4m3_block128 alone; source.dtype is not given\n"
      "    2 |  \"source\": {\"layout\": \"vllm\", \"scale_fmt\": "
      "\"ue8m0\"},\n"
      "      |                                            ^\n");
}

TEST(JobTest, ScaleFormatsHaveNames) {
  const std::string errors =
      Read(WithSource(R"({"layout": "vllm", "dtype": "fp8_e4m3_block128",
 "scale_fmt": "fp32"})"))
          .errors;
  EXPECT_EQ(errors.substr(0, errors.find('\n')),
            "job.json:3:15: error: source.scale_fmt is \"fp32\"; wanted "
            "\"ue8m0\"");
}

TEST(JobTest, UnknownDTypeIsAnError) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "dtype": "bf61"})")).errors,
      "job.json:2:40: error: source.dtype is \"bf61\"; wanted bf16, fp16, "
      "fp32, fp8_e4m3_block128 or mxfp8_e4m3\n"
      "    2 |  \"source\": {\"layout\": \"vllm\", \"dtype\": "
      "\"bf61\"},\n"
      "      |                                        ^\n");
}

TEST(JobTest, ReportsAllMissingKeysInOneRun) {
  EXPECT_EQ(Read("{\"source\": {}}").errors,
            "job.json:1:1: error: missing key \"model\"; wanted the path of a "
            "config.json, {\"config\": PATH, \"rules\": PATH}, "
            "{\"safetensors\": PATH} or {\"parameters\": […]}\n"
            "    1 | {\"source\": {}}\n"
            "      | ^\n"
            "job.json:1:12: error: missing key \"layout\" in source; wanted "
            "megatron, fsdp, vllm, sglang or generic\n"
            "    1 | {\"source\": {}}\n"
            "      |            ^\n"
            "job.json:1:1: error: missing key \"destination\"; wanted an "
            "object\n"
            "    1 | {\"source\": {}}\n"
            "      | ^\n");
}

TEST(JobTest, BothSidesTogetherAreLimited) {
  EXPECT_EQ(
      Read(WithSource(R"({"layout": "vllm", "tensor_parallel": 65536})"))
          .errors,
      "job.json:1:1: error: source and destination have 65537 ranks together; "
      "wanted at most 65536\n"
      "    1 | {\"model\": \"config.json\",\n"
      "      | ^\n");
  EXPECT_EQ(
      Read(WithSource("{\"layout\": \"megatron\",\n"
                      "\"tensor_parallel\": 1000000, \"data_parallel\": "
                      "1000000, \"replicas\": 1000000, "
                      "\"context_parallel\": 1000000}"))
          .errors,
      "job.json:2:12: error: source has more than 65536 ranks, the most a job "
      "may have\n"
      "    2 |  \"source\": {\"layout\": \"megatron\",\n"
      "      |            ^\n");
}

TEST(JobTest, HostsAreGivenForEveryRank) {
  EXPECT_EQ(Read(R"({"model": "c", "source": {"layout": "vllm"},
 "destination": {"layout": "vllm", "replicas": 2},
 "topology": {"hosts": [0, 1]}})")
                .errors,
            "job.json:3:24: error: topology.hosts has 2 ranks; wanted 3, the 1 "
            "of the source and the 2 of the destination\n"
            "    3 |  \"topology\": {\"hosts\": [0, 1]}}\n"
            "      |                        ^\n");
}

std::string WithTopology(std::string_view topology) {
  return absl::StrFormat(R"({"model": "c", "source": {"layout": "vllm"},
 "destination": {"layout": "vllm", "replicas": 2},
 "topology": %s})",
                         topology);
}

TEST(JobTest, AMachineGivesWhatTheJobDoesNot) {
  const ReadResult rack = Read(WithTopology(
      R"({"network_gigabytes_per_second": 25, "machine": "gb200-nvl72"})"));
  ASSERT_EQ(rack.errors, "");
  EXPECT_EQ(rack.job->topology.machine.value, "gb200-nvl72");
  EXPECT_EQ(rack.job->topology.gpus_per_host.value, 4);
  EXPECT_EQ(rack.job->topology.hosts_per_nvlink_domain.value, 18);
  EXPECT_EQ(rack.job->topology.peer_gigabytes_per_second.value, 740);
  EXPECT_EQ(rack.job->topology.network_gigabytes_per_second.value, 25);
  // The job's hosts are in the place of the machine's number of GPUs.
  const ReadResult hosts =
      Read(WithTopology(R"({"machine": "hgx-h200", "hosts": [0, 1, 1]})"));
  ASSERT_EQ(hosts.errors, "");
  EXPECT_FALSE(hosts.job->topology.gpus_per_host.given);
}

// Every machine's file is read as a job's topology, and names its figures.
TEST(JobTest, MachinesAreWholeTopologies) {
  ASSERT_EQ(MachineNames(),
            (std::vector<std::string_view>{"gb200-nvl72", "hgx-b200",
                                           "hgx-h100", "hgx-h200"}));
  for (const std::string_view name : MachineNames()) {
    const ReadResult read =
        Read(WithTopology(absl::StrFormat(R"({"machine": "%s"})", name)));
    ASSERT_EQ(read.errors, "");
    const TopologySpec& topology = read.job->topology;
    EXPECT_TRUE(topology.gpus_per_host.given) << name;
    EXPECT_TRUE(topology.hosts_per_nvlink_domain.given) << name;
    EXPECT_TRUE(topology.gpus_per_nic.given) << name;
    EXPECT_TRUE(topology.peer_gigabytes_per_second.given) << name;
    EXPECT_TRUE(topology.network_gigabytes_per_second.given) << name;
  }
}

TEST(JobTest, HostsByNameAreOneError) {
  EXPECT_EQ(Read(R"({"model": "c", "source": {"layout": "vllm"},
 "destination": {"layout": "vllm", "replicas": 2},
 "topology": {"hosts": [0, "a", "b"]}})")
                .errors,
            "job.json:3:28: error: topology.hosts[1] is \"a\"; wanted an "
            "integer from 0 to 65535 (1 more of this list)\n"
            "    3 |  \"topology\": {\"hosts\": [0, \"a\", \"b\"]}}\n"
            "      |                            ^\n");
}

// RapidJSON made tiny numbers out of these zeros, and NaN of 1.8e308.
TEST(JobTest, NumbersAreWhatTheySay) {
  const auto error_of = [](const std::string& number) {
    const std::string errors =
        Read(R"({"model": "config.json", "source": {"layout": "vllm"},
 "destination": {"layout": "vllm"},
 "topology": {"peer_gigabytes_per_second": )" +
             number + "}}")
            .errors;
    return errors.substr(0, errors.find('\n'));
  };
  const std::string is_zero =
      "job.json:3:44: error: topology.peer_gigabytes_per_second is 0.0; wanted "
      "a number above 0";
  for (const std::string zero :
       {"0e300", "0.0e308", "5e-400",
        "0.0000000000000000000000000000000000000000000000000000000000e350"}) {
    EXPECT_EQ(error_of(zero), is_zero) << zero;
  }
  for (const std::string number : {"0.1", "1e308", "18446744073709551616"}) {
    EXPECT_EQ(error_of(number), "") << number;
  }
  for (const std::string large : {"1.8e308", "-1.8e308", "1e999"}) {
    EXPECT_EQ(error_of(large), "job.json:3:44: error: number is too large")
        << large;
  }
}

TEST(JobTest, OptionsHaveRanges) {
  const ReadResult result = Read(R"({"model": "c",
 "source": {"layout": "vllm"}, "destination": {"layout": "vllm"},
 "options": {"bucket_bytes": 16,
             "network_peers": 0}})");
  EXPECT_EQ(result.errors,
            "job.json:3:30: error: options.bucket_bytes is 16; wanted an "
            "integer from 4096 to 1099511627776\n"
            "    3 |  \"options\": {\"bucket_bytes\": 16,\n"
            "      |                              ^\n"
            "job.json:4:31: error: options.network_peers is 0; wanted an "
            "integer from 1 to 65536\n"
            "    4 |              \"network_peers\": 0}}\n"
            "      |                               ^\n");
}

TEST(JobTest, AModelIsNamedInOneWay) {
  EXPECT_EQ(
      Read(R"({"model": {}, "source": {"layout": "vllm"},
 "destination": {"layout": "vllm"}})")
          .errors,
      "job.json:1:11: error: model has none of \"config\", \"safetensors\" "
      "and \"parameters\"; wanted one of them\n"
      "    1 | {\"model\": {}, \"source\": {\"layout\": \"vllm\"},\n"
      "      |           ^\n");
}

// What the file itself may look like.

TEST(JobFileTest, EmptyFile) {
  EXPECT_EQ(Read("").errors,
            "job.json: error: file is empty; wanted a JSON object\n");
}

TEST(JobFileTest, NotAnObject) {
  EXPECT_EQ(Read("[]").errors,
            "job.json:1:1: error: job is an array; wanted an object\n"
            "    1 | []\n"
            "      | ^\n");
}

TEST(JobFileTest, NotUtf8) {
  EXPECT_EQ(Read("{\"a\": \"\xff\"}").errors,
            "job.json: error: not UTF-8 text: byte 0xff at offset 7\n");
  EXPECT_EQ(Read(std::string_view("{\0}", 3)).errors,
            "job.json: error: not UTF-8 text: byte 0x00 at offset 1\n");
}

TEST(JobFileTest, MissingFileAndDirectory) {
  Diagnostics diagnostics;
  EXPECT_FALSE(ReadJob("no/such/job.json", diagnostics, "refitc").has_value());
  EXPECT_FALSE(ReadJob("/", diagnostics, "refitc").has_value());
  EXPECT_EQ(diagnostics.Render(),
            "no/such/job.json: error: cannot be opened: No such file or "
            "directory\n"
            "/: error: is a directory; wanted a file\n");
}

TEST(JobFileTest, ManyMegabytesAreRefusedUnread) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("job.json", "{");
  std::filesystem::resize_file(path, 100'000'000);
  Diagnostics diagnostics;
  EXPECT_FALSE(ReadJob(path, diagnostics, "refitc").has_value());
  EXPECT_EQ(directory.Relative(diagnostics.Render()),
            "job.json: error: file has 100000000 bytes; wanted at most "
            "67108864\n");
}

TEST(JobFileTest, EndlessInputIsRefused) {
  Diagnostics diagnostics;
  EXPECT_FALSE(ReadJob("/dev/zero", diagnostics, "refitc").has_value());
  EXPECT_EQ(diagnostics.Render(),
            "/dev/zero: error: file has more than 67108864 bytes; wanted at "
            "most 67108864\n");
}

TEST(JobFileTest, DeepNestingDoesNotOverflowTheStack) {
  const ReadResult result = Read(std::string(10'000'000, '['));
  EXPECT_EQ(result.errors,
            "job.json:1:65: error: values are nested deeper than 64 levels\n"
            "    1 | " +
                std::string(96, '[') +
                "…\n"
                "      | " +
                std::string(64, ' ') + "^\n");
}

struct SyntaxCase {
  std::string text;
  std::string error;
};

class JobSyntaxTest : public ::testing::TestWithParam<SyntaxCase> {};

TEST_P(JobSyntaxTest, IsReportedWhereItIs) {
  EXPECT_EQ(Read(GetParam().text).errors, GetParam().error);
}

INSTANTIATE_TEST_SUITE_P(
    Mistakes, JobSyntaxTest,
    ::testing::Values(
        SyntaxCase{"{\"model\": \"a\",}",
                   "job.json:1:15: error: found '}'; wanted a key in double "
                   "quotes\n"
                   "    1 | {\"model\": \"a\",}\n"
                   "      |               ^\n"},
        SyntaxCase{"{\"model\" \"a\"}",
                   "job.json:1:10: error: found '\"'; wanted ':' after the "
                   "key\n"
                   "    1 | {\"model\" \"a\"}\n"
                   "      |          ^\n"},
        SyntaxCase{"{\"model\": \"a\"\n \"source\": 1}",
                   "job.json:2:2: error: found '\"'; wanted ',' or '}' after a "
                   "value\n"
                   "    2 |  \"source\": 1}\n"
                   "      |  ^\n"},
        SyntaxCase{"{'a': 1}",
                   "job.json:1:2: error: found a single quotation mark; wanted "
                   "a key in double quotes\n"
                   "    1 | {'a': 1}\n"
                   "      |  ^\n"},
        SyntaxCase{"{\"a\": yes}",
                   "job.json:1:7: error: found 'yes'; wanted a value\n"
                   "    1 | {\"a\": yes}\n"
                   "      |       ^\n"},
        SyntaxCase{"{\"a\": [1 2]}",
                   "job.json:1:10: error: found '2'; wanted ',' or ']' after a "
                   "value\n"
                   "    1 | {\"a\": [1 2]}\n"
                   "      |          ^\n"},
        SyntaxCase{"{\"a\": 1\n\n",
                   "job.json:1:8: error: found the end of the file; wanted "
                   "',' or '}' after a value\n"
                   "    1 | {\"a\": 1\n"
                   "      |        ^\n"},
        SyntaxCase{"{} {}",
                   "job.json:1:4: error: found '{' after the end of the value\n"
                   "    1 | {} {}\n"
                   "      |    ^\n"},
        SyntaxCase{"{\"a\": \"b\n}",
                   "job.json:1:9: error: string has no closing quotation "
                   "mark\n"
                   "    1 | {\"a\": \"b\n"
                   "      |         ^\n"},
        SyntaxCase{"{\"a\": \"\x01\"}",
                   "job.json:1:8: error: control character in a string; wanted "
                   "it escaped\n"
                   "    1 | {\"a\": \"?\"}\n"
                   "      |        ^\n"},
        SyntaxCase{"{\"a\": \"\\q\"}",
                   "job.json:1:8: error: unknown escape in a string\n"
                   "    1 | {\"a\": \"\\q\"}\n"
                   "      |        ^\n"},
        SyntaxCase{"{ /* }",
                   "job.json:1:7: error: unfinished comment\n"
                   "    1 | { /* }\n"
                   "      |       ^\n"},
        SyntaxCase{"{\"a\": 1e999}",
                   "job.json:1:7: error: number is too large\n"
                   "    1 | {\"a\": 1e999}\n"
                   "      |       ^\n"},
        SyntaxCase{"{\"a\": 1, // \"a\": 2,\n \"a\": 3}",
                   "job.json:2:2: error: key \"a\" stands twice in this "
                   "object\n"
                   "    2 |  \"a\": 3}\n"
                   "      |  ^\n"}));

// Generic sides.

std::string Generic(const std::string& meshes, const std::string& tensors) {
  return WithSource("{\"layout\": \"generic\",\n  \"meshes\": " + meshes +
                    ",\n  \"tensors\": " + tensors + "}");
}
constexpr char kMesh[] = R"({"main": {"axes": {"dp": 2, "tp": 2}}})";

TEST(GenericSideTest, ReadsMeshesAndRules) {
  const ReadResult result = Read(Generic(
      R"({"main": {"axes": {"dp": 1, "tp": 2}, "ranks": [1, 0]},
          "all": {"axes": {"x": 3}}})",
      R"json([{"match": "*.q", "mesh": "main", "placements": ["R", "Shard(1)"],
           "rename": "engine.{name}", "dtype": "int8"},
          {"match": "*", "mesh": "all",
           "placements": ["_StridedShard(dim=0, sf=2)"]}])json"));
  ASSERT_EQ(result.errors, "");
  const GenericSpec& spec = result.job->source.generic;
  ASSERT_EQ(spec.meshes.size(), 2u);
  EXPECT_EQ(spec.meshes[0].axes, (std::vector<std::string>{"dp", "tp"}));
  EXPECT_EQ(spec.meshes[0].shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(spec.meshes[0].ranks, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(spec.meshes[1].ranks, (std::vector<int64_t>{0, 1, 2}));
  ASSERT_EQ(spec.tensors.size(), 2u);
  EXPECT_EQ(spec.tensors[0].placements[0].kind, Placement::Kind::kReplicate);
  EXPECT_EQ(spec.tensors[0].placements[1].kind, Placement::Kind::kShard);
  EXPECT_EQ(spec.tensors[0].placements[1].dim, 1);
  EXPECT_EQ(spec.tensors[0].rename, "engine.{name}");
  EXPECT_EQ(spec.tensors[0].dtype, DType::kInt8);
  EXPECT_EQ(spec.tensors[1].placements[0].kind, Placement::Kind::kStridedShard);
  EXPECT_EQ(spec.tensors[1].placements[0].split_factor, 2);
}

// The first line of what a generic side's mistake gives.
std::string FirstError(const std::string& meshes, const std::string& tensors) {
  const std::string errors = Read(Generic(meshes, tensors)).errors;
  return errors.substr(0, errors.find('\n'));
}

TEST(GenericSideTest, MeshesHaveRanks) {
  EXPECT_EQ(FirstError("{}", "[]"),
            "job.json:3:13: error: source.meshes has no mesh; wanted at least "
            "one");
  EXPECT_EQ(FirstError(R"({"main": {"axes": {}}})", "[]"),
            "job.json:3:31: error: mesh \"main\" has no axes; wanted at least "
            "one");
  EXPECT_EQ(FirstError(R"({"main": {"axes": {"dp": 0}}})", "[]"),
            "job.json:3:38: error: source.meshes.main.axes.dp is 0; wanted an "
            "integer from 1 to 65536");
  EXPECT_EQ(FirstError(R"({"main": {"axes": {"a": 60000, "b": 60000}}})", "[]"),
            "job.json:3:31: error: mesh \"main\" has more than 65536 ranks; "
            "wanted fewer");
}

TEST(GenericSideTest, RanksOfAMeshAreDistinctAndComplete) {
  EXPECT_EQ(
      FirstError(R"({"main": {"axes": {"a": 2}, "ranks": [1, 1]}})", "[]"),
      "job.json:3:54: error: rank 1 stands twice in mesh \"main\"");
  EXPECT_EQ(FirstError(R"({"main": {"axes": {"a": 2}, "ranks": [1]}})", "[]"),
            "job.json:3:50: error: mesh \"main\" has 1 ranks; wanted 2, the "
            "product of its axes");
  EXPECT_EQ(
      FirstError(R"({"main": {"axes": {"a": 2}, "ranks": [0, 2]}})", "[]"),
      "job.json:3:13: error: rank 1 is in no mesh; wanted all of 0 to 2, the "
      "largest rank named");
}

TEST(GenericSideTest, RulesNameAKnownMesh) {
  EXPECT_EQ(
      FirstError(kMesh, R"([{"match": "*", "mesh": "mian",
      "placements": ["R", "R"]}])"),
      "job.json:4:38: error: unknown mesh \"mian\"; did you mean \"main\"?");
  EXPECT_EQ(FirstError(kMesh, "[]"),
            "job.json:4:14: error: source.tensors has no rule; wanted at least "
            "one");
}

TEST(GenericSideTest, RulesPlaceEveryAxis) {
  EXPECT_EQ(FirstError(kMesh, R"([{"match": "*", "mesh": "main",
      "placements": ["R"]}])"),
            "job.json:5:21: error: source.tensors[0].placements has 1 "
            "placements; wanted 2, one per axis of mesh \"main\"");
}

TEST(GenericSideTest, PlacementsAreKnown) {
  const auto error_of = [](const std::string& placement) {
    return FirstError(kMesh, R"([{"match": "*", "mesh": "main",
 "placements": ["R", ")" + placement +
                                 "\"]}]");
  };
  EXPECT_EQ(error_of("Shrad(0)"),
            "job.json:5:22: error: unknown placement \"Shrad(0)\"; wanted "
            "Replicate, Shard(d) or StridedShard(d, split_factor=k)");
  EXPECT_EQ(error_of("Shard(0"),
            "job.json:5:22: error: unknown placement \"Shard(0\"; wanted "
            "Replicate, Shard(d) or StridedShard(d, split_factor=k)");
  EXPECT_EQ(error_of("S(-1)"),
            "job.json:5:22: error: dimension of placement \"S(-1)\" is -1; "
            "wanted 0 or more, counted from the first");
  EXPECT_EQ(error_of("StridedShard(0, split_factor=0)"),
            "job.json:5:22: error: split_factor of placement "
            "\"StridedShard(0, split_factor=0)\" is 0; wanted 1 or more");
}

TEST(GenericSideTest, BracesOfARenameAreThoseOfTheName) {
  for (const std::string rename : {"{nam}", "w{0}", "{name", "{{name}}"}) {
    const std::string errors =
        Read(Generic(kMesh, R"([{"match": "*", "mesh": "main",
 "placements": ["R", "R"], "rename": ")" +
                                rename + "\"}]"))
            .errors;
    EXPECT_EQ(errors.substr(0, errors.find('\n')),
              "job.json:5:38: error: source.tensors[0].rename \"" + rename +
                  "\" holds a brace outside of {name}; wanted {name} for the "
                  "parameter's name, and no other brace");
    EXPECT_EQ(errors.find("error", errors.find('\n')), std::string::npos);
  }
}

TEST(GenericSideTest, MeshesBelongToGenericAlone) {
  const std::string errors =
      Read(WithSource(R"({"layout": "vllm", "meshes": {}})")).errors;
  EXPECT_EQ(errors.substr(0, errors.find('\n')),
            "job.json:2:31: error: source.meshes is a key of layout generic; "
            "source.layout is vllm");
}

TEST(JobTest, AHubIdIsToldFromAPath) {
  const auto errors = [](const std::string& model) {
    return Read("{\"model\": " + model +
                ", \"source\": {\"layout\": \"fsdp\"}, \"destination\": "
                "{\"layout\": \"fsdp\"}}")
        .errors;
  };
  EXPECT_NE(errors("\"Qwen/Qwen3-0.6B\"")
                .find("job.json:1:11: error: \"Qwen/Qwen3-0.6B\" is no path "
                      "here; if it is a model of the Hugging Face hub, Refit "
                      "does not fetch it; wanted the path of its config.json"),
            std::string::npos);
  EXPECT_NE(errors(R"({"safetensors": "Qwen/Qwen3-0.6B"})")
                .find("wanted the directory of its files, downloaded"),
            std::string::npos);
  // Paths, which whoever opens them finds missing.
  for (const char* path : {"models/config.json", "./Qwen", "../Qwen", "Qwen",
                           "/Qwen", "a/b/c", "Qwen/"}) {
    EXPECT_EQ(errors("\"" + std::string(path) + "\""), "") << path;
  }
}

}  // namespace
}  // namespace refit
