// Module: the one value the passes build, stage by stage.
//
// Nodes live in vectors and name each other by typed id. A stage reads what
// the stages before it wrote and adds its own part; nothing is taken back.
#ifndef REFIT_COMPILER_IR_MODULE_H_
#define REFIT_COMPILER_IR_MODULE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "compiler/ir/block_scheme.h"
#include "compiler/ir/box.h"
#include "compiler/ir/limits.h"
#include "compiler/ir/param_role.h"
#include "compiler/ir/value_form.h"
#include "plan/dtype.h"
#include "plan/post_hooks.h"
#include "plan_generated.h"

namespace refit {

using SkipReason = fb::SkipReason;

enum class ParamId : int32_t {};
enum class BufferId : int32_t {};
enum class PieceId : int32_t {};
enum class Rank : int32_t {
};  // global: source 0 .. S-1, destination S .. S+D-1

template <typename Id>
constexpr size_t IndexOf(Id id) {
  return static_cast<size_t>(id);
}

// The numbers that stand for "{i}" of a name, in stack order. Layers of a
// stack need not be consecutive.
struct IndexDim {
  std::vector<int32_t> numbers;

  int64_t extent() const { return static_cast<int64_t>(numbers.size()); }
  friend bool operator==(const IndexDim&, const IndexDim&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const IndexDim& dim) {
    return H::combine(std::move(h), dim.numbers);
  }
};

// first, first + 1, … first + count - 1.
IndexDim Consecutive(int32_t first, int64_t count);

// Which dimension of its tensor a param's `shape` has as several, so that a box
// can hold what lies at a stride in the tensor.
enum class Split : uint8_t {
  kNone,
  // The elements of the last dimension alternate between two things: it is
  // [n / 2, 2].
  kLastInPairs,
  // The rows of each head alternate between the first and the second of a
  // rotary pair: they are [heads, n / 2, 2].
  kRowsInHeadPairs,
};

// A stack of logical parameters (docs/architecture.md). Its virtual tensor has
// the dimensions [index…, shape…].
struct Param {
  std::string name;  // "model.layers.{0}.mlp.experts.{1}.up_proj.weight"
  std::vector<IndexDim>
      index;   // index[0] is the layer of a layer's param, index[1] its expert
  Dims shape;  // of one parameter
  DType dtype = DType::kUnspecified;
  ParamRole role = ParamRole::kOther;
  // Of a layer's param: the number n in its name is the model's layer
  // first_layer + n. Not 0 where extra layers count anew ("mtp.layers.{0}").
  int32_t first_layer = 0;
  SkipReason skip = SkipReason::kUnspecified;  // set: no element is moved
  Split split = Split::kNone;

  Dims VirtualShape() const;
  // The full name of the stack's first member.
  std::string FirstName() const;
  // By dimension of the tensor: those of `shape` that stand for it.
  std::vector<Dims> Factors() const;
  Dims StoredShape() const;  // of the tensor
};

// Where a param's blocks are quantized.
enum class QuantizedAt : uint8_t {
  kNowhere,  // it is moved as it is: quantized on both sides, or excluded
  kSource,
  kDestination,
};

// A param that a side holds as fp8 values and scales, which are two more
// params: of its own shape, and of one element for each block.
struct Quantization {
  ParamId of{};  // equal to `data` when both sides hold it quantized
  ParamId data{};
  ParamId scales{};
  BlockScheme scheme;
  QuantizedAt at = QuantizedAt::kNowhere;  // place-quantization
  std::string reason;                      // of kDestination
};

// A box of one param = a strided box of one buffer. `box` has the dimensions
// of the param's virtual tensor; the element at box.lo is at `offset` of the
// buffer's virtual tensor, the next index in dimension d moves it by stride[d].
struct Fragment {
  ParamId param{};
  Box box;
  int64_t offset = 0;
  Dims stride;

  friend bool operator==(const Fragment&, const Fragment&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Fragment& f) {
    return H::combine(std::move(h), f.param, f.box, f.offset, f.stride);
  }
};

// A part of a destination buffer that holds no param: zero fill, or a declared
// skip. Of a source buffer: only skips, and only to declare them.
struct Region {
  fb::RegionKind kind = fb::RegionKind::kUnspecified;
  SkipReason reason = SkipReason::kUnspecified;
  int64_t offset = 0;
  Dims extent;
  Dims stride;
  std::string detail;

