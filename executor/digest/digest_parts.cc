#include "executor/digest/digest_parts.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "absl/container/inlined_vector.h"
#include "plan/scratch_windows.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

// A loop over elements of one param in the rank's tensors.
struct ElementLoop {
  uint64_t extent = 1;
  uint64_t buffer_stride = 0;  // virtual elements of the buffer
  uint64_t param_stride = 0;   // elements of the param
};
using ElementLoops = absl::InlinedVector<ElementLoop, 6>;

// Calls `visit(slot, buffer number)` for each of the rank's stacks.
template <typename Visit>
void ForEachStack(const PlanFile& plan, int32_t rank, HeldStacks stacks,
                  const Visit& visit) {
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  if (program.buffers() == nullptr) return;
  for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
    const uint32_t buffer = program.buffers()->Get(slot);
    const auto* hooks = plan.body().buffers()->Get(buffer)->post_hooks();
    const bool is_plain =
        !IsScratch(program, slot) && (hooks == nullptr || hooks->size() == 0);
    if (stacks == HeldStacks::kAll || is_plain) visit(slot, buffer);
  }
}

// Of what the plan moves.
template <typename Visit>
void ForEachFragment(const PlanFile& plan, uint32_t buffer,
                     const Visit& visit) {
  const fb::Body& body = plan.body();
  const auto* fragments = body.buffers()->Get(buffer)->fragments();
  if (fragments == nullptr) return;
  for (const fb::Fragment* fragment : *fragments) {
    const fb::Param& param = *body.params()->Get(fragment->param());
    if (param.skip() == fb::SkipReason::kUnspecified) visit(*fragment);
  }
}

size_t IndexDims(const fb::Param& param) { return Length(param.index()); }

// Appends the copies of one part, cut where a loop runs on from one tensor into
// the next.
class PartLowering {
 public:
  PartLowering(const TensorTable& tensors, const DigestBox& held,
               const DigestTarget& target, CopyBatch& batch)
      : tensors_(tensors),
        slot_(held.slot),
        tensor_elements_(TensorElements(tensors.buffer(held.slot))),
        dtype_(held.dtype),
        target_(target),
        batch_(batch) {}

  // `offset`: virtual, in the buffer. `position`: in the param.
  void Append(uint64_t offset, uint64_t position,
              absl::Span<const ElementLoop> loops) {
    uint64_t span = 0;  // from the first element to the last
    for (const ElementLoop& loop : loops) {
      span += (loop.extent - 1) * loop.buffer_stride;
    }
    if (offset % tensor_elements_ + span < tensor_elements_) {
      return AppendCopy(offset, position, loops);
    }
    const ElementLoop& outer = loops.front();
    const auto inner = loops.subspan(1);
    if (outer.buffer_stride % tensor_elements_ == 0) {
      whole_loops_.push_back(outer);
      Append(offset, position, inner);
      whole_loops_.pop_back();
      return;
    }
    const uint64_t inner_span = span - (outer.extent - 1) * outer.buffer_stride;
    ElementLoops part(loops.begin(), loops.end());
    for (uint64_t i = 0; i < outer.extent; i += part.front().extent) {
      const uint64_t at = offset + i * outer.buffer_stride;
      const uint64_t room = tensor_elements_ - at % tensor_elements_;
      part.front().extent =
          inner_span >= room
              ? 1
              : std::min(outer.extent - i,
                         (room - 1 - inner_span) / outer.buffer_stride + 1);
      const uint64_t part_position = position + i * outer.param_stride;
      if (part.front().extent == 1) {
        Append(at, part_position, inner);
      } else {
        AppendCopy(at, part_position, part);
      }
    }
  }

