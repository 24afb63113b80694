// Whole compilations of jobs that once went wrong.
#include "compiler/compile.h"

#include <fstream>
#include <map>
#include <string>

#include "gtest/gtest.h"
#include "plan/plan_file.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

// Compiles (which proves) the job; its errors, or "".
std::string ErrorsOf(const std::string& job_text,
                     std::vector<uint8_t>* plan = nullptr) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("job.json", job_text);
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(path, CompileOptions(), diagnostics);
  if (!diagnostics.ok()) return diagnostics.Render();
  if (!bytes.ok()) return std::string(bytes.status().message());
  if (plan != nullptr) *plan = *std::move(bytes);
  return "";
}

// A side on a one-dimensional mesh of `ranks`, every parameter placed alike.
std::string GenericSide(int ranks, const std::string& placement) {
  return R"({"layout": "generic", "meshes": {"m": {"axes": {"x": )" +
         std::to_string(ranks) +
         R"(}}}, "tensors": [{"match": "*", "mesh": "m", "placements": [")" +
         placement + R"("]}]})";
}

std::string GenericJob(const std::string& parameters, const std::string& source,
                       const std::string& destination,
                       const std::string& more = "") {
  return R"({"model": {"parameters": [)" + parameters + R"(]}, "source": )" +
         source + R"(, "destination": )" + destination + more + "}";
}

TEST(CompileTest, OneParameterFillsTensOfThousandsOfBuckets) {
  const std::string job = GenericJob(
      R"({"name": "w", "shape": [65536, 1024], "dtype": "bf16"})",
      GenericSide(1, "Replicate"), GenericSide(1, "Replicate"),
      R"(, "options": {"bucket_bytes": 4096, "staging_bytes": 65536})");
  EXPECT_EQ(ErrorsOf(job), "");
}

TEST(CompileTest, BucketsThatMakeTooManyMessagesAreRefusedBeforeTheyAreMade) {
  const auto errors = [](const std::string& options) {
    return ErrorsOf(GenericJob(
        R"({"name": "w", "shape": [1048576, 16384], "dtype": "bf16"})",
        GenericSide(1, "Replicate"), GenericSide(2, "Replicate"),
        R"(, "options": {"peer": "staged", "fan_out": "none", )" + options +
            "}"));
  };
  // 32 GiB for each of two ranks.
  EXPECT_NE(errors(R"("bucket_bytes": 4096)")
                .find("error: options.bucket_bytes 4096 cuts this job into "
                      "16777216 messages; wanted at least 32768, which makes "
                      "2097152\n"),
            std::string::npos)
      << errors(R"("bucket_bytes": 4096)");
  EXPECT_NE(errors(R"("bucket_bytes": 4096, "staging_bytes": 8192)")
                .find("wanted at least 32768 (and staging_bytes 65536), which"),
            std::string::npos);
  EXPECT_EQ(errors(R"("bucket_bytes": 67108864)"), "");
}

TEST(CompileTest, ColocatedRanksTakeAHostList) {
  const auto with_hosts = [](const std::string& hosts) {
    return ErrorsOf(GenericJob(
        R"({"name": "w", "shape": [8, 8], "dtype": "bf16"})",
        GenericSide(2, "Shard(0)"), GenericSide(2, "Shard(1)"),
        R"(, "colocated": true, "topology": {"hosts": )" + hosts + "}"));
  };
  EXPECT_EQ(with_hosts("[0, 1, 0, 1]"), "");
  EXPECT_NE(with_hosts("[0, 1, 1, 1]")
                .find("topology.hosts puts rank 0 on host 0 and rank 2, which "
                      "shares its GPU, on host 1; wanted one host"),
            std::string::npos);
}

TEST(CompileTest, OrderOfTheListedParametersDoesNotMatter) {
  const std::string a =
      R"({"name": "a.10.w", "shape": [8, 4], "dtype": "bf16"})";
  const std::string b =
      R"({"name": "a.9.w", "shape": [8, 4], "dtype": "bf16"})";
  const std::string c = R"({"name": "c", "shape": [6], "dtype": "fp32"})";
  const auto plan_of = [](const std::string& parameters) {
    std::vector<uint8_t> plan;
    EXPECT_EQ(ErrorsOf(GenericJob(parameters, GenericSide(2, "Shard(0)"),
                                  GenericSide(3, "Shard(0)")),
                       &plan),
              "");
    return plan;
  };
  const std::vector<uint8_t> plan = plan_of(a + "," + b + "," + c);
  EXPECT_EQ(plan_of(c + "," + b + "," + a), plan);
  EXPECT_EQ(plan_of(b + "," + c + "," + a), plan);
}

