#include "tests/compiler/layout_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/model/model.h"
#include "tests/compiler/temporary_directory.h"

namespace refit::layout_testing {
namespace {

// The coordinates of a box one after the other, row-major.
template <typename Visit>
void ForEach(const std::vector<int64_t>& lo, const std::vector<int64_t>& hi,
             Visit visit) {
  std::vector<int64_t> at = lo;
  for (size_t i = 0; i < lo.size(); ++i) {
    if (lo[i] >= hi[i]) return;
  }
  while (true) {
    visit(at);
    size_t dim = at.size();
    while (true) {
      if (dim == 0) return;
      --dim;
      if (++at[dim] < hi[dim]) break;
      at[dim] = lo[dim];
    }
  }
}

std::vector<int64_t> Vector(const Dims& dims) {
  return {dims.begin(), dims.end()};
}

int64_t Count(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

// The names of a stack, row-major.
std::vector<std::string> Names(const std::string& pattern,
                               const std::vector<IndexDim>& index) {
  std::vector<int64_t> lo(index.size()), hi;
  for (const IndexDim& dim : index) hi.push_back(dim.extent());
  std::vector<std::string> names;
  ForEach(lo, hi, [&](const std::vector<int64_t>& at) {
    std::string name = pattern;
    for (size_t i = 0; i < at.size(); ++i) {
      name = absl::StrReplaceAll(name,
                                 {{"{" + std::to_string(i) + "}",
                                   std::to_string(index[i].numbers[at[i]])}});
    }
    names.push_back(name);
  });
  return names;
}

const Family* FamilyOf(const std::string& model_type) {
  static auto& models = *new std::map<std::string, Model>;
  const auto [it, is_new] = models.try_emplace(model_type);
  if (is_new) {
    it->second = ReadTinyModel(absl::StrFormat(R"({"model_type": "%s",
        "num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 2,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2,
        "intermediate_size": 2, "moe_intermediate_size": 2,
        "num_local_experts": 2, "n_routed_experts": 2})",
                                               model_type));
  }
  return it->second.architecture.family;
}

}  // namespace

