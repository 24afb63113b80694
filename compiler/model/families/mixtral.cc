#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

void Build(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  decoder.Begin();
  decoder.AddAttention({});
  decoder.AddExperts(decoder.AllLayers(), "block_sparse_moe",
                     {.gate = "w1", .up = "w3", .down = "w2"},
                     config.Count("num_local_experts"),
                     config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace

extern const Family kMixtral = {
    .model_type = "mixtral",
    .build = Build,
    .vllm = {.every_stage = VllmTraits::EveryStage::kEnds},
    .sglang = {.head = SglangTraits::Head::kOwnTensor,
               .dp_attention = false,
               .redundant_experts = false},
};

}  // namespace refit
