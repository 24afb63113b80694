#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"
#include "compiler/model/tower.h"

namespace refit {
namespace {

using enum ParamRole;

// What joins the tower to the language model.
struct Projector {
  std::string_view root;
  std::string_view first;
  std::string_view second;
};

constexpr Projector kK25Projector = {"mm_projector.", "proj.0", "proj.2"};
constexpr Projector kVlProjector = {"multi_modal_projector.", "linear_1",
                                    "linear_2"};

// The key that has a size of the tower. Published files and classes differ in
// a prefix: with two keys that disagree they would build different towers. Both
// are literals, of which the reader keeps views.
std::string_view KeyOf(std::string_view prefixed, std::string_view key,
                       ConfigReader& vision) {
  if (!vision.Has(prefixed)) return key;
  if (vision.Has(key) && vision.Size(key) != vision.Size(prefixed)) {
    vision.Error(key, absl::StrFormat("%s %d is not %s %d, and frameworks "
                                      "differ in which they read; wanted both "
                                      "alike",
                                      key, vision.Size(key), prefixed,
                                      vision.Size(prefixed)));
  }
  return prefixed;
}

// Reports a size that other keys say too.
void CheckSame(std::string_view key, int64_t wanted, ConfigReader& config) {
  if (!config.HasOrDefault(key) || config.Size(key) == wanted) return;
  config.Error(key, absl::StrFormat("%s %d is not the %d that other keys say, "
                                    "and frameworks differ in which they "
                                    "read; wanted both alike",
                                    key, config.Size(key), wanted));
}

// Rows and columns of patches that are merged.
int64_t ReadMerged(ConfigReader& vision) {
  constexpr std::string_view kKey = "merge_kernel_size";
  const std::vector<int64_t> sizes = vision.IntegersOr(kKey, {2, 2});
  if (sizes.size() == 2 && sizes[0] > 0 && sizes[1] > 0) {
    return sizes[0] * sizes[1];
  }
  vision.Error(kKey, absl::StrFormat("%s [%s]; wanted two sizes", kKey,
                                     absl::StrJoin(sizes, ", ")));
  return 1;
}

// A MoonViT tower.
void AddTower(ConfigReader& config, ConfigReader& text, Model& model,
              const Projector& projector) {
  ConfigReader vision = config.Vision();
  // Of its classes, which a file may leave out.
  vision.Defaults({{"hidden_size", 1152},
                   {"intermediate_size", 4304},
                   {"num_hidden_layers", 27},
                   {"num_attention_heads", 16},
                   {"patch_size", 14},
                   {"pos_emb_height", 64},
                   {"pos_emb_width", 64}});
  const auto size = [&](std::string_view prefixed, std::string_view key) {
    return vision.Size(KeyOf(prefixed, key, vision));
  };
  const int64_t hidden = size("vt_hidden_size", "hidden_size");
  const int64_t intermediate =
      size("vt_intermediate_size", "intermediate_size");
  const int64_t patch = vision.Size("patch_size");
  const int64_t text_hidden = text.Size("hidden_size");
  const int64_t merged = hidden * ReadMerged(vision);
  ReadTowerHeads(KeyOf("vt_num_attention_heads", "num_attention_heads", vision),
                 hidden, vision, model);
  CheckTowerDType(vision, text);
  CheckSame("mm_hidden_size", hidden, vision);
  CheckSame("text_hidden_size", text_hidden, vision);
  CheckSame("projection_hidden_size", hidden, config);
  constexpr std::string_view kKind = "mm_projector_type";
  if (vision.Has(kKind) && vision.String(kKind) != "patchmerger") {
    vision.Error(kKind, absl::StrFormat("%s \"%s\" is not supported; wanted "
                                        "\"patchmerger\"",
                                        kKind, vision.String(kKind)));
  }

  TowerBuilder tower(vision, text, model, "vision_tower.");
  tower.Add("patch_embed.proj.weight", kTowerWhole, {hidden, 3, patch, patch});
  tower.Add("patch_embed.proj.bias", kTowerWhole, {hidden});
  tower.Add("patch_embed.pos_emb.weight", kTowerWhole,
            {size("init_pos_emb_height", "pos_emb_height"),
             size("init_pos_emb_width", "pos_emb_width"), hidden});
  const TowerBuilder::Index blocks = {
      Consecutive(0, vision.Count(KeyOf("vt_num_hidden_layers",
                                        "num_hidden_layers", vision)))};
  const std::string block = "encoder.blocks.{0}.";
  tower.AddNorm(block + "norm0", hidden, blocks);
  tower.AddNorm(block + "norm1", hidden, blocks);
  tower.AddLinear(block + "wqkv", kTowerHeads, 3 * hidden, hidden, blocks);
  tower.AddLinear(block + "wo", kTowerRow, hidden, hidden, blocks);
  tower.AddLinear(block + "mlp.fc0", kTowerColumn, intermediate, hidden,
                  blocks);
  tower.AddLinear(block + "mlp.fc1", kTowerRow, hidden, intermediate, blocks);
  tower.AddNorm("encoder.final_layernorm", hidden);
  TowerBuilder connector(vision, text, model, std::string(projector.root));
  connector.AddNorm("pre_norm", hidden);
  connector.AddLinear(projector.first, kTowerWhole, merged, merged);
  connector.AddLinear(projector.second, kTowerWhole, text_hidden, merged);
}

using ClassDefaults =
    std::initializer_list<std::pair<std::string_view, int64_t>>;

// A language model of deepseek_v3 with a tower.
void BuildWith(ConfigReader& config, Model& model, const Projector& projector,
               ClassDefaults of_class) {
  ConfigReader text = config.Text();
  text.Defaults(of_class);
  model.quant_method = text.QuantMethod();
  if (model.vision) {
    AddTower(config, text, model, projector);
  } else {
    model.stored_beside.emplace_back("vision_tower.*");
    model.stored_beside.push_back(absl::StrFormat("%s*", projector.root));
  }
  DecoderBuilder decoder(text, model, HeadForm::kLatent);
  model.architecture.tied = ReadTied(config, text, std::nullopt);
  decoder.NameModel("language_model.model.", "language_model.lm_head.weight");
  text.ExpectFalse("attention_bias");
  decoder.Begin();
  decoder.AddLatentAttention();
  AddSharedExpertLayers(text, decoder, model);
  decoder.End();
}

void BuildK25(ConfigReader& config, Model& model) {
  config.Default("projection_hidden_size", 1152);
  BuildWith(config, model, kK25Projector,
            {{"q_lora_rank", 1536},
             {"first_k_dense_replace", 3},
             {"n_shared_experts", 1}});
}

void BuildVl(ConfigReader& config, Model& model) {
  // transformers has no class of it, so nothing is known of missing keys.
  BuildWith(config, model, kVlProjector, {});
}

constexpr Rename kK25VllmNames[] = {
    {"mm_projector.proj.0.", "mm_projector.linear_1."},
    {"mm_projector.proj.2.", "mm_projector.linear_2."}};
constexpr Rename kSglangNames[] = {
    {".wqkv.", ".attn.qkv_proj."},
    {".wo.", ".attn.proj."},
    {"mm_projector.proj.0.", "mm_projector.linear_1."},
    {"mm_projector.proj.2.", "mm_projector.linear_2."}};
// The classes of release 5 also make three tensors of wqkv, and permute the
// rows of queries and keys.
constexpr Rename kTransformers5TextNames[] = {
    {"language_model.model.", "model.language_model."},
    {"language_model.lm_head.", "lm_head."}};

}  // namespace

extern const Family kKimiK25 = {
    .model_type = "kimi_k25",
    .transformers_class = "Kimi_K25ForConditionalGeneration",
    .build = BuildK25,
    .vllm = {.renames = kK25VllmNames},
    .sglang = {.renames = kSglangNames, .whole_in_tower = ".mlp."},
    .megatron = {.known = false},
    .transformers = {.renames_since_5 = kTransformers5TextNames,
                     .knows_tower_since_5 = false},
    .tower = true,
};

extern const Family kKimiVl = {
    .model_type = "kimi_vl",
    .transformers_class = "KimiVLForConditionalGeneration",
    .build = BuildVl,
    .sglang = {.renames = kSglangNames,
               .pipeline_parallel = false,
               .dp_attention = false},
    .megatron = {.known = false},
    .tower = true,
};

}  // namespace refit
