// Small networks as the tests draw them: their config.json and their
// parameters, listed one by one.
#ifndef REFIT_TESTS_PROPERTY_TINY_MODEL_H_
#define REFIT_TESTS_PROPERTY_TINY_MODEL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/property/draw.h"
#include "tests/property/oracle.h"

namespace refit {

struct TinyModel {
  std::string family;  // config.json's model_type
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t vocab = 0;
  int64_t experts = 0;  // 0: dense
  int64_t expert_intermediate = 0;
  std::vector<int64_t> dense_layers;  // of qwen3_moe
  bool tied = false;
  bool attention_bias = false;
  std::string dtype;

  bool HasQkvBias() const { return family == "qwen2" || attention_bias; }
  bool HasOutputBias() const { return attention_bias && family == "llama"; }
  bool HasQueryKeyNorm() const { return family.starts_with("qwen3"); }
  bool IsMoe(int64_t layer) const;
};

TinyModel DrawModel(Draw& draw);
std::string ConfigText(const TinyModel& model);
std::vector<LogicalTensor> TensorsOf(const TinyModel& model);

// What an expert's three matrices and their module are called.
struct ExpertNames {
  std::string module;
  std::string gate;
  std::string up;
  std::string down;
};
ExpertNames ExpertNamesOf(const TinyModel& model);

// Writes down a rank's tensors, naming logical tensors by name.
class CellWriter {
 public:
  explicit CellWriter(const std::vector<LogicalTensor>& tensors);

  // Row `row`, column `column` of a matrix; of a vector, element `row`.
  Cell At(const std::string& name, int64_t row, int64_t column) const;
  const std::vector<int64_t>& Shape(const std::string& name) const;

  // A tensor of one, two or three dimensions whose cell at [slab, row, column]
  // `cell` gives; a missing last dimension has the index 0, and so has a
  // missing first one.
  PhysicalTensor Write(std::string name, std::string dtype,
                       std::vector<int64_t> shape,
                       const std::function<Cell(int64_t slab, int64_t row,
                                                int64_t column)>& cell) const;

  // All of a logical tensor.
  PhysicalTensor Whole(std::string name, std::string dtype,
                       const std::string& tensor) const;
  // Part `index` of `count` of a matrix' columns.
  PhysicalTensor Columns(std::string name, std::string dtype,
                         const std::string& tensor, int64_t count,
                         int64_t index) const;
  // Rows [index * rows, (index + 1) * rows) of a vocabulary matrix, padding
  // where it has no such row.
  PhysicalTensor Vocabulary(std::string name, std::string dtype,
                            const std::string& tensor, int64_t rows,
                            int64_t index) const;

 private:
  const std::vector<LogicalTensor>& tensors_;
  std::map<std::string, int32_t> numbers_;
};

// Sizes of a side as its layout names them in a job; 1 by default.
struct FrameworkSide {
  std::string layout;  // "megatron" or "vllm"
  int64_t tensor = 1;
  int64_t pipeline = 1;
  int64_t data = 1;
  int64_t replicas = 1;
  std::string dtype;                      // "": the model's
  std::vector<int64_t> layers_per_stage;  // empty: not given

  // megatron
  int64_t virtual_pipeline = 1;
  int64_t context = 1;
  int64_t expert = 1;
  int64_t expert_tensor = 1;
  int64_t first_stage_layers = 0;  // 0: not given
  int64_t last_stage_layers = 0;
  int64_t vocab_divisor = 128;

  // vllm
  bool expert_parallel = false;
  bool old_names = false;  // those before routed_experts

  int64_t Ranks() const {
    return tensor * pipeline * data * context * replicas;
  }
};

// Sides of at most `ranks_max` ranks that fit `model`.
FrameworkSide DrawMegatronSide(Draw& draw, const TinyModel& model,
                               int64_t ranks_max);
FrameworkSide DrawVllmSide(Draw& draw, const TinyModel& model,
                           int64_t ranks_max);
std::string SideText(const FrameworkSide& side);

// Every buffer of every rank.
PhysicalSide LayOutMegatronSide(const FrameworkSide& side,
                                const TinyModel& model,
                                const std::vector<LogicalTensor>& tensors,
                                bool is_source);
PhysicalSide LayOutVllmSide(const FrameworkSide& side, const TinyModel& model,
                            const std::vector<LogicalTensor>& tensors);

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_TINY_MODEL_H_
