// vLLM's buffers, element by element.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/property/tiny_model.h"

namespace refit {
namespace {

constexpr int64_t kVocabUnit = 64;

int64_t PaddedVocab(const TinyModel& model) {
  return (model.vocab + kVocabUnit - 1) / kVocabUnit * kVocabUnit;
}

// How many layers a stage has.
int64_t StageLayers(const FrameworkSide& side, int64_t layers, int64_t stage) {
  if (!side.layers_per_stage.empty()) return side.layers_per_stage[stage];
  // The remainder goes to the stages before the last one, from behind.
  const int64_t stages_from_behind = side.pipeline - 2 - stage;
  const bool more =
      stages_from_behind >= 0 && stages_from_behind < layers % side.pipeline;
  return layers / side.pipeline + (more ? 1 : 0);
}

// One rank's buffers.
class RankWriter {
 public:
  RankWriter(const FrameworkSide& side, const TinyModel& model,
             const CellWriter& writer, int64_t data, int64_t tensor)
      : side_(side),
        model_(model),
        writer_(writer),
        tensor_(tensor),
        expert_rank_(data * side.tensor + tensor),
        dtype_(side.dtype.empty() ? model.dtype : side.dtype) {}

  std::vector<PhysicalTensor> WriteStage(int64_t stage) {
    const bool first = stage == 0;
    const bool last = stage == side_.pipeline - 1;
    End(first || (last && model_.tied),
        writer_.Vocabulary("model.embed_tokens.weight", dtype_,
                           "model.embed_tokens.weight",
                           PaddedVocab(model_) / side_.tensor, tensor_));
    int64_t layer = 0;
    for (int64_t s = 0; s < stage; ++s) {
      layer += StageLayers(side_, model_.layers, s);
    }
    const int64_t end = layer + StageLayers(side_, model_.layers, stage);
    for (; layer < end; ++layer) WriteLayer(layer);
    End(last, writer_.Whole("model.norm.weight", dtype_, "model.norm.weight"));
    if (!model_.tied) {
      End(last,
          writer_.Vocabulary("lm_head.weight", dtype_, "lm_head.weight",
                             PaddedVocab(model_) / side_.tensor, tensor_));
    }
    return std::move(out_);
  }

 private:
  // The MoE families build embedding, norm and head on every stage; a copy
  // that the stage does not read is left alone.
  void End(bool read, PhysicalTensor tensor) {
    if (!read) {
      if (model_.experts == 0) return;
      for (Cell& cell : tensor.cells) cell = {.tensor = Cell::kUntouched};
    }
    out_.push_back(std::move(tensor));
  }

  void Whole(const std::string& name) {
    out_.push_back(writer_.Whole(name, dtype_, name));
  }

  void Columns(const std::string& name) {
    out_.push_back(writer_.Columns(name, dtype_, name, side_.tensor, tensor_));
  }

  // Query heads of the rank, then its key heads, then its value heads.
  void WriteQkv(const std::string& attention, const std::string& leaf) {
    const int64_t head = model_.head_dim;
    const int64_t query_rows = model_.heads / side_.tensor * head;
    int64_t kv_rows = head;
    int64_t first_kv_row = 0;
    if (side_.tensor >= model_.kv_heads) {
      first_kv_row = tensor_ / (side_.tensor / model_.kv_heads) * head;
    } else {
      kv_rows = model_.kv_heads / side_.tensor * head;
      first_kv_row = tensor_ * kv_rows;
    }
    std::vector<int64_t> shape = {query_rows + 2 * kv_rows};
    if (leaf == "weight") shape.push_back(model_.hidden);
    out_.push_back(writer_.Write(
        attention + "qkv_proj." + leaf, dtype_, shape,
        [&](int64_t, int64_t row, int64_t column) {
          if (row < query_rows) {
            return writer_.At(attention + "q_proj." + leaf,
                              tensor_ * query_rows + row, column);
          }
          row -= query_rows;
          const std::string name =
              attention + (row < kv_rows ? "k_proj." : "v_proj.") + leaf;
          return writer_.At(name, first_kv_row + row % kv_rows, column);
        }));
  }

  void WriteLayer(int64_t layer) {
    const std::string in = absl::StrFormat("model.layers.%d.", layer);
    const std::string attention = in + "self_attn.";
    Whole(in + "input_layernorm.weight");
    WriteQkv(attention, "weight");
    if (model_.HasQkvBias()) WriteQkv(attention, "bias");
    Columns(attention + "o_proj.weight");
    if (model_.HasOutputBias()) Whole(attention + "o_proj.bias");
    if (model_.HasQueryKeyNorm()) {
      Whole(attention + "q_norm.weight");
      Whole(attention + "k_norm.weight");
    }
    Whole(in + "post_attention_layernorm.weight");
    if (model_.IsMoe(layer)) {
      WriteExperts(in);
      return;
    }
    const int64_t half = model_.intermediate / side_.tensor;
    out_.push_back(writer_.Write(
        in + "mlp.gate_up_proj.weight", dtype_, {2 * half, model_.hidden},
        [&](int64_t, int64_t row, int64_t column) {
          return writer_.At(
              in + (row < half ? "mlp.gate_proj.weight" : "mlp.up_proj.weight"),
              tensor_ * half + row % half, column);
        }));
    Columns(in + "mlp.down_proj.weight");
  }

