// Plans of the compiler, damaged one field at a time: whatever the loader and
// the proof let pass must still do what the whole plan does.
//
//   REFIT_SEED=N      replays one damage; a failure names its seed
//   REFIT_DAMAGES=N   damages instead of the default
#include <gtest/gtest.h>
#include <rapidjson/document.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "plan/diff/diff.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "plan/text/text.h"
#include "refit/host_device.h"
#include "runner/checked_run.h"
#include "runner/local_ranks.h"
#include "runner/value_check.h"
#include "simulator/simulation.h"
#include "tests/compiler/make_compact.h"
#include "tests/compiler/temporary_directory.h"
#include "tests/plan/plan_spec.h"
#include "tests/plan/proof_oracle.h"
#include "tests/property/chain.h"
#include "tests/property/draw.h"
#include "tests/property/plan_damage.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kTimeout{30};
// Tensors of a damaged plan may be of any size.
constexpr uint64_t kRunnableBytes = uint64_t{1} << 24;

// Some ten seconds of one core, with or without a sanitizer.
constexpr int64_t kDamages = kSanitized ? 200 : 4000;

struct SampleJob {
  std::string job;
  std::string config;  // beside it; "" without one
};

// Each holds what the others do not: pipeline stages, replicated heads, fills;
// a tied head and routes local and peer, direct; experts over hosts and stacks
// of two dimensions; direct rounds beside staged ones, casts from several
// dtypes, excludes, empty shards, numbers with a gap, several buckets a pair;
// relays; dealing; quantization in windows.
const SampleJob kJobs[] = {
    {R"({"model": "config.json",
 "source": {"layout": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2,
            "make_vocab_size_divisible_by": 4},
 "destination": {"layout": "vllm", "tensor_parallel": 4},
 "options": {"peer": "staged", "bucket_bytes": 4096, "staging_bytes": 16384}})",
     R"({"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 4,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
 "intermediate_size": 12, "vocab_size": 50, "tie_word_embeddings": false,
 "torch_dtype": "bfloat16"})"},
    {R"({"model": "config.json",
 "source": {"layout": "megatron", "tensor_parallel": 2, "data_parallel": 2,
            "make_vocab_size_divisible_by": 4},
 "destination": {"layout": "vllm", "tensor_parallel": 2, "replicas": 2},
 "colocated": true,
 "options": {"bucket_bytes": 4096, "staging_bytes": 16384}})",
     R"({"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12,
 "vocab_size": 50, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16"})"},
    {R"({"model": "config.json",
 "source": {"layout": "megatron", "tensor_parallel": 2, "data_parallel": 2,
            "expert_parallel": 4},
 "destination": {"layout": "vllm", "tensor_parallel": 2, "replicas": 2,
                 "expert_parallel": true},
 "topology": {"gpus_per_host": 2},
 "options": {"bucket_bytes": 4096, "staging_bytes": 16384}})",
     R"({"model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
 "intermediate_size": 12, "moe_intermediate_size": 4, "num_experts": 4,
 "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
 "vocab_size": 64, "tie_word_embeddings": false,
 "torch_dtype": "bfloat16"})"},
    {R"json({"model": {"parameters": [
  {"name": "layers.0.w", "shape": [40, 6], "dtype": "fp32"},
  {"name": "layers.1.w", "shape": [40, 6], "dtype": "fp32"},
  {"name": "layers.4.w", "shape": [40, 6], "dtype": "fp32"},
  {"name": "big", "shape": [60, 50], "dtype": "fp32"},
  {"name": "norm", "shape": [3], "dtype": "fp32"},
  {"name": "scale", "shape": [], "dtype": "fp32"},
  {"name": "rotary", "shape": [3], "dtype": "fp32"}]},
 "source": {"layout": "generic",
  "meshes": {"m": {"axes": {"dp": 2, "tp": 2}, "ranks": [3, 1, 2, 0]}},
  "tensors": [
   {"match": "layers.1.w", "mesh": "m", "placements": ["StridedShard(0, split_factor=2)", "Shard(0)"], "dtype": "fp16"},
   {"match": "*.w", "mesh": "m", "placements": ["StridedShard(0, split_factor=2)", "Shard(0)"]},
   {"match": "scale", "mesh": "m", "placements": ["Replicate", "Replicate"]},
   {"match": "*", "mesh": "m", "placements": ["Shard(0)", "Shard(0)"]}]},
 "destination": {"layout": "generic", "dtype": "bf16",
  "meshes": {"m": {"axes": {"tp": 3}}},
  "tensors": [
   {"match": "*.w", "mesh": "m", "placements": ["Shard(1)"]},
   {"match": "norm", "mesh": "m", "placements": ["Shard(0)"], "dtype": "fp32"},
   {"match": "*", "mesh": "m", "placements": ["Replicate"], "rename": "engine.{name}"}]},
 "topology": {"hosts": [0, 0, 1, 1, 0, 1, 2]},
 "options": {"exclude": ["rotary"], "bucket_bytes": 4096,
             "staging_bytes": 16384}})json",
     ""},
    // Replicas that relay: two on the source's host in several steps, three on
    // another after the network.
    {R"json({"model": {"parameters": [
  {"name": "layers.0.w", "shape": [48, 6], "dtype": "bf16"},
  {"name": "layers.1.w", "shape": [48, 6], "dtype": "bf16"},
  {"name": "wide", "shape": [3, 40], "dtype": "fp32"},
  {"name": "norm", "shape": [3], "dtype": "bf16"}]},
 "source": {"layout": "generic", "meshes": {"m": {"axes": {"tp": 1}}},
  "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
 "destination": {"layout": "generic", "meshes": {"m": {"axes": {"dp": 5}}},
  "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
 "topology": {"hosts": [0, 0, 0, 1, 1, 1],
              "peer_gigabytes_per_second": 0.005,
              "network_gigabytes_per_second": 0.0005},
 "options": {"bucket_bytes": 4096, "staging_bytes": 16384}})json",
     ""},
    // Replicas of three hosts that relay in stages, then in the host.
    {R"json({"model": {"parameters": [
  {"name": "layers.0.w", "shape": [48, 6], "dtype": "bf16"},
  {"name": "layers.1.w", "shape": [48, 6], "dtype": "bf16"},
  {"name": "wide", "shape": [3, 40], "dtype": "fp32"},
  {"name": "norm", "shape": [3], "dtype": "bf16"}]},
 "source": {"layout": "generic", "meshes": {"m": {"axes": {"tp": 1}}},
  "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
 "destination": {"layout": "generic", "meshes": {"m": {"axes": {"dp": 5}}},
  "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
 "topology": {"hosts": [0, 1, 1, 2, 2, 3],
              "peer_gigabytes_per_second": 0.005,
              "network_gigabytes_per_second": 0.0005},
 "options": {"bucket_bytes": 4096, "staging_bytes": 16384}})json",
     ""},
    // Replicas and slices that one rank of each host deals out.
    {R"json({"model": {"parameters": [
  {"name": "layers.0.w", "shape": [48, 64], "dtype": "bf16"},
  {"name": "layers.1.w", "shape": [48, 64], "dtype": "bf16"},
  {"name": "wide", "shape": [3, 40], "dtype": "fp32"},
  {"name": "norm", "shape": [3], "dtype": "bf16"}]},
 "source": {"layout": "generic", "meshes": {"m": {"axes": {"tp": 2}}},
  "tensors": [{"match": "*.w", "mesh": "m", "placements": ["Shard(0)"]},
              {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
 "destination": {"layout": "generic", "meshes": {"m": {"axes": {"tp": 3}}},
  "tensors": [{"match": "*.w", "mesh": "m", "placements": ["Shard(1)"]},
              {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
 "topology": {"hosts": [0, 0, 1, 1, 1]},
 "options": {"bucket_bytes": 4096, "staging_bytes": 16384}})json",
     ""},
    // Attention is quantized at the source, the MLP at the destination, in
    // several windows of both slots.
    {R"({"model": "config.json",
 "source": {"layout": "megatron", "tensor_parallel": 2,
            "make_vocab_size_divisible_by": 4},
 "destination": {"layout": "vllm", "dtype": "mxfp8_e4m3"},
 "options": {"peer": "staged", "bucket_bytes": 4096, "staging_bytes": 16384,
             "scratch_bytes": 4096}})",
     R"({"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2,
 "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
 "intermediate_size": 48, "vocab_size": 20, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16"})"},
};

