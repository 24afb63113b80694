#include "compiler/layout/common/tensor_stack.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace refit {
namespace {

// `count` consecutive entries of a param's index that stand in as many entries
// of a buffer's index, `stride` apart.
struct IndexRun {
  ParamId param{};
  int64_t position = 0;
  int64_t buffer_position = 0;
  int64_t count = 0;
  int64_t stride = 1;
};

// Layers whose experts stand elsewhere (`experts`, if any) are other runs.
std::vector<IndexRun> LayerRuns(const RoleTable& table, const Part& part,
                                absl::Span<const int32_t> layers,
                                const std::optional<ExpertSlice>& experts) {
  const auto same_experts = [&](int64_t a, int64_t b) {
    return !experts.has_value() ||
           experts->OfLayer(layers[a]) == experts->OfLayer(layers[b]);
  };
  std::vector<IndexRun> runs;
  for (size_t i = 0; i < layers.size(); ++i) {
    for (const LayerEntry& entry : table.At(part.role, layers[i])) {
      if (!part.name.empty() && table.param(entry.param).name != part.name) {
        continue;
      }
      const auto continues = [&](const IndexRun& run) {
        return run.param == entry.param &&
               run.position + run.count == entry.position &&
               run.buffer_position + run.count == static_cast<int64_t>(i) &&
               same_experts(run.buffer_position, i);
      };
      const auto run = std::find_if(runs.rbegin(), runs.rend(), continues);
      if (run != runs.rend()) {
        ++run->count;
      } else {
        runs.push_back(
            {entry.param, entry.position, static_cast<int64_t>(i), 1});
      }
    }
  }
  return runs;
}

// The runs of a param's experts among those that a rank holds.
std::vector<IndexRun> ExpertRuns(ParamId id, const Param& param,
                                 const std::vector<int32_t>& experts) {
  absl::flat_hash_map<int32_t, int64_t> positions;
  for (const int32_t expert : param.index[1].numbers) {
    positions.emplace(expert, static_cast<int64_t>(positions.size()));
  }
  std::vector<IndexRun> runs;
  // The runs that an expert at this position may continue, oldest first.
  absl::flat_hash_map<int64_t, std::vector<size_t>> runs_before;
  for (size_t i = 0; i < experts.size(); ++i) {
    const auto found = positions.find(experts[i]);
    if (found == positions.end()) continue;  // another stack's
    const int64_t position = found->second;
    // The second expert of a run sets its stride.
    const auto continues = [&](size_t number) {
      const IndexRun& run = runs[number];
      return run.count == 1 || run.buffer_position + run.count * run.stride ==
                                   static_cast<int64_t>(i);
    };
    std::vector<size_t>& before = runs_before[position];
    const auto it = std::find_if(before.begin(), before.end(), continues);
    size_t number = runs.size();
    if (it == before.end()) {
      runs.push_back({id, position, static_cast<int64_t>(i), 1});
    } else {
      number = *it;
      before.erase(it);
      IndexRun& run = runs[number];
      if (run.count == 1)
        run.stride = static_cast<int64_t>(i) - run.buffer_position;
      ++run.count;
    }
    runs_before[position + 1].push_back(number);
  }
  return runs;
}

struct StackStrides {
  int64_t layer = 0;
  int64_t expert = 0;
};

Fragment MakeFragment(const Part& part, const IndexRun& layers,
                      const IndexRun* experts, const StackStrides& strides) {
  Fragment fragment;
  fragment.param = layers.param;
  fragment.offset = part.offset + layers.buffer_position * strides.layer;
  fragment.box.lo.push_back(layers.position);
  fragment.box.hi.push_back(layers.position + layers.count);
  fragment.stride.push_back(strides.layer);
  if (experts != nullptr) {
    fragment.offset += experts->buffer_position * strides.expert;
    fragment.box.lo.push_back(experts->position);
    fragment.box.hi.push_back(experts->position + experts->count);
    fragment.stride.push_back(strides.expert * experts->stride);
  }
  for (size_t dim = 0; dim < part.stride.size(); ++dim) {
    fragment.box.lo.push_back(part.box.lo[dim]);
    fragment.box.hi.push_back(part.box.hi[dim]);
    fragment.stride.push_back(part.stride[dim]);
  }
  return fragment;
}

std::string_view OwnName(const Param& param) {
  const bool has_many = IsPlainModule(param.role) || IsTower(param.role);
  return has_many ? std::string_view(param.name) : "";
}

Buffer MakeBuffer(std::string name, Dims shape, DType dtype) {
  Buffer buffer;
  buffer.name = std::move(name);
  buffer.shape = std::move(shape);
  buffer.dtype = dtype;
  return buffer;
}

}  // namespace

