#include "compiler/passes/quantize_work.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "compiler/passes/quantize_waves.h"
#include "plan/quantize_check.h"

namespace refit {
namespace {

// Of scratch tensors, so that each box in them begins where a GPU's widest
// access does.
constexpr int64_t kScratchAlignmentElements = 128;

const Quantization& QuantizationOf(const Module& module,
                                   const QuantizeItem& item) {
  return module.quantizations[static_cast<size_t>(item.quantization)];
}

Dims Extents(const Box& box) {
  Dims extents;
  for (size_t dim = 0; dim < box.lo.size(); ++dim) {
    extents.push_back(box.extent(dim));
  }
  return extents;
}

// A scratch tensor under construction: boxes of params one after the other.
class ScratchTensor {
 public:
  ScratchTensor(int32_t slot, int32_t wave, DType dtype) : slot_(slot) {
    const std::string number = wave == kNoWave ? "" : absl::StrCat(".", wave);
    buffer_.name =
        absl::StrCat("scratch", number, ".", std::string(DTypeName(dtype)));
    buffer_.dtype = dtype;
    buffer_.wave = wave;
  }

  QuantizeOperand Add(ParamId param, const Box& box) {
    const QuantizeOperand operand = {.slot = slot_,
                                     .offset = size_,
                                     .stride = RowMajorStrides(Extents(box))};
    buffer_.fragments.push_back({.param = param,
                                 .box = box,
                                 .offset = operand.offset,
                                 .stride = operand.stride});
    size_ += (box.Volume() + kScratchAlignmentElements - 1) /
             kScratchAlignmentElements * kScratchAlignmentElements;
    return operand;
  }

  Buffer Take() {
    buffer_.shape = {size_};
    return std::move(buffer_);
  }

 private:
  int32_t slot_;
  int64_t size_ = 0;
  Buffer buffer_;
};

// The operations of one list of items, and their scratch.
class ItemListBuilder {
 public:
  ItemListBuilder(const Module& module, const std::vector<DType>& source_dtypes,
                  size_t first_slot)
      : module_(module),
        source_dtypes_(source_dtypes),
        first_slot_(first_slot) {}

  void StartWave(int32_t wave) {
    if (wave != wave_) slots_.clear();
    wave_ = wave;
  }

  // Of the present wave: `box` is a part of the item's.
  void Add(const QuantizeItem& item, const Box& box) {
    const Quantization& quantization = QuantizationOf(module_, item);
    const Box grid = ScaleBox(box, quantization.scheme);
    if (quantization.at == QuantizedAt::kSource) {
      const DType scale_dtype = ScaleDType(quantization.scheme.scale_format);
      const QuantizeOperand output =
          Scratch(DType::kFp8E4m3).Add(quantization.data, box);
      ops_.push_back(
          {.quantization = item.quantization,
           .box = box,
           .input = item.values.front().Of(box),
           .output = output,
           .scales = Scratch(scale_dtype).Add(quantization.scales, grid)});
      return;
    }
    const QuantizeOperand input =
        Scratch(source_dtypes_[IndexOf(quantization.of)])
            .Add(quantization.of, box);
    for (size_t i = 0; i < item.values.size(); ++i) {
      ops_.push_back({.quantization = item.quantization,
                      .box = box,
                      .input = input,
                      .output = item.values[i].Of(box),
                      .scales = item.scales[i].Of(grid)});
    }
  }

  QuantizeWork Finish() {
    QuantizeWork work;
    work.quantizes.scratch_buffers = static_cast<int32_t>(tensors_.size());
    work.quantizes.quantizes = std::move(ops_);
    for (ScratchTensor& tensor : tensors_) {
      work.scratch.push_back(tensor.Take());
    }
    return work;
  }

 private:
  ScratchTensor& Scratch(DType dtype) {
    const auto [it, is_new] = slots_.try_emplace(dtype, tensors_.size());
    if (!is_new) return tensors_[it->second];
    return tensors_.emplace_back(
        static_cast<int32_t>(first_slot_ + tensors_.size()), wave_, dtype);
  }