PlanFile CompileJob(const SampleJob& sample,
                    const std::function<void(Limits&)>& change_limits = {}) {
  const TemporaryDirectory directory;
  if (!sample.config.empty()) directory.Write("config.json", sample.config);
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(directory.Write("job.json", sample.job),
                  {.change_limits = change_limits}, diagnostics);
  EXPECT_TRUE(bytes.ok()) << diagnostics.Render() << bytes.status().message();
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(*std::move(bytes));
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return *std::move(plan);
}

// What a damaged plan came to.
enum class Fate {
  kLoader,    // PlanFile refused it
  kProof,     // the proof did
  kContract,  // it says that tensors hold something else, and makes it so
  kHarmless,  // it does what the whole plan does
  kWrong,     // it does not
};

// Rank, slot and offset of an element of the destination.
using Element = std::tuple<uint32_t, uint32_t, uint64_t>;

template <typename Part>
std::vector<uint64_t> OffsetsOf(const Part& part) {
  std::vector<uint64_t> offsets = {part.offset()};
  const uint32_t dims = part.extent() == nullptr ? 0 : part.extent()->size();
  for (uint32_t d = 0; d < dims; ++d) {
    std::vector<uint64_t> longer;
    for (const uint64_t offset : offsets) {
      for (uint64_t i = 0; i < part.extent()->Get(d); ++i) {
        longer.push_back(offset + i * part.stride()->Get(d));
      }
    }
    offsets = std::move(longer);
  }
  return offsets;
}

