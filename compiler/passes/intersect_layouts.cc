#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// All ranks of a side that hold exactly this box of a param, in one wave if it
// is in their scratch.
struct Holding {
  Box box;
  int32_t wave = kNoWave;
  DType dtype = DType::kUnspecified;  // of all ranks: a side has one per member
  bool own_dtype = false;             // the framework's, not the side's
  std::vector<Rank> ranks;            // ascending, without repeats
};

// The holdings of every param on one side of a part, in order of first
// appearance.
struct SideHoldings {
  std::vector<std::vector<Holding>> by_param;
};

SideHoldings Collect(const Module& module, const SideLayout& side,
                     int32_t first_rank, int32_t part) {
  SideHoldings holdings;
  holdings.by_param.resize(module.params.size());
  std::vector<absl::flat_hash_map<std::pair<Box, int32_t>, size_t>> index(
      module.params.size());
  for (size_t i = 0; i < side.ranks.size(); ++i) {
    const Rank rank{first_rank + static_cast<int32_t>(i)};
    if (module.PartOf(rank) != part) continue;
    for (BufferId id : side.ranks[i]) {
      const Buffer& buffer = module.buffers[id];
      for (const Fragment& fragment : buffer.fragments) {
        const size_t param = IndexOf(fragment.param);
        std::vector<Holding>& of_param = holdings.by_param[param];
        const auto [it, is_new] = index[param].try_emplace(
            {fragment.box, buffer.wave}, of_param.size());
        if (is_new) {
          of_param.push_back({.box = fragment.box,
                              .wave = buffer.wave,
                              .dtype = buffer.dtype,
                              .own_dtype = buffer.own_dtype,
                              .ranks = {}});
        }
        std::vector<Rank>& ranks = of_param[it->second].ranks;
        if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
      }
    }
  }
  return holdings;
}

bool AreDisjoint(const std::vector<Holding>& holdings) {
  if (holdings.size() < 2) return true;
  // Sweep along the dimension with the most cuts: there the fewest boxes are
  // open at a time.
  const size_t dims = holdings[0].box.lo.size();
  size_t sweep = 0;
  size_t most_cuts = 0;
  for (size_t dim = 0; dim < dims; ++dim) {
    std::set<int64_t> cuts;
    for (const Holding& holding : holdings) cuts.insert(holding.box.lo[dim]);
    if (cuts.size() > most_cuts) {
      most_cuts = cuts.size();
      sweep = dim;
    }
  }
  if (dims == 0) return false;  // two holdings of one scalar
  std::vector<const Box*> boxes;
  for (const Holding& holding : holdings) boxes.push_back(&holding.box);
  std::sort(boxes.begin(), boxes.end(), [&](const Box* a, const Box* b) {
    return a->lo[sweep] < b->lo[sweep];
  });
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = i + 1; j < boxes.size(); ++j) {
      if (boxes[j]->lo[sweep] >= boxes[i]->hi[sweep]) break;
      if (Intersect(*boxes[i], *boxes[j]).has_value()) return false;
    }
  }
  return true;
}

// A part of a destination box and the source holdings that contain it.
struct Atom {
  Box box;
  std::vector<size_t> holdings;
};

// Cuts `box` until each part lies wholly inside or outside every holding.
std::vector<Atom> CutByHoldings(const Box& box,
                                const std::vector<Holding>& holdings) {
  std::vector<Atom> atoms = {{.box = box, .holdings = {}}};
  for (size_t i = 0; i < holdings.size(); ++i) {
    std::vector<Atom> cut;
    for (Atom& atom : atoms) {
      std::optional<Box> inside = Intersect(atom.box, holdings[i].box);
      if (!inside.has_value()) {
        cut.push_back(std::move(atom));
        continue;
      }
      for (Box& outside : Subtract(atom.box, *inside)) {
        cut.push_back({.box = std::move(outside), .holdings = atom.holdings});
      }
      atom.box = *std::move(inside);
      atom.holdings.push_back(i);
      cut.push_back(std::move(atom));
    }
    atoms = std::move(cut);
  }
  std::sort(atoms.begin(), atoms.end(),
            [](const Atom& a, const Atom& b) { return a.box.lo < b.box.lo; });
  return atoms;
}

