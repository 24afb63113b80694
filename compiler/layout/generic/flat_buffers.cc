#include <algorithm>
#include <cassert>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/generic/generic.h"
#include "compiler/model/stacks.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

std::string WithLayer(std::string_view name, std::string_view layer) {
  return absl::StrReplaceAll(std::string(name),
                             {{std::string(kLayerMark), std::string(layer)}});
}

// A member of a param.
struct Member {
  ParamId param{};
  int64_t number = 0;  // row-major over the index dims
};

// Members at consecutive positions of index dim `dim`, in as many consecutive
// layers of a flat buffer.
struct MemberRun {
  ParamId param{};
  std::vector<int64_t> first;  // position per index dim
  size_t dim = 0;
  int64_t buffer_position = 0;  // of the first in the buffer's stack
  int64_t count = 1;
};

// An entry with its params found.
struct PlacedEntry {
  const FlatEntry* entry = nullptr;
  Dims shape;  // of the param
  Range rows;  // those it holds, as elements of the param
  int64_t offset = 0;
  std::vector<MemberRun> runs;

  int64_t end() const { return offset + rows.size(); }
};

// Positions per index dim of the member of this number.
std::vector<int64_t> Positions(const Param& param, int64_t number) {
  std::vector<int64_t> positions(param.index.size());
  for (size_t dim = positions.size(); dim-- > 0;) {
    positions[dim] = number % param.index[dim].extent();
    number /= param.index[dim].extent();
  }
  return positions;
}

// Appends a member to the run if it continues it.
bool Extend(MemberRun& run, ParamId param,
            const std::vector<int64_t>& positions) {
  if (run.param != param) return false;
  std::vector<int64_t> next = run.first;
  for (size_t dim = 0; dim < next.size(); ++dim) {
    if (run.count > 1 && dim != run.dim) continue;
    next[dim] += run.count;
    if (next == positions) {
      run.dim = dim;
      ++run.count;
      return true;
    }
    next[dim] -= run.count;
  }
  return false;
}

class FlatBuffers {
 public:
  FlatBuffers(const LayoutContext& context, SideLayout& layout)
      : context_(context), layout_(layout), held_(context.model.params.size()) {
    for (size_t i = 0; i < context.model.params.size(); ++i) {
      int64_t number = 0;
      for (std::string& name : MemberNames(context.model.params[i])) {
        members_.try_emplace(std::move(name),
                             Member{static_cast<ParamId>(i), number++});
      }
    }
  }

  std::vector<HeldMembers> PlaceAll() {
    for (const FlatBufferSpec& flat : context_.side.generic.flat_buffers) {
      PlaceOne(flat);
    }
    return std::move(held_);
  }

 private:
  const Param& param(ParamId id) const {
    return context_.model.params[IndexOf(id)];
  }
  static int64_t Layers(const FlatBufferSpec& flat) {
    return flat.layers.has_value() ? flat.layers->end - flat.layers->begin : 1;
  }

  void PlaceOne(const FlatBufferSpec& flat);
  bool CheckPlacements(const FlatBufferSpec& flat);

  // The entries in order of their offsets; nullopt after an error.
  std::optional<std::vector<PlacedEntry>> FindEntries(
      const FlatBufferSpec& flat);
  bool FindRuns(const FlatBufferSpec& flat, PlacedEntry& placed);
  bool FindElements(const FlatBufferSpec& flat, PlacedEntry& placed);

  DType DTypeOf(const FlatBufferSpec& flat,
                const std::vector<PlacedEntry>& entries) const;
  bool Hold(const std::vector<PlacedEntry>& entries, DType dtype);

  Buffer LocalBuffer(const FlatBufferSpec& flat,
                     const std::vector<PlacedEntry>& entries, DType dtype,
                     const Runs& local) const;

  const LayoutContext& context_;
  SideLayout& layout_;
  std::vector<HeldMembers> held_;  // of each param
  absl::flat_hash_map<std::string, Member> members_;
};

bool FlatBuffers::CheckPlacements(const FlatBufferSpec& flat) {
  for (const Placement& placement : flat.placements) {
    if (placement.kind == Placement::Kind::kReplicate || placement.dim == 0) {
      continue;
    }
    return context_.diagnostics.Error(
        placement.place, "shard dim is %d but a flat buffer has one dim, 0",
        placement.dim);
  }
  return true;
}