// All that the destination declares not to receive.
std::set<Element> SkippedElements(const PlanFile& plan) {
  std::set<Element> skipped;
  const fb::Body& body = plan.body();
  for (uint32_t rank = body.source_ranks(); rank < body.programs()->size();
       ++rank) {
    const auto& buffers = *body.programs()->Get(rank)->buffers();
    for (uint32_t slot = 0; slot < buffers.size(); ++slot) {
      const fb::Buffer& buffer = *body.buffers()->Get(buffers.Get(slot));
      const auto add = [&](const auto& part) {
        for (const uint64_t offset : OffsetsOf(part)) {
          skipped.emplace(rank, slot, offset);
        }
      };
      if (buffer.fragments() != nullptr) {
        for (const fb::Fragment* fragment : *buffer.fragments()) {
          if (body.params()->Get(fragment->param())->skip() !=
              fb::SkipReason::kUnspecified) {
            add(*fragment);
          }
        }
      }
      if (buffer.regions() == nullptr) continue;
      for (const fb::Region* region : *buffer.regions()) {
        if (region->kind() == fb::RegionKind::kSkip) add(*region);
      }
    }
  }
  return skipped;
}

// Whether a reviewer would see that the contract with the workers changed.
bool ContractsDiffer(const PlanFile& a, const PlanFile& b) {
  const PlanDifference difference = ComparePlans(a, b);
  return std::any_of(
      difference.differences.begin(), difference.differences.end(),
      [](const Difference& d) { return d.kind == DifferenceClass::kContract; });
}

// Runs a plan on generated data. "" or what is wrong by its own contract.
std::string FaultOfRun(const PlanFile& plan) {
  const absl::StatusOr<RunOfRanksResult> run =
      RunChecked(plan, {.timeout = kTimeout});
  if (!run.ok()) return run.status().ToString();
  if (run->check.wrong_elements == 0) return "";
  return absl::StrCat(run->check.wrong_elements, " wrong elements; ",
                      run->check.mismatches.front());
}

// Text of any reader of JSON, who wants UTF-8.
bool IsJson(const std::string& text) {
  rapidjson::Document json;
  return !json.Parse<rapidjson::kParseValidateEncodingFlag>(text.c_str())
              .HasParseError();
}

// A whole plan, its ranks' tensors, and what a damaged one is compared with.
class Whole {
 public:
  explicit Whole(PlanFile plan) : plan_(std::move(plan)), check_(plan_) {
    for (int32_t rank = 0; rank < plan_.world_size(); ++rank) {
      tensors_.push_back(TensorsOfRank(plan_, rank));
      absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
          AllocateTensors(device_, tensors_.back());
      EXPECT_TRUE(memory.ok());
      memory_.push_back(*std::move(memory));
    }
    check_.FillSources(tensors_);
    skipped_ = SkippedElements(plan_);
  }

  const PlanFile& plan() const { return plan_; }

  // `text` becomes what is wrong, or what refused the plan.
  Fate FateOf(std::vector<uint8_t> damaged, std::string& text) const {
    const absl::StatusOr<PlanFile> plan =
        PlanFile::FromBytes(std::move(damaged));
    if (!plan.ok()) {
      text = plan.status().ToString();
      return Fate::kLoader;
    }
    if (!IsJson(PlanJson(*plan, {}))) {
      text = "what refit-dump --json says of it is no JSON";
      return Fate::kWrong;
    }
    // Of any plan that the loader takes, this returns times or an error.
    if (const absl::StatusOr<simulator::Simulation> simulation =
            simulator::Simulate(*plan, {});
        simulation.ok() && !(simulation->seconds >= 0)) {
      text = "a simulation ends before it begins";
      return Fate::kWrong;
    }
    text = Prove(*plan).violation;
    if (!text.empty()) return Fate::kProof;
    const bool is_contract = ContractsDiffer(plan_, *plan);
    RunOfRanksResult sizes;
    MeasureSizes(*plan, sizes);
    if (sizes.source_bytes + sizes.destination_bytes + sizes.scratch_bytes <=
        kRunnableBytes) {
      text = FaultOfRun(*plan);
      // What a run on one machine does not show: staging that is still owed,
      // the order of operations, limits.
      if (text.empty()) text = FaultOf(SpecOf(plan->body()));
    }
    if (text.empty() && !is_contract) text = DifferenceOf(*plan);
    if (!text.empty()) return Fate::kWrong;
    return is_contract ? Fate::kContract : Fate::kHarmless;
  }