Model MakeModel(const ModelSizes& sizes) {
  Model model;
  Architecture& a = model.architecture;
  const bool dense_qwen3 = sizes.experts == 0 && sizes.family == "qwen3_moe";
  a.family = FamilyOf(dense_qwen3 ? "qwen3" : sizes.family);
  a.layers = sizes.layers;
  a.hidden = sizes.hidden;
  a.heads = sizes.heads;
  a.kv_heads = sizes.kv_heads;
  a.head_dim = sizes.head_dim;
  a.vocab = sizes.vocab;
  a.experts = sizes.experts;
  a.tied = sizes.tied;

  IndexDim all, dense, moe;
  for (int32_t layer = 0; layer < sizes.layers; ++layer) {
    const bool is_dense =
        sizes.experts == 0 || std::count(sizes.dense_layers.begin(),
                                         sizes.dense_layers.end(), layer) > 0;
    all.numbers.push_back(layer);
    (is_dense ? dense : moe).numbers.push_back(layer);
  }
  const auto add = [&](std::string name, std::vector<IndexDim> index,
                       Dims shape, ParamRole role) {
    if (!index.empty() && index[0].numbers.empty()) return;
    if (!index.empty()) name = "model.layers.{0}." + name;
    model.params.push_back({.name = std::move(name),
                            .index = std::move(index),
                            .shape = std::move(shape),
                            .dtype = DType::kBf16,
                            .role = role});
  };
  const int64_t h = sizes.hidden;
  const int64_t q = sizes.heads * sizes.head_dim;
  const int64_t kv = sizes.kv_heads * sizes.head_dim;
  add("model.embed_tokens.weight", {}, {sizes.vocab, h}, ParamRole::kEmbedding);
  add("input_layernorm.weight", {all}, {h}, ParamRole::kAttentionNorm);
  add("self_attn.q_proj.weight", {all}, {q, h}, ParamRole::kQuery);
  add("self_attn.k_proj.weight", {all}, {kv, h}, ParamRole::kKey);
  add("self_attn.v_proj.weight", {all}, {kv, h}, ParamRole::kValue);
  if (sizes.qkv_bias) {
    add("self_attn.q_proj.bias", {all}, {q}, ParamRole::kQueryBias);
    add("self_attn.k_proj.bias", {all}, {kv}, ParamRole::kKeyBias);
    add("self_attn.v_proj.bias", {all}, {kv}, ParamRole::kValueBias);
    add("self_attn.o_proj.bias", {all}, {h}, ParamRole::kAttentionOutputBias);
  }
  if (sizes.qk_norm) {
    add("self_attn.q_norm.weight", {all}, {sizes.head_dim},
        ParamRole::kQueryNorm);
    add("self_attn.k_norm.weight", {all}, {sizes.head_dim},
        ParamRole::kKeyNorm);
  }
  add("self_attn.o_proj.weight", {all}, {h, q}, ParamRole::kAttentionOutput);
  add("post_attention_layernorm.weight", {dense}, {h}, ParamRole::kMlpNorm);
  add("post_attention_layernorm.weight", {moe}, {h}, ParamRole::kMoeNorm);
  add("mlp.gate_proj.weight", {dense}, {sizes.intermediate, h},
      ParamRole::kMlpGate);
  add("mlp.up_proj.weight", {dense}, {sizes.intermediate, h},
      ParamRole::kMlpUp);
  add("mlp.down_proj.weight", {dense}, {h, sizes.intermediate},
      ParamRole::kMlpDown);
  const bool mixtral = sizes.family == "mixtral";
  const std::string block = mixtral ? "block_sparse_moe." : "mlp.";
  const std::string expert = block + "experts.{1}.";
  const IndexDim experts = Consecutive(0, sizes.experts);
  const int64_t i = sizes.expert_intermediate;
  add(block + "gate.weight", {moe}, {sizes.experts, h}, ParamRole::kRouter);
  add(expert + (mixtral ? "w1.weight" : "gate_proj.weight"), {moe, experts},
      {i, h}, ParamRole::kExpertGate);
  add(expert + (mixtral ? "w3.weight" : "up_proj.weight"), {moe, experts},
      {i, h}, ParamRole::kExpertUp);
  add(expert + (mixtral ? "w2.weight" : "down_proj.weight"), {moe, experts},
      {h, i}, ParamRole::kExpertDown);
  add("model.norm.weight", {}, {h}, ParamRole::kFinalNorm);
  if (!sizes.tied) {
    add("lm_head.weight", {}, {sizes.vocab, h}, ParamRole::kOutputHead);
  }
  return model;
}

Tensors Checkpoint(const Model& model) {
  Tensors tensors;
  int64_t next = 0;
  for (const Param& param : model.params) {
    for (const std::string& name : Names(param.name, param.index)) {
      Tensor tensor = {.shape = Vector(param.StoredShape()), .cells = {}};
      tensor.cells.resize(Count(tensor.shape));
      std::iota(tensor.cells.begin(), tensor.cells.end(), next);
      next += static_cast<int64_t>(tensor.cells.size());
      EXPECT_TRUE(tensors.emplace(name, std::move(tensor)).second) << name;
    }
  }
  return tensors;
}

Tensor Rows(const Tensor& tensor, int64_t begin, int64_t end) {
  const int64_t row =
      tensor.shape[0] == 0 ? 0 : Count(tensor.shape) / tensor.shape[0];
  Tensor out = {.shape = tensor.shape, .cells = {}};
  out.shape[0] = end - begin;
  out.cells.assign(tensor.cells.begin() + begin * row,
                   tensor.cells.begin() + end * row);
  return out;
}

Tensor Columns(const Tensor& tensor, int64_t begin, int64_t end) {
  Tensor out = {.shape = {tensor.shape[0], end - begin}, .cells = {}};
  for (int64_t row = 0; row < tensor.shape[0]; ++row) {
    for (int64_t column = begin; column < end; ++column) {
      out.cells.push_back(tensor.cells[row * tensor.shape[1] + column]);
    }
  }
  return out;
}