ExpertSlice ConsecutiveExperts(Range experts, bool in_name) {
  const auto first = static_cast<int32_t>(experts.begin);
  return {.experts = {Consecutive(first, experts.size()).numbers},
          .in_name = in_name};
}

Part RowsPart(const Param& param, Range rows, int64_t buffer_row) {
  Part part = {.role = param.role,
               .box = WholeBox(param.shape),
               .offset = 0,
               .stride = RowMajorStrides(param.shape),
               .name = OwnName(param)};
  part.box.lo[0] = rows.begin;
  part.box.hi[0] = rows.end;
  part.offset = buffer_row * part.stride[0];
  return part;
}

Part ColumnsPart(const Param& param, Range columns) {
  assert(param.shape.size() == 2);
  return {
      .role = param.role,
      .box = {.lo = {0, columns.begin}, .hi = {param.shape[0], columns.end}},
      .offset = 0,
      .stride = {columns.size(), 1},
      .name = OwnName(param)};
}

Buffer LayerStack(const RoleTable& table, TensorSpec spec,
                  absl::Span<const int32_t> layers,
                  const LayerStackOptions& options) {
  Buffer buffer = MakeBuffer(std::move(spec.name), {}, options.dtype);
  IndexDim& numbers = buffer.index.emplace_back();
  for (const int32_t layer : layers) {
    numbers.numbers.push_back(layer -
                              static_cast<int32_t>(options.first_layer));
  }

  StackStrides strides;
  strides.expert = Product(spec.shape);
  strides.layer = strides.expert;
  if (options.experts.has_value()) {
    const auto experts =
        static_cast<int64_t>(options.experts->experts[0].size()) +
        options.experts->layer_experts;
    strides.layer *= experts;
    if (options.experts->in_name) {
      buffer.index.push_back(Consecutive(0, experts));
    } else {
      buffer.shape.push_back(experts);
    }
  }
  if (options.fused_experts.has_value()) {
    strides.layer *= *options.fused_experts;
    buffer.index.push_back(Consecutive(0, *options.fused_experts));
  }
  buffer.shape.insert(buffer.shape.end(), spec.shape.begin(), spec.shape.end());
  buffer.form = spec.form;
  buffer.post_hooks = std::move(spec.post_hooks);
  buffer.own_dtype = spec.own_dtype.has_value() ||
                     (!spec.parts.empty() && IsAlwaysFp32(spec.parts[0].role));
  if (spec.own_dtype.has_value()) buffer.dtype = *spec.own_dtype;

  if (spec.zeros) {
    const Dims shape = buffer.VirtualShape();
    buffer.regions.push_back({.kind = fb::RegionKind::kFill,
                              .offset = 0,
                              .extent = shape,
                              .stride = RowMajorStrides(shape),
                              .detail = {}});
  }
  if (spec.tail.has_value()) {
    const auto& [begin, why] = *spec.tail;
    const int64_t tail = spec.shape[0] - begin;
    buffer.regions.push_back(
        {.kind = fb::RegionKind::kSkip,
         .reason = why.reason,
         .offset = begin,
         .extent = {static_cast<int64_t>(layers.size()), tail},
         .stride = {strides.layer, 1},
         .detail = why.detail});
  }
  for (const Part& part : spec.parts) {
    if (part.box.Empty()) continue;
    for (const IndexRun& run :
         LayerRuns(table, part, layers, options.experts)) {
      if (!options.experts.has_value() ||
          FormOf(part.role).scope == RoleScope::kLayer) {
        buffer.fragments.push_back(MakeFragment(part, run, nullptr, strides));
        continue;
      }
      for (const IndexRun& experts :
           ExpertRuns(run.param, table.param(run.param),
                      options.experts->OfLayer(layers[run.buffer_position]))) {
        buffer.fragments.push_back(MakeFragment(part, run, &experts, strides));
      }
    }
  }
  if (!spec.skip.has_value()) return buffer;
  return SkippedCopy(std::move(buffer), spec.skip->reason,
                     std::move(spec.skip->detail));
}