TEST(CompileTest, NoByteOfAPlanCanChangeUnseen) {
  std::vector<uint8_t> plan;
  ASSERT_EQ(
      ErrorsOf(
          GenericJob(R"({"name": "w", "shape": [8, 8], "dtype": "bf16"})",
                     GenericSide(2, "Shard(0)"), GenericSide(2, "Shard(1)")),
          &plan),
      "");
  ASSERT_TRUE(PlanFile::FromBytes(plan).ok());
  for (size_t at = 0; at < plan.size(); ++at) {
    for (const uint8_t flip : {0x01, 0x80, 0xff}) {
      plan[at] ^= flip;
      EXPECT_FALSE(PlanFile::FromBytes(plan).ok()) << "byte " << at;
      plan[at] ^= flip;
    }
  }
}

TEST(CompileTest, ConfigWithoutItsSizesIsReported) {
  const TemporaryDirectory directory;
  directory.Write("config.json",
                  R"({"model_type": "llama", "num_attention_heads": 4,
                      "num_key_value_heads": 2, "intermediate_size": 8,
                      "num_hidden_layers": 1, "vocab_size": 8})");
  const std::string job =
      directory.Write("job.json",
                      R"({"model": "config.json", "source": {"layout": "fsdp"},
          "destination": {"layout": "vllm"}})");
  Diagnostics diagnostics;
  EXPECT_FALSE(CompileFile(job, CompileOptions(), diagnostics).ok());
  EXPECT_NE(diagnostics.Render().find("missing key \"hidden_size\""),
            std::string::npos)
      << diagnostics.Render();
}

// 256 FSDP ranks name the same tensors: names are checked once, not by rank.
TEST(CompileTest, ManyRanksMayHoldTheSameNames) {
  std::string parameters;
  for (int expert = 0; expert < 20000; ++expert) {
    parameters += (expert == 0 ? "" : ",\n");
    parameters += R"({"name": "e.)" + std::to_string(expert) +
                  R"(.w", "shape": [256, 8], "dtype": "bf16"})";
  }
  EXPECT_EQ(ErrorsOf(GenericJob(parameters, GenericSide(256, "Shard(0)"),
                                GenericSide(1, "Replicate"))),
            "");
}

TEST(CompileTest, EnginesNameMicroscalingScalesDifferently) {
  const TemporaryDirectory directory;
  const std::string config = directory.Write("config.json", R"({
      "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1,
      "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
      "intermediate_size": 64, "vocab_size": 64})");
  const auto scales_of = [&](const std::string& layout) {
    std::vector<uint8_t> bytes;
    EXPECT_EQ(ErrorsOf(R"({"model": ")" + config +
                           R"(", "source": {"layout": "megatron"},
                               "destination": {"dtype": "mxfp8_e4m3",
                                               "layout": ")" +
                           layout + R"("}})",
                       &bytes),
              "");
    const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
    EXPECT_TRUE(plan.ok());
    std::string found;
    const fb::RankProgram& rank = *plan->body().programs()->Get(1);
    for (uint32_t i = 0; i < rank.buffers()->size() - rank.scratch_buffers();
         ++i) {
      const fb::Buffer* buffer =
          plan->body().buffers()->Get(rank.buffers()->Get(i));
      const std::string name = buffer->name()->str();
      if (!name.starts_with("model.layers.{0}.mlp.down_proj.weight_")) continue;
      found = name.substr(name.rfind('.') + 1);
      if (buffer->post_hooks() == nullptr) continue;
      for (const fb::PostHook* hook : *buffer->post_hooks()) {
        found += " " + hook->name()->str();
      }
    }
    return found;
  };
  EXPECT_EQ(scales_of("vllm"), "weight_scale");
  EXPECT_EQ(scales_of("sglang"), "weight_scale_inv derive-scale-copies");
}

TEST(CompileTest, AnEnginesDefaultIsAnotherInputThanTheSameWord) {
  const TemporaryDirectory directory;
  const std::string config = directory.Write("config.json", R"({
      "model_type": "glm4_moe_lite", "hidden_size": 4, "vocab_size": 64,
      "num_hidden_layers": 1, "num_attention_heads": 2, "kv_lora_rank": 2,
      "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 1,
      "moe_intermediate_size": 4, "n_routed_experts": 2,
      "n_shared_experts": 1})");
  const auto digest_with = [&](const std::string& key) {
    std::vector<uint8_t> bytes;
    EXPECT_EQ(ErrorsOf(R"({"model": ")" + config +
                           R"(", "source": {"layout": "megatron"},
                               "destination": {"layout": "sglang")" +
                           key + "}}",
                       &bytes),
              "");
    const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
    EXPECT_TRUE(plan.ok());
    return DigestText(*plan->plan().inputs_digest());
  };
  EXPECT_NE(digest_with(""), digest_with(R"(, "shared_experts": "tensor")"));
}

