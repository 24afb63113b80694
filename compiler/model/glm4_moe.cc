#include "compiler/model/decoder.h"
#include "compiler/model/families.h"
#include "compiler/model/shared_expert_layers.h"

namespace refit {

void BuildGlm4Moe(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  decoder.ReadMtpLayers();
  decoder.Begin();
  decoder.AddAttention(
      {.query_key_value_bias = config.FlagOr("attention_bias", false),
       .query_key_norm = config.FlagOr("use_qk_norm", false)});
  AddSharedExpertLayers(config, decoder, model);
  decoder.End();
}

}  // namespace refit
