// Megatron Core's buffers, element by element.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/property/tiny_model.h"

namespace refit {
namespace {

struct LayerRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The layers of virtual stage `chunk` of pipeline stage `stage`.
LayerRange LayersOf(const FrameworkSide& side, int64_t layers, int64_t stage,
                    int64_t chunk) {
  const int64_t chunks = side.virtual_pipeline;
  if (!side.layers_per_stage.empty()) {
    const int64_t cell = chunk * side.pipeline + stage;
    int64_t begin = 0;
    for (int64_t i = 0; i < cell; ++i) begin += side.layers_per_stage[i];
    return {begin, begin + side.layers_per_stage[cell]};
  }
  const int64_t first = side.first_stage_layers / chunks;
  const int64_t last = side.last_stage_layers / chunks;
  const int64_t stages_between =
      side.pipeline - (first > 0 ? 1 : 0) - (last > 0 ? 1 : 0);
  const int64_t between = layers / chunks - first - last;
  const int64_t per_stage = stages_between > 0 ? between / stages_between : 0;
  int64_t begin = chunk * (first + between + last);
  int64_t size = per_stage;
  if (first > 0) {
    begin += stage > 0 ? first + (stage - 1) * per_stage : 0;
    if (stage == 0) size = first;
  } else {
    begin += stage * per_stage;
  }
  if (last > 0 && stage == side.pipeline - 1) size = last;
  return {begin, begin + size};
}

// One rank's buffers.
class RankWriter {
 public:
  RankWriter(const FrameworkSide& side, const TinyModel& model,
             const CellWriter& writer, int64_t rank_in_stage)
      : side_(side),
        model_(model),
        writer_(writer),
        tensor_(rank_in_stage % side.tensor),
        expert_tensor_(rank_in_stage % side.expert_tensor),
        expert_(rank_in_stage / side.expert_tensor % side.expert),
        dtype_(side.dtype.empty() ? model.dtype : side.dtype) {}

  void WriteChunk(int64_t stage, int64_t chunk) {
    const std::string prefix = side_.virtual_pipeline > 1
                                   ? absl::StrFormat("vp_stage.%d.", chunk)
                                   : "";
    const bool first = stage == 0 && chunk == 0;
    const bool last =
        stage == side_.pipeline - 1 && chunk == side_.virtual_pipeline - 1;
    if (first) {
      WriteVocabulary(prefix + "embedding.word_embeddings.weight",
                      "model.embed_tokens.weight");
    }
    const LayerRange layers = LayersOf(side_, model_.layers, stage, chunk);
    for (int64_t layer = layers.begin; layer < layers.end; ++layer) {
      WriteLayer(
          absl::StrFormat("%sdecoder.layers.%d.", prefix, layer - layers.begin),
          layer);
    }
    if (!last) return;
    Whole(prefix + "decoder.final_layernorm.weight", "model.norm.weight");
    if (!model_.tied) {
      WriteVocabulary(prefix + "output_layer.weight", "lm_head.weight");
    } else if (!first) {
      WriteVocabulary(prefix + "output_layer.weight",
                      "model.embed_tokens.weight");
      if (is_source_) {
        for (Cell& cell : out_.back().cells) {
          cell = {.tensor = Cell::kUntouched};
        }
      }
    }
  }

  // A source's copy of a tied embedding is nobody's to read.
  void set_is_source(bool is_source) { is_source_ = is_source; }
  std::vector<PhysicalTensor> Take() { return std::move(out_); }

 private:
  void Whole(std::string name, const std::string& tensor) {
    out_.push_back(writer_.Whole(std::move(name), dtype_, tensor));
  }

  void WriteVocabulary(std::string name, const std::string& tensor) {
    const int64_t unit = side_.vocab_divisor * side_.tensor;
    const int64_t padded = (model_.vocab + unit - 1) / unit * unit;
    out_.push_back(writer_.Vocabulary(std::move(name), dtype_, tensor,
                                      padded / side_.tensor, tensor_));
  }