 private:
  // Runs a plan of the same contract on the whole plan's tensors. "" or how
  // the outcome differs.
  std::string DifferenceOf(const PlanFile& plan) const {
    if (SkippedElements(plan) != skipped_) return "declares other skips";
    absl::StatusOr<std::unique_ptr<LocalRanks>> ranks =
        LocalRanks::Create(plan, tensors_, kTimeout);
    if (!ranks.ok()) return ranks.status().ToString();
    check_.PoisonDestinations(tensors_);
    const absl::StatusOr<RefitMeasurement> refit = (*ranks)->Refit();
    if (!refit.ok()) return refit.status().ToString();
    const CheckResult result = check_.Check(tensors_);
    if (result.wrong_elements == 0) return "";
    return absl::StrCat("by the whole plan's contract: ", result.wrong_elements,
                        " wrong elements; ", result.mismatches.front());
  }

  PlanFile plan_;
  HostDevice device_;
  TensorsByRank tensors_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  ValueCheck check_;
  std::set<Element> skipped_;
};

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  int64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

// The text of a plan's body: without its digests, and without the estimates,
// which stand in the provenance.
std::string ContentOf(const PlanFile& plan) {
  std::string text = PlanText(plan, {});
  text.erase(0, text.find('\n'));
  const size_t estimates = text.find("\nstats lower_bound");
  if (estimates != std::string::npos) {
    text.erase(estimates, text.find('\n', estimates + 1) - estimates);
  }
  return text;
}

TEST(DamageTest, WholePlansStayWhole) {
  for (const SampleJob& job : kJobs) {
    const Whole whole(CompileJob(job));
    fb::BodyT body;
    whole.plan().body().UnPackTo(&body);
    std::vector<uint8_t> packed =
        PackPlan(body, whole.plan().plan().required_features());
    const absl::StatusOr<PlanFile> again = PlanFile::FromBytes(packed);
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(ContentOf(*again), ContentOf(whole.plan()));
    std::string text;
    EXPECT_EQ(whole.FateOf(std::move(packed), text), Fate::kHarmless) << text;
  }
}

TEST(DamageTest, WhatIsProvedOfADamagedPlanIsTrue) {
  std::vector<std::unique_ptr<Whole>> wholes;
  for (const SampleJob& job : kJobs) {
    wholes.push_back(std::make_unique<Whole>(CompileJob(job)));
    wholes.push_back(std::make_unique<Whole>(CompileJob(job, MakeCompact)));
  }
  std::map<Fate, int64_t> count;
  const int64_t one = FromEnvironment("REFIT_SEED", -1);
  const int64_t damages =
      one >= 0 ? 1 : FromEnvironment("REFIT_DAMAGES", kDamages);
  for (int64_t i = 0; i < damages; ++i) {
    const int64_t seed = one >= 0 ? one : i;
    Draw draw(static_cast<uint64_t>(seed));
    const Whole& whole = *draw.Pick(wholes);
    fb::BodyT body;
    whole.plan().body().UnPackTo(&body);
    std::string damage = DamageBody(draw, body);
    // Two together may hide each other.
    if (draw.Chance(20)) absl::StrAppend(&damage, "; ", DamageBody(draw, body));
    std::string text;
    const Fate fate = whole.FateOf(
        PackPlan(body, whole.plan().plan().required_features()), text);
    ++count[fate];
    if (fate != Fate::kWrong) continue;
    ADD_FAILURE() << "seed=" << seed << " (replay with REFIT_SEED=" << seed
                  << ")\nproved after " << damage << ", but " << text;
  }
  std::cout << damages << " damages: " << count[Fate::kLoader]
            << " refused by the loader, " << count[Fate::kProof]
            << " by the proof, " << count[Fate::kContract]
            << " of the contract, " << count[Fate::kHarmless] << " harmless\n";
  if (damages < 1000) return;
  EXPECT_GT(count[Fate::kLoader], damages / 10);
  EXPECT_GT(count[Fate::kProof], damages / 10);
  EXPECT_GT(count[Fate::kContract], damages / 50);
  EXPECT_GT(count[Fate::kHarmless], damages / 50);
}

}  // namespace
}  // namespace refit
