// Small models built by hand, and every element of a layout written out, so
// that a test can compare a layout with what a framework's loader would do to
// whole tensors.
#ifndef REFIT_TESTS_COMPILER_LAYOUT_TESTING_H_
#define REFIT_TESTS_COMPILER_LAYOUT_TESTING_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "compiler/layout/layout.h"

namespace refit::layout_testing {

struct ModelSizes {
  int64_t layers = 4;
  int64_t hidden = 3;
  int64_t heads = 12;
  int64_t kv_heads = 4;
  int64_t head_dim = 2;
  int64_t intermediate = 12;
  int64_t vocab = 70;
  int64_t experts = 0;  // of each layer that is not dense
  int64_t expert_intermediate = 12;
  std::vector<int32_t> dense_layers = {};  // with experts: the layers without
  bool tied = false;
  bool qkv_bias = false;
  bool qk_norm = false;
  // "mixtral": its names. Without experts qwen3_moe is qwen3.
  std::string family = "qwen3_moe";
};

Model MakeModel(const ModelSizes& sizes);

// The model of a config.json, and with `mtp` its layers of multi-token
// prediction. Without diagnostics one fails the test.
std::optional<Model> ReadTinyModel(const std::string& config, bool mtp,
                                   Diagnostics& diagnostics);
Model ReadTinyModel(const std::string& config, bool mtp = false);

// The same with its vision tower.
std::optional<Model> ReadTinyTower(const std::string& config,
                                   Diagnostics& diagnostics);
Model ReadTinyTower(const std::string& config);

// A tensor whose cells name elements: every element of a model's params has
// its own number. Negative cells are none.
struct Tensor {
  static constexpr int64_t kFill = -1;
  static constexpr int64_t kSkip = -2;
  static constexpr int64_t kNothing = -3;

  std::vector<int64_t> shape;
  std::vector<int64_t> cells;

  friend bool operator==(const Tensor&, const Tensor&) = default;
};
using Tensors = std::map<std::string, Tensor>;

// All params of the model by their full names.
Tensors Checkpoint(const Model& model);

// Cuts and joins of whole tensors, as loaders do them.
Tensor Rows(const Tensor& tensor, int64_t begin, int64_t end);
Tensor Columns(const Tensor& tensor, int64_t begin, int64_t end);
Tensor Concat(const std::vector<Tensor>& parts);  // along dim 0
Tensor Stack(const std::vector<Tensor>& parts);   // along a new dim 0
Tensor Filled(std::vector<int64_t> shape, int64_t cell);

// What each rank holds, from the fragments and regions of its buffers. Fails
// the test where two of them overlap or leave their buffer.
std::vector<Tensors> Expand(const Model& model, const BufferTable& buffers,
                            const SideLayout& layout);

// Lays the side out, fails the test on a diagnostic, expands.
std::vector<Tensors> LayOutAndExpand(const Model& model, const SideSpec& side,
                                     fb::Side which);

// The tensor of this name, "{0}" for a layer's number, on the destination's
// rank 0.
Buffer BufferOf(const Model& model, const SideSpec& side,
                const std::string& name);

// The diagnostics of laying out, messages only, one a line.
std::string LayOutErrors(const Model& model, const SideSpec& side);

// A side named "destination" with this layout.
SideSpec MakeSide(LayoutKind layout, int64_t tensor_parallel = 1,
                  int64_t pipeline_parallel = 1);

// The tensors of `all` whose names begin with `prefix`, without it.
Tensors Under(const Tensors& all, const std::string& prefix);

// Fails the test naming the tensors that differ.
void ExpectSameTensors(const Tensors& found, const Tensors& wanted);

// The names of the tensors that are one declared skip, in order.
std::vector<std::string> SkippedTensors(const Tensors& rank);

// A given value.
template <typename T>
Located<T> Given(T value) {
  return {.value = std::move(value), .place = {}, .given = true};
}

}  // namespace refit::layout_testing

#endif  // REFIT_TESTS_COMPILER_LAYOUT_TESTING_H_