  // Rank t has fused rows [t * N / T, (t + 1) * N / T).
  void WriteQkv(std::string name, const std::string& attention,
                const std::string& leaf) {
    const int64_t head = model_.head_dim;
    const int64_t queries = model_.heads / model_.kv_heads;
    const int64_t group_rows = (queries + 2) * head;
    const int64_t rows = model_.kv_heads * group_rows / side_.tensor;
    std::vector<int64_t> shape = {rows};
    if (leaf == "weight") shape.push_back(model_.hidden);
    const std::string q = attention + "q_proj." + leaf;
    const std::string k = attention + "k_proj." + leaf;
    const std::string v = attention + "v_proj." + leaf;
    out_.push_back(writer_.Write(
        std::move(name), dtype_, shape,
        [&](int64_t, int64_t row, int64_t column) {
          const int64_t fused = tensor_ * rows + row;
          const int64_t group = fused / group_rows;
          const int64_t row_in_group = fused % group_rows;
          if (row_in_group < queries * head) {
            return writer_.At(q, group * queries * head + row_in_group, column);
          }
          const int64_t in_head = row_in_group % head;
          return writer_.At(row_in_group < (queries + 1) * head ? k : v,
                            group * head + in_head, column);
        }));
  }

  void WriteGateAndUp(std::string name, const std::string& gate,
                      const std::string& up, int64_t count, int64_t index) {
    const int64_t half = writer_.Shape(gate)[0] / count;
    out_.push_back(writer_.Write(
        std::move(name), dtype_, {2 * half, model_.hidden},
        [&](int64_t, int64_t row, int64_t column) {
          return row < half ? writer_.At(gate, index * half + row, column)
                            : writer_.At(up, index * half + row - half, column);
        }));
  }

  void WriteLayer(const std::string& to, int64_t layer) {
    const std::string from = absl::StrFormat("model.layers.%d.", layer);
    const std::string attention = from + "self_attn.";
    Whole(to + "self_attention.linear_qkv.layer_norm_weight",
          from + "input_layernorm.weight");
    WriteQkv(to + "self_attention.linear_qkv.weight", attention, "weight");
    if (model_.HasQkvBias()) {
      WriteQkv(to + "self_attention.linear_qkv.bias", attention, "bias");
    }
    out_.push_back(writer_.Columns(to + "self_attention.linear_proj.weight",
                                   dtype_, attention + "o_proj.weight",
                                   side_.tensor, tensor_));
    if (model_.HasOutputBias()) {
      Whole(to + "self_attention.linear_proj.bias", attention + "o_proj.bias");
    }
    if (model_.HasQueryKeyNorm()) {
      Whole(to + "self_attention.q_layernorm.weight",
            attention + "q_norm.weight");
      Whole(to + "self_attention.k_layernorm.weight",
            attention + "k_norm.weight");
    }
    const std::string norm = from + "post_attention_layernorm.weight";
    if (model_.IsMoe(layer)) {
      Whole(to + "pre_mlp_layernorm.weight", norm);
      WriteExperts(to, from);
      return;
    }
    Whole(to + "mlp.linear_fc1.layer_norm_weight", norm);
    WriteGateAndUp(to + "mlp.linear_fc1.weight", from + "mlp.gate_proj.weight",
                   from + "mlp.up_proj.weight", side_.tensor, tensor_);
    out_.push_back(writer_.Columns(to + "mlp.linear_fc2.weight", dtype_,
                                   from + "mlp.down_proj.weight", side_.tensor,
                                   tensor_));
  }

  void WriteExperts(const std::string& to, const std::string& from) {
    const ExpertNames names = ExpertNamesOf(model_);
    Whole(to + "mlp.router.weight",
          absl::StrCat(from, names.module, ".gate.weight"));
    const int64_t local = model_.experts / side_.expert;
    for (int64_t k = 0; k < local; ++k) {
      const auto matrix = [&](const std::string& name) {
        return absl::StrCat(from, names.module, ".experts.",
                            expert_ * local + k, ".", name, ".weight");
      };
      WriteGateAndUp(absl::StrCat(to, "mlp.experts.linear_fc1.weight", k),
                     matrix(names.gate), matrix(names.up), side_.expert_tensor,
                     expert_tensor_);
      out_.push_back(writer_.Columns(
          absl::StrCat(to, "mlp.experts.linear_fc2.weight", k), dtype_,
          matrix(names.down), side_.expert_tensor, expert_tensor_));
    }
  }