TEST(CompileTest, ReplicasShareTheSending) {
  const std::string parameters =
      R"({"name": "w", "shape": [1024, 64], "dtype": "bf16"},
         {"name": "v", "shape": [64, 2], "dtype": "bf16"})";
  std::vector<uint8_t> bytes;
  ASSERT_EQ(ErrorsOf(GenericJob(parameters, GenericSide(4, "Replicate"),
                                GenericSide(3, "Shard(0)"),
                                R"(, "topology": {"gpus_per_host": 4})"),
                     &bytes),
            "");
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(bytes);
  ASSERT_TRUE(plan.ok());
  const double mean =
      static_cast<double>(plan->body().stats()->moved_bytes()) / 4;
  for (int32_t rank = 0; rank < plan->source_ranks(); ++rank) {
    double sent = 0;
    for (const fb::Message* message :
         *plan->body().programs()->Get(rank)->messages()) {
      sent += static_cast<double>(message->size_bytes());
    }
    EXPECT_LE(sent, mean * 1.05) << "rank " << rank;
  }
}

// Links so slow that a few kilobytes are worth relaying.
std::string SlowLinks(const std::string& more = "") {
  return R"(, "topology": {"peer_gigabytes_per_second": 0.1, )"
         R"("network_gigabytes_per_second": 0.01)" +
         more + "}";
}

// One rank's tensors for `replicas` ranks, w and a small v.
std::string FanOutJob(int replicas, const std::string& more) {
  return GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"},
                       {"name": "v", "shape": [64, 2], "dtype": "bf16"})",
                    GenericSide(1, "Replicate"),
                    GenericSide(replicas, "Replicate"), more);
}
constexpr uint64_t kFanOutBytes = (960 * 64 + 64 * 2) * 2;

PlanFile OpenJob(const std::string& job) {
  std::vector<uint8_t> bytes;
  EXPECT_EQ(ErrorsOf(job, &bytes), "");
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
  EXPECT_TRUE(plan.ok());
  return *std::move(plan);
}

// `copies` trainers of `ranks` ranks feed twice as many engines of two.
std::string FoldedJob(int copies, int ranks, const std::string& hosts,
                      const std::string& fold) {
  const auto side = [](int replicas, int shards) {
    return R"({"layout": "generic", "meshes": {"m": {"axes": {"dp": )" +
           std::to_string(replicas) + R"(, "tp": )" + std::to_string(shards) +
           R"(}}}, "tensors": [{"match": "*", "mesh": "m",)"
           R"x( "placements": ["Replicate", "Shard(0)"]}]})x";
  };
  return GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                    side(copies, ranks), side(2 * copies, 2),
                    R"(, "topology": {"peer_gigabytes_per_second": 0.1,
          "network_gigabytes_per_second": 0.01, "hosts": )" +
                        hosts + R"(}, "options": {"fold": ")" + fold + R"("})");
}
// Two trainers of four ranks on a host each, and two engines on each of two.
constexpr char kHostsOfParts[] =
    "[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]";

bool IsFolded(const PlanFile& plan) {
  return (plan.plan().required_features() & kFeatureShifts) != 0;
}

TEST(CompileTest, EqualPartsAreOneProgramWithAShift) {
  const PlanFile plan = OpenJob(FoldedJob(2, 4, kHostsOfParts, "always"));
  ASSERT_TRUE(IsFolded(plan));
  const fb::Body& body = plan.body();
  for (const uint32_t rank : {4u, 5u, 6u, 7u, 12u, 13u, 14u, 15u}) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    EXPECT_TRUE(AreShared(*body.programs()->Get(rank - 4), program));
    EXPECT_EQ(program.source_shift(), 4u);
    EXPECT_EQ(program.destination_shift(), 4u);
    EXPECT_GT(program.messages()->size(), 0u);
  }
  EXPECT_EQ(body.programs()->Get(1)->source_shift(), 0u);
  const PlanFile whole = OpenJob(FoldedJob(2, 4, kHostsOfParts, "never"));
  EXPECT_FALSE(IsFolded(whole));
  const fb::Stats& stats = *body.stats();
  EXPECT_EQ(stats.moved_bytes(), whole.body().stats()->moved_bytes());
  EXPECT_EQ(stats.lower_bound_seconds(),
            whole.body().stats()->lower_bound_seconds());
  EXPECT_LE(stats.predicted_seconds(),
            whole.body().stats()->predicted_seconds() * 1.01);
}

