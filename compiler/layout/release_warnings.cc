// What releases and backends of frameworks deserve a warning for.
#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/side.h"
#include "compiler/job/version.h"
#include "compiler/layout/layout.h"

namespace refit {
namespace {

// NVLink of Hopper, per GPU and direction; faster links are a newer GPU's.
constexpr double kHopperGigabytesPerSecond = 450;

// The newest release of which the names and shapes are known. docs/layouts.md
// says what was read.
struct NewestRelease {
  LayoutKind layout;
  std::string_view name;
  std::string_view version;
};
constexpr std::array kNewest = {
    NewestRelease{LayoutKind::kMegatron, "Megatron Core", "0.19"},
    NewestRelease{LayoutKind::kFsdp, "transformers", "5.24"},
    NewestRelease{LayoutKind::kVllm, "vLLM", "0.33"},
    NewestRelease{LayoutKind::kSglang, "SGLang", "0.5.23"},
};

// Only the numbers that both have are compared: 0.33.1 is a 0.33.
bool IsNewer(const std::vector<int64_t>& version,
             const std::vector<int64_t>& known) {
  const size_t count = std::min(version.size(), known.size());
  return std::lexicographical_compare(known.begin(), known.begin() + count,
                                      version.begin(), version.begin() + count);
}

void WarnOfVersion(const SideSpec& side, Diagnostics& diagnostics) {
  if (!side.version.given) return;
  for (const NewestRelease& newest : kNewest) {
    if (newest.layout != side.layout.value) continue;
    const std::vector<int64_t> version = VersionNumbers(side.version.value);
    if (version.empty()) {
      diagnostics.Warning(side.version.place,
                          "%s.version \"%s\" is no release of %s; the names of "
                          "%s are used; wanted one like %s",
                          side.key, side.version.value, newest.name,
                          newest.version, newest.version);
    } else if (IsNewer(version, VersionNumbers(newest.version))) {
      diagnostics.Warning(side.version.place,
                          "%s.version \"%s\" is newer than %s %s, the newest "
                          "release this build knows; the names of %s are used",
                          side.key, side.version.value, newest.name,
                          newest.version, newest.version);
    }
  }
}

bool IsServing(const SideSpec& side) {
  return side.layout.value == LayoutKind::kVllm ||
         side.layout.value == LayoutKind::kSglang;
}

void WarnOfQuantizedCheckpoint(const Job& job, const Model& model,
                               Diagnostics& diagnostics) {
  const SideSpec& side = job.destination;
  if (!model.quant_method.given || !IsServing(side)) return;
  if (side.dtype.given || side.quantized.given) return;
  const std::string& method = model.quant_method.value;
  // Whether a destination can be quantized in the same way.
  const bool is_fp8 = method.find("fp8") != std::string::npos &&
                      (side.layout.value != LayoutKind::kVllm ||
                       model.architecture.family->vllm.block_scales);
  diagnostics.Warning(
      model.quant_method.place,

      "the checkpoint is quantized (quantization_config %s), and an engine "
      "that loads it holds quantized tensors; this job writes unquantized "
      "ones; wanted destination.dtype: %s",
      method,
      is_fp8 ? "bf16 if the engine runs unquantized, else "
               "fp8_e4m3_block128 or mxfp8_e4m3"
             : "bf16, and an engine that runs unquantized: no job writes "
               "tensors in this format");
}

void WarnOfMoeBackend(const Job& job, const Model& model,
                      Diagnostics& diagnostics) {
  const SideSpec& side = job.destination;
  if (!IsServing(side) || side.moe_backend.given) return;
  if (model.architecture.experts == 0) return;
  const TopologySpec& topology = job.topology;
  const auto warn = [&](const Place& place, const std::string& found) {
    diagnostics.Warning(place,
                        "%s is beyond Hopper; on newer GPUs %s chooses another "
                        "MoE backend by itself, which reorders the experts; "
                        "wanted destination.moe_backend, as the engine is "
                        "started with",
                        found, LayoutName(side.layout.value));
  };
  if (topology.peer_gigabytes_per_second.value > kHopperGigabytesPerSecond) {
    warn(topology.peer_gigabytes_per_second.place,
         absl::StrFormat("topology.peer_gigabytes_per_second %g",
                         topology.peer_gigabytes_per_second.value));
  } else if (topology.gpus_per_host.given &&
             topology.gpus_per_host.value > kUsualGpusPerHost) {
    warn(topology.gpus_per_host.place,
         absl::StrFormat("topology.gpus_per_host %d",
                         topology.gpus_per_host.value));
  }
}

// Warns of jobs that SGLang's own loader does not take, or reads otherwise.
void WarnOfSglangsLoader(const SideSpec& side, const Model& model,
                         Diagnostics& diagnostics) {
  if (side.layout.value != LayoutKind::kSglang) return;
  const Architecture& a = model.architecture;
  const bool is_newer = side.version.given && IsSince(side, {0, 5, 24});
  if (!a.family->sglang.loads_expert_parallel &&
      side.expert_parallel.value > 1 && !is_newer) {
    diagnostics.Warning(side.expert_parallel.place,
                        "%s.expert_parallel %d: SGLang 0.5.23 cannot load "
                        "%s with expert parallelism; wanted 1, or "
                        "%s.version of a newer release that can",
                        side.key, side.expert_parallel.value,
                        a.family->model_type, side.key);
  }
  if (a.mamba.has_value() && a.mamba->groups != a.mamba->sglang_groups) {
    diagnostics.Warning(model.place,
                        "n_groups is %d, and %s reads mamba_n_groups, which is "
                        "%d where config.json does not have it; wanted "
                        "\"mamba_n_groups\": %d",
                        a.mamba->groups, LayoutName(side.layout.value),
                        a.mamba->sglang_groups, a.mamba->groups);
  }
}

// Trainers on transformers 5 whose experts the job takes as the checkpoint's.
void WarnOfSeparateExperts(const SideSpec& side, const Model& model,
                           Diagnostics& diagnostics) {
  if (side.layout.value != LayoutKind::kFsdp || side.fused_experts.given ||
      !side.version.given || !IsSince(side, {5})) {
    return;
  }
  const bool separate =
      std::any_of(model.params.begin(), model.params.end(),
                  [](const Param& param) { return param.index.size() == 2; });
  if (!separate) return;
  diagnostics.Warning(side.version.place,
                      "%s.version %s: transformers 5 holds the experts of a "
                      "layer in one tensor, and this job has a tensor for "
                      "each; wanted %s.fused_experts: true, or false if that "
                      "is meant",
                      side.key, side.version.value, side.key);
}

}  // namespace

void WarnOfFrameworks(const Job& job, const Model& model,
                      Diagnostics& diagnostics) {
  for (const SideSpec* side : {&job.source, &job.destination}) {
    WarnOfVersion(*side, diagnostics);
    WarnOfSglangsLoader(*side, model, diagnostics);
  }
  WarnOfSeparateExperts(job.source, model, diagnostics);
  WarnOfQuantizedCheckpoint(job, model, diagnostics);
  WarnOfMoeBackend(job, model, diagnostics);
}

}  // namespace refit