  const FrameworkSide& side_;
  const TinyModel& model_;
  const CellWriter& writer_;
  const int64_t tensor_;
  const int64_t expert_tensor_;
  const int64_t expert_;
  const std::string dtype_;
  bool is_source_ = false;
  std::vector<PhysicalTensor> out_;
};

bool Fits(const FrameworkSide& side, const TinyModel& model,
          int64_t ranks_max) {
  const int64_t stage_ranks = side.tensor * side.context * side.data;
  const bool heads_fit =
      model.kv_heads % side.tensor == 0 || side.tensor % model.kv_heads == 0;
  const int64_t qkv_rows = (model.heads + 2 * model.kv_heads) * model.head_dim;
  if (side.Ranks() > ranks_max || !heads_fit ||
      model.heads % side.tensor != 0 || qkv_rows % side.tensor != 0 ||
      model.intermediate % side.tensor != 0) {
    return false;
  }
  if (model.experts == 0) return side.expert == 1 && side.expert_tensor == 1;
  return model.experts % side.expert == 0 &&
         model.expert_intermediate % side.expert_tensor == 0 &&
         stage_ranks % (side.expert * side.expert_tensor) == 0;
}

// Gives the stages their layers, in one of the ways a job can.
void DrawStages(Draw& draw, const TinyModel& model, FrameworkSide& side) {
  const int64_t cells = side.pipeline * side.virtual_pipeline;
  if (model.layers % cells == 0 && draw.Chance(50)) return;
  if (side.pipeline > 1 && draw.Chance(50)) {
    const int64_t chunks = side.virtual_pipeline;
    const int64_t first = chunks * draw.Between(0, 2);
    const int64_t last = chunks * draw.Between(0, 2);
    const int64_t between =
        side.pipeline - (first > 0 ? 1 : 0) - (last > 0 ? 1 : 0);
    const int64_t rest = model.layers - first - last;
    if (first + last > 0 && rest >= 0 &&
        (between > 0 ? rest % (between * chunks) == 0 : rest == 0)) {
      side.first_stage_layers = first;
      side.last_stage_layers = last;
      return;
    }
  }
  side.layers_per_stage.assign(cells, 0);
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    ++side.layers_per_stage[draw.Between(0, cells - 1)];
  }
}

}  // namespace

FrameworkSide DrawMegatronSide(Draw& draw, const TinyModel& model,
                               int64_t ranks_max) {
  FrameworkSide side;
  do {
    side = FrameworkSide();
    side.layout = "megatron";
    side.tensor = draw.Pick<int64_t>({1, 2, 2, 3, 4, 6});
    side.pipeline = draw.Between(1, 4);
    side.data = draw.Between(1, 4);
    side.context = draw.Chance(30) ? 2 : 1;
    side.replicas = draw.Chance(20) ? 2 : 1;
    side.expert = draw.Pick<int64_t>({1, 2, 3, 4, 6});
    side.expert_tensor = draw.Pick<int64_t>({1, 1, 2, 3});
  } while (!Fits(side, model, ranks_max));
  if (side.pipeline > 1 && draw.Chance(40)) {
    side.virtual_pipeline = draw.Between(2, 3);
  }
  side.vocab_divisor = draw.Pick<int64_t>({1, 8, 10, 128});
  DrawStages(draw, model, side);
  return side;
}

PhysicalSide LayOutMegatronSide(const FrameworkSide& side,
                                const TinyModel& model,
                                const std::vector<LogicalTensor>& tensors,
                                bool is_source) {
  const CellWriter writer(tensors);
  PhysicalSide ranks;
  for (int64_t replica = 0; replica < side.replicas; ++replica) {
    for (int64_t stage = 0; stage < side.pipeline; ++stage) {
      for (int64_t i = 0; i < side.data * side.context * side.tensor; ++i) {
        RankWriter rank(side, model, writer, i);
        rank.set_is_source(is_source);
        for (int64_t chunk = 0; chunk < side.virtual_pipeline; ++chunk) {
          rank.WriteChunk(stage, chunk);
        }
        ranks.push_back(rank.Take());
      }
    }
  }
  return ranks;
}

}  // namespace refit
