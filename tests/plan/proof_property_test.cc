// Random good plans, broken at random: the proof must see whatever running the
// programs element by element sees.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"
#include "plan/file_limits.h"
#include "plan/proof/proof.h"
#include "tests/executor/refit_order.h"
#include "tests/plan/plan_spec.h"
#include "tests/plan/proof_oracle.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t Below(uint64_t bound) {
    return std::uniform_int_distribution<uint64_t>(0, bound - 1)(engine_);
  }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  template <typename T>
  T& Of(std::vector<T>& values) {
    return values[Below(values.size())];
  }

 private:
  std::mt19937_64 engine_;
};

using Sizes = std::vector<uint64_t>;

uint64_t Product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{1},
                         std::multiplies<>());
}

struct Box {
  Sizes lo, extent;
};

// Cuts a box by random planes.
std::vector<Box> Cut(const Box& box, Random& random) {
  std::vector<Box> boxes = {box};
  for (uint64_t cuts = random.Below(4); cuts > 0; --cuts) {
    Box& lower = random.Of(boxes);
    if (lower.extent.empty()) continue;
    const uint64_t d = random.Below(lower.extent.size());
    if (lower.extent[d] < 2) continue;
    const uint64_t at = 1 + random.Below(lower.extent[d] - 1);
    Box upper = lower;
    upper.lo[d] += at;
    upper.extent[d] -= at;
    lower.extent[d] = at;
    boxes.push_back(upper);
  }
  return boxes;
}

// One box of a param in one buffer of one rank.
struct Holding {
  uint32_t rank = 0;
  uint32_t slot = 0;
  PlanSpec::Fragment fragment;
  bool is_stack = false;  // loops must stop at its outermost dimension
};

// Draws a plan that is right: params cut into boxes on both sides, boxes laid
// out in buffers in permuted order, with gaps, interleaved or as a stack; each
// common box sent by one holder, in messages of random rounds. In half of the
// plans destinations deal out what they receive, perhaps for themselves as
// well, to others of their host and of others, who may deal it out once more.
class Planner {
 public:
  explicit Planner(uint64_t seed) : random_(seed) {}

  PlanSpec Draw() {
    deals_ = random_.OneIn(2);
    spec_.source_ranks = static_cast<uint32_t>(1 + random_.Below(3));
    spec_.programs.resize(spec_.source_ranks + 1 + random_.Below(3) +
                          (deals_ ? 1 : 0));
    spec_.copy_lists.emplace_back();
    for (uint32_t rank = 0; rank < spec_.programs.size(); ++rank) {
      const bool is_apart =
          deals_ && rank >= spec_.source_ranks && !random_.OneIn(8);
      spec_.programs[rank].host = is_apart ? 1 + random_.OneIn(4) : 0;
      spec_.programs[rank].fills = 0;
    }
    rounds_ = 1 + random_.Below(3);
    spec_.rounds.assign(rounds_, fb::Route::kPeer);
    if (deals_) {
      spec_.rounds.assign(rounds_ + 2 * kHeldRoundsMax, fb::Route::kNetwork);
    }
    if (random_.OneIn(3)) spec_.casts = {{DType::kFp32, DType::kBf16}};
    for (uint64_t params = 1 + random_.Below(3); params > 0; --params) {
      DrawParam();
    }
    AddFills();
    AddMessages();
    spec_.bucket_bytes = 1 << 16;
    spec_.staging_bytes = 1 << 20;
    spec_.slots = static_cast<uint32_t>(
        1 + random_.Below(std::min<uint64_t>(rounds_, kSlotsMax)));
    spec_.operations_per_round = 64;
    return spec_;
  }