Tensor Concat(const std::vector<Tensor>& parts) {
  Tensor out = parts.at(0);
  for (size_t i = 1; i < parts.size(); ++i) {
    out.shape[0] += parts[i].shape[0];
    out.cells.insert(out.cells.end(), parts[i].cells.begin(),
                     parts[i].cells.end());
  }
  return out;
}

Tensor Stack(const std::vector<Tensor>& parts) {
  Tensor out = Concat(parts);
  out.shape = parts.at(0).shape;
  out.shape.insert(out.shape.begin(), static_cast<int64_t>(parts.size()));
  return out;
}

Tensor Filled(std::vector<int64_t> shape, int64_t cell) {
  const int64_t count = Count(shape);
  return {.shape = std::move(shape),
          .cells = std::vector<int64_t>(count, cell)};
}

std::vector<Tensors> Expand(const Model& model, const BufferTable& buffers,
                            const SideLayout& layout) {
  const Tensors checkpoint = Checkpoint(model);
  // The cells of each param's virtual tensor.
  std::vector<std::vector<int64_t>> params;
  for (const Param& param : model.params) {
    std::vector<int64_t>& cells = params.emplace_back();
    for (const std::string& name : Names(param.name, param.index)) {
      const Tensor& tensor = checkpoint.at(name);
      cells.insert(cells.end(), tensor.cells.begin(), tensor.cells.end());
    }
  }

  std::vector<Tensors> expanded;
  for (const Buffer& buffer : buffers.all()) {
    std::vector<int64_t> cells(Product(buffer.VirtualShape()),
                               Tensor::kNothing);
    const auto put = [&](int64_t offset, int64_t cell) {
      if (offset < 0 || offset >= static_cast<int64_t>(cells.size())) {
        ADD_FAILURE() << buffer.name << ": outside at " << offset;
      } else if (cells[offset] != Tensor::kNothing) {
        ADD_FAILURE() << buffer.name << ": twice at " << offset;
      } else {
        cells[offset] = cell;
      }
    };
    for (const Fragment& fragment : buffer.fragments) {
      const Param& param = model.params[IndexOf(fragment.param)];
      const Dims shape = param.VirtualShape();
      EXPECT_EQ(fragment.box.lo.size(), shape.size());
      EXPECT_EQ(fragment.stride.size(), shape.size());
      EXPECT_FALSE(fragment.box.Empty()) << buffer.name;
      ForEach(Vector(fragment.box.lo), Vector(fragment.box.hi),
              [&](const std::vector<int64_t>& at) {
                int64_t offset = fragment.offset;
                int64_t element = 0;
                for (size_t d = 0; d < at.size(); ++d) {
                  offset += (at[d] - fragment.box.lo[d]) * fragment.stride[d];
                  element = element * shape[d] + at[d];
                }
                put(offset, params[IndexOf(fragment.param)].at(element));
              });
    }
    for (const Region& region : buffer.regions) {
      const int64_t cell =
          region.kind == fb::RegionKind::kFill ? Tensor::kFill : Tensor::kSkip;
      EXPECT_EQ(region.reason == SkipReason::kUnspecified,
                cell == Tensor::kFill);
      ForEach(std::vector<int64_t>(region.extent.size()), Vector(region.extent),
              [&](const std::vector<int64_t>& at) {
                int64_t offset = region.offset;
                for (size_t d = 0; d < at.size(); ++d) {
                  offset += at[d] * region.stride[d];
                }
                put(offset, cell);
              });
    }
    Tensors& tensors = expanded.emplace_back();
    const int64_t size = Product(buffer.shape);
    int64_t begin = 0;
    for (const std::string& name : Names(buffer.name, buffer.index)) {
      tensors[name] = {
          .shape = Vector(buffer.shape),
          .cells = {cells.begin() + begin, cells.begin() + begin + size}};
      begin += size;
    }
  }

  std::vector<Tensors> ranks;
  for (const std::vector<BufferId>& ids : layout.ranks) {
    Tensors& tensors = ranks.emplace_back();
    for (const BufferId id : ids) {
      for (const auto& [name, tensor] : expanded[IndexOf(id)]) {
        EXPECT_TRUE(tensors.emplace(name, tensor).second)
            << "rank " << ranks.size() - 1 << " has two tensors " << name;
      }
    }
  }
  return ranks;
}

