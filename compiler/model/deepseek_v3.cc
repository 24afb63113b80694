#include "compiler/model/decoder.h"
#include "compiler/model/families.h"
#include "compiler/model/shared_expert_layers.h"

namespace refit {

void BuildDeepseekV3(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model, HeadForm::kLatent);
  if (config.FlagOr("attention_bias", false)) {
    config.Error("attention_bias",
                 "attention_bias true is not supported; wanted false");
  }
  decoder.ReadMtpLayers();
  decoder.Begin();
  decoder.AddLatentAttention();
  AddSharedExpertLayers(config, decoder, model);
  decoder.End();
}

}  // namespace refit