 private:
  void DrawParam() {
    const auto index = static_cast<uint32_t>(spec_.params.size());
    PlanSpec::Param param;
    param.name = absl::StrCat("param", index, ".{0}");
    if (random_.OneIn(2)) {
      param.index = {{.first = 3, .count = 1 + uint32_t(random_.Below(4))}};
    }
    Box whole;
    for (const PlanSpec::IndexDim& dim : param.index) {
      whole.extent.push_back(dim.count);
    }
    for (uint64_t dims = random_.Below(3); dims > 0; --dims) {
      param.shape.push_back(1 + random_.Below(6));
      whole.extent.push_back(param.shape.back());
    }
    whole.lo.assign(whole.extent.size(), 0);
    spec_.params.push_back(param);
    source_dtype_ =
        !spec_.casts.empty() && random_.OneIn(2) ? DType::kFp32 : DType::kBf16;

    std::vector<std::pair<Box, std::vector<Holding>>> sources;
    for (const Box& box : Cut(whole, random_)) {
      auto& [source_box, holders] = sources.emplace_back();
      source_box = box;
      const uint64_t first = random_.Below(spec_.source_ranks);
      holders.push_back(Place(index, box, static_cast<uint32_t>(first), false));
      if (random_.OneIn(3)) {
        const uint64_t second = random_.Below(spec_.source_ranks);
        if (second != first) {
          holders.push_back(
              Place(index, box, static_cast<uint32_t>(second), false));
        }
      }
    }
    for (uint32_t rank = spec_.source_ranks; rank < spec_.programs.size();
         ++rank) {
      for (const Box& box : Cut(whole, random_)) {
        if (random_.OneIn(4)) continue;
        std::vector<Holding> to = {Place(index, box, rank, true)};
        const uint32_t other = NeighbourOf(rank);
        if (other > rank && random_.OneIn(2)) {
          to.push_back(Place(index, box, other, true));
        }
        for (auto& [source_box, holders] : sources) {
          Send(random_.Of(holders), to, source_box, box);
        }
      }
    }
  }

  // Lays a box out in a new buffer of the rank.
  Holding Place(uint32_t param, const Box& box, uint32_t rank,
                bool is_destination) {
    PlanSpec::Buffer buffer;
    buffer.name = absl::StrCat("buffer", spec_.buffers.size());
    buffer.dtype = is_destination ? DType::kBf16 : source_dtype_;
    const size_t dims = box.extent.size();
    const bool is_stack = dims > 1 && random_.OneIn(3);
    std::vector<size_t> order(dims);
    std::iota(order.begin(), order.end(), size_t{0});
    if (!is_stack) {
      for (size_t d = dims; d > 1; --d) {
        std::swap(order[d - 1], order[random_.Below(d)]);
      }
    }
    PlanSpec::Fragment fragment = {.param = param,
                                   .lo = box.lo,
                                   .extent = box.extent,
                                   .offset = 0,
                                   .stride = Sizes(dims)};
    // Every `spread`-th element of the buffer holds the box, from `first` on.
    const uint64_t spread = is_stack ? 1 : 1 + random_.Below(3) / 2;
    fragment.offset = random_.Below(spread);
    uint64_t stride = spread;
    for (size_t d = dims; d-- > 0;) {
      fragment.stride[order[d]] = stride;
      stride *= box.extent[order[d]];
    }
    if (is_stack) {
      buffer.name += ".{0}";
      buffer.index = {
          {.first = 0, .count = static_cast<uint32_t>(box.extent[0])}};
      buffer.shape.assign(box.extent.begin() + 1, box.extent.end());
    } else {
      buffer.shape = {stride};
    }
    if (spread == 2) {
      buffer.regions.push_back({.kind = fb::RegionKind::kFill,
                                .offset = 1 - fragment.offset,
                                .extent = {stride / 2},
                                .stride = {2},
                                .detail = ""});
      if (random_.OneIn(3)) {
        buffer.regions[0].kind = fb::RegionKind::kSkip;
        buffer.regions[0].reason = fb::SkipReason::kDerived;
      }
    }
    buffer.fragments = {fragment};
    PlanSpec::Program& program = spec_.programs[rank];
    const auto slot = static_cast<uint32_t>(program.buffers.size());
    program.buffers.push_back(static_cast<uint32_t>(spec_.buffers.size()));
    spec_.buffers.push_back(buffer);
    return {rank, slot, fragment, is_stack};
  }