bool FlatBuffers::FindRuns(const FlatBufferSpec& flat, PlacedEntry& placed) {
  const FlatEntry& entry = *placed.entry;
  for (int64_t layer = 0; layer < Layers(flat); ++layer) {
    const std::string name =
        flat.layers.has_value()
            ? WithLayer(entry.param, absl::StrCat(flat.layers->begin + layer))
            : entry.param;
    const auto found = members_.find(name);
    if (found == members_.end()) {
      std::vector<std::string_view> names;
      for (const auto& [known, member] : members_) names.push_back(known);
      std::sort(names.begin(), names.end());
      const std::string nearest = NearestWord(name, names);
      return context_.diagnostics.Error(
          entry.place, "\"%s\" is no parameter%s", name,
          nearest.empty() ? ""
                          : absl::StrFormat("; did you mean \"%s\"?", nearest));
    }
    const auto [id, number] = found->second;
    const Param& member = param(id);
    if (layer == 0) {
      placed.shape = member.shape;
    } else if (placed.shape != member.shape) {
      return context_.diagnostics.Error(
          entry.place,
          "\"%s\" has another shape than in layer %d; wanted equal layers in "
          "one flat buffer",
          name, flat.layers->begin);
    }
    std::vector<int64_t> positions = Positions(member, number);
    if (placed.runs.empty() || !Extend(placed.runs.back(), id, positions)) {
      placed.runs.push_back({.param = id,
                             .first = std::move(positions),
                             .dim = 0,
                             .buffer_position = layer,
                             .count = 1});
    }
  }
  return true;
}

bool FlatBuffers::FindElements(const FlatBufferSpec& flat,
                               PlacedEntry& placed) {
  const FlatEntry& entry = *placed.entry;
  placed.offset = entry.offset;
  placed.rows = {0, Product(placed.shape)};
  if (entry.rows.has_value()) {
    const Dims tensor = param(placed.runs[0].param).StoredShape();
    const int64_t rows = tensor.empty() ? 0 : tensor[0];
    if (entry.rows->end > rows) {
      return context_.diagnostics.Error(entry.rows->place,
                                        "rows end at %d but \"%s\" has %d rows",
                                        entry.rows->end, entry.param, rows);
    }
    const int64_t row = rows == 0 ? 0 : placed.rows.end / rows;
    placed.rows = {entry.rows->begin * row, entry.rows->end * row};
  }
  if (placed.end() > flat.length) {
    return context_.diagnostics.Error(
        entry.place,
        "\"%s\" ends at element %d; wanted at most %d, the length of flat "
        "buffer \"%s\"",
        entry.param, placed.end(), flat.length, flat.name);
  }
  return true;
}

std::optional<std::vector<PlacedEntry>> FlatBuffers::FindEntries(
    const FlatBufferSpec& flat) {
  std::vector<PlacedEntry> entries;
  for (const FlatEntry& entry : flat.entries) {
    PlacedEntry placed;
    placed.entry = &entry;
    if (!FindRuns(flat, placed) || !FindElements(flat, placed)) {
      return std::nullopt;
    }
    if (placed.rows.size() > 0) entries.push_back(std::move(placed));
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const PlacedEntry& a, const PlacedEntry& b) {
                     return a.offset < b.offset;
                   });
  for (size_t i = 1; i < entries.size(); ++i) {
    if (entries[i - 1].end() <= entries[i].offset) continue;
    context_.diagnostics.Error(entries[i].entry->place,
                               "\"%s\" begins at element %d of flat buffer "
                               "\"%s\", inside of \"%s\", which ends at %d",
                               entries[i].entry->param, entries[i].offset,
                               flat.name, entries[i - 1].entry->param,
                               entries[i - 1].end());
    return std::nullopt;
  }
  return entries;
}

DType FlatBuffers::DTypeOf(const FlatBufferSpec& flat,
                           const std::vector<PlacedEntry>& entries) const {
  if (flat.dtype.has_value()) return *flat.dtype;
  // A buffer that holds nothing has some dtype too: the first param's.
  const Param& first = entries.empty() ? context_.model.params.front()
                                       : param(entries[0].runs[0].param);
  return BufferDType(context_.side, first);
}

bool FlatBuffers::Hold(const std::vector<PlacedEntry>& entries, DType dtype) {
  for (const PlacedEntry& placed : entries) {
    for (const MemberRun& run : placed.runs) {
      const std::vector<IndexDim>& index = param(run.param).index;
      HeldMembers& held = held_[IndexOf(run.param)];
      size_t members = 1, first = 0, stride = 1;
      for (size_t dim = 0; dim < index.size(); ++dim) {
        const auto extent = static_cast<size_t>(index[dim].extent());
        members *= extent;
        first = first * extent + static_cast<size_t>(run.first[dim]);
        if (dim > run.dim) stride *= extent;
      }
      held.resize(members, DType::kUnspecified);
      for (int64_t i = 0; i < run.count; ++i) {
        DType& of_member = held[first + static_cast<size_t>(i) * stride];
        if (of_member != DType::kUnspecified && of_member != dtype) {
          return context_.diagnostics.Error(
              placed.entry->place,
              "\"%s\" stands in flat buffers of %s and of %s; wanted one dtype",
              placed.entry->param, DTypeName(of_member), DTypeName(dtype));
        }
        of_member = dtype;
      }
    }
  }
  return true;
}

