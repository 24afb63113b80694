#include "tests/executor/nccl_world.h"

#include <cstdlib>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "tests/compiler/temporary_directory.h"
#include "tests/executor/fake_nccl/fake_nccl.h"

namespace refit {
namespace {

std::vector<uint32_t> HostsOf(const PlanFile& plan) {
  std::vector<uint32_t> hosts;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    hosts.push_back(program->host());
  }
  return hosts;
}

}  // namespace

std::vector<std::unique_ptr<Transport>> MakeNcclTransports(
    Device& device, const std::vector<uint32_t>& hosts, uint16_t* port,
    bool has_secret, const std::vector<std::string>& real,
    std::chrono::milliseconds abort_time) {
  const auto ranks = static_cast<int32_t>(hosts.size());
  TcpRendezvous rendezvous = *LoopbackRendezvous(ranks);
  if (!has_secret) rendezvous.secret.clear();
  if (port != nullptr) *port = rendezvous.port;
  std::vector<std::unique_ptr<Transport>> ends(hosts.size());
  EXPECT_TRUE(
      RunRankThreads(ranks, [&](int32_t rank) {
        TcpRendezvous mine = rendezvous;
        mine.rank = rank;
        auto control = ConnectTcp(
            mine, std::chrono::steady_clock::now() + ExecutorWorld::kTimeout);
        ASSERT_TRUE(control.ok()) << control.status();
        NcclOptions options;
        options.device = &device;
        options.meeting = *std::move(control);
        options.hosts = hosts;
        options.host = real.empty() ? absl::StrCat(hosts[rank]) : real[rank];
        options.abort_time = abort_time;
        ends[rank] = *CreateNcclTransport(std::move(options));
      }).ok());
  return ends;
}

PlanFile CompiledPlan(const std::string& job, const std::string& config,
                      const std::function<void(Limits&)>& change_limits) {
  const TemporaryDirectory directory;
  if (!config.empty()) directory.Write("config.json", config);
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(directory.Write("job.json", job),
                  {.change_limits = change_limits}, diagnostics);
  if (!bytes.ok()) {
    std::cerr << diagnostics.Render() << bytes.status() << "\n" << job << "\n";
    std::abort();
  }
  return *PlanFile::FromBytes(*std::move(bytes));
}

PlanFile HostsPlan(std::string_view hosts, std::string_view options,
                   int32_t slots, std::string_view transport) {
  return CompiledPlan(absl::StrFormat(
                          R"({
    "model": {"parameters": [
      {"name": "w", "shape": [480, 36], "dtype": "bf16"},
      {"name": "v", "shape": [36, 480], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"x": 5}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "topology": {"hosts": [%s], "transport": "%s",
      "peer_gigabytes_per_second": 0.1,
      "network_gigabytes_per_second": 0.01},
    "options": {%s}})",
                          hosts, transport, options),
                      "", [&](Limits& limits) { limits.slots = slots; });
}

PlanFile WindowsPlan(const std::string& options) {
  PlanFile plan = CompiledPlan(
      absl::StrCat(R"({"model": "config.json",
 "source": {"layout": "megatron", "tensor_parallel": 4},
 "destination": {"layout": "vllm", "tensor_parallel": 2,
                 "dtype": "fp8_e4m3_block128"},
 "options": {)",
                   options, "}}"),
      R"({"model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
 "intermediate_size": 256, "vocab_size": 40, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16"})");
  for (const fb::RankProgram* program : *plan.body().programs()) {
    EXPECT_NE(program->scratch_windows(), nullptr);
    if (program->scratch_windows() == nullptr) continue;
    EXPECT_GE(program->scratch_windows()->size(), 3);
  }
  return plan;
}

std::string ReshardJob(int sources, int destinations,
                       const std::string& options, const std::string& more) {
  const auto rule = [](const char* match, int dim) {
    return absl::StrCat("{\"match\": \"", match,
                        "\", \"mesh\": \"m\", \"placements\": [\"Shard(", dim,
                        ")\"]}");
  };
  const auto side = [&](int ranks, int dim_of_a) {
    return absl::StrCat(
        R"({"layout": "generic", "meshes": {"m": {"axes": {"x": )", ranks,
        R"(}}}, "tensors": [)", rule("a", dim_of_a), ", ", rule("*", 0), "]}");
  };
  return absl::StrCat(
      R"({"model": {"parameters": [)",
      R"({"name": "a", "shape": [960, 160], "dtype": "bf16"}, )",
      R"({"name": "b", "shape": [2400, 7], "dtype": "fp32"}]}, "source": )",
      side(sources, 0), R"(, "destination": )", side(destinations, 1),
      R"(, "options": {)", options, "}", more, "}");
}

NcclWorld::NcclWorld(const PlanFile& plan, const ExecutorOptions& options,
                     std::chrono::milliseconds abort_time)
    : NcclWorld(
          plan, [&](int32_t) { return options; }, abort_time) {}

NcclWorld::NcclWorld(
    const PlanFile& plan,
    const std::function<ExecutorOptions(int32_t rank)>& options,
    std::chrono::milliseconds abort_time)
    : ExecutorWorld(plan.world_size()) {
  for (auto& transport :
       MakeNcclTransports(device_, HostsOf(plan), &port_, /*has_secret=*/true,
                          /*real=*/{}, abort_time)) {
    const int32_t rank = transport->rank();
    AddRank(plan, std::move(transport), options(rank));
  }
}

std::vector<absl::Status> NcclWorld::OnAllRanks(
    const std::function<absl::Status(int32_t)>& body) {
  return ExecutorWorld::OnAllRanks([&](int32_t rank) {
    fake_nccl_set_rank(rank);
    return body(rank);
  });
}

}  // namespace refit
