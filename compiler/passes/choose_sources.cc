#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <tuple>

#include "compiler/ir/counting_sort.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/tree_choices.h"
#include "llvm/ADT/EquivalenceClasses.h"

namespace refit {
namespace {

// Nearer replicas win whatever their load: crossing a host costs several times
// the time of staying inside.
constexpr std::array kNearestFirst = {Route::kLocal, Route::kPeer,
                                      Route::kNetwork};
bool IsNearer(Route a, Route b) {
  static_assert(std::is_sorted(kNearestFirst.begin(), kNearestFirst.end()));
  return a < b;
}

// Pieces are cut finer while the busiest sender that has a choice is further
// than this from the best that can be reached, and while cutting helps.
constexpr double kImbalanceTarget = 1.01;
constexpr double kImbalanceGain = 1.01;
// Parts per sender that are tried in turn, whole pieces first. More parts mean
// more messages.
constexpr std::array kPartsPerSender = {0, 8, 32, 128};
// One piece for one receiver, with the senders that may feed it.
struct Choice {
  PieceId piece{};
  Rank destination{};
  int64_t bytes = 0;
  int32_t wave = 0;
  Route route = Route::kUnspecified;
  Route link = Route::kUnspecified;  // kPeer also between hosts of a domain
  // Which of the chooser's sets; choices one after the other often share one.
  // At least two senders, ascending, of the nearest route.
  size_t candidates = 0;
};

class Chooser {
 public:
  Chooser(const Module& module, const NetworkLinks& links)
      : module_(module),
        links_(links),
        loads_(static_cast<size_t>(module.waves)),
        sent_(loads_.size()),
        least_sent_(static_cast<size_t>(module.world_size()), 0),
        feeders_(static_cast<size_t>(module.world_size())),
        pair_loads_(static_cast<size_t>(module.world_size()), 0) {
    const auto world = static_cast<size_t>(module.world_size());
    for (LoadsByLink& by_link : loads_) {
      for (std::vector<int64_t>& loads : by_link) loads.resize(world, 0);
    }
    for (std::vector<int64_t>& sent : sent_) sent.resize(world, 0);
  }

  // Assigns a sender to every piece for every receiver; transfers in no order.
  std::vector<Transfer> Assign();

  // Over all senders that had a choice, or their NICs: the worst of load /
  // max(mean load of those that can take load from each other, load without a
  // choice). 1 is perfect. Of several waves, the mean that their busiest
  // senders weigh.
  double Imbalance() const { return imbalance_; }

 private:
  // Transfers that leave no choice go to `transfers` at once.
  std::vector<Choice> ListChoices(std::vector<Transfer>& transfers);
  Rank Pick(const Choice& choice);
  using LoadsByLink =
      std::array<std::vector<int64_t>, static_cast<size_t>(Route::MAX) + 1>;

  // The worst of one wave's senders by one link, and the largest load of them.
  struct WaveImbalance {
    double imbalance = 1;
    int64_t load = 0;
  };
  // `choices`: of the wave.
  WaveImbalance ImbalanceOf(Route link, absl::Span<const Choice> choices,
                            const std::vector<int64_t>& loads,
                            const std::vector<int64_t>& fixed_loads) const;
  void MeasureImbalance(absl::Span<const Choice> choices,
                        const std::vector<LoadsByLink>& fixed_loads);
  // NVLink and NICs work side by side, and waves one after the other, so each
  // has its loads.
  std::vector<int64_t>& LoadsOf(int32_t wave, Route link) {
    return loads_[static_cast<size_t>(wave)][static_cast<size_t>(link)];
  }
  void AddLoad(int32_t wave, Route link, Rank source, int64_t bytes) {
    LoadsOf(wave, link)[SenderOf(source, link)] += bytes;
    sent_[static_cast<size_t>(wave)][IndexOf(source)] += bytes;
  }
  // Whose load it is: ranks may share a NIC.
  size_t SenderOf(Rank source, Route link) const {
    return link == Route::kNetwork ? links_.EgressOf(source) : IndexOf(source);
  }

  const Module& module_;
  const NetworkLinks& links_;
  // A sender of a destination that had a choice, and the bytes for it.
  struct Feeder {
    Rank source{};
    int64_t bytes = 0;
  };

