#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/quantize_work.h"

namespace refit {
namespace {

// A wave of this many bytes costs far more time than its rounds do, and many of
// them make little of the work wait: only the first is quantized, or the last,
// while nothing travels. More waves than that save less than their rounds cost,
// and are made for memory alone.
constexpr int64_t kWaveBytes = int64_t{256} << 20;
constexpr int64_t kWavesToOverlap = 16;
constexpr int64_t kMostWaves = 1024;

// Why the blocks of a fragment cannot be quantized where it is; "" if they can.
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
  std::vector<Quantization*> of_param(module.params.size(), nullptr);
  for (Quantization& quantization : module.quantizations) {
    if (quantization.of == quantization.data ||
        module.param(quantization.of).skip != SkipReason::kUnspecified) {
      continue;
    }
    quantization.at = QuantizedAt::kSource;
    of_param[IndexOf(quantization.of)] = &quantization;
  }
  for (size_t rank = 0; rank < module.source.ranks.size(); ++rank) {
    for (const BufferId id : module.source.ranks[rank]) {
      for (const Fragment& fragment : module.buffers[id].fragments) {
        Quantization* quantization = of_param[IndexOf(fragment.param)];
        if (quantization == nullptr ||
            quantization->at == QuantizedAt::kDestination) {
          continue;
        }
        const std::string obstacle = Obstacle(
            fragment, module.param(fragment.param), quantization->scheme);
        if (obstacle.empty()) continue;
        quantization->at = QuantizedAt::kDestination;
        quantization->reason =
            absl::StrCat("source rank ", rank, " holds ", BoxText(fragment.box),
                         ", ", obstacle);
      }
    }
  }
}

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

// Ranks whose scratch is alike: their buffers, and the part of each item.
using Alike = std::pair<std::vector<BufferId>, std::vector<QuantizedPart>>;

// One side's part: what its ranks quantize.
struct SideWork {
  SideLayout& side;
  std::vector<Alike> ranks;
  std::map<Alike, std::vector<QuantizeItem>> items;
  std::map<Alike, QuantizeWork> works;
};

// Sources of one host that hold the same quantize a part of it each, so that
// they need less scratch and no receiver waits for the one that it was given.
// Ranks that share GPUs with receivers do not: theirs is the nearest.
std::vector<std::vector<QuantizedPart>> PartsOfSources(
    const Module& module,
    const std::map<std::vector<BufferId>, std::vector<QuantizeItem>>& items) {
  using Held = std::tuple<int32_t, int32_t, Box>;  // host, quantization, box
  absl::flat_hash_map<Held, std::vector<size_t>> holders;
  std::vector<std::vector<QuantizedPart>> parts;
  std::map<std::vector<size_t>, int32_t> groups;
  for (const bool counts : {true, false}) {
    for (size_t rank = 0; rank < module.source.ranks.size(); ++rank) {
      const auto& of_rank = items.at(module.source.ranks[rank]);
      if (counts) parts.emplace_back(of_rank.size());
      for (size_t i = 0; i < of_rank.size(); ++i) {
        std::vector<size_t>& of_box =
            holders[{module.topology.host[rank], of_rank[i].quantization,
                     of_rank[i].box}];
        if (counts) {
          of_box.push_back(rank);
        } else if (of_box.size() > 1) {
          const int32_t next = static_cast<int32_t>(groups.size()) + 1;
          parts[rank][i] = {
              .group = groups.try_emplace(of_box, next).first->second,
              .number = static_cast<int32_t>(
                  std::find(of_box.begin(), of_box.end(), rank) -
                  of_box.begin()),
              .count = static_cast<int32_t>(of_box.size())};
        }
      }
    }
  }
  return parts;
}

// A rank whose scratch is larger than any other's.
struct LargestArena {
  int64_t bytes = 0;
  size_t rank = 0;
};

class WaveCutter {
 public:
  // `divides`: sources of a host may quantize a part each of what all hold.
  WaveCutter(Module& module, bool divides)
      : module_(module),
        source_dtypes_(SourceDTypes(module)),
        sides_{SideWork{module.source, {}, {}, {}},
               SideWork{module.destination, {}, {}, {}}} {
    for (const bool is_source : {true, false}) {
      SideWork& work = sides_[is_source ? 0 : 1];
      const QuantizeLister lister(
          module, is_source ? QuantizedAt::kSource : QuantizedAt::kDestination);
      std::map<std::vector<BufferId>, std::vector<QuantizeItem>> whole;
      for (const std::vector<BufferId>& buffers : work.side.ranks) {
        const auto [it, is_new] = whole.try_emplace(buffers);
        if (is_new) it->second = lister.List(buffers);
      }
      std::vector<std::vector<QuantizedPart>> parts;
      if (is_source && divides) parts = PartsOfSources(module, whole);
      for (size_t rank = 0; rank < work.side.ranks.size(); ++rank) {
        const std::vector<BufferId>& buffers = work.side.ranks[rank];
        const std::vector<QuantizeItem>& items = whole.at(buffers);
        work.ranks.emplace_back(
            buffers, parts.empty() ? std::vector<QuantizedPart>(items.size())
                                   : parts[rank]);
        const auto [it, is_new] = work.items.try_emplace(work.ranks.back());
        if (!is_new) continue;
        it->second = items;
        for (size_t i = 0; i < items.size(); ++i) {
          it->second[i].part = work.ranks.back().second[i];
        }
        largest_bytes_ =
            std::max(largest_bytes_, BuilderFor(buffers).Bytes(it->second));
        (is_source ? quantizes_at_source_ : quantizes_at_destination_) |=
            !it->second.empty();
      }
    }
  }