Buffer BufferOf(const Model& model, const SideSpec& side,
                const std::string& name) {
  Diagnostics diagnostics;
  BufferTable buffers;
  const SideLayout layout = LayOut({.model = model,
                                    .side = side,
                                    .which = fb::Side::kDestination,
                                    .buffers = buffers,
                                    .diagnostics = diagnostics});
  EXPECT_EQ(diagnostics.Render(), "");
  for (const BufferId id : layout.ranks.at(0)) {
    if (buffers[id].name == name) return buffers[id];
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

std::vector<Tensors> LayOutAndExpand(const Model& model, const SideSpec& side,
                                     fb::Side which) {
  BufferTable buffers;
  Diagnostics diagnostics;
  const SideLayout layout = LayOut({.model = model,
                                    .side = side,
                                    .which = which,
                                    .buffers = buffers,
                                    .diagnostics = diagnostics});
  EXPECT_TRUE(diagnostics.ok()) << diagnostics.Render();
  if (!diagnostics.ok()) return {};
  return Expand(model, buffers, layout);
}

std::string LayOutErrors(const Model& model, const SideSpec& side) {
  BufferTable buffers;
  Diagnostics diagnostics;
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kDestination,
          .buffers = buffers,
          .diagnostics = diagnostics});
  return absl::StrReplaceAll(diagnostics.Render(), {{"error: ", ""}});
}

namespace {

std::optional<Model> ReadTiny(const std::string& config, bool mtp, bool vision,
                              Diagnostics& diagnostics) {
  const TemporaryDirectory directory;
  Job job;
  job.model.config_path = directory.Write("config.json", config);
  job.source.mtp = Given(mtp);
  job.source.vision = Given(vision);
  job.source.key = "source";
  return ReadModel(job, diagnostics);
}

}  // namespace

std::optional<Model> ReadTinyModel(const std::string& config, bool mtp,
                                   Diagnostics& diagnostics) {
  return ReadTiny(config, mtp, /*vision=*/false, diagnostics);
}

Model ReadTinyModel(const std::string& config, bool mtp) {
  Diagnostics diagnostics;
  const std::optional<Model> model = ReadTinyModel(config, mtp, diagnostics);
  EXPECT_EQ(diagnostics.Render(), "");
  return model.value_or(Model());
}

std::optional<Model> ReadTinyTower(const std::string& config,
                                   Diagnostics& diagnostics) {
  return ReadTiny(config, /*mtp=*/false, /*vision=*/true, diagnostics);
}

Model ReadTinyTower(const std::string& config) {
  Diagnostics diagnostics;
  const std::optional<Model> model = ReadTinyTower(config, diagnostics);
  EXPECT_EQ(diagnostics.Render(), "");
  return model.value_or(Model());
}

SideSpec MakeSide(LayoutKind layout, int64_t tensor_parallel,
                  int64_t pipeline_parallel) {
  SideSpec side;
  side.key = "destination";
  side.layout = Given(layout);
  side.tensor_parallel.value = tensor_parallel;
  side.pipeline_parallel.value = pipeline_parallel;
  return side;
}

Tensors Under(const Tensors& all, const std::string& prefix) {
  Tensors under;
  for (const auto& [name, tensor] : all) {
    if (name.starts_with(prefix)) under[name.substr(prefix.size())] = tensor;
  }
  return under;
}

std::vector<std::string> SkippedTensors(const Tensors& rank) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : rank) {
    if (tensor == Filled(tensor.shape, Tensor::kSkip)) names.push_back(name);
  }
  return names;
}

void ExpectSameTensors(const Tensors& found, const Tensors& wanted) {
  for (const auto& [name, tensor] : wanted) {
    const auto other = found.find(name);
    if (other == found.end()) {
      ADD_FAILURE() << "missing " << name;
    } else {
      EXPECT_EQ(other->second.shape, tensor.shape) << name;
      EXPECT_EQ(other->second.cells, tensor.cells) << name;
    }
  }
  for (const auto& [name, tensor] : found) {
    EXPECT_TRUE(wanted.contains(name)) << "unexpected " << name;
  }
}

}  // namespace refit::layout_testing