  friend bool operator==(const Region&, const Region&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Region& r) {
    return H::combine(std::move(h), r.kind, r.reason, r.offset, r.extent,
                      r.stride, r.detail);
  }
};

// What a worker must do with a destination's tensor after a refit wrote it,
// before it serves.
struct PostHook {
  PostHookName name;
  std::string detail;  // one sentence

  friend bool operator==(const PostHook&, const PostHook&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const PostHook& hook) {
    return H::combine(std::move(h), hook.name, hook.detail);
  }
};

// What is quantized travels in waves: all rounds of one come before all rounds
// of the next.
inline constexpr int32_t kNoWave = -1;

// A stack of physical tensors of one rank. Its virtual tensor
// has the dimensions [index…, shape…]. Ranks that hold equal stacks share one.
struct Buffer {
  std::string name;  // as the framework's named_parameters() names it
  std::vector<IndexDim> index;  // numbers as they stand in the name
  Dims shape;                   // of one tensor
  DType dtype = DType::kUnspecified;
  std::vector<Fragment> fragments;
  std::vector<Region> regions;
  // How its values follow from those of the params that it holds.
  ValueForm form = ValueForm::kPlain;
  // The framework keeps the tensor in this dtype whatever the side's is, so
  // that a cast from or to it needs no word of the job.
  bool own_dtype = false;
  // Of a destination. A layout gives those that each write of the tensor asks
  // for; name-post-hooks adds those by which the two sides' forms differ.
  std::vector<PostHook> post_hooks;
  int32_t wave = kNoWave;  // of scratch: in which it is sent or received

  Dims VirtualShape() const;
  friend bool operator==(const Buffer&, const Buffer&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Buffer& b) {
    return H::combine(std::move(h), b.name, b.index, b.shape, b.dtype,
                      b.fragments, b.regions, b.form, b.own_dtype, b.post_hooks,
                      b.wave);
  }
};

// A box of one buffer that a Quantize reads or writes.
struct QuantizeOperand {
  int32_t slot = 0;  // of the rank's buffers
  int64_t offset = 0;
  Dims stride;
};

// One operation of a rank: quantizes a box of whole blocks of a param.
struct Quantize {
  int32_t quantization = 0;  // of Module::quantizations
  Box box;                   // of the param
  QuantizeOperand input;
  QuantizeOperand output;
  QuantizeOperand scales;  // strides are those of ScaleBox(box)
};

// Where and in which rounds [begin, end) a rank's scratch buffer lies.
struct ScratchWindow {
  int64_t offset = 0;  // bytes from the start of the rank's scratch arena
  int32_t begin = 0;   // schedule-rounds
  int32_t end = 0;     // schedule-rounds
};

// What a rank quantizes: a source before it sends the wave, a destination after
// it received it.
struct RankQuantizes {
  int32_t scratch_buffers = 0;  // of the last of its buffers
  std::vector<Quantize> quantizes;
  // One for each scratch buffer; empty in a plan of one wave.
  std::vector<ScratchWindow> windows;
  int64_t arena_bytes = 0;  // of all windows
};

// All buffers of all ranks, equal ones stored once.
class BufferTable {
 public:
  BufferId Intern(Buffer buffer);
  const Buffer& operator[](BufferId id) const { return buffers_[IndexOf(id)]; }
  const std::vector<Buffer>& all() const { return buffers_; }

  // Appends to a buffer's own. Ends Intern: a changed buffer is not found.
  void AddPostHooks(BufferId id, std::vector<PostHook> hooks);

 private:
  std::vector<Buffer> buffers_;
  absl::flat_hash_map<size_t, std::vector<BufferId>> ids_by_hash_;
};

// The buffers of each rank of one side, in the order of the framework's module
// tree. Index: rank within the side.
struct SideLayout {
  std::vector<std::vector<BufferId>> ranks;
  // By key: what the framework must be set to for the buffers to hold this,
  // where another setting keeps names, dtypes and shapes.
  std::map<std::string, std::string> requirements;
};

// A name of the checkpoint that the plan does not move, and why.
struct Skip {
  std::string name;
  SkipReason reason = SkipReason::kUnspecified;
  std::string detail;
};

// One destination rank that passes on to another what it was given.
struct Relay {
  Rank sender{};
  Rank receiver{};