TEST(CompileTest, OnlyLargeJobsAreFoldedUnasked) {
  EXPECT_FALSE(IsFolded(OpenJob(FoldedJob(2, 4, kHostsOfParts, "auto"))));
  std::string hosts = "0";
  for (int rank = 1; rank < 1040; ++rank) {
    hosts += ", " + std::to_string(rank / 4);
  }
  const PlanFile large = OpenJob(FoldedJob(130, 4, "[" + hosts + "]", "auto"));
  ASSERT_TRUE(IsFolded(large));
  EXPECT_EQ(large.body().programs()->Get(1039)->destination_shift(), 516u);
}

// Where hosts are shared or parts stand elsewhere, a part would not find what
// is near, or not be as far from its peers as the first.
TEST(CompileTest, PartsOnHostsOfTheirOwnAloneAreFolded) {
  for (const char* hosts :
       {"[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]",
        "[0, 0, 4, 4, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]",
        "[0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 3, 3, 3, 3]"}) {
    EXPECT_FALSE(IsFolded(OpenJob(FoldedJob(2, 4, hosts, "always")))) << hosts;
  }
}

// With half as many trainers' ranks, engines of one part pass on to those of
// the other what only one trainer sends them: apart they would take longer.
TEST(CompileTest, PartsThatSendMoreThanTheyReceiveAreNotFolded) {
  EXPECT_FALSE(IsFolded(OpenJob(
      FoldedJob(2, 2, "[0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]", "always"))));
}

// By route.
std::map<fb::Route, uint64_t> SentBytes(const PlanFile& plan, uint32_t rank) {
  std::map<fb::Route, uint64_t> bytes;
  for (const fb::Message* message :
       *plan.body().programs()->Get(rank)->messages()) {
    if (message->kind() != fb::MessageKind::kSend) continue;
    bytes[plan.body().rounds()->Get(message->round())->route()] +=
        message->size_bytes();
  }
  return bytes;
}

TEST(CompileTest, ASourceSendsOnceWhatReplicasRelay) {
  const PlanFile plan = OpenJob(FanOutJob(3, SlowLinks()));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kPeer], kFanOutBytes);
  uint64_t relayed = 0;
  for (uint32_t rank = 1; rank <= 3; ++rank) {
    const uint64_t bytes = SentBytes(plan, rank)[fb::Route::kPeer];
    relayed += bytes;
    EXPECT_NEAR(static_cast<double>(bytes), kFanOutBytes * 2 / 3,
                kFanOutBytes / 20);
  }
  EXPECT_EQ(relayed, kFanOutBytes * 2);
  EXPECT_EQ(plan.body().stats()->relayed_bytes(), relayed);
  EXPECT_EQ(plan.body().stats()->moved_bytes(), kFanOutBytes * 3);
}

TEST(CompileTest, AHostIsSentOnceWhatItsReplicasRelay) {
  const PlanFile plan =
      OpenJob(FanOutJob(4, SlowLinks(R"(, "hosts": [0, 1, 1, 1, 1])")));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kNetwork], kFanOutBytes);
  uint64_t relayed = 0;
  for (uint32_t rank = 1; rank <= 4; ++rank) {
    relayed += SentBytes(plan, rank)[fb::Route::kPeer];
  }
  EXPECT_EQ(relayed, kFanOutBytes * 3);
}

// What ranks 1 and up send, by route.
std::map<fb::Route, uint64_t> RelayedBytes(const PlanFile& plan) {
  std::map<fb::Route, uint64_t> relayed;
  for (uint32_t rank = 1; rank < plan.body().programs()->size(); ++rank) {
    for (const auto& [route, bytes] : SentBytes(plan, rank)) {
      relayed[route] += bytes;
    }
  }
  return relayed;
}

TEST(CompileTest, ASourceSendsOnceWhatReplicasRelayInStages) {
  const PlanFile plan =
      OpenJob(FanOutJob(3, SlowLinks() + R"(, "options": {"peer": "staged"})"));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kPeer], kFanOutBytes);
  EXPECT_EQ(RelayedBytes(plan)[fb::Route::kPeer], kFanOutBytes * 2);
}