  const Module& module_;
  const std::vector<DType>& source_dtypes_;
  const size_t first_slot_;
  int32_t wave_ = kNoWave;
  std::vector<Quantize> ops_;
  std::vector<ScratchTensor> tensors_;
  std::map<DType, size_t> slots_;  // of the present wave, into tensors_
};

int64_t BytesOf(const Buffer& buffer) {
  return buffer.shape[0] * DTypeBytes(buffer.dtype);
}

void PlaceInOwnMemory(QuantizeWork& work) {
  for (const Buffer& buffer : work.scratch) {
    work.quantizes.arena_bytes += BytesOf(buffer);
  }
}

// Waves lie at the two ends of the arena in turns, so that it is no larger than
// two neighbours need. Where a rank has no part in a wave, those around it may
// share bytes: that wave's rounds are the time to fill or to empty them.
void PlaceInTurns(QuantizeWork& work) {
  std::vector<ScratchWindow>& windows = work.quantizes.windows;
  std::map<int32_t, int64_t> wave_bytes;
  for (const Buffer& buffer : work.scratch) {
    int64_t& bytes = wave_bytes[buffer.wave];
    windows.push_back({.offset = bytes});
    bytes += BytesOf(buffer);
  }
  int64_t& arena_bytes = work.quantizes.arena_bytes;
  for (const auto& [wave, bytes] : wave_bytes) {
    const auto before = wave_bytes.find(wave - 1);
    arena_bytes = std::max(
        arena_bytes, bytes + (before == wave_bytes.end() ? 0 : before->second));
  }
  for (size_t i = 0; i < windows.size(); ++i) {
    const int32_t wave = work.scratch[i].wave;
    if (wave % 2 == 1) windows[i].offset += arena_bytes - wave_bytes.at(wave);
  }
}

}  // namespace

QuantizeOperand HeldBox::Of(const Box& part) const {
  QuantizeOperand operand = {
      .slot = slot, .offset = fragment.offset, .stride = fragment.stride};
  for (size_t dim = 0; dim < part.lo.size(); ++dim) {
    operand.offset +=
        (part.lo[dim] - fragment.box.lo[dim]) * operand.stride[dim];
  }
  return operand;
}

QuantizeLister::QuantizeLister(const Module& module, QuantizedAt at)
    : module_(module), at_(at), by_param_(module.params.size(), -1) {
  for (size_t i = 0; i < module.quantizations.size(); ++i) {
    const Quantization& quantization = module.quantizations[i];
    if (quantization.at != at) continue;
    const ParamId held =
        at == QuantizedAt::kSource ? quantization.of : quantization.data;
    by_param_[IndexOf(held)] = static_cast<int32_t>(i);
  }
}

template <typename Visit>
void QuantizeLister::ForEachFragment(const std::vector<BufferId>& buffers,
                                     const Visit& visit) const {
  for (size_t slot = 0; slot < buffers.size(); ++slot) {
    for (const Fragment& fragment : module_.buffers[buffers[slot]].fragments) {
      visit(static_cast<int32_t>(slot), fragment);
    }
  }
}

std::vector<QuantizeItem> QuantizeLister::List(
    const std::vector<BufferId>& buffers) const {
  std::vector<QuantizeItem> items;
  absl::flat_hash_map<std::pair<int32_t, Box>, size_t> known;
  ForEachFragment(buffers, [&](int32_t slot, const Fragment& fragment) {
    const int32_t quantization = by_param_[IndexOf(fragment.param)];
    if (quantization < 0) return;
    const auto [it, is_new] =
        known.try_emplace({quantization, fragment.box}, items.size());
    if (is_new) {
      items.push_back({.quantization = quantization,
                       .box = fragment.box,
                       .values = {},
                       .scales = {},
                       .part = {}});
    }
    items[it->second].values.push_back({slot, fragment});
  });
  if (at_ == QuantizedAt::kDestination) AddScales(buffers, items);
  return items;
}

// Scales stand in the order of their values, so that the n-th of equal boxes of
// values has the n-th of equal boxes of scales.
void QuantizeLister::AddScales(const std::vector<BufferId>& buffers,
                               std::vector<QuantizeItem>& items) const {
  absl::flat_hash_map<std::pair<ParamId, Box>, std::vector<HeldBox>> scales;
  ForEachFragment(buffers, [&](int32_t slot, const Fragment& fragment) {
    scales[{fragment.param, fragment.box}].push_back({slot, fragment});
  });
  for (QuantizeItem& item : items) {
    const Quantization& quantization = QuantizationOf(module_, item);
    item.scales = scales.at(
        {quantization.scales, ScaleBox(item.box, quantization.scheme)});
  }
}

namespace {

// Positions of items by group. Ranks that share a group have one order of it,
// however else their lists differ.
std::map<int32_t, std::vector<size_t>> GroupsOf(
    const std::vector<QuantizeItem>& items) {
  std::map<int32_t, std::vector<size_t>> groups;
  for (size_t i = 0; i < items.size(); ++i) {
    groups[items[i].part.group].push_back(i);
  }
  for (auto& [group, members] : groups) {
    if (group == 0) continue;
    std::sort(members.begin(), members.end(), [&](size_t a, size_t b) {
      return std::tie(items[a].quantization, items[a].box.lo) <
             std::tie(items[b].quantization, items[b].box.lo);
    });
  }
  return groups;
}

}  // namespace

int64_t QuantizeWorkBuilder::ElementBytes(const QuantizeItem& item) const {
  const Quantization& quantization = QuantizationOf(module_, item);
  return DTypeBytes(quantization.at == QuantizedAt::kSource
                        ? DType::kFp8E4m3
                        : source_dtypes_[IndexOf(quantization.of)]);
}

int64_t QuantizeWorkBuilder::Bytes(
    const std::vector<QuantizeItem>& items) const {
  int64_t bytes = 0;
  for (const QuantizeItem& item : items) {
    bytes += item.box.Volume() * ElementBytes(item) / item.part.count;
  }
  return bytes;
}

QuantizeWork QuantizeWorkBuilder::Build(const std::vector<QuantizeItem>& items,
                                        int32_t first_wave,
                                        int32_t waves) const {
  // A group is cut into the parts of the first wave, then those of the second:
  // so a wave, of all its ranks, is a run of whole layers but for its ends.
  std::vector<WavePart> cuts;
  for (const auto& [group, members] : GroupsOf(items)) {
    const QuantizedPart part = items[members.front()].part;
    std::vector<QuantizedBox> boxes;
    for (const size_t member : members) {
      boxes.push_back({.box = items[member].box,
                       .scheme = QuantizationOf(module_, items[member]).scheme,
                       .element_bytes = ElementBytes(items[member])});
    }
    for (WavePart& cut : CutIntoWaves(boxes, waves * part.count, kUnevenPart)) {
      if (cut.wave % part.count != part.number) continue;
      cut.wave /= part.count;
      cut.of = members[cut.of];
      cuts.push_back(std::move(cut));
    }
  }
  std::stable_sort(
      cuts.begin(), cuts.end(),
      [](const WavePart& a, const WavePart& b) { return a.wave < b.wave; });
  ItemListBuilder builder(module_, source_dtypes_, first_slot_);
  for (const WavePart& cut : cuts) {
    if (waves > 1) builder.StartWave(first_wave + cut.wave);
    builder.Add(items[cut.of], cut.box);
  }
  QuantizeWork work = builder.Finish();
  if (waves > 1) {
    PlaceInTurns(work);
  } else {
    PlaceInOwnMemory(work);
  }
  return work;
}

}  // namespace refit
