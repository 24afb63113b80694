#include "tests/property/tiny_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace refit {

bool TinyModel::IsMoe(int64_t layer) const {
  return experts > 0 && std::find(dense_layers.begin(), dense_layers.end(),
                                  layer) == dense_layers.end();
}

ExpertNames ExpertNamesOf(const TinyModel& model) {
  if (model.family == "mixtral") {
    return {
        .module = "block_sparse_moe", .gate = "w1", .up = "w3", .down = "w2"};
  }
  return {.module = "mlp",
          .gate = "gate_proj",
          .up = "up_proj",
          .down = "down_proj"};
}

TinyModel DrawModel(Draw& draw) {
  TinyModel model;
  model.family = draw.Pick<std::string>(
      {"llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe", "mixtral"});
  model.layers = draw.Between(1, 6);
  model.hidden = draw.Pick<int64_t>({4, 8, 12, 18});
  model.kv_heads = draw.Pick<int64_t>({1, 2, 3, 4});
  model.heads = model.kv_heads * draw.Pick<int64_t>({1, 2, 4, 6});
  model.head_dim = draw.Pick<int64_t>({2, 3, 4});
  model.intermediate = 12 * draw.Between(1, 2);
  model.vocab = draw.Pick<int64_t>({7, 64, 65, 100, 129, 192});
  model.tied = draw.Chance(40);
  // vLLM's qwen3 and qwen3_moe have no bias behind their attention.
  model.attention_bias =
      (model.family == "llama" || model.family == "qwen2") && draw.Chance(25);
  model.dtype = draw.Pick<std::string>({"bf16", "fp16", "fp32"});
  if (model.family == "qwen3_moe" || model.family == "mixtral") {
    model.experts = draw.Pick<int64_t>({2, 4, 5, 6});
    model.expert_intermediate = draw.Pick<int64_t>({4, 12, 24});
  }
  if (model.family == "qwen3_moe") {
    for (int64_t layer = 0; layer < model.layers; ++layer) {
      if (draw.Chance(20)) model.dense_layers.push_back(layer);
    }
    if (static_cast<int64_t>(model.dense_layers.size()) == model.layers) {
      model.dense_layers.pop_back();
    }
  }
  return model;
}

std::string ConfigText(const TinyModel& model) {
  const std::map<std::string, std::string> dtypes = {
      {"bf16", "bfloat16"}, {"fp16", "float16"}, {"fp32", "float32"}};
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  std::string text = absl::StrFormat(
      "{\"model_type\": \"%s\", \"num_hidden_layers\": %d, \"hidden_size\": "
      "%d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d, "
      "\"head_dim\": %d, \"vocab_size\": %d, \"tie_word_embeddings\": %s, "
      "\"torch_dtype\": \"%s\"",
      model.family, model.layers, model.hidden, model.heads, model.kv_heads,
      model.head_dim, model.vocab, flag(model.tied), dtypes.at(model.dtype));
  if (model.attention_bias)
    absl::StrAppend(&text, ", \"attention_bias\": true");
  if (model.family == "mixtral") {
    absl::StrAppendFormat(
        &text, ", \"num_local_experts\": %d, \"intermediate_size\": %d",
        model.experts, model.expert_intermediate);
  } else {
    absl::StrAppendFormat(&text, ", \"intermediate_size\": %d",
                          model.intermediate);
  }
  if (model.family == "qwen3_moe") {
    absl::StrAppendFormat(&text,
                          ", \"num_experts\": %d, \"moe_intermediate_size\": "
                          "%d, \"mlp_only_layers\": [%s]",
                          model.experts, model.expert_intermediate,
                          absl::StrJoin(model.dense_layers, ", "));
  }
  return text + "}";
}

std::vector<LogicalTensor> TensorsOf(const TinyModel& model) {
  std::vector<LogicalTensor> tensors;
  const auto add = [&](std::string name, std::vector<int64_t> shape) {
    tensors.push_back({std::move(name), std::move(shape), model.dtype});
  };
  const int64_t hidden = model.hidden;
  const int64_t query = model.heads * model.head_dim;
  const int64_t key_value = model.kv_heads * model.head_dim;
  add("model.embed_tokens.weight", {model.vocab, hidden});
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string in = absl::StrFormat("model.layers.%d.", layer);
    add(in + "input_layernorm.weight", {hidden});
    add(in + "self_attn.q_proj.weight", {query, hidden});
    add(in + "self_attn.k_proj.weight", {key_value, hidden});
    add(in + "self_attn.v_proj.weight", {key_value, hidden});
    add(in + "self_attn.o_proj.weight", {hidden, query});
    if (model.HasQkvBias()) {
      add(in + "self_attn.q_proj.bias", {query});
      add(in + "self_attn.k_proj.bias", {key_value});
      add(in + "self_attn.v_proj.bias", {key_value});
    }
    if (model.HasOutputBias()) add(in + "self_attn.o_proj.bias", {hidden});
    if (model.HasQueryKeyNorm()) {
      add(in + "self_attn.q_norm.weight", {model.head_dim});
      add(in + "self_attn.k_norm.weight", {model.head_dim});
    }
    add(in + "post_attention_layernorm.weight", {hidden});
    if (!model.IsMoe(layer)) {
      add(in + "mlp.gate_proj.weight", {model.intermediate, hidden});
      add(in + "mlp.up_proj.weight", {model.intermediate, hidden});
      add(in + "mlp.down_proj.weight", {hidden, model.intermediate});
      continue;
    }
    const ExpertNames names = ExpertNamesOf(model);
    add(absl::StrCat(in, names.module, ".gate.weight"),
        {model.experts, hidden});
    for (int64_t expert = 0; expert < model.experts; ++expert) {
      const std::string in_expert =
          absl::StrCat(in, names.module, ".experts.", expert, ".");
      add(absl::StrCat(in_expert, names.gate, ".weight"),
          {model.expert_intermediate, hidden});
      add(absl::StrCat(in_expert, names.up, ".weight"),
          {model.expert_intermediate, hidden});
      add(absl::StrCat(in_expert, names.down, ".weight"),
          {hidden, model.expert_intermediate});
    }
  }
  add("model.norm.weight", {hidden});
  if (!model.tied) add("lm_head.weight", {model.vocab, hidden});
  return tensors;
}