  // A destination, of the rank's host as a rule, where such deal out; perhaps
  // itself.
  uint32_t NeighbourOf(uint32_t rank) {
    if (!deals_) return rank;
    const bool is_anywhere = random_.OneIn(4);
    std::vector<uint32_t> neighbours;
    for (uint32_t other = spec_.source_ranks; other < spec_.programs.size();
         ++other) {
      if (is_anywhere ||
          spec_.programs[other].host == spec_.programs[rank].host) {
        neighbours.push_back(other);
      }
    }
    return random_.Of(neighbours);
  }

  // A copy of `box` out of or into a buffer, loops merged at random.
  PlanSpec::Copy CopyOf(const Holding& holding, const Box& box,
                        uint64_t staging_offset, DType wire) {
    PlanSpec::Copy copy = {.slot = holding.slot,
                           .offset = holding.fragment.offset,
                           .loops = {},
                           .staging_offset = staging_offset,
                           .dtype = wire};
    const bool merge = random_.OneIn(2);
    bool may_merge_last = false;
    for (size_t d = 0; d < box.lo.size(); ++d) {
      const uint64_t stride = holding.fragment.stride[d];
      copy.offset += (box.lo[d] - holding.fragment.lo[d]) * stride;
      if (box.extent[d] == 1) continue;
      if (merge && may_merge_last &&
          copy.loops.back().stride() == box.extent[d] * stride) {
        copy.loops.back() =
            fb::Loop(copy.loops.back().extent() * box.extent[d], stride);
      } else {
        copy.loops.emplace_back(box.extent[d], stride);
      }
      may_merge_last = !holding.is_stack || d > 0;
    }
    return copy;
  }

  using Copies = std::vector<PlanSpec::Copy>;
  // What a source sends one destination in a round, or several alike.
  struct Open {
    Copies packs;
    std::map<uint32_t, Copies> unpacks;  // by destination
    uint64_t bytes = 0;
  };

  void Send(const Holding& from, const std::vector<Holding>& to, const Box& a,
            const Box& b) {
    Box common;
    for (size_t d = 0; d < a.lo.size(); ++d) {
      const uint64_t lo = std::max(a.lo[d], b.lo[d]);
      const uint64_t hi =
          std::min(a.lo[d] + a.extent[d], b.lo[d] + b.extent[d]);
      if (hi <= lo) return;
      common.lo.push_back(lo);
      common.extent.push_back(hi - lo);
    }
    // Cast before it is sent, or on arrival.
    const DType wire = random_.OneIn(2) ? DType::kBf16 : source_dtype_;
    std::vector<uint32_t> ranks;
    for (const Holding& holding : to) ranks.push_back(holding.rank);
    Open& open = open_[{static_cast<uint32_t>(random_.Below(rounds_)),
                        from.rank, ranks}];
    open.packs.push_back(CopyOf(from, common, open.bytes, wire));
    for (const Holding& holding : to) {
      open.unpacks[holding.rank].push_back(
          CopyOf(holding, common, open.bytes, wire));
    }
    open.bytes += Aligned(static_cast<uint64_t>(DTypeBytes(wire)) *
                          Product(common.extent));
  }
  static uint64_t Aligned(uint64_t bytes) { return (bytes + 15) / 16 * 16; }

