// What the decoders of most families have in common: the names, shapes and
// roles of embedding, attention, gated MLP, experts and head.
#ifndef REFIT_COMPILER_MODEL_DECODER_H_
#define REFIT_COMPILER_MODEL_DECODER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "compiler/ir/module.h"
#include "compiler/model/config.h"
#include "compiler/model/model.h"

namespace refit {

// Adds the stacks of a decoder in the order of the calls. Names are relative to
// "model.layers.{0}.", or to what NameLayers says.
class DecoderBuilder {
 public:
  // Reads the sizes that every decoder has.
  DecoderBuilder(ConfigReader& config, Model& model);

  // From here on the layers are called `prefix`; the model's layer
  // `first_layer` is number 0.
  void NameLayers(std::string prefix, int32_t first_layer);

  // Adds the embedding.
  void Begin();
  // Norm and dense MLP of `layers`.
  void AddMlp(const IndexDim& layers, int64_t intermediate,
              std::string_view module = "mlp");
  // Norm, router and experts of `layers`.
  void AddExperts(const IndexDim& layers, int64_t experts,
                  int64_t intermediate);
  // Adds final norm and head.
  void End();
  // Adds the head, or says that it is the embedding of this name.
  void AddHead(std::string_view embedding);

  // A param of the layers `index[0]`, or of no layer.
  Param& Add(std::string_view name, ParamRole role, Dims shape,
             std::vector<IndexDim> index);
  // A param under its full name. `index`: layers, then experts; empty: of no
  // layer. Layer n of the index is the model's layer first_layer + n.
  Param& AddParam(std::string name, ParamRole role, Dims shape,
                  std::vector<IndexDim> index, int32_t first_layer = 0);

  IndexDim AllLayers() const;

 private:
  void ReadGroupedHeads();
  void AddMlpNorm(ParamRole role, const IndexDim& layers);
  ConfigReader& config_;
  Model& model_;
  DType dtype_ = DType::kUnspecified;
  std::string root_ = "model.";
  std::string head_ = "lm_head.weight";
  std::string layer_prefix_ = "model.layers.{0}.";
  int32_t first_layer_ = 0;
};

// Reports routing that would give the layers other parameters.
void CheckRouting(ConfigReader& config);

// The groups of experts that "n_group" names; 0: config.json does not say.
int64_t ReadExpertGroups(ConfigReader& config);

// Which layers of Qwen's decoders have experts. A layer is dense if
// `mlp_only_layers` names it, or if its number, counted from 1, is not a
// multiple of `decoder_sparse_step`.
struct SparseLayers {
  IndexDim dense;
  IndexDim sparse;
  std::string_view key;  // of the config: what makes the dense ones so
};
SparseLayers ReadSparseLayers(ConfigReader& config, const IndexDim& layers);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_DECODER_H_