 private:
  void AppendCopy(uint64_t offset, uint64_t position,
                  absl::Span<const ElementLoop> loops) {
    const auto to_bytes = static_cast<uint64_t>(DTypeBytes(dtype_));
    StridedCopy& copy = batch_.copies.emplace_back();
    copy.from = tensors_.AddressOf(slot_, offset);
    copy.to = {.entry = 0, .byte_offset = position * to_bytes, .dtype = dtype_};
    copy.loops_begin = static_cast<uint32_t>(batch_.loops.size());
    copy.loops_count =
        static_cast<uint32_t>(whole_loops_.size() + loops.size());
    const auto append = [&](const ElementLoop& loop) {
      batch_.loops.push_back(
          {.extent = loop.extent,
           .from = tensors_.StrideOf(slot_, loop.buffer_stride),
           .to = {.entries = 0, .bytes = loop.param_stride * to_bytes}});
    };
    for (const ElementLoop& loop : whole_loops_) append(loop);
    for (const ElementLoop& loop : loops) append(loop);
    batch_.digests.push_back(target_);
  }

  const TensorTable& tensors_;
  const size_t slot_;
  const uint64_t tensor_elements_;
  const DType dtype_;
  const DigestTarget target_;
  CopyBatch& batch_;
  ElementLoops whole_loops_;  // around what is appended
};

// Low half of the name's digest.
uint64_t KeyOf(const std::string& name) {
  return DigestOf({reinterpret_cast<const uint8_t*>(name.data()), name.size()})
      .low();
}

}  // namespace

std::vector<DigestBox> BoxesCountedBy(const PlanFile& plan, int32_t rank,
                                      absl::Span<const int32_t> among,
                                      HeldStacks stacks) {
  // Ranks that hold the same have one entry of Body.buffers.
  std::set<uint32_t> of_lower;
  for (const int32_t other : among) {
    if (other >= rank) continue;
    ForEachStack(plan, other, stacks,
                 [&](uint32_t, uint32_t buffer) { of_lower.insert(buffer); });
  }
  std::map<uint32_t, std::vector<ParamBox>> taken;  // by param
  for (const uint32_t buffer : of_lower) {
    ForEachFragment(plan, buffer, [&](const fb::Fragment& fragment) {
      taken[fragment.param()].push_back(BoxOf(fragment));
    });
  }
  std::vector<DigestBox> counted;
  ForEachStack(plan, rank, stacks, [&](uint32_t slot, uint32_t buffer) {
    const DType dtype = plan.body().buffers()->Get(buffer)->dtype();
    ForEachFragment(plan, buffer, [&](const fb::Fragment& fragment) {
      std::vector<ParamBox>& others = taken[fragment.param()];
      std::vector<ParamBox> left = {BoxOf(fragment)};
      for (const ParamBox& other : others) left = Without(left, other);
      for (ParamBox& box : left) {
        counted.push_back({.slot = slot,
                           .fragment = &fragment,
                           .box = std::move(box),
                           .dtype = dtype});
      }
      others.push_back(BoxOf(fragment));
    });
  });
  return counted;
}

namespace {

using DigestRegionKey =
    std::tuple<uint32_t, DType, std::vector<uint64_t>, std::vector<uint64_t>>;

DigestRegionKey KeyOf(uint32_t param, DType dtype, const ParamBox& box) {
  return {param,
          dtype,
          {box.lo.begin(), box.lo.end()},
          {box.extent.begin(), box.extent.end()}};
}

}  // namespace

std::vector<DigestRegion> RegionsOf(const PlanFile& plan) {
  std::vector<DigestRegion> regions;
  std::set<DigestRegionKey> known;
  std::set<uint32_t> buffers;
  for (int32_t rank = plan.source_ranks(); rank < plan.world_size(); ++rank) {
    ForEachStack(plan, rank, HeldStacks::kAll, [&](uint32_t, uint32_t buffer) {
      if (!buffers.insert(buffer).second) return;
      const DType dtype = plan.body().buffers()->Get(buffer)->dtype();
      ForEachFragment(plan, buffer, [&](const fb::Fragment& fragment) {
        ParamBox box = BoxOf(fragment);
        if (known.insert(KeyOf(fragment.param(), dtype, box)).second) {
          regions.push_back({.param = fragment.param(),
                             .box = std::move(box),
                             .dtype = dtype});
        }
      });
    });
  }
  return regions;
}