CellWriter::CellWriter(const std::vector<LogicalTensor>& tensors)
    : tensors_(tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    numbers_[tensors[i].name] = static_cast<int32_t>(i);
  }
}

const std::vector<int64_t>& CellWriter::Shape(const std::string& name) const {
  return tensors_[numbers_.at(name)].shape;
}

Cell CellWriter::At(const std::string& name, int64_t row,
                    int64_t column) const {
  const std::vector<int64_t>& shape = Shape(name);
  const int64_t columns = shape.size() > 1 ? shape[1] : 1;
  return {.tensor = numbers_.at(name), .element = row * columns + column};
}

PhysicalTensor CellWriter::Write(
    std::string name, std::string dtype, std::vector<int64_t> shape,
    const std::function<Cell(int64_t, int64_t, int64_t)>& cell) const {
  PhysicalTensor tensor = {.name = std::move(name),
                           .dtype = std::move(dtype),
                           .shape = shape,
                           .cells = {}};
  if (shape.size() < 2) shape.push_back(1);
  if (shape.size() < 3) shape.insert(shape.begin(), 1);
  for (int64_t slab = 0; slab < shape[0]; ++slab) {
    for (int64_t row = 0; row < shape[1]; ++row) {
      for (int64_t column = 0; column < shape[2]; ++column) {
        tensor.cells.push_back(cell(slab, row, column));
      }
    }
  }
  return tensor;
}

PhysicalTensor CellWriter::Whole(std::string name, std::string dtype,
                                 const std::string& tensor) const {
  return Write(std::move(name), std::move(dtype), Shape(tensor),
               [&](int64_t, int64_t row, int64_t column) {
                 return At(tensor, row, column);
               });
}

PhysicalTensor CellWriter::Columns(std::string name, std::string dtype,
                                   const std::string& tensor, int64_t count,
                                   int64_t index) const {
  const int64_t columns = Shape(tensor)[1] / count;
  return Write(std::move(name), std::move(dtype), {Shape(tensor)[0], columns},
               [&](int64_t, int64_t row, int64_t column) {
                 return At(tensor, row, index * columns + column);
               });
}

PhysicalTensor CellWriter::Vocabulary(std::string name, std::string dtype,
                                      const std::string& tensor, int64_t rows,
                                      int64_t index) const {
  return Write(std::move(name), std::move(dtype), {rows, Shape(tensor)[1]},
               [&](int64_t, int64_t row, int64_t column) -> Cell {
                 const int64_t token = index * rows + row;
                 if (token >= Shape(tensor)[0]) return {};
                 return At(tensor, token, column);
               });
}

std::string SideText(const FrameworkSide& side) {
  std::string text = absl::StrFormat("{\"layout\": \"%s\"", side.layout);
  const auto add = [&](const char* key, int64_t value, int64_t otherwise) {
    if (value != otherwise)
      absl::StrAppendFormat(&text, ", \"%s\": %d", key, value);
  };
  add("tensor_parallel", side.tensor, 1);
  add("pipeline_parallel", side.pipeline, 1);
  add("data_parallel", side.data, 1);
  add("replicas", side.replicas, 1);
  add("virtual_pipeline_parallel", side.virtual_pipeline, 1);
  add("context_parallel", side.context, 1);
  add("expert_parallel", side.expert, 1);
  add("expert_tensor_parallel", side.expert_tensor, 1);
  add("num_layers_in_first_pipeline_stage", side.first_stage_layers, 0);
  add("num_layers_in_last_pipeline_stage", side.last_stage_layers, 0);
  add("make_vocab_size_divisible_by", side.vocab_divisor, 128);
  if (!side.layers_per_stage.empty()) {
    absl::StrAppendFormat(&text, ", \"layers_per_stage\": [%s]",
                          absl::StrJoin(side.layers_per_stage, ", "));
  }
  if (side.expert_parallel)
    absl::StrAppend(&text, ", \"expert_parallel\": true");
  if (side.old_names) absl::StrAppend(&text, ", \"version\": \"0.23\"");
  if (!side.dtype.empty()) {
    absl::StrAppendFormat(&text, ", \"dtype\": \"%s\"", side.dtype);
  }
  return text + "}";
}

}  // namespace refit