std::vector<Atom> Parts(const Box& box, const std::vector<Holding>& holdings,
                        bool disjoint) {
  if (!disjoint) return CutByHoldings(box, holdings);
  std::vector<Atom> parts;
  int64_t volume = 0;
  for (size_t i = 0; i < holdings.size(); ++i) {
    std::optional<Box> both = Intersect(box, holdings[i].box);
    if (!both.has_value()) continue;
    volume += both->Volume();
    parts.push_back({.box = *std::move(both), .holdings = {i}});
  }
  // Something is missing: cut properly, to be able to name it.
  if (volume != box.Volume()) return CutByHoldings(box, holdings);
  return parts;
}

// The sources of a piece, by the wave in which they hold it. Replicas are cut
// alike, so more than one wave is rare: boxes that overlap without being equal.
using SourcesByWave = std::map<int32_t, std::vector<Rank>>;

SourcesByWave SourcesOf(const Atom& atom,
                        const std::vector<Holding>& holdings) {
  SourcesByWave by_wave;
  for (size_t i : atom.holdings) {
    std::vector<Rank>& ranks = by_wave[holdings[i].wave];
    ranks.insert(ranks.end(), holdings[i].ranks.begin(),
                 holdings[i].ranks.end());
  }
  for (auto& [wave, ranks] : by_wave) {
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  }
  return by_wave;
}

// Fills sources and wave of a piece, which is sent in one wave: that in which
// most sources hold it.
void SetSources(const Module& module, int32_t destination_wave,
                const SourcesByWave& by_wave, Piece& piece) {
  const auto most = std::max_element(by_wave.begin(), by_wave.end(),
                                     [](const auto& a, const auto& b) {
                                       return a.second.size() < b.second.size();
                                     });
  piece.sources = most->second;
  for (const auto& [wave, ranks] : by_wave) {
    if (wave == most->first) continue;
    piece.sources_of_other_waves.insert(piece.sources_of_other_waves.end(),
                                        ranks.begin(), ranks.end());
  }
  const int32_t wave = std::max(most->first, destination_wave);
  piece.wave = wave == kNoWave ? module.unquantized_wave : wave;
}

bool DeclaresDType(const SideSpec& side) {
  if (side.dtype.given || side.quantized.given) return true;
  for (const TensorRule& rule : side.generic.tensors) {
    if (rule.dtype.has_value()) return true;
  }
  return false;
}

// Params whose dtype changes in one way, for one message about all of them.
struct DTypeChange {
  DType from;
  DType to;
  bool own;  // by a framework that keeps the params in a dtype of its own
  std::string first_param;
  int64_t other_params = 0;
};

void NoteChange(const Param& param, const Holding& held, const Holding& want,
                std::vector<DTypeChange>& changes) {
  const bool own = held.own_dtype || want.own_dtype;
  for (DTypeChange& change : changes) {
    if (change.from != held.dtype || change.to != want.dtype ||
        change.own != own) {
      continue;
    }
    ++change.other_params;
    return;
  }
  changes.push_back({.from = held.dtype,
                     .to = want.dtype,
                     .own = own,
                     .first_param = param.name});
}

// Reports changes that the job does not declare or that do not exist.
void CheckChanges(const PassOptions& options,
                  const std::vector<DTypeChange>& changes) {
  for (const DTypeChange& change : changes) {
    const bool supported = IsSupportedCast(change.from, change.to);
    if (supported && (change.own || DeclaresDType(options.job.destination))) {
      continue;
    }
    const std::string others =
        change.other_params == 0
            ? ""
            : absl::StrFormat(" (and %d others)", change.other_params);
    options.diagnostics.Error(
        options.job.destination.place,
        absl::StrFormat("parameter \"%s\"%s is %s at the source and %s at the "
                        "destination; %s",
                        change.first_param, others, DTypeName(change.from),
                        DTypeName(change.to),
                        supported ? "declare the cast with destination.dtype"
                                  : "a cast between these does not exist"));
  }
}