DType BufferDType(const SideSpec& side, const Param& param) {
  if (IsAlwaysFp32(param.role)) return DType::kFp32;
  return side.dtype.given ? side.dtype.value : param.dtype;
}

Buffer TensorOf(const LayoutContext& context, TensorSpec spec, ParamId id) {
  Buffer buffer =
      MakeBuffer(std::move(spec.name), std::move(spec.shape),
                 BufferDType(context.side, context.model.params[IndexOf(id)]));
  buffer.own_dtype = IsAlwaysFp32(context.model.params[IndexOf(id)].role);
  for (Part& part : spec.parts) {
    buffer.fragments.push_back({.param = id,
                                .box = std::move(part.box),
                                .offset = part.offset,
                                .stride = std::move(part.stride)});
  }
  return buffer;
}

Buffer WholeTensor(const LayoutContext& context, std::string name, ParamId id) {
  const Param& param = context.model.params[IndexOf(id)];
  return TensorOf(context,
                  {.name = std::move(name),
                   .shape = param.shape,
                   .parts = {RowsPart(param, {0, param.shape[0]}, 0)}},
                  id);
}

Buffer VocabularyTensor(const LayoutContext& context, std::string name,
                        ParamId id, const VocabularyShard& shard) {
  const Param& param = context.model.params[IndexOf(id)];
  const int64_t vocab = param.shape[0];
  const int64_t columns = param.shape[1];
  const Range rows = EvenShard(shard.padded_rows, shard.count, shard.index);
  const int64_t end = std::clamp(vocab, rows.begin, rows.end);

  Buffer buffer = MakeBuffer(std::move(name), {rows.size(), columns},
                             BufferDType(context.side, param));
  if (rows.begin < end) {
    buffer.fragments.push_back(
        {.param = id,
         .box = {.lo = {rows.begin, 0}, .hi = {end, columns}},
         .offset = 0,
         .stride = {columns, 1}});
  }
  if (end < rows.end && context.which == fb::Side::kDestination) {
    buffer.regions.push_back({.kind = fb::RegionKind::kFill,
                              .offset = (end - rows.begin) * columns,
                              .extent = {rows.end - end, columns},
                              .stride = {columns, 1},
                              .detail = {}});
  }
  return buffer;
}

Buffer SkippedCopy(Buffer buffer, SkipReason reason, std::string detail) {
  const Dims shape = buffer.VirtualShape();
  buffer.fragments.clear();
  buffer.regions.clear();
  buffer.regions.push_back({.kind = fb::RegionKind::kSkip,
                            .reason = reason,
                            .offset = 0,
                            .extent = shape,
                            .stride = RowMajorStrides(shape),
                            .detail = std::move(detail)});
  return buffer;
}

void AppendReplicas(int64_t replicas, SideLayout& layout) {
  const std::vector<std::vector<BufferId>> replica = layout.ranks;
  layout.ranks.reserve(replica.size() * replicas);
  for (int64_t i = 1; i < replicas; ++i) {
    layout.ranks.insert(layout.ranks.end(), replica.begin(), replica.end());
  }
}

}  // namespace refit
