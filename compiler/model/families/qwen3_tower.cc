#include "compiler/model/families/qwen3_tower.h"

#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/model/stacks.h"
#include "compiler/model/tower.h"

namespace refit {

using enum ParamRole;

namespace {

constexpr std::string_view kDeepstackLayers = "deepstack_visual_indexes";

// vLLM and SGLang build mergers for layers that are listed, transformers does
// not.
void RefuseDeepstack(const std::string& model_type, ConfigReader& vision) {
  const std::vector<int64_t> layers = vision.IntegersOr(kDeepstackLayers, {});
  if (layers.empty()) return;
  vision.Error(kDeepstackLayers,
               absl::StrFormat("%s [%s] gives the tower %d mergers of layers, "
                               "which no checkpoint of a %s has; wanted []",
                               kDeepstackLayers, absl::StrJoin(layers, ", "),
                               layers.size(), model_type));
}

}  // namespace

void AddQwen3Tower(ConfigReader& config, ConfigReader& text, Model& model,
                   Deepstack deepstack) {
  if (!model.vision) {
    model.stored_beside.push_back("model.visual.*");
    return;
  }
  ConfigReader vision = config.Vision();
  // Of its class in transformers, which a file may leave out.
  vision.Defaults({{"depth", 27},
                   {"hidden_size", 1152},
                   {"intermediate_size", 4304},
                   {"num_heads", 16},
                   {"in_channels", 3},
                   {"patch_size", 16},
                   {"spatial_merge_size", 2},
                   {"temporal_patch_size", 2},
                   {"out_hidden_size", 3584},
                   {"num_position_embeddings", 2304}});
  const int64_t hidden = vision.Size("hidden_size");
  const int64_t intermediate = vision.Size("intermediate_size");
  const int64_t patch = vision.Size("patch_size");
  const int64_t merge = vision.Size("spatial_merge_size");
  const int64_t out = vision.Size("out_hidden_size");
  ReadTowerHeads("num_heads", hidden, vision, model);
  CheckTowerDType(vision, text);

  TowerBuilder tower(vision, text, model, "model.visual.");
  tower.Add("patch_embed.proj.weight", kTowerWhole,
            {hidden, vision.Size("in_channels"),
             vision.Size("temporal_patch_size"), patch, patch});
  tower.Add("patch_embed.proj.bias", kTowerWhole, {hidden});
  tower.Add("pos_embed.weight", kTowerPositions,
            {vision.Size("num_position_embeddings"), hidden});
  const TowerBuilder::Index blocks = {Consecutive(0, vision.Count("depth"))};
  tower.AddNorm("blocks.{0}.norm1", hidden, blocks);
  tower.AddNorm("blocks.{0}.norm2", hidden, blocks);
  tower.AddLinear("blocks.{0}.attn.qkv", kTowerHeads, 3 * hidden, hidden,
                  blocks);
  tower.AddLinear("blocks.{0}.attn.proj", kTowerRow, hidden, hidden, blocks);
  tower.AddLinear("blocks.{0}.mlp.linear_fc1", kTowerColumn, intermediate,
                  hidden, blocks);
  tower.AddLinear("blocks.{0}.mlp.linear_fc2", kTowerRow, hidden, intermediate,
                  blocks);

  const int64_t merged = hidden * merge * merge;
  const auto add_merger = [&](std::string_view name, int64_t norm,
                              const TowerBuilder::Index& index) {
    tower.AddNorm(absl::StrFormat("%s.norm", name), norm, index);
    tower.AddLinear(absl::StrFormat("%s.linear_fc1", name), kTowerColumn,
                    merged, merged, index);
    tower.AddLinear(absl::StrFormat("%s.linear_fc2", name), kTowerRow, out,
                    merged, index);
  };
  add_merger("merger", hidden, {});
  if (deepstack == Deepstack::kNone) {
    RefuseDeepstack(config.String("model_type"), vision);
    return;
  }
  const std::vector<int64_t> layers =
      vision.IntegersOr(kDeepstackLayers, {8, 16, 24});
  if (layers.empty()) return;
  add_merger("deepstack_merger_list.{0}", merged,
             {Consecutive(0, static_cast<int64_t>(layers.size()))});
}

}  // namespace refit