  std::vector<LoadsByLink> loads_;  // bytes to send, by wave, link, sender
  std::vector<std::vector<int64_t>> sent_;  // by wave, rank
  std::vector<int64_t> least_sent_;         // by sender, of what Pick looks at
  std::vector<std::vector<Feeder>> feeders_;  // by destination
  // By source: of the destination that Pick looks at, else 0.
  std::vector<int64_t> pair_loads_;
  std::vector<std::vector<Rank>> candidates_;
  double imbalance_ = 1;
};

std::vector<Choice> Chooser::ListChoices(std::vector<Transfer>& transfers) {
  std::vector<Choice> choices;
  std::vector<Rank> candidates;
  for (size_t i = 0; i < module_.pieces.size(); ++i) {
    const Piece& piece = module_.pieces[i];
    const PieceId id{static_cast<int32_t>(i)};
    const int64_t bytes = module_.WireBytes(piece);
    for (Rank destination : piece.destinations) {
      candidates.clear();
      Route nearest = kNearestFirst.back();
      Route nearest_link = kNearestFirst.back();
      for (Rank source : piece.sources) {
        const Route route = module_.RouteBetween(source, destination);
        // Of other hosts, those of the destination's NVLink domain.
        const Route link = module_.LinkBetween(source, destination);
        if (IsNearer(route, nearest) ||
            (route == nearest && IsNearer(link, nearest_link))) {
          candidates.clear();
          nearest = route;
          nearest_link = link;
        }
        if (route == nearest && link == nearest_link) {
          candidates.push_back(source);
        }
      }
      if (candidates.size() == 1) {
        // What is broadcast is sent once.
        if (!piece.broadcasts || destination == piece.destinations.front()) {
          AddLoad(piece.wave, nearest_link, candidates.front(), bytes);
        }
        transfers.push_back({.piece = id,
                             .source = candidates.front(),
                             .destination = destination});
        continue;
      }
      if (candidates_.empty() || candidates_.back() != candidates) {
        candidates_.push_back(candidates);
      }
      choices.push_back({.piece = id,
                         .destination = destination,
                         .bytes = bytes,
                         .wave = piece.wave,
                         .route = nearest,
                         .link = nearest_link,
                         .candidates = candidates_.size() - 1});
    }
  }
  return choices;
}

// Also adds the choice's bytes to the feeders of its destination.
Rank Chooser::Pick(const Choice& choice) {
  const std::vector<int64_t>& loads = LoadsOf(choice.wave, choice.link);
  const std::vector<Rank>& candidates = candidates_[choice.candidates];
  const std::vector<int64_t>& sent = sent_[static_cast<size_t>(choice.wave)];
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (Rank source : candidates) {
    least_sent_[SenderOf(source, choice.link)] = kMost;
  }
  int64_t least = kMost;
  for (Rank source : candidates) {
    const size_t sender = SenderOf(source, choice.link);
    least = std::min(least, loads[sender]);
    least_sent_[sender] = std::min(least_sent_[sender], sent[IndexOf(source)]);
  }
  // Among senders that are about as free as the freest, and ranks as those that
  // share their NIC: each has its own staging. Inside a host a pair
  // of GPUs alone does not fill a link, so spread a receiver over senders;
  // across hosts every pair costs connections and small messages, so stick to
  // those in use, unless others receive for it. Equal ones are told apart by
  // load, then by distance.
  std::vector<Feeder>& feeders = feeders_[IndexOf(choice.destination)];
  for (const Feeder& feeder : feeders) {
    pair_loads_[IndexOf(feeder.source)] = feeder.bytes;
  }
  Rank best = candidates.front();
  std::array<int64_t, 3> best_key = {kMost, 0, 0};
  for (Rank source : candidates) {
    const size_t sender = SenderOf(source, choice.link);
    const int64_t load = loads[sender];
    if (load > least + choice.bytes ||
        sent[IndexOf(source)] >= least_sent_[sender] + choice.bytes) {
      continue;
    }
    const int64_t pair_load = pair_loads_[IndexOf(source)];
    const int64_t preference =
        choice.route == Route::kNetwork ? -pair_load : pair_load;
    const int64_t distance = (static_cast<int64_t>(choice.destination) -
                              static_cast<int64_t>(source)) %
                             static_cast<int64_t>(candidates.size());
    const std::array<int64_t, 3> key = {preference, load, distance};
    if (key < best_key) {
      best_key = key;
      best = source;
    }
  }
  if (pair_loads_[IndexOf(best)] == 0) feeders.push_back({.source = best});
  for (Feeder& feeder : feeders) {
    pair_loads_[IndexOf(feeder.source)] = 0;
    if (feeder.source == best) feeder.bytes += choice.bytes;
  }
  return best;
}

Chooser::WaveImbalance Chooser::ImbalanceOf(
    Route link, absl::Span<const Choice> choices,
    const std::vector<int64_t>& loads,
    const std::vector<int64_t>& fixed_loads) const {
  WaveImbalance worst;
  // Senders that can take load from each other, directly or through others.
  llvm::EquivalenceClasses<size_t> classes;
  std::vector<bool> seen(candidates_.size(), false);
  for (const Choice& choice : choices) {
    if (choice.link != link || seen[choice.candidates]) continue;
    seen[choice.candidates] = true;
    const std::vector<Rank>& candidates = candidates_[choice.candidates];
    for (Rank candidate : candidates) {
      classes.unionSets(SenderOf(candidates.front(), link),
                        SenderOf(candidate, link));
    }
  }
  for (auto found = classes.begin(); found != classes.end(); ++found) {
    if (!found->isLeader()) continue;
    const std::vector<size_t> senders(classes.member_begin(found),
                                      classes.member_end());
    int64_t sum = 0;
    for (size_t sender : senders) sum += loads[sender];
    const double mean =
        static_cast<double>(sum) / static_cast<double>(senders.size());
    for (size_t sender : senders) {
      if (loads[sender] == 0) continue;
      const double reachable =
          std::max(mean, static_cast<double>(fixed_loads[sender]));
      worst.imbalance = std::max(
          worst.imbalance, static_cast<double>(loads[sender]) / reachable);
      worst.load = std::max(worst.load, loads[sender]);
    }
  }
  return worst;
}

void Chooser::MeasureImbalance(absl::Span<const Choice> choices,
                               const std::vector<LoadsByLink>& fixed_loads) {
  for (Route link : kNearestFirst) {
    const size_t by_link = static_cast<size_t>(link);
    double load = 0;
    double reachable = 0;
    for (size_t begin = 0; begin < choices.size();) {
      const size_t wave = static_cast<size_t>(choices[begin].wave);
      size_t end = begin;
      while (end < choices.size() && choices[end].wave == choices[begin].wave) {
        ++end;
      }
      const WaveImbalance worst =
          ImbalanceOf(link, choices.subspan(begin, end - begin),
                      loads_[wave][by_link], fixed_loads[wave][by_link]);
      load += static_cast<double>(worst.load);
      reachable += static_cast<double>(worst.load) / worst.imbalance;
      begin = end;
    }
    if (reachable > 0) imbalance_ = std::max(imbalance_, load / reachable);
  }
}

std::vector<Transfer> Chooser::Assign() {
  std::vector<Transfer> transfers;
  std::vector<Choice> choices = ListChoices(transfers);
  const std::vector<LoadsByLink> fixed_loads = loads_;
  // Wave by wave, so that each is level; in it the largest first, so that the
  // small ones level what is left.
  std::stable_sort(
      choices.begin(), choices.end(), [&](const Choice& a, const Choice& b) {
        return std::tuple(a.wave, -a.bytes) < std::tuple(b.wave, -b.bytes);
      });
  for (const Choice& choice : choices) {
    const Rank source = Pick(choice);
    AddLoad(choice.wave, choice.link, source, choice.bytes);
    transfers.push_back({.piece = choice.piece,
                         .source = source,
                         .destination = choice.destination});
  }
  MeasureImbalance(choices, fixed_loads);
  return transfers;
}

// Cuts `box` into `count` nearly equal parts (or fewer, when it has too few
// elements), along its outermost dimensions first.
void CutInto(const Box& box, int64_t count, std::vector<Box>& parts) {
  size_t dim = 0;
  while (dim < box.lo.size() && box.extent(dim) == 1) ++dim;
  if (count <= 1 || dim == box.lo.size()) {
    parts.push_back(box);
    return;
  }
  const int64_t cuts = std::min(count, box.extent(dim));
  for (int64_t i = 0; i < cuts; ++i) {
    Box part = box;
    part.lo[dim] = box.lo[dim] + box.extent(dim) * i / cuts;
    part.hi[dim] = box.lo[dim] + box.extent(dim) * (i + 1) / cuts;
    CutInto(part, (count + cuts - 1) / cuts, parts);
  }
}

// The pieces with those that have several possible sources cut to at most
// `part_bytes`.
std::vector<Piece> CutPieces(const Module& module, int64_t part_bytes) {
  std::vector<Piece> cut;
  for (const Piece& piece : module.pieces) {
    const int64_t bytes = module.WireBytes(piece);
    std::vector<Box> parts;
    const bool cuttable = piece.sources.size() > 1 && bytes > part_bytes;
    CutInto(piece.box, cuttable ? (bytes + part_bytes - 1) / part_bytes : 1,
            parts);
    for (Box& part : parts) {
      cut.push_back(piece);
      cut.back().box = std::move(part);
    }
  }
  return cut;
}

// What relays pass on; who does was decided by fan-out.
void AddRelays(Module& module) {
  for (size_t i = 0; i < module.pieces.size(); ++i) {
    for (const Relay& relay : module.pieces[i].relays) {
      module.transfers.push_back({.piece = PieceId{static_cast<int32_t>(i)},
                                  .source = relay.sender,
                                  .destination = relay.receiver});
    }
  }
}

int64_t MeanBytesPerSource(const Module& module) {
  int64_t total = 0;
  for (const Piece& piece : module.pieces) {
    total += module.WireBytes(piece) *
             (piece.broadcasts ? 1 : std::ssize(piece.destinations));
  }
  return total / std::max<int64_t>(module.PlannedSources(), 1);
}

// The largest parts that pieces may be cut into, in turn.
std::vector<int64_t> PartBytesToTry(const Module& module) {
  const int64_t mean_bytes = MeanBytesPerSource(module);
  std::vector<int64_t> part_bytes;
  for (const int64_t parts : kPartsPerSender) {
    const int64_t bytes = parts > 0 ? std::max<int64_t>(mean_bytes / parts, 1)
                                    : std::numeric_limits<int64_t>::max();
    if (part_bytes.empty() || bytes < part_bytes.back()) {
      part_bytes.push_back(bytes);
    }
  }
  return part_bytes;
}

}  // namespace

absl::Status ChooseSources(const PassOptions&, Module& module) {
  const NetworkLinks links(module);
  // Pieces are many: the module's are not copied, only those that are cut.
  std::optional<std::vector<Piece>> best_cut;  // none: the pieces are whole
  double best_imbalance = std::numeric_limits<double>::infinity();
  for (const int64_t part_bytes : PartBytesToTry(module)) {
    std::optional<std::vector<Piece>> cut;
    if (part_bytes < std::numeric_limits<int64_t>::max()) {
      cut = CutPieces(module, part_bytes);
      std::swap(module.pieces, *cut);
    }
    Chooser chooser(module, links);
    std::vector<Transfer> transfers = chooser.Assign();
    if (cut.has_value()) std::swap(module.pieces, *cut);
    if (chooser.Imbalance() * kImbalanceGain >= best_imbalance) continue;
    best_imbalance = chooser.Imbalance();
    best_cut = std::move(cut);
    module.transfers = std::move(transfers);
    if (best_imbalance <= kImbalanceTarget) break;
  }
  if (best_cut.has_value()) module.pieces = *std::move(best_cut);
  AddRelays(module);
  const size_t world = static_cast<size_t>(module.world_size());
  CountingSort(
      module.transfers, module.pieces.size(),
      [](const Transfer& transfer) { return IndexOf(transfer.piece); });
  CountingSort(module.transfers, world, [](const Transfer& transfer) {
    return IndexOf(transfer.destination);
  });
  CountingSort(module.transfers, world, [](const Transfer& transfer) {
    return IndexOf(transfer.source);
  });
  return absl::OkStatus();
}

}  // namespace refit