  void AddFills() {
    for (uint32_t rank = spec_.source_ranks; rank < spec_.programs.size();
         ++rank) {
      std::vector<PlanSpec::Copy> fills;
      const std::vector<uint32_t>& buffers = spec_.programs[rank].buffers;
      for (uint32_t slot = 0; slot < buffers.size(); ++slot) {
        for (const PlanSpec::Region& region :
             spec_.buffers[buffers[slot]].regions) {
          if (region.kind != fb::RegionKind::kFill) continue;
          PlanSpec::Copy copy = {
              .slot = slot, .offset = region.offset, .loops = {}};
          if (region.extent[0] > 1) {
            copy.loops = {{region.extent[0], region.stride[0]}};
          }
          fills.push_back(copy);
        }
      }
      spec_.programs[rank].fills =
          static_cast<uint32_t>(spec_.copy_lists.size());
      spec_.copy_lists.push_back(fills);
    }
  }

  uint32_t AddList(const Copies& copies) {
    spec_.copy_lists.push_back(copies);
    return static_cast<uint32_t>(spec_.copy_lists.size() - 1);
  }
  // A range of the rank's staging that is nobody else's.
  uint64_t Stage(uint32_t rank, uint64_t bytes) {
    return (spec_.programs[rank].staging_bytes += bytes) - bytes;
  }

  // A message of a program before they are sorted.
  struct Draft {
    fb::Message message;
    size_t number = 0;                  // of both ends
    std::optional<size_t> fed_by = {};  // the message that a dealer holds
  };

  // One message of several parts to a host. Its dealer keeps what it wants and
  // deals each part out to those who want that. Without dealing there is one
  // part, and the dealer is its receiver.
  void AddFeed(uint32_t round, uint32_t source,
               const std::vector<const Open*>& parts) {
    const uint32_t first = parts[0]->unpacks.begin()->first;
    const uint32_t dealer = NeighbourOf(first);
    Copies packs, unpacks;
    uint64_t bytes = 0;
    const auto append = [&](const Copies& copies, Copies& to) {
      for (PlanSpec::Copy copy : copies) {
        copy.staging_offset += bytes;
        to.push_back(copy);
      }
    };
    std::vector<uint64_t> begins;
    for (const Open* part : parts) {
      append(part->packs, packs);
      const auto own = part->unpacks.find(dealer);
      if (own != part->unpacks.end()) append(own->second, unpacks);
      begins.push_back(bytes);
      bytes += part->bytes;
    }
    const uint64_t staged = Stage(dealer, bytes);
    const size_t number = next_++;
    drafts_[source].push_back(
        {SendTo(dealer, round, AddList(packs), Stage(source, bytes), bytes),
         number});
    drafts_[dealer].push_back(
        {RecvFrom(source, round, unpacks.empty() ? 0 : AddList(unpacks), staged,
                  bytes),
         number});
    for (size_t i = 0; i < parts.size(); ++i) {
      // Who holds the part: the dealer, or one that it was dealt out to.
      struct Holder {
        uint32_t rank = 0;
        uint32_t round = 0;
        uint64_t staged = 0;
        size_t number = 0;
      };
      const Holder first_holder = {dealer, round, staged + begins[i], number};
      Holder holder = first_holder;
      for (const auto& [rank, copies] : parts[i]->unpacks) {
        if (rank == dealer) continue;
        const auto later = holder.round + 1 +
                           static_cast<uint32_t>(random_.Below(kHeldRoundsMax));
        const uint64_t size = parts[i]->bytes;
        const uint64_t lies = Stage(rank, size);
        drafts_[holder.rank].push_back(
            {SendTo(rank, later, 0, holder.staged, size), next_,
             holder.number});
        drafts_[rank].push_back(
            {RecvFrom(holder.rank, later, AddList(copies), lies, size), next_});
        const bool is_first = holder.rank == dealer;
        holder = is_first && random_.OneIn(2) ? Holder{rank, later, lies, next_}
                                              : first_holder;
        ++next_;
      }
    }
  }