// Params of which one side alone has fragments: what is quantized at the source
// does not leave it, what a destination makes of it does not come from one.
std::vector<bool> MadeOrUsedInPlace(const Module& module) {
  std::vector<bool> in_place(module.params.size(), false);
  for (const Quantization& quantization : module.quantizations) {
    if (quantization.at == QuantizedAt::kSource) {
      in_place[IndexOf(quantization.of)] = true;
    } else if (quantization.at == QuantizedAt::kDestination) {
      in_place[IndexOf(quantization.data)] = true;
      in_place[IndexOf(quantization.scales)] = true;
    }
  }
  return in_place;
}

// Adds the pieces of a part's ranks. Returns the changes of dtype in them.
std::vector<DTypeChange> AddPieces(const PassOptions& options, int32_t part,
                                   Module& module) {
  const SideHoldings sources = Collect(module, module.source, 0, part);
  const SideHoldings destinations =
      Collect(module, module.destination, module.source_ranks(), part);
  const std::vector<bool> in_place = MadeOrUsedInPlace(module);
  std::vector<DTypeChange> changes;
  for (size_t p = 0; p < module.params.size(); ++p) {
    const Param& param = module.params[p];
    if (param.skip != SkipReason::kUnspecified || in_place[p]) continue;
    const std::vector<Holding>& held = sources.by_param[p];
    const std::vector<Holding>& wanted = destinations.by_param[p];
    if (Product(param.VirtualShape()) == 0) continue;
    if (held.empty() || wanted.empty()) {
      const char* present = held.empty() ? "destination" : "source";
      const char* absent = held.empty() ? "source" : "destination";
      options.diagnostics.Error(
          held.empty() ? options.job.source.place
                       : options.job.destination.place,
          absl::StrFormat("parameter \"%s\" is on the %s but no %s buffer "
                          "holds it; wanted on both, or in options.exclude",
                          param.name, present, absent));
      continue;
    }
    std::set<std::pair<DType, DType>> casts;
    const bool disjoint = AreDisjoint(held);
    for (const Holding& want : wanted) {
      for (const Atom& atom : Parts(want.box, held, disjoint)) {
        if (atom.holdings.empty()) {
          options.diagnostics.Error(
              options.job.source.place,
              absl::StrFormat("no source buffer holds %s of parameter \"%s\", "
                              "which the destination needs",
                              BoxText(atom.box), param.name));
          continue;
        }
        const DType from = held[atom.holdings[0]].dtype;
        if (from != want.dtype && casts.emplace(from, want.dtype).second) {
          NoteChange(param, held[atom.holdings[0]], want, changes);
        }
        Piece& piece = module.pieces.emplace_back();
        piece.param = ParamId{static_cast<int32_t>(p)};
        piece.box = atom.box;
        piece.destination_box = want.box;
        piece.destinations = want.ranks;
        piece.wire_dtype =
            DTypeBytes(from) < DTypeBytes(want.dtype) ? from : want.dtype;
        piece.destination_dtype = want.dtype;
        SetSources(module, want.wave, SourcesOf(atom, held), piece);
      }
    }
  }
  return changes;
}

}  // namespace

absl::Status IntersectLayouts(const PassOptions& options, Module& module) {
  const std::vector<DTypeChange> changes = AddPieces(options, 0, module);
  CheckChanges(options, changes);
  // What one part of a folded job lacks all do.
  for (int32_t part = 1; part < module.parts() && options.diagnostics.ok();
       ++part) {
    if (module.fold->IsFirst(part)) AddPieces(options, part, module);
  }
  for (const DTypeChange& change : changes) {
    module.casts.emplace_back(change.from, change.to);
  }
  std::sort(module.casts.begin(), module.casts.end());
  module.casts.erase(std::unique(module.casts.begin(), module.casts.end()),
                     module.casts.end());
  return absl::OkStatus();
}

}  // namespace refit