TEST(CompileTest, HostsPassOnToEachOtherWhatASourceSendsOnce) {
  const PlanFile plan =
      OpenJob(FanOutJob(3, SlowLinks(R"(, "hosts": [0, 1, 2, 3])")));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kNetwork], kFanOutBytes);
  for (uint32_t rank = 1; rank <= 3; ++rank) {
    EXPECT_NEAR(static_cast<double>(SentBytes(plan, rank)[fb::Route::kNetwork]),
                kFanOutBytes * 2 / 3, kFanOutBytes / 20)
        << "rank " << rank;
  }
}

TEST(CompileTest, WhatComesFromAnotherHostIsRelayedInTheHost) {
  const PlanFile plan =
      OpenJob(FanOutJob(6, SlowLinks(R"(, "hosts": [0, 1, 1, 1, 2, 2, 2])")));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kNetwork], kFanOutBytes);
  std::map<fb::Route, uint64_t> relayed = RelayedBytes(plan);
  EXPECT_EQ(relayed[fb::Route::kNetwork], kFanOutBytes);
  EXPECT_EQ(relayed[fb::Route::kPeer], 2 * 2 * kFanOutBytes);
}

// Every rank of the pipeline sends one message and receives one in a round, so
// that the rounds are hardly more than those that one receiver's bytes need.
TEST(CompileTest, HostsPassOnWhileTheyReceive) {
  const PlanFile plan = OpenJob(FanOutJob(
      4, SlowLinks(R"(, "hosts": [0, 1, 2, 3, 4])") +
             R"(, "options": {"bucket_bytes": 4096, "staging_bytes": 16384})"));
  std::map<uint32_t, uint64_t> received_in;  // rounds of rank 1
  for (const fb::Message* message :
       *plan.body().programs()->Get(1)->messages()) {
    if (message->kind() == fb::MessageKind::kRecv) {
      received_in[message->round()] += message->size_bytes();
    }
  }
  EXPECT_LE(plan.body().rounds()->size(), received_in.size() + 6);
}

bool UsesRelays(const PlanFile& plan) {
  return (RequiredFeatures(plan.body()) & kFeatureRelays) != 0;
}

TEST(CompileTest, NothingIsRelayedThatNeedNotBe) {
  const auto relays = [](const std::string& job) {
    return UsesRelays(OpenJob(job));
  };
  EXPECT_TRUE(relays(FanOutJob(3, SlowLinks())));
  EXPECT_FALSE(relays(
      FanOutJob(3, SlowLinks() + R"(, "options": {"fan_out": "none"})")));
  // A round takes longer than such links need for all.
  EXPECT_FALSE(relays(FanOutJob(3, "")));
  // Each receiver has a source of its own.
  const std::string w = R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})";
  EXPECT_FALSE(relays(GenericJob(w, GenericSide(3, "Replicate"),
                                 GenericSide(3, "Replicate"), SlowLinks())));
  // The sources hold shards: none sends more than a receiver gets.
  EXPECT_FALSE(relays(GenericJob(w, GenericSide(4, "Shard(0)"),
                                 GenericSide(4, "Replicate"), SlowLinks())));
}

TEST(CompileTest, WhatIsCastOnArrivalIsNotRelayed) {
  const auto relays = [](const std::string& from, const std::string& to) {
    const std::string side = GenericSide(3, "Replicate");
    const std::string w =
        R"({"name": "w", "shape": [960, 64], "dtype": ")" + from + R"("})";
    return UsesRelays(OpenJob(GenericJob(
        w, GenericSide(1, "Replicate"),
        R"({"dtype": ")" + to + R"(", )" + side.substr(1), SlowLinks())));
  };
  EXPECT_FALSE(relays("bf16", "fp32"));
  EXPECT_TRUE(relays("fp32", "bf16"));
}

TEST(CompileTest, WhatIsRelayedIsCutIntoSteps) {
  const auto rounds = [](const std::string& gigabytes_per_second) {
    const PlanFile plan =
        OpenJob(FanOutJob(3, R"(, "topology": {"peer_gigabytes_per_second": )" +
                                 gigabytes_per_second + "}"));
    return plan.body().rounds()->size();
  };
  // 120 KiB take 1.2 ms; a round 20 us, a sixtieth: about eight steps.
  EXPECT_EQ(rounds("0.1"), 8 + 1);
  EXPECT_EQ(rounds("8"), 1 + 1);
}

}  // namespace
}  // namespace refit
