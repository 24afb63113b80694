#include "compiler/model/shared_expert_layers.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_format.h"
#include "compiler/job/json.h"

namespace refit {
namespace {

// Reports what would give the layers other parameters.
void CheckRouting(ConfigReader& config) {
  if (config.SizeOr("moe_layer_freq", 1) != 1) {
    config.Error("moe_layer_freq",
                 "moe_layer_freq other than 1 is not supported; wanted 1");
  }
  if (!config.Has("topk_method")) return;
  const std::string method = config.String("topk_method");
  if (method.empty() || method == "noaux_tc") return;
  config.Error("topk_method",
               absl::StrFormat("topk_method %s is not supported; wanted "
                               "\"noaux_tc\"",
                               Quoted(method)));
}

}  // namespace

void AddSharedExpertLayers(ConfigReader& config, DecoderBuilder& decoder,
                           Model& model) {
  CheckRouting(config);
  // A checkpoint in block-scaled FP8, and buffers that older code stored.
  model.stored_beside.insert(model.stored_beside.end(),
                             {"*.weight_scale_inv", "*.rotary_emb.inv_freq"});

  IndexDim sparse = decoder.AllLayers();
  const int64_t dense_count =
      std::min(config.CountOr("first_k_dense_replace", 0), sparse.extent());
  if (dense_count > 0) {
    decoder.AddMlp(Consecutive(0, dense_count),
                   config.Size("intermediate_size"));
    sparse.numbers.erase(sparse.numbers.begin(),
                         sparse.numbers.begin() + dense_count);
  }
  if (!sparse.numbers.empty()) {
    const int64_t intermediate = config.Size("moe_intermediate_size");
    decoder.AddExperts(sparse, "mlp", {}, config.Count("n_routed_experts"),
                       intermediate);
    decoder.AddRouterCorrection(sparse, "mlp");
    const int64_t shared = config.CountOr("n_shared_experts", 0);
    if (shared > 0) {
      decoder.AddSharedExperts(sparse, "mlp.shared_experts",
                               shared * intermediate);
    }
  }
  decoder.AddMtpProjections();
}

}  // namespace refit
