// libFuzzer target: a file of rules of any bytes gives a model or diagnostics,
// and a small model a proved plan or diagnostics.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/model/model.h"
#include "tests/fuzz/small_job.h"

namespace refit {
namespace {

constexpr char kSizes[] = R"("num_hidden_layers": 2, "hidden_size": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "intermediate_size": 8, "vocab_size": 64, "num_experts": 4,
    "moe_intermediate_size": 8, "decoder_sparse_step": 1, "attention_bias": true,
    "use_qkv_bias": true, "mlp_only_layers": [0],
    "layer_types": ["full_attention", "linear_attention"],
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "hybrid_override_pattern": "M*",
    "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_head_dim": 2,
    "mamba_d_ssm": 8, "n_groups": 2, "mamba_n_groups": 2, "ssm_state_size": 4,
    "mamba_d_state": 4, "conv_kernel": 4, "mamba_d_conv": 4,
    "moe_shared_expert_intermediate_size": 8})";
constexpr const char* kDestinations[] = {"vllm", "sglang", "megatron"};

// A file in memory, and a path to it.
class MemoryFile {
 public:
  MemoryFile(const void* data, size_t size) : file_(memfd_create("fuzz", 0)) {
    if (file_ < 0 || write(file_, data, size) != static_cast<ssize_t>(size)) {
      std::abort();
    }
  }
  explicit MemoryFile(std::string_view text)
      : MemoryFile(text.data(), text.size()) {}
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() { close(file_); }

  std::string path() const { return absl::StrCat("/proc/self/fd/", file_); }

 private:
  int file_;
};

// The model_type that the rules name, so that most of them get beyond it.
std::string ModelTypeOf(std::string_view rules) {
  constexpr std::string_view kKey = R"("model_type": ")";
  const size_t at = rules.find(kKey);
  if (at == std::string_view::npos) return "mine";
  const std::string_view rest = rules.substr(at + kKey.size());
  const size_t end =
      rest.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789");
  return end == 0 ? "mine" : std::string(rest.substr(0, end));
}

void CompileRules(const uint8_t* data, size_t size) {
  const MemoryFile rules(data, size);
  const MemoryFile config(
      absl::StrCat(R"({"model_type": ")",
                   ModelTypeOf({reinterpret_cast<const char*>(data), size}),
                   "\", ", kSizes));
  const auto file = std::make_shared<SourceFile>();
  file->path = "job.json";
  file->text = absl::StrCat(R"({"model": {"config": ")", config.path(),
                            R"(", "rules": ")", rules.path(),
                            R"("}, "source": {"layout": "fsdp"},
                                "destination": {"tensor_parallel": 2,
                                                "layout": ")",
                            kDestinations[size % 3], "\"}}");
  Diagnostics diagnostics;
  const std::optional<Job> job = ReadJobText(file, "", diagnostics, "refitc");
  if (!job.has_value()) std::abort();
  const std::optional<Model> model = ReadModel(*job, diagnostics);
  diagnostics.Render();
  if (!model.has_value() || !IsSmall(*job, *model)) return;
  const absl::StatusOr<std::vector<uint8_t>> plan =
      Compile(*job, {}, diagnostics);
  diagnostics.Render();
  if (plan.ok() || !diagnostics.ok()) return;
  std::cerr << plan.status() << "\n";  // the plan failed its own proof
  std::abort();
}

}  // namespace
}  // namespace refit

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  refit::CompileRules(data, size);
  return 0;
}