  friend auto operator<=>(const Relay&, const Relay&) = default;
};

// A box of a param that has one set of possible senders and is wanted by one
// set of receivers (intersect-layouts), or a part of such a box
// (choose-sources).
struct Piece {
  ParamId param{};
  Box box;
  Box destination_box;        // the receivers' fragments that it is a part of
  std::vector<Rank> sources;  // ascending
  // Hold it too, but in scratch of other waves: they do not send it.
  std::vector<Rank> sources_of_other_waves;
  std::vector<Rank> destinations;  // ascending; each is fed by a source
  // route-flows, fan-out: each starts at the one rank in `destinations`, or at
  // a receiver of one before it.
  std::vector<Relay> relays;
  // route-flows: what comes over the network, and `relays` are how it goes on
  // from the one destination, over several hosts or inside one. That one keeps
  // it, unless it only receives it for others.
  bool is_routed = false;
  bool root_keeps = true;
  // Routed: what a rank sends to several of other hosts it broadcasts. Its
  // source then feeds all of `destinations`, or one that passes it on does.
  bool broadcasts = false;
  // The smaller of both sides' dtypes: members of a stack may differ in theirs.
  DType wire_dtype = DType::kUnspecified;
  DType destination_dtype = DType::kUnspecified;
  int32_t wave = 0;
};

// One thing to move. The source of a relayed one is a destination rank.
struct Transfer {
  PieceId piece{};
  Rank source{};
  Rank destination{};
};

// One part of a message: a box of a param, packed from staging_offset on.
struct Packed {
  PieceId piece{};
  Box box;                     // within the piece's
  int64_t staging_offset = 0;  // bytes from the start of the message
};

// Consecutive ones of Module::messages.
struct MessageRange {
  size_t begin = 0;
  size_t count = 0;
};

// Which messages are one broadcast: those with the numbers first + k * stride,
// for k from 0 to `others`.
struct BroadcastRange {
  int32_t first = -1;  // -1: it is none
  // Of the first message alone.
  int32_t others = 0;
  int32_t stride = 0;
};

// Transfers of one pair of ranks that travel as one. `contents` indexes
// Module::contents: messages with equal contents share one.
struct Message {
  Rank source{};
  Rank destination{};
  Route route = Route::kUnspecified;
  Mechanism mechanism = Mechanism::kStaged;
  int32_t wave = 0;
  int32_t contents = 0;
  int64_t size_bytes = 0;
  // Direct: which of the successive rounds of its route. A chunk of a relayed
  // pipeline travels one round later with each relay. Staged and routed: which
  // chunk of its stream.
  int32_t pipeline_round = 0;
  // Of a relay: the messages that bring its contents to its source, and the
  // route by which they come. Relays inside a host of what the network brought
  // come after the network's rounds.
  MessageRange fed_by;
  Route relayed_from = Route::kUnspecified;
  // Of one that its destination deals out: the messages that do so, and whether
  // the destination wants it itself.
  MessageRange dealt_by = {};
  bool is_unpacked = true;
  // Of one that deals out: its source packs nothing.
  bool is_held = false;
  // Of a routed piece. Inside a host it goes in a round between hosts.
  bool is_routed = false;
  BroadcastRange broadcast = {};
  int32_t round = -1;  // schedule-rounds
  // schedule-rounds; 0 if direct
  int64_t source_staging_offset = 0;
  int64_t destination_staging_offset = 0;

  bool is_broadcast() const { return broadcast.first >= 0; }
  // Whether another message of its broadcast stands for what its sender does.
  bool is_sent_with_other() const {
    return is_broadcast() && broadcast.others == 0;
  }
};

// All messages of a round share these.
struct Round {
  Route route = Route::kUnspecified;
  Mechanism mechanism = Mechanism::kStaged;
};

// How refits of the plan find what changed (options.delta).
struct Delta {
  fb::DeltaChanges changes = fb::DeltaChanges::kSnapshot;
  int64_t dense_every = 20;
  bool check = true;
  std::vector<uint8_t> rungs;  // fb::Delta.rungs
};

// What joins hosts, where the job says more of it than its speed.
struct Fabric {
  std::string machine;  // "" where the job names none
  int32_t hosts_per_nvlink_domain = 1;
  int32_t gpus_per_nic = 1;
  int32_t hosts_per_leaf = 0;  // 0: all
  bool rails = false;
  double spine_oversubscription = 1;
  double nic_bytes_per_second = 0;
};

// Where ranks are and how fast their links are. Index: global rank.
struct Topology {
  std::vector<int32_t> host;
  bool colocated = false;
  double peer_bytes_per_second = 0;  // per rank and direction, inside a host
  // Per rank and direction, across hosts: its share of a NIC.
  double network_bytes_per_second = 0;
  // How many GPUs share a NIC, at most: of a host that has so many.
  int32_t gpus_per_nic = 1;
  double local_bytes_per_second = 0;  // copy inside one GPU
  std::optional<Fabric> fabric;

