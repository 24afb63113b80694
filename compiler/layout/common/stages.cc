#include "compiler/layout/common/stages.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"

namespace refit {
namespace {

// Owner table of layer counts, chunk 0 of every stage first.
PipelineSplit FromCounts(const std::vector<int64_t>& counts, int64_t stages) {
  PipelineSplit split(stages);
  int64_t next = 0;
  for (size_t cell = 0; cell < counts.size(); ++cell) {
    split[cell % stages].push_back({next, next + counts[cell]});
    next += counts[cell];
  }
  return split;
}

std::optional<PipelineSplit> FromOwnerTable(const SideSpec& side,
                                            int64_t layers,
                                            Diagnostics& diagnostics) {
  const std::vector<int64_t>& counts = side.layers_per_stage.value;
  const auto error = [&](std::string_view found, int64_t value,
                         std::string_view wanted) {
    diagnostics.Error(side.layers_per_stage.place,
                      "%s.layers_per_stage %s %d %s", side.key, found, value,
                      wanted);
    return std::nullopt;
  };
  const int64_t stages = side.pipeline_parallel.value;
  const int64_t chunks = side.virtual_pipeline_parallel.value;
  const int64_t cells = stages * chunks;
  if (static_cast<int64_t>(counts.size()) != cells) {
    return error("has", counts.size(),
                 absl::StrFormat("entries; wanted %d, one per stage%s", cells,
                                 chunks > 1 ? " and virtual stage" : ""));
  }
  int64_t sum = 0;
  for (const int64_t count : counts) {
    if (count < 0 || count > layers) {
      return error("has an entry of", count,
                   absl::StrFormat("layers; the model has %d", layers));
    }
    sum += count;
  }
  if (sum != layers) {
    return error("adds up to", sum,
                 absl::StrFormat("layers; the model has %d", layers));
  }
  return FromCounts(counts, stages);
}

// Layers of each stage, of which the first and the last may have a number of
// their own. Empty after an error.
std::vector<int64_t> StageLayers(const SideSpec& side, int64_t layers,
                                 Diagnostics& diagnostics) {
  const Located<int64_t>& first = side.num_layers_in_first_pipeline_stage;
  const Located<int64_t>& last = side.num_layers_in_last_pipeline_stage;
  const int64_t stages = side.pipeline_parallel.value;
  const int64_t chunks = side.virtual_pipeline_parallel.value;
  int64_t rest = layers;
  int64_t middle = stages;
  for (const auto& [key, size] :
       {std::pair("num_layers_in_first_pipeline_stage", &first),
        std::pair("num_layers_in_last_pipeline_stage", &last)}) {
    if (!size->given) continue;
    if (size->value < 0 || size->value > layers) {
      diagnostics.Error(size->place, "%s.%s is %d; the model has %d layers",
                        side.key, key, size->value, layers);
      return {};
    }
    if (size->value % chunks != 0) {
      diagnostics.Error(size->place,
                        "%s.virtual_pipeline_parallel %d does not divide %s %d",
                        side.key, chunks, key, size->value);
      return {};
    }
    rest -= size->value;
    --middle;
  }
  const bool is_even = middle == stages;
  if (is_even && rest % stages == 0 && rest / stages % chunks != 0) {
    diagnostics.Error(side.virtual_pipeline_parallel.place,
                      "%s.virtual_pipeline_parallel %d does not divide %d "
                      "layers of a pipeline stage",
                      side.key, chunks, rest / stages);
    return {};
  }
  if (middle < 0 || rest < 0 ||
      (middle == 0 ? rest != 0 : rest % (middle * chunks) != 0)) {
    const Place& place = first.given  ? first.place
                         : last.given ? last.place
                                      : side.pipeline_parallel.place;
    const std::string why =
        is_even
            ? absl::StrFormat("does not divide %d layers", layers)
            : absl::StrFormat(
                  "leaves %d of %d layers to %d other stages%s, which do not "
                  "share them evenly",
                  rest, layers, middle,
                  chunks > 1 ? absl::StrFormat(" of %d chunks", chunks) : "");
    diagnostics.Error(place, "%s.pipeline_parallel %d %s", side.key, stages,
                      why);
    return {};
  }
  std::vector<int64_t> counts(stages, middle > 0 ? rest / middle : 0);
  if (first.given) counts.front() = first.value;
  if (last.given) counts.back() = last.value;
  return counts;
}

}  // namespace

std::optional<PipelineSplit> SplitMegatronLayers(const SideSpec& side,
                                                 int64_t layers,
                                                 Diagnostics& diagnostics) {
  const Located<int64_t>& first = side.num_layers_in_first_pipeline_stage;
  const Located<int64_t>& last = side.num_layers_in_last_pipeline_stage;
  const int64_t stages = side.pipeline_parallel.value;
  const int64_t chunks = side.virtual_pipeline_parallel.value;
  if (side.layers_per_stage.given) {
    if (first.given || last.given) {
      diagnostics.Error(first.given ? first.place : last.place,
                        "%s.num_layers_in_%s_pipeline_stage is given beside "
                        "layers_per_stage; wanted one of them",
                        side.key, first.given ? "first" : "last");
      return std::nullopt;
    }
    return FromOwnerTable(side, layers, diagnostics);
  }

  const std::vector<int64_t> per_stage = StageLayers(side, layers, diagnostics);
  if (per_stage.empty()) return std::nullopt;
  std::vector<int64_t> counts;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (const int64_t count : per_stage) counts.push_back(count / chunks);
  }
  return FromCounts(counts, stages);
}

std::optional<PipelineSplit> SplitServingLayers(const SideSpec& side,
                                                int64_t layers,
                                                int64_t remainder_ends_before,
                                                Diagnostics& diagnostics) {
  if (side.layers_per_stage.given) {
    return FromOwnerTable(side, layers, diagnostics);
  }
  const int64_t stages = side.pipeline_parallel.value;
  if (stages > layers) {
    diagnostics.Error(side.pipeline_parallel.place,
                      "%s.pipeline_parallel %d leaves stages without a layer; "
                      "the model has %d",
                      side.key, stages, layers);
    return std::nullopt;
  }
  std::vector<int64_t> counts(stages, layers / stages);
  for (int64_t extra = 0; extra < layers % stages; ++extra) {
    ++counts[stages - 1 - remainder_ends_before - extra];
  }
  return FromCounts(counts, stages);
}

}  // namespace refit