Buffer FlatBuffers::LocalBuffer(const FlatBufferSpec& flat,
                                const std::vector<PlacedEntry>& entries,
                                DType dtype, const Runs& local) const {
  const int64_t length = RunsSize(local);
  Buffer buffer;
  buffer.name = WithLayer(flat.name, "{0}");
  buffer.shape = {length};
  buffer.dtype = dtype;
  if (flat.layers.has_value()) {
    buffer.index.push_back(
        Consecutive(static_cast<int32_t>(flat.layers->begin), Layers(flat)));
  }

  // Fills the local elements that no entry holds.
  const auto fill = [&](int64_t begin, int64_t end) {
    if (begin == end || context_.which != fb::Side::kDestination) return;
    buffer.regions.push_back({.kind = fb::RegionKind::kFill,
                              .offset = begin,
                              .extent = {Layers(flat), end - begin},
                              .stride = {length, 1},
                              .detail = {}});
  };
  int64_t run_begin = 0;
  for (const Range& range : local) {
    int64_t filled = run_begin;
    for (const PlacedEntry& placed : entries) {
      const int64_t begin = std::max(placed.offset, range.begin);
      const int64_t end = std::min(placed.end(), range.end);
      if (begin >= end) continue;
      const int64_t at = run_begin + begin - range.begin;
      fill(filled, at);
      filled = at + end - begin;

      const Dims strides = RowMajorStrides(placed.shape);
      int64_t box_at = at;
      for (const Box& box : BoxesOfElements(
               placed.shape, {placed.rows.begin + begin - placed.offset,
                              placed.rows.begin + end - placed.offset})) {
        for (const MemberRun& run : placed.runs) {
          Fragment& fragment = buffer.fragments.emplace_back();
          fragment.param = run.param;
          fragment.offset = run.buffer_position * length + box_at;
          for (size_t dim = 0; dim < run.first.size(); ++dim) {
            const int64_t count = dim == run.dim ? run.count : 1;
            fragment.box.lo.push_back(run.first[dim]);
            fragment.box.hi.push_back(run.first[dim] + count);
            fragment.stride.push_back(length);
          }
          fragment.box.lo.insert(fragment.box.lo.end(), box.lo.begin(),
                                 box.lo.end());
          fragment.box.hi.insert(fragment.box.hi.end(), box.hi.begin(),
                                 box.hi.end());
          fragment.stride.insert(fragment.stride.end(), strides.begin(),
                                 strides.end());
        }
        box_at += box.Volume();
      }
    }
    run_begin += range.size();
    fill(filled, run_begin);
  }
  return buffer;
}

void FlatBuffers::PlaceOne(const FlatBufferSpec& flat) {
  const std::optional<std::vector<PlacedEntry>> entries = FindEntries(flat);
  if (!CheckPlacements(flat) || !entries.has_value()) return;
  const DType dtype = DTypeOf(flat, *entries);
  if (!Hold(*entries, dtype)) return;

  const MeshSpec& mesh = MeshNamed(context_.side.generic, flat.mesh);
  const int64_t shape[] = {flat.length};
  for (size_t i = 0; i < mesh.ranks.size(); ++i) {
    Runs local;
    if (flat.ranges.empty()) {
      local = LocalRuns(shape, mesh, flat.placements,
                        Coordinates(mesh, static_cast<int64_t>(i)))[0];
    } else if (flat.ranges[i].begin < flat.ranges[i].end) {
      local = {{flat.ranges[i].begin, flat.ranges[i].end}};
    }
    layout_.ranks[mesh.ranks[i]].push_back(
        context_.buffers.Intern(LocalBuffer(flat, *entries, dtype, local)));
  }
}

}  // namespace

std::vector<HeldMembers> PlaceFlatBuffers(const LayoutContext& context,
                                          SideLayout& layout) {
  if (context.side.generic.flat_buffers.empty()) {
    return std::vector<HeldMembers>(context.model.params.size());
  }
  return FlatBuffers(context, layout).PlaceAll();
}

std::vector<std::string> FlatBufferNames(const FlatBufferSpec& flat) {
  if (!flat.layers.has_value()) return {flat.name};
  std::vector<std::string> names;
  for (int64_t layer = flat.layers->begin; layer < flat.layers->end; ++layer) {
    names.push_back(WithLayer(flat.name, absl::StrCat(layer)));
  }
  return names;
}

}  // namespace refit