  void AddMessages() {
    drafts_.resize(spec_.programs.size());
    // By round, source and host.
    std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::vector<const Open*>>
        feeds;
    for (const auto& [channel, open] : open_) {
      const auto& [round, source, destinations] = channel;
      feeds[{round, source, spec_.programs[destinations[0]].host}].push_back(
          &open);
    }
    for (const auto& [channel, parts] : feeds) {
      const auto [round, source, host] = channel;
      if (deals_ && random_.OneIn(2)) {
        AddFeed(round, source, parts);
        continue;
      }
      for (const Open* part : parts) AddFeed(round, source, {part});
    }
    for (uint32_t rank = 0; rank < drafts_.size(); ++rank) AddProgram(rank);
  }

  void AddProgram(uint32_t rank) {
    const auto order = [](const fb::Message& m) {
      return std::tuple(m.round(), m.kind() == fb::MessageKind::kSend,
                        m.peer());
    };
    std::stable_sort(drafts_[rank].begin(), drafts_[rank].end(),
                     [&](const Draft& a, const Draft& b) {
                       return order(a.message) < order(b.message);
                     });
    PlanSpec::Program& program = spec_.programs[rank];
    std::map<size_t, uint32_t> position;  // by number
    for (const Draft& draft : drafts_[rank]) {
      const auto at = static_cast<uint32_t>(program.messages.size());
      program.messages.push_back(draft.message);
      position[draft.number] = at;
      if (!draft.fed_by.has_value()) continue;
      program.relays.emplace_back(at, position.at(*draft.fed_by));
    }
  }

  // Rounds after the one in which it came, in which what is held leaves.
  static constexpr uint64_t kHeldRoundsMax = 2;

  Random random_;
  PlanSpec spec_;
  uint64_t rounds_ = 1;  // in which sources send
  bool deals_ = false;
  DType source_dtype_ = DType::kBf16;  // of the param being drawn
  // By round, source, and destinations.
  std::map<std::tuple<uint32_t, uint32_t, std::vector<uint32_t>>, Open> open_;
  std::vector<std::vector<Draft>> drafts_;  // by rank
  size_t next_ = 0;
};

// Changes one number somewhere.
class Breaker {
 public:
  Breaker(uint64_t seed, PlanSpec& spec) : random_(seed), spec_(spec) {}

  void Break() {
    switch (random_.Below(10)) {
      case 0:
      case 1:
      case 2:
        return BreakCopy();
      case 3:
        return BreakList();
      case 4:
        return BreakMessage();
      case 5:
        return BreakPart();
      case 6:
        return BreakStack();
      case 7:
      case 8:
        return BreakHeld();
      default:
        return BreakRest();
    }
  }

 private:
  uint64_t Near(uint64_t value) {
    const uint64_t step = 1 + random_.Below(3);
    return random_.OneIn(2) && value >= step ? value - step : value + step;
  }
  DType AnyDType() {
    const DType dtypes[] = {DType::kBf16, DType::kFp16, DType::kFp32,
                            DType::kInt16};
    return dtypes[random_.Below(4)];
  }

  void BreakCopy() {
    std::vector<PlanSpec::Copy>& list = random_.Of(spec_.copy_lists);
    if (list.empty()) return;
    PlanSpec::Copy& copy = random_.Of(list);
    switch (random_.Below(7)) {
      case 0:
        copy.offset = Near(copy.offset);
        break;
      case 1:
        copy.staging_offset = random_.OneIn(4) ? Near(copy.staging_offset)
                                               : 16 * random_.Below(6);
        break;
      case 2:
        copy.slot = static_cast<uint32_t>(random_.Below(4));
        break;
      case 3:
        copy.dtype = AnyDType();
        break;
      case 4:
        if (copy.loops.empty()) {
          copy.loops.emplace_back(2, 1 + random_.Below(4));
        } else {
          copy.loops.pop_back();
        }
        break;
      case 5:
        if (copy.loops.size() > 1) std::swap(copy.loops[0], copy.loops[1]);
        break;
      default:
        if (copy.loops.empty()) break;
        fb::Loop& loop = random_.Of(copy.loops);
        loop = random_.OneIn(2) ? fb::Loop(Near(loop.extent()), loop.stride())
                                : fb::Loop(loop.extent(), Near(loop.stride()));
    }
  }

