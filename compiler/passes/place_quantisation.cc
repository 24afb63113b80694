#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"
#include "plan/quantise_check.h"

namespace refit {
namespace {

// Of scratch tensors, so that each box in them begins where a GPU's widest
// access does.
constexpr int64_t kScratchAlignmentElements = 128;

// Why the blocks of a fragment cannot be quantised where it is; "" if they can.
std::string Obstacle(const Fragment& fragment, const Param& param,
                     const BlockScheme& scheme) {
  if (!HoldsWholeBlocks(fragment.box, param.shape, scheme)) {
    return "which cuts a block";
  }
  if (fragment.stride.back() != 1 &&
      fragment.box.extent(fragment.box.lo.size() - 1) > 1) {
    return "whose rows are not contiguous";
  }
  return "";
}

void DecidePlaces(Module& module) {
  std::vector<Quantisation*> of_param(module.params.size(), nullptr);
  for (Quantisation& quantisation : module.quantisations) {
    if (quantisation.of == quantisation.data ||
        module.param(quantisation.of).skip != SkipReason::kUnspecified) {
      continue;
    }
    quantisation.at = QuantisedAt::kSource;
    of_param[IndexOf(quantisation.of)] = &quantisation;
  }
  for (size_t rank = 0; rank < module.source.ranks.size(); ++rank) {
    for (const BufferId id : module.source.ranks[rank]) {
      for (const Fragment& fragment : module.buffers[id].fragments) {
        Quantisation* quantisation = of_param[IndexOf(fragment.param)];
        if (quantisation == nullptr ||
            quantisation->at == QuantisedAt::kDestination) {
          continue;
        }
        const std::string obstacle = Obstacle(
            fragment, module.param(fragment.param), quantisation->scheme);
        if (obstacle.empty()) continue;
        quantisation->at = QuantisedAt::kDestination;
        quantisation->reason =
            absl::StrCat("source rank ", rank, " holds ", BoxText(fragment.box),
                         ", ", obstacle);
      }
    }
  }
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
  ScratchTensor(int32_t slot, DType dtype) : slot_(slot) {
    buffer_.name = absl::StrCat("scratch.", std::string(DTypeName(dtype)));
    buffer_.dtype = dtype;
  }

  QuantiseSide Add(ParamId param, const Box& box) {
    const QuantiseSide side = {.slot = slot_,
                               .offset = size_,
                               .stride = RowMajorStrides(Extents(box))};
    buffer_.fragments.push_back({.param = param,
                                 .box = box,
                                 .offset = side.offset,
                                 .stride = side.stride});
    size_ += (box.Volume() + kScratchAlignmentElements - 1) /
             kScratchAlignmentElements * kScratchAlignmentElements;
    return side;
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

// What all ranks with one list of buffers quantise.
struct Work {
  RankQuantises quantises;
  std::vector<BufferId> scratch;
  int64_t scratch_bytes = 0;
};

class WorkBuilder {
 public:
  WorkBuilder(Module& module, const std::vector<BufferId>& buffers)
      : module_(module),
        buffers_(buffers),
        by_of_(module.params.size(), -1),
        by_data_(module.params.size(), -1) {
    for (size_t i = 0; i < module.quantisations.size(); ++i) {
      const Quantisation& quantisation = module.quantisations[i];
      if (quantisation.at == QuantisedAt::kNowhere) continue;
      by_of_[IndexOf(quantisation.of)] = static_cast<int32_t>(i);
      by_data_[IndexOf(quantisation.data)] = static_cast<int32_t>(i);
    }
  }

  // A source's tensors are quantised into scratch.
  Work OfSource() {
    ForEachFragment([&](int32_t slot, const Buffer&, const Fragment& fragment) {
      const int32_t i = by_of_[IndexOf(fragment.param)];
      if (i < 0 || At(i).at != QuantisedAt::kSource) return;
      const Quantisation& quantisation = At(i);
      ops_.push_back(
          {.quantisation = i,
           .box = fragment.box,
           .input = SideOf(slot, fragment),
           .output =
               Scratch(DType::kFp8E4m3).Add(quantisation.data, fragment.box),
           .scales = Scratch(ScaleDType(quantisation.scheme.scale_format))
                         .Add(quantisation.scales,
                              ScaleBox(fragment.box, quantisation.scheme))});
    });
    return Finish();
  }

  // What comes into a destination's scratch is quantised into its tensors.
  Work OfDestination(const std::vector<DType>& source_dtypes) {
    std::map<std::pair<ParamId, Dims>, QuantiseSide> scales;
    ForEachFragment([&](int32_t slot, const Buffer&, const Fragment& fragment) {
      scales[{fragment.param, fragment.box.lo}] = SideOf(slot, fragment);
    });
    ForEachFragment([&](int32_t slot, const Buffer&, const Fragment& fragment) {
      const int32_t i = by_data_[IndexOf(fragment.param)];
      if (i < 0 || At(i).at != QuantisedAt::kDestination) return;
      const Quantisation& quantisation = At(i);
      const Box grid = ScaleBox(fragment.box, quantisation.scheme);
      ops_.push_back({.quantisation = i,
                      .box = fragment.box,
                      .input = Scratch(source_dtypes[IndexOf(quantisation.of)])
                                   .Add(quantisation.of, fragment.box),
                      .output = SideOf(slot, fragment),
                      .scales = scales.at({quantisation.scales, grid.lo})});
    });
    return Finish();
  }

 private:
  const Quantisation& At(int32_t i) const {
    return module_.quantisations[static_cast<size_t>(i)];
  }

  static QuantiseSide SideOf(int32_t slot, const Fragment& fragment) {
    return {.slot = slot, .offset = fragment.offset, .stride = fragment.stride};
  }

  template <typename Visit>
  void ForEachFragment(const Visit& visit) const {
    for (size_t slot = 0; slot < buffers_.size(); ++slot) {
      const Buffer& buffer = module_.buffers[buffers_[slot]];
      for (const Fragment& fragment : buffer.fragments) {
        visit(static_cast<int32_t>(slot), buffer, fragment);
      }
    }
  }

  ScratchTensor& Scratch(DType dtype) {
    const auto found = by_dtype_.find(dtype);
    if (found != by_dtype_.end()) return tensors_[found->second];
    by_dtype_[dtype] = tensors_.size();
    return tensors_.emplace_back(
        static_cast<int32_t>(buffers_.size() + tensors_.size()), dtype);
  }

  Work Finish() {
    Work work;
    work.quantises = {.scratch_buffers = static_cast<int32_t>(tensors_.size()),
                      .quantises = std::move(ops_)};
    for (ScratchTensor& tensor : tensors_) {
      Buffer buffer = tensor.Take();
      work.scratch_bytes += buffer.shape[0] * DTypeBytes(buffer.dtype);
      work.scratch.push_back(module_.buffers.Intern(std::move(buffer)));
    }
    return work;
  }

  Module& module_;
  const std::vector<BufferId>& buffers_;
  // Numbers of quantisations by their params; -1: none.
  std::vector<int32_t> by_of_;
  std::vector<int32_t> by_data_;
  std::vector<Quantise> ops_;
  std::vector<ScratchTensor> tensors_;
  std::map<DType, size_t> by_dtype_;  // into tensors_
};

// The dtype in which sources hold each param.
std::vector<DType> SourceDTypes(const Module& module) {
  std::vector<DType> dtypes;
  for (const Param& param : module.params) dtypes.push_back(param.dtype);
  for (const std::vector<BufferId>& rank : module.source.ranks) {
    for (const BufferId id : rank) {
      const Buffer& buffer = module.buffers[id];
      for (const Fragment& fragment : buffer.fragments) {
        dtypes[IndexOf(fragment.param)] = buffer.dtype;
      }
    }
  }
  return dtypes;
}

}  // namespace

absl::Status PlaceQuantisation(const PassOptions& options, Module& module) {
  if (module.quantisations.empty()) return absl::OkStatus();
  DecidePlaces(module);
  const std::vector<DType> source_dtypes = SourceDTypes(module);
  std::map<std::vector<BufferId>, Work> works[2];
  bool reported = false;
  const auto add_side = [&](SideLayout& side, bool is_source) {
    for (std::vector<BufferId>& buffers : side.ranks) {
      const auto [it, is_new] = works[is_source].try_emplace(buffers);
      Work& work = it->second;
      if (is_new) {
        WorkBuilder builder(module, it->first);
        work = is_source ? builder.OfSource()
                         : builder.OfDestination(source_dtypes);
      }
      if (work.scratch_bytes > module.limits.scratch_bytes && !reported) {
        reported = true;
        options.diagnostics.Error(
            options.job.options.scratch_bytes.place,
            absl::StrFormat(
                "rank %d needs %d bytes of scratch to quantise at the %s; "
                "wanted at most options.scratch_bytes %d",
                module.quantises.size(), work.scratch_bytes,
                is_source ? "source" : "destination",
                module.limits.scratch_bytes));
      }
      module.quantises.push_back(work.quantises);
      buffers.insert(buffers.end(), work.scratch.begin(), work.scratch.end());
    }
  };
  add_side(module.source, true);
  add_side(module.destination, false);
  return absl::OkStatus();
}

}  // namespace refit
