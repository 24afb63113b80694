#include "compiler/model/decoder.h"
#include "compiler/model/families.h"

namespace refit {

void BuildMixtral(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  decoder.Begin();
  decoder.AddAttention({});
  decoder.AddExperts(decoder.AllLayers(), "block_sparse_moe",
                     {.gate = "w1", .up = "w3", .down = "w2"},
                     config.Count("num_local_experts"),
                     config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace refit