  double BytesPerSecond(Route route) const;
  // The NVLink domain of a host.
  int32_t DomainOf(int32_t host_number) const;
  // Whether the way of a leaf to the others is narrower than its NICs together.
  // Not where rails divide a host's NICs among leaves.
  bool HasNarrowLeaves() const;
};

// Consecutive parts of a job that are alike: in each of them as many ranks hold
// the same, on as many hosts. Passes plan the first of them; emit writes its
// programs for all. A job that is not folded is one part.
struct AlikeParts {
  int32_t first = 0;    // number of a part
  int32_t count = 1;    // of parts
  int32_t sources = 0;  // of a part
  int32_t destinations = 0;
  // From a rank to the same one of the next part.
  int32_t source_shift = 0;
  int32_t destination_shift = 0;
};

// The job consists of smaller jobs, its parts, which exchange nothing. Most of
// them are alike; where engines do not divide evenly, some have one less.
struct Fold {
  std::vector<AlikeParts> alike;  // ascending
  std::vector<int32_t> part;      // by rank
  std::vector<int32_t> alike_of;  // by part: into `alike`

  const AlikeParts& LikeThat(int32_t of_part) const {
    return alike[static_cast<size_t>(alike_of[static_cast<size_t>(of_part)])];
  }
  // Whether passes plan this part, for others too.
  bool IsFirst(int32_t of_part) const {
    return LikeThat(of_part).first == of_part;
  }
};

struct Stats {
  int64_t moved_bytes = 0;
  int64_t local_bytes = 0;
  int64_t peer_bytes = 0;
  int64_t network_bytes = 0;
  int64_t relayed_bytes = 0;  // of these, by destination ranks
  double lower_bound_seconds = 0;
  double predicted_seconds = 0;
  std::string binding_link;   // after the passes
  bool routes_flows = false;  // any piece is routed; not in the plan
  // kHeldRounds or kHeldRoundsOfBroadcast, where ranks pass on to other hosts
  // what is routed; else 0. Not in the plan.
  int32_t held_rounds = 0;
  bool levels_sources = false;  // some receivers relay between hosts
  bool trees = false;           // hosts pass on to hosts, or are broadcast to
  bool long_chains = false;     // of more than kHostsOfChain hosts
  bool broadcasts = false;      // any rank broadcasts; not in the plan

  bool routes_between_hosts() const { return held_rounds > 0; }
};

// Whether a message inside a host travels in a round between hosts.
inline bool IsBesideNetwork(const Message& message) {
  return message.route == Route::kPeer &&
         (message.is_held ||
          (message.is_routed && message.mechanism == Mechanism::kStaged &&
           message.relayed_from == Route::kUnspecified));
}

struct Module {
  // Before the passes.
  std::vector<Param> params;  // the model's, then those of quantization
  std::vector<Quantization> quantizations;
  std::vector<Skip> skips;
  Limits limits;
  std::optional<Delta> delta;
  Topology topology;
  fb::Digest inputs_digest;
  std::map<std::string, std::string> job_facts;  // for readers of the plan

  // lay-out-source, lay-out-destination
  BufferTable buffers;
  SideLayout source;
  SideLayout destination;

  // place-quantization; it adds scratch to both sides' buffers
  std::vector<RankQuantizes> quantizes;  // by rank; empty if there are none
  int32_t waves = 1;
  int32_t unquantized_wave = 0;  // of what needs no scratch

  // fold-ranks
  std::optional<Fold> fold;
  // Whether the file is to be small: equal ranks of all parts share lists, and
  // messages are packed.
  bool is_compact = false;

  // intersect-layouts, choose-sources: of the ranks that are planned
  std::vector<std::pair<DType, DType>> casts;  // declared, sorted
  std::vector<Piece> pieces;
  std::vector<Transfer> transfers;  // sorted by (source, destination, piece)

  // form-buckets, schedule-rounds
  std::vector<std::vector<Packed>> contents;
  std::vector<Message> messages;
  std::vector<Round> rounds;
  // Numbers of `messages` in the order of programs: by round, then source, then
  // destination. A rank has what it receives in a round before what it sends.
  std::vector<uint32_t> message_order;  // schedule-rounds