  void BreakList() {
    std::vector<PlanSpec::Copy>& list = random_.Of(spec_.copy_lists);
    if (list.empty()) return;
    switch (random_.Below(4)) {
      case 0:
        list.pop_back();
        break;
      case 1:
        list.push_back(random_.Of(list));
        break;
      case 2:
        std::swap(random_.Of(list).offset, random_.Of(list).offset);
        break;
      default: {
        // In two parts, which is right when the loop is cut where it may be.
        PlanSpec::Copy& copy = random_.Of(list);
        if (copy.loops.empty()) return;
        fb::Loop& loop = copy.loops.front();
        uint64_t inner = 1;
        for (const fb::Loop& other : copy.loops) inner *= other.extent();
        inner /= loop.extent();
        const uint64_t keep = 1 + random_.Below(loop.extent() - 1);
        PlanSpec::Copy rest = copy;
        rest.offset += keep * loop.stride();
        rest.staging_offset +=
            keep * inner * static_cast<uint64_t>(DTypeBytes(copy.dtype));
        const auto shorten = [](PlanSpec::Copy& c, uint64_t extent) {
          if (extent > 1) {
            c.loops.front() = fb::Loop(extent, c.loops.front().stride());
          } else {
            c.loops.erase(c.loops.begin());
          }
        };
        shorten(rest, loop.extent() - keep);
        shorten(copy, keep);
        list.push_back(rest);
      }
    }
  }

  void BreakMessage() {
    PlanSpec::Program& program = random_.Of(spec_.programs);
    if (program.messages.empty()) return;
    fb::Message& m = random_.Of(program.messages);
    uint32_t round = m.round();
    uint32_t peer = m.peer();
    uint32_t copies = m.copies();
    uint64_t offset = m.staging_offset();
    uint64_t size = m.size_bytes();
    switch (random_.Below(7)) {
      case 0:
        round = static_cast<uint32_t>(random_.Below(spec_.rounds.size()));
        break;
      case 1:
        peer = static_cast<uint32_t>(random_.Below(spec_.programs.size()));
        break;
      case 2:
        copies = static_cast<uint32_t>(random_.Below(spec_.copy_lists.size()));
        break;
      case 3:
        offset = random_.OneIn(3) ? Near(offset) : 16 * random_.Below(8);
        break;
      case 4:
        size = Near(size);
        break;
      case 5:
        program.messages.erase(program.messages.begin());
        return;
      default:
        std::swap(program.messages.front(), program.messages.back());
        return;
    }
    m = fb::Message(round, peer, copies, m.kind(), 0, 0, offset, size);
  }

  // What a rank deals out, or else a copy.
  void BreakHeld() {
    std::vector<size_t> dealers;
    for (size_t rank = 0; rank < spec_.programs.size(); ++rank) {
      if (!spec_.programs[rank].relays.empty()) dealers.push_back(rank);
    }
    if (dealers.empty()) return BreakCopy();
    PlanSpec::Program& program = spec_.programs[random_.Of(dealers)];
    fb::Relay& relay = random_.Of(program.relays);
    fb::Message& held = program.messages[relay.message()];
    const auto move = [](fb::Message& m, uint32_t round, uint64_t offset) {
      m = fb::Message(round, m.peer(), m.copies(), m.kind(), 0, 0, offset,
                      m.size_bytes());
    };
    switch (random_.Below(5)) {
      case 0:
        move(held, held.round(), 16 * random_.Below(8));
        break;
      case 1:
        relay = fb::Relay(
            relay.message(),
            static_cast<uint32_t>(random_.Below(program.messages.size())));
        break;
      case 2: {
        // What comes there meanwhile, perhaps.
        fb::Message& other = random_.Of(program.messages);
        if (other.kind() != fb::MessageKind::kRecv) break;
        move(other, other.round(), held.staging_offset());
        break;
      }
      case 3:
        random_.Of(spec_.rounds) = fb::Route::kPeer;
        break;
      default: {
        // Its other end as well, where it has the same order in its round.
        const uint32_t to =
            static_cast<uint32_t>(random_.Below(spec_.rounds.size()));
        for (fb::Message& other : spec_.programs[held.peer()].messages) {
          if (other.round() != held.round() ||
              other.size_bytes() != held.size_bytes()) {
            continue;
          }
          move(other, to, other.staging_offset());
          break;
        }
        move(held, to, held.staging_offset());
      }
    }
  }