std::vector<DigestBox> BoxesOfRegions(const PlanFile& plan, int32_t rank,
                                      absl::Span<const DigestRegion> regions) {
  std::vector<DigestBox> boxes;
  if (plan.side(rank) == fb::Side::kDestination) {
    std::map<DigestRegionKey, uint32_t> number;
    for (uint32_t i = 0; i < regions.size(); ++i) {
      number[KeyOf(regions[i].param, regions[i].dtype, regions[i].box)] = i;
    }
    ForEachStack(
        plan, rank, HeldStacks::kAll, [&](uint32_t slot, uint32_t buffer) {
          const DType dtype = plan.body().buffers()->Get(buffer)->dtype();
          ForEachFragment(plan, buffer, [&](const fb::Fragment& fragment) {
            ParamBox box = BoxOf(fragment);
            const uint32_t region =
                number.at(KeyOf(fragment.param(), dtype, box));
            boxes.push_back({.slot = slot,
                             .fragment = &fragment,
                             .box = std::move(box),
                             .dtype = dtype,
                             .region = region});
          });
        });
    return boxes;
  }
  std::map<uint32_t, std::vector<uint32_t>> of_param;
  for (uint32_t i = 0; i < regions.size(); ++i) {
    of_param[regions[i].param].push_back(i);
  }
  std::vector<int32_t> sources;
  for (int32_t i = 0; i < plan.source_ranks(); ++i) sources.push_back(i);
  for (const DigestBox& counted :
       BoxesCountedBy(plan, rank, sources, HeldStacks::kAll)) {
    for (const uint32_t i : of_param[counted.fragment->param()]) {
      const DigestRegion& region = regions[i];
      if (region.dtype != counted.dtype &&
          !IsSupportedCast(counted.dtype, region.dtype)) {
        continue;
      }
      std::optional<ParamBox> both = Meet(counted.box, region.box);
      if (!both.has_value()) continue;
      boxes.push_back({.slot = counted.slot,
                       .fragment = counted.fragment,
                       .box = *std::move(both),
                       .dtype = region.dtype,
                       .region = i});
    }
  }
  return boxes;
}

void AppendDigests(const PlanFile& plan, const TensorTable& tensors,
                   absl::Span<const DigestBox> boxes, uint64_t sums_entry,
                   std::vector<DigestPart>& parts, CopyBatch& batch) {
  batch.kind = CopyKind::kDigest;
  for (size_t b = 0; b < boxes.size(); ++b) {
    const DigestBox& held = boxes[b];
    const fb::Fragment& fragment = *held.fragment;
    const fb::Param& param = *plan.body().params()->Get(fragment.param());
    const size_t index_dims = IndexDims(param);
    const size_t dims = held.box.lo.size();
    uint64_t offset = fragment.offset();
    uint64_t position = 0;
    uint64_t elements = 1;
    uint64_t param_stride = 1;
    ElementLoops loops;
    for (size_t d = dims; d-- > 0;) {
      const uint64_t stride = fragment.stride()->Get(d);
      offset += (held.box.lo[d] - fragment.lo()->Get(d)) * stride;
      if (d < index_dims) continue;
      position += held.box.lo[d] * param_stride;
      elements *= held.box.extent[d];
      if (held.box.extent[d] > 1) {
        loops.insert(loops.begin(), {.extent = held.box.extent[d],
                                     .buffer_stride = stride,
                                     .param_stride = param_stride});
      }
      param_stride *= param.shape()->Get(d - index_dims);
    }
    // One param of the stack after the other.
    ParamBox::Numbers at(index_dims, 0);
    while (true) {
      uint64_t ordinal = 0;
      uint64_t param_offset = offset;
      for (size_t d = 0; d < index_dims; ++d) {
        ordinal =
            ordinal * param.index()->Get(d)->count() + held.box.lo[d] + at[d];
        param_offset += at[d] * fragment.stride()->Get(d);
      }
      PartLowering(tensors, held,
                   {.param_key = KeyOf(TensorName(param, ordinal)),
                    .entry = sums_entry,
                    .byte_offset = parts.size() * sizeof(DigestSum)},
                   batch)
          .Append(param_offset, position, loops);
      parts.push_back({.box = b,
                       .param = fragment.param(),
                       .ordinal = ordinal,
                       .elements = elements});
      size_t d = index_dims;
      while (d > 0 && ++at[d - 1] == held.box.extent[d - 1]) at[--d] = 0;
      if (d == 0) break;
    }
  }
}

}  // namespace refit