  // bound-time, estimate-cost
  Stats stats;

  int32_t source_ranks() const {
    return static_cast<int32_t>(source.ranks.size());
  }
  int32_t world_size() const {
    return static_cast<int32_t>(source.ranks.size() + destination.ranks.size());
  }
  const std::vector<BufferId>& buffers_of(Rank rank) const;
  // How many parts the job has, and which of them is the rank's.
  int32_t parts() const {
    return fold.has_value() ? static_cast<int32_t>(fold->alike_of.size()) : 1;
  }
  int32_t PartOf(Rank rank) const {
    return fold.has_value() ? fold->part[IndexOf(rank)] : 0;
  }
  // Those that are like the rank's.
  AlikeParts AlikePartsOf(Rank rank) const;
  // The rank whose program this one has, with peers shifted: the one of the
  // first part that is like the rank's.
  Rank FirstOf(Rank rank) const;
  bool IsPlanned(Rank rank) const { return FirstOf(rank) == rank; }
  int64_t PlannedSources() const;
  bool HasWindows() const { return waves > 1; }
  bool IsRelay(Rank sender) const {
    return IndexOf(sender) >= source.ranks.size();
  }
  // How bytes between these two ranks travel.
  Route RouteBetween(Rank source_rank, Rank destination_rank) const {
    if (topology.colocated && !IsRelay(source_rank) &&
        IndexOf(destination_rank) ==
            IndexOf(source_rank) + source.ranks.size()) {
      return Route::kLocal;
    }
    return topology.host[IndexOf(source_rank)] ==
                   topology.host[IndexOf(destination_rank)]
               ? Route::kPeer
               : Route::kNetwork;
  }
  // Which links they take: kPeer also between hosts of one NVLink domain.
  Route LinkBetween(Rank source_rank, Rank destination_rank) const {
    const Route route = RouteBetween(source_rank, destination_rank);
    if (route != Route::kNetwork || !topology.fabric.has_value()) return route;
    return topology.DomainOf(topology.host[IndexOf(source_rank)]) ==
                   topology.DomainOf(topology.host[IndexOf(destination_rank)])
               ? Route::kPeer
               : Route::kNetwork;
  }
  // Whether ranks pass on to other hosts of their NVLink domain what the
  // network brings: staging has room for a message and for the one that a rank
  // passes on meanwhile, each worth its start. Not in colocated jobs, where a
  // rank that receives for others may be on the source's GPU.
  bool JoinsHosts() const;
  // Ranks of one site pass on to each other: it is their NVLink domain, or
  // their host.
  int32_t SiteOf(Rank rank) const {
    const int32_t host = topology.host[IndexOf(rank)];
    return JoinsHosts() ? topology.DomainOf(host) : host;
  }
  Mechanism MechanismOf(Route route) const;
  // What a round of the route costs before its bytes, with one message.
  double RoundSeconds(Route route) const;
  bool IsStaged(const Relay& relay) const {
    return MechanismOf(RouteBetween(relay.sender, relay.receiver)) ==
           Mechanism::kStaged;
  }
  // Whether what receivers store to each other waits for the last wave. Not if
  // they quantize it: then they need the scratch for the next one.
  bool DefersStores() const;
  // Bytes of one copy of the piece on the wire.
  int64_t WireBytes(const Piece& piece) const;
  // The rank from which message `number` comes to its destination: what is
  // broadcast goes from one of its receivers to the next.
  Rank SentBy(size_t number) const;
  const Param& param(ParamId id) const { return params[IndexOf(id)]; }
  const Piece& piece(PieceId id) const { return pieces[IndexOf(id)]; }
};

// How many consecutive rounds share no staging of a rank. What came in one
// round is dealt out in the next, while a rank that relays in stages may pack
// what it sends in the one after that; where hosts pass it on to hosts it may
// stay longer.
inline int32_t StagingTurns(const Module& module) {
  const int32_t slots = module.limits.slots;
  if (module.stats.routes_between_hosts()) {
    return slots + module.stats.held_rounds;
  }
  if (!module.stats.routes_flows) return slots;
  const bool packs = module.MechanismOf(Route::kPeer) == Mechanism::kStaged;
  return packs ? slots + 1 : std::max(slots, 2);
}

}  // namespace refit

#endif  // REFIT_COMPILER_IR_MODULE_H_