  void BreakPart() {
    PlanSpec::Buffer& buffer = random_.Of(spec_.buffers);
    const bool region = !buffer.regions.empty() && random_.OneIn(2);
    Sizes& extent =
        region ? buffer.regions[0].extent : buffer.fragments[0].extent;
    Sizes& stride =
        region ? buffer.regions[0].stride : buffer.fragments[0].stride;
    uint64_t& offset =
        region ? buffer.regions[0].offset : buffer.fragments[0].offset;
    switch (random_.Below(6)) {
      case 0:
        if (!extent.empty()) random_.Of(extent) = 1 + random_.Below(5);
        break;
      case 1:
        if (!stride.empty()) random_.Of(stride) = random_.Below(7);
        break;
      case 2:
        offset = Near(offset);
        break;
      case 3:
        if (!region && !extent.empty()) {
          random_.Of(buffer.fragments[0].lo) = random_.Below(3);
        }
        break;
      case 4:
        if (stride.size() > 1) std::swap(stride.front(), stride.back());
        break;
      default:
        if (region) {
          buffer.regions.clear();
        } else {
          buffer.fragments[0].param =
              static_cast<uint32_t>(random_.Below(spec_.params.size()));
        }
    }
  }

  void BreakStack() {
    PlanSpec::Buffer& buffer = random_.Of(spec_.buffers);
    PlanSpec::Param& param = random_.Of(spec_.params);
    switch (random_.Below(6)) {
      case 0:
        buffer.dtype = AnyDType();
        break;
      case 1:
        buffer.name = random_.Of(spec_.buffers).name;
        break;
      case 2:
        if (!buffer.shape.empty()) {
          buffer.shape[0] = Near(buffer.shape[0]);
        }
        break;
      case 3:
        param.skip = fb::SkipReason::kFrozen;
        break;
      case 4:
        param.name = random_.Of(spec_.params).name;
        break;
      default:
        if (!param.shape.empty()) param.shape[0] = Near(param.shape[0]);
    }
  }

  void BreakRest() {
    PlanSpec::Program& program = random_.Of(spec_.programs);
    switch (random_.Below(8)) {
      case 0:
        program.fills =
            static_cast<uint32_t>(random_.Below(spec_.copy_lists.size()));
        break;
      case 1:
        program.host = static_cast<uint32_t>(random_.Below(3));
        break;
      case 2:
        if (!program.buffers.empty()) {
          random_.Of(program.buffers) =
              static_cast<uint32_t>(random_.Below(spec_.buffers.size()));
        }
        break;
      case 3:
        spec_.operations_per_round = static_cast<uint32_t>(random_.Below(4));
        break;
      case 4:
        spec_.bucket_bytes = 16 * random_.Below(8);
        break;
      case 5:
        spec_.staging_bytes = 16 * random_.Below(16);
        break;
      case 6:
        spec_.slots = static_cast<uint32_t>(random_.Below(3));
        break;
      default:
        spec_.casts.clear();
    }
  }

  Random random_;
  PlanSpec& spec_;
};