  void WriteExperts(const std::string& in) {
    const ExpertNames names = ExpertNamesOf(model_);
    const std::string moe = absl::StrCat(in, names.module, ".");
    Whole(moe + "gate.weight");
    // With expert parallelism whole experts, the first ranks one more; without
    // it a slice of every expert.
    const int64_t ranks = side_.data * side_.tensor;
    int64_t first_expert = 0;
    int64_t experts = model_.experts;
    int64_t first_feature = 0;
    int64_t features = model_.expert_intermediate;
    if (side_.expert_parallel) {
      experts = 0;
      for (int64_t expert = 0; expert < model_.experts; ++expert) {
        const int64_t more = model_.experts % ranks;
        const int64_t base = model_.experts / ranks;
        const int64_t in_larger = more * (base + 1);
        const int64_t owner = expert < in_larger
                                  ? expert / (base + 1)
                                  : more + (expert - in_larger) / base;
        if (owner != expert_rank_) continue;
        if (experts == 0) first_expert = expert;
        ++experts;
      }
    } else {
      features /= ranks;
      first_feature = expert_rank_ * features;
    }
    const auto matrix = [&](int64_t slab, const std::string& name) {
      return absl::StrCat(moe, "experts.", first_expert + slab, ".", name,
                          ".weight");
    };
    const std::string to =
        absl::StrCat(moe, "experts.", side_.old_names ? "" : "routed_experts.");
    out_.push_back(writer_.Write(
        to + "w13_weight", dtype_, {experts, 2 * features, model_.hidden},
        [&](int64_t slab, int64_t row, int64_t column) {
          return writer_.At(
              matrix(slab, row < features ? names.gate : names.up),
              first_feature + row % features, column);
        }));
    out_.push_back(writer_.Write(
        to + "w2_weight", dtype_, {experts, model_.hidden, features},
        [&](int64_t slab, int64_t row, int64_t column) {
          return writer_.At(matrix(slab, names.down), row,
                            first_feature + column);
        }));
  }

  const FrameworkSide& side_;
  const TinyModel& model_;
  const CellWriter& writer_;
  const int64_t tensor_;
  const int64_t expert_rank_;
  const std::string dtype_;
  std::vector<PhysicalTensor> out_;
};

bool Fits(const FrameworkSide& side, const TinyModel& model,
          int64_t ranks_max) {
  const bool heads_fit =
      model.kv_heads % side.tensor == 0 || side.tensor % model.kv_heads == 0;
  if (side.Ranks() > ranks_max || side.pipeline > model.layers || !heads_fit ||
      model.heads % side.tensor != 0 || model.intermediate % side.tensor != 0 ||
      PaddedVocab(model) % side.tensor != 0) {
    return false;
  }
  return model.experts == 0 || side.expert_parallel ||
         model.expert_intermediate % (side.data * side.tensor) == 0;
}

}  // namespace

FrameworkSide DrawVllmSide(Draw& draw, const TinyModel& model,
                           int64_t ranks_max) {
  FrameworkSide side;
  do {
    side = FrameworkSide();
    side.layout = "vllm";
    side.tensor = draw.Pick<int64_t>({1, 2, 2, 3, 4, 4, 6, 8});
    side.pipeline = draw.Chance(50) ? 1 : draw.Between(2, 4);
    side.data = draw.Chance(60) ? 1 : draw.Between(2, 3);
    side.replicas = draw.Chance(60) ? 1 : draw.Between(2, 3);
    side.expert_parallel = model.experts > 0 && draw.Chance(50);
  } while (!Fits(side, model, ranks_max));
  side.old_names = draw.Chance(20);
  if (side.pipeline > 1 && draw.Chance(25)) {
    side.layers_per_stage.assign(side.pipeline, 0);
    for (int64_t layer = 0; layer < model.layers; ++layer) {
      ++side.layers_per_stage[draw.Between(0, side.pipeline - 1)];
    }
  }
  return side;
}

PhysicalSide LayOutVllmSide(const FrameworkSide& side, const TinyModel& model,
                            const std::vector<LogicalTensor>& tensors) {
  const CellWriter writer(tensors);
  PhysicalSide ranks;
  for (int64_t replica = 0; replica < side.replicas; ++replica) {
    for (int64_t data = 0; data < side.data; ++data) {
      for (int64_t stage = 0; stage < side.pipeline; ++stage) {
        for (int64_t tensor = 0; tensor < side.tensor; ++tensor) {
          ranks.push_back(
              RankWriter(side, model, writer, data, tensor).WriteStage(stage));
        }
      }
    }
  }
  return ranks;
}

}  // namespace refit