  // Cuts into the fewest waves that are no larger than wanted and of which two
  // fit into `limits.scratch_bytes`. Returns the largest arena of a rank when
  // none fit: the least that was found.
  //
  // `shares_gpus`: processes take turns on a GPU, milliseconds each, and those
  // of a receiver that quantizes and of its sender must after every wave.
  LargestArena Cut(bool shares_gpus) {
    const int64_t limit = module_.limits.scratch_bytes;
    const auto count = [&](int64_t wave_bytes) {
      return (largest_bytes_ + wave_bytes - 1) /
             std::max<int64_t>(wave_bytes, 1);
    };
    int64_t waves =
        shares_gpus && quantizes_at_destination_
            ? 1
            : std::clamp<int64_t>(count(kWaveBytes), 1, kWavesToOverlap);
    if (largest_bytes_ > limit) {
      waves = std::clamp<int64_t>(count(limit / 2), waves, kMostWaves);
    }
    LargestArena least;
    while (true) {
      const LargestArena largest = BuildAll(static_cast<int32_t>(waves));
      if (largest.bytes <= limit) return largest;
      if (least.bytes == 0 || largest.bytes < least.bytes) least = largest;
      if (waves == kMostWaves) return least;
      waves = std::min(kMostWaves, waves + std::max<int64_t>(1, waves / 8));
    }
  }

  bool IsSource(size_t rank) const {
    return rank < module_.source.ranks.size();
  }

  void AddToModule() {
    for (SideWork& work : sides_) {
      std::map<Alike, std::vector<BufferId>> scratch;
      for (size_t rank = 0; rank < work.ranks.size(); ++rank) {
        std::vector<BufferId>& buffers = work.side.ranks[rank];
        QuantizeWork& of_rank = work.works.at(work.ranks[rank]);
        const auto [it, is_new] = scratch.try_emplace(work.ranks[rank]);
        for (size_t i = 0; is_new && i < of_rank.scratch.size(); ++i) {
          it->second.push_back(
              module_.buffers.Intern(std::move(of_rank.scratch[i])));
        }
        module_.quantizes.push_back(of_rank.quantizes);
        buffers.insert(buffers.end(), it->second.begin(), it->second.end());
      }
    }
  }

 private:
  QuantizeWorkBuilder BuilderFor(const std::vector<BufferId>& buffers) const {
    return QuantizeWorkBuilder(module_, source_dtypes_, buffers.size());
  }

  // What needs no scratch travels while the first window of a source is
  // filled, or while a destination empties its last.
  LargestArena BuildAll(int32_t waves) {
    const bool first = waves > 1 && quantizes_at_source_;
    module_.waves = waves == 1 ? 1 : waves + 1;
    module_.unquantized_wave = first || waves == 1 ? 0 : waves;
    LargestArena largest;
    size_t rank = 0;
    for (SideWork& work : sides_) {
      work.works.clear();
      for (const Alike& alike : work.ranks) {
        const auto [it, is_new] = work.works.try_emplace(alike);
        if (is_new) {
          it->second = BuilderFor(alike.first)
                           .Build(work.items.at(alike), first ? 1 : 0, waves);
        }
        const int64_t bytes = it->second.quantizes.arena_bytes;
        if (bytes > largest.bytes) largest = {bytes, rank};
        ++rank;
      }
    }
    return largest;
  }

  Module& module_;
  const std::vector<DType> source_dtypes_;
  std::array<SideWork, 2> sides_;
  int64_t largest_bytes_ = 0;  // of what a rank quantizes
  bool quantizes_at_source_ = false;
  bool quantizes_at_destination_ = false;
};

}  // namespace

absl::Status PlaceQuantization(const PassOptions& options, Module& module) {
  if (module.quantizations.empty()) return absl::OkStatus();
  DecidePlaces(module);
  const bool shares_gpus = options.job.colocated.value;
  std::optional<WaveCutter> cutter;
  cutter.emplace(module, /*divides=*/!shares_gpus);
  LargestArena largest = cutter->Cut(shares_gpus);
  if (!shares_gpus && largest.bytes > module.limits.scratch_bytes) {
    // A wave has a part of each group, and blocks cannot be cut.
    cutter.emplace(module, /*divides=*/false);
    largest = cutter->Cut(shares_gpus);
  }
  if (largest.bytes > module.limits.scratch_bytes) {
    options.diagnostics.Error(
        options.job.options.scratch_bytes.place,
        absl::StrFormat(
            "rank %d needs %d bytes of scratch to quantize at the %s, in the "
            "smallest windows; options.scratch_bytes%s is %d, wanted %d",
            largest.rank, largest.bytes,
            cutter->IsSource(largest.rank) ? "source" : "destination",
            options.job.options.scratch_bytes.given ? "" : " (the default)",
            module.limits.scratch_bytes, largest.bytes));
  }
  cutter->AddToModule();
  return absl::OkStatus();
}

}  // namespace refit