uint64_t Seed() {
  const char* seed = std::getenv("REFIT_SEED");
  return seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10);
}

uint64_t Runs() {
  const char* runs = std::getenv("REFIT_RUNS");
  if (runs != nullptr) return std::strtoull(runs, nullptr, 10);
  return kSanitized ? 1000 : 4000;
}

TEST(ProofPropertyTest, DrawnPlansAreValid) {
  for (uint64_t seed = Seed(); seed < Seed() + Runs() / 4; ++seed) {
    const PlanSpec spec = Planner(seed).Draw();
    ASSERT_EQ(FaultOf(spec), "") << "seed=" << seed;
    const PlanFile plan = OpenSpec(spec);
    ASSERT_EQ(Prove(plan).violation, "") << "seed=" << seed;
  }
}

TEST(ProofPropertyTest, NoBrokenPlanIsProved) {
  uint64_t broken = 0;
  uint64_t harmless = 0;
  uint64_t refused = 0;  // harmless, but beyond what the proof can show
  for (uint64_t seed = Seed(); seed < Seed() + Runs(); ++seed) {
    PlanSpec spec = Planner(seed / 4).Draw();
    Breaker breaker(seed, spec);
    breaker.Break();
    if (seed % 8 == 0) breaker.Break();
    const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(BuildPlan(spec));
    if (!plan.ok()) continue;
    const std::string fault = FaultOf(spec);
    const ProofResult proof = Prove(*plan);
    if (!fault.empty()) {
      ASSERT_FALSE(proof.valid) << "seed=" << seed << ": " << fault;
      ++broken;
    } else {
      ++harmless;
      refused += proof.valid ? 0 : 1;
      if (!proof.valid) std::cout << proof.violation << "\n";
    }
  }
  EXPECT_GT(broken, Runs() / 4);
  EXPECT_GT(harmless, Runs() / 50);
  EXPECT_LT(refused, harmless / 4);
  std::cout << broken << " broken, " << harmless << " harmless, " << refused
            << " of these refused\n";
}

// Rounds become direct at random, where the plan stays right.
PlanSpec WithDirectRounds(PlanSpec spec, uint64_t seed) {
  Random random(seed);
  for (size_t round = 0; round < spec.rounds.size(); ++round) {
    PlanSpec changed = spec;
    changed.mechanisms.resize(spec.rounds.size(), fb::Mechanism::kStaged);
    changed.mechanisms[round] = fb::Mechanism::kDirect;
    if (random.OneIn(3)) continue;
    const absl::StatusOr<PlanFile> plan =
        PlanFile::FromBytes(BuildPlan(changed));
    if (plan.ok() && Prove(*plan).valid) spec = std::move(changed);
  }
  return spec;
}

// The proof must see whatever race looking at all bytes sees.
TEST(ProofPropertyTest, NoRaceIsProved) {
  size_t tried = 0;
  size_t noticed = 0;
  size_t direct = 0;
  for (uint64_t seed = Seed(); seed < Seed() + Runs() / 20; ++seed) {
    const PlanFile plan =
        OpenSpec(WithDirectRounds(Planner(seed).Draw(), seed));
    direct += HasDirectRounds(plan) ? 1 : 0;
    for (const proof::Movers movers :
         {proof::Movers::kSenders, proof::Movers::kReceivers}) {
      const OrderMutations mutations = MutateOrder(plan, movers);
      ASSERT_EQ(mutations.missed, "") << "seed=" << seed;
      tried += mutations.tried;
      noticed += mutations.noticed;
      if (!HasDirectRounds(plan)) break;
    }
  }
  EXPECT_GT(direct, Runs() / 200);
  EXPECT_GT(noticed, tried / 2);
  std::cout << tried << " waits and fences left out, " << noticed
            << " noticed; " << direct << " plans with direct rounds\n";
}

}  // namespace
}  // namespace refit
