#include "compiler/emit/emit_plan.h"

#include <algorithm>
#include <cstring>

#include "compiler/emit/lower_copies.h"
#include "compiler/emit/lower_messages.h"
#include "compiler/emit/pack_messages.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

using Builder = flatbuffers::FlatBufferBuilder;
template <typename T>
using Offset = flatbuffers::Offset<T>;
template <typename T>
using OffsetVector = flatbuffers::Offset<flatbuffers::Vector<T>>;

template <typename T>
OffsetVector<const T*> StructsOrNone(Builder& builder,
                                     const std::vector<T>& structs) {
  if (structs.empty()) return 0;
  return builder.CreateVectorOfStructs(structs);
}

OffsetVector<uint64_t> DimsVector(Builder& builder, const Dims& dims) {
  const std::vector<uint64_t> values(dims.begin(), dims.end());
  return builder.CreateVector(values);
}

OffsetVector<Offset<fb::IndexDim>> IndexVector(
    Builder& builder, const std::vector<IndexDim>& index) {
  std::vector<Offset<fb::IndexDim>> dims;
  for (const IndexDim& dim : index) {
    const int32_t first = dim.numbers.empty() ? 0 : dim.numbers.front();
    const bool consecutive = dim == Consecutive(first, dim.extent());
    const OffsetVector<int32_t> numbers =
        consecutive ? 0 : builder.CreateVector(dim.numbers);
    dims.push_back(fb::CreateIndexDim(
        builder, first, static_cast<uint32_t>(dim.extent()), numbers));
  }
  return builder.CreateVector(dims);
}

Offset<fb::Param> EmitParam(Builder& builder, const Param& param) {
  const auto name = builder.CreateString(param.name);
  const auto index = IndexVector(builder, param.index);
  const auto shape = DimsVector(builder, param.shape);
  return fb::CreateParam(builder, name, index, shape, param.dtype, param.skip);
}

Offset<fb::Fragment> EmitFragment(Builder& builder, const Fragment& fragment) {
  Dims extent;
  for (size_t dim = 0; dim < fragment.box.lo.size(); ++dim) {
    extent.push_back(fragment.box.extent(dim));
  }
  const auto lo = DimsVector(builder, fragment.box.lo);
  const auto extents = DimsVector(builder, extent);
  const auto stride = DimsVector(builder, fragment.stride);
  return fb::CreateFragment(
      builder, static_cast<uint32_t>(IndexOf(fragment.param)), lo, extents,
      static_cast<uint64_t>(fragment.offset), stride);
}

Offset<fb::Region> EmitRegion(Builder& builder, const Region& region) {
  const auto extent = DimsVector(builder, region.extent);
  const auto stride = DimsVector(builder, region.stride);
  const auto detail =
      region.detail.empty() ? 0 : builder.CreateString(region.detail);
  return fb::CreateRegion(builder, region.kind, region.reason,
                          static_cast<uint64_t>(region.offset), extent, stride,
                          detail);
}

OffsetVector<Offset<fb::PostHook>> EmitPostHooks(
    Builder& builder, const std::vector<PostHook>& hooks) {
  if (hooks.empty()) return 0;
  std::vector<Offset<fb::PostHook>> offsets;
  for (const PostHook& hook : hooks) {
    const auto name = builder.CreateString(hook.name.text());
    const auto detail = builder.CreateString(hook.detail);
    offsets.push_back(fb::CreatePostHook(builder, name, detail));
  }
  return builder.CreateVector(offsets);
}

Offset<fb::Buffer> EmitBuffer(Builder& builder, const Buffer& buffer) {
  std::vector<Offset<fb::Fragment>> fragments;
  for (const Fragment& fragment : buffer.fragments) {
    fragments.push_back(EmitFragment(builder, fragment));
  }
  std::vector<Offset<fb::Region>> regions;
  for (const Region& region : buffer.regions) {
    regions.push_back(EmitRegion(builder, region));
  }
  const auto name = builder.CreateString(buffer.name);
  const auto index = IndexVector(builder, buffer.index);
  const auto shape = DimsVector(builder, buffer.shape);
  const auto fragment_vector = builder.CreateVector(fragments);
  const auto region_vector = builder.CreateVector(regions);
  const auto post_hooks = EmitPostHooks(builder, buffer.post_hooks);
  return fb::CreateBuffer(builder, name, index, shape, buffer.dtype,
                          fragment_vector, region_vector, post_hooks);
}

// Quantizations that nobody does are not part of the plan.
bool IsDone(const Quantization& quantization) {
  return quantization.at != QuantizedAt::kNowhere;
}

// What ranks quantize, lowered; equal loops are written once.
class QuantizeLowering {
 public:
  explicit QuantizeLowering(const Module& module) {
    uint32_t next = 0;
    for (const Quantization& quantization : module.quantizations) {
      numbers_.push_back(next);
      next += IsDone(quantization) ? 1 : 0;
    }
  }

  fb::Quantize Lower(const Quantize& op) {
    const size_t row = op.box.lo.size() - 2;
    std::vector<fb::QuantizeLoop> loops;
    for (size_t dim = 0; dim < row; ++dim) {
      if (op.box.extent(dim) == 1) continue;
      loops.emplace_back(static_cast<uint64_t>(op.box.extent(dim)),
                         static_cast<uint64_t>(op.input.stride[dim]),
                         static_cast<uint64_t>(op.output.stride[dim]),
                         static_cast<uint64_t>(op.scales.stride[dim]));
    }
    const auto begin =
        std::search(loops_.begin(), loops_.end(), loops.begin(), loops.end(),
                    [](const fb::QuantizeLoop& a, const fb::QuantizeLoop& b) {
                      return std::memcmp(&a, &b, sizeof(a)) == 0;
                    });
    const auto loops_begin = static_cast<uint32_t>(begin - loops_.begin());
    if (begin == loops_.end()) {
      loops_.insert(loops_.end(), loops.begin(), loops.end());
    }
    return fb::Quantize(numbers_[static_cast<size_t>(op.quantization)],
                        static_cast<uint32_t>(op.input.slot),
                        static_cast<uint32_t>(op.output.slot),
                        static_cast<uint32_t>(op.scales.slot), loops_begin,
                        static_cast<uint32_t>(loops.size()),
                        static_cast<uint64_t>(op.input.offset),
                        static_cast<uint64_t>(op.output.offset),
                        static_cast<uint64_t>(op.scales.offset),
                        static_cast<uint64_t>(op.box.extent(row)),
                        static_cast<uint64_t>(op.box.extent(row + 1)),
                        static_cast<uint64_t>(op.input.stride[row]),
                        static_cast<uint64_t>(op.output.stride[row]),
                        static_cast<uint64_t>(op.scales.stride[row]));
  }

  const std::vector<fb::QuantizeLoop>& loops() const { return loops_; }

 private:
  std::vector<uint32_t> numbers_;  // in the plan, by Module::quantizations
  std::vector<fb::QuantizeLoop> loops_;
};

OffsetVector<Offset<fb::Quantization>> EmitQuantizations(Builder& builder,
                                                         const Module& module) {
  std::vector<Offset<fb::Quantization>> quantizations;
  for (const Quantization& quantization : module.quantizations) {
    if (!IsDone(quantization)) continue;
    const BlockScheme& scheme = quantization.scheme;
    quantizations.push_back(fb::CreateQuantization(
        builder, static_cast<uint32_t>(IndexOf(quantization.of)),
        static_cast<uint32_t>(IndexOf(quantization.data)),
        static_cast<uint32_t>(IndexOf(quantization.scales)),
        static_cast<uint32_t>(scheme.block_rows),
        static_cast<uint32_t>(scheme.block_columns), scheme.scale_format));
  }
  return quantizations.empty() ? 0 : builder.CreateVector(quantizations);
}

// A program's messages in the file: one of the two.
struct EmittedMessages {
  flatbuffers::Offset<MessageVector> messages;
  int32_t packed_list = -1;
};

EmittedMessages EmitMessages(Builder& builder, const RankMessages& rank,
                             MessagePacker* packer) {
  const std::vector<RankMessages::End>& ends = rank.ends;
  const auto message_at = [&](size_t i) -> const fb::Message& {
    return ends[i].message;
  };
  if (packer != nullptr) {
    const std::optional<int32_t> list = packer->Pack(ends.size(), message_at);
    if (list.has_value()) return {.messages = 0, .packed_list = *list};
  }
  return {.messages = builder.CreateVectorOfStructs<fb::Message>(
              ends.size(), [&](size_t i, fb::Message* message) {
                *message = message_at(i);
              })};
}

// What the programs of a folded job's other parts share with the first's.
struct ProgramLists {
  OffsetVector<uint32_t> buffers;
  EmittedMessages messages;
  uint32_t scratch_buffers = 0;
  OffsetVector<const fb::Quantize*> quantizes;
  OffsetVector<const fb::ScratchWindow*> windows;
  uint64_t arena_bytes = 0;
  OffsetVector<const fb::Relay*> relays;
};

void EmitQuantizes(Builder& builder, const RankQuantizes& of_rank,
                   QuantizeLowering& lowering, ProgramLists& lists) {
  lists.scratch_buffers = static_cast<uint32_t>(of_rank.scratch_buffers);
  std::vector<fb::Quantize> quantizes;
  for (const Quantize& op : of_rank.quantizes) {
    quantizes.push_back(lowering.Lower(op));
  }
  lists.quantizes = StructsOrNone(builder, quantizes);
  std::vector<fb::ScratchWindow> windows;
  for (const ScratchWindow& window : of_rank.windows) {
    windows.emplace_back(static_cast<uint64_t>(window.offset),
                         static_cast<uint32_t>(window.begin),
                         static_cast<uint32_t>(window.end));
  }
  lists.windows = StructsOrNone(builder, windows);
  if (!windows.empty()) {
    lists.arena_bytes = static_cast<uint64_t>(of_rank.arena_bytes);
  }
}

// The messages of a rank of another part: those of `first` with other peers.
EmittedMessages EmitShifted(Builder& builder, const Module& module,
                            const RankMessages& first, uint32_t source_shift,
                            uint32_t destination_shift) {
  return {.messages = builder.CreateVectorOfStructs<fb::Message>(
              first.ends.size(), [&](size_t i, fb::Message* message) {
                const fb::Message& of_first = first.ends[i].message;
                const Rank peer{static_cast<int32_t>(of_first.peer())};
                *message = fb::Message(
                    of_first.round(),
                    of_first.peer() + (module.IsRelay(peer) ? destination_shift
                                                            : source_shift),
                    of_first.copies(), of_first.kind(), of_first.broadcast(),
                    /*reserved2=*/0, of_first.staging_offset(),
                    of_first.size_bytes());
              })};
}

absl::StatusOr<OffsetVector<Offset<fb::RankProgram>>> EmitPrograms(
    Builder& builder, const Module& module, CopyLowering& lowering,
    QuantizeLowering& quantize_lowering, MessagePacker& packer) {
  // Filling comes first in every program, so its lists get the first numbers.
  std::vector<uint32_t> fills;
  for (int32_t rank = 0; rank < module.world_size(); ++rank) {
    fills.push_back(lowering.Fill(module.FirstOf(Rank{rank})));
  }
  const absl::StatusOr<LoweredMessages> lowered =
      LowerMessages(module, lowering);
  if (!lowered.ok()) return lowered.status();
  const std::vector<RankMessages>& ranks = lowered->ranks;
  packer.StartLists(lowering.lists().size());
  absl::flat_hash_map<std::vector<BufferId>, OffsetVector<uint32_t>> shared;
  std::vector<ProgramLists> lists(ranks.size());
  std::vector<Offset<fb::RankProgram>> programs;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Rank id{static_cast<int32_t>(rank)};
    const size_t first = IndexOf(module.FirstOf(id));
    if (first == rank) {
      ProgramLists& own = lists[rank];
      const auto [buffers, is_new] = shared.try_emplace(module.buffers_of(id));
      if (is_new) {
        std::vector<uint32_t> numbers;
        for (BufferId held : buffers->first) {
          numbers.push_back(static_cast<uint32_t>(IndexOf(held)));
        }
        buffers->second = builder.CreateVector(numbers);
      }
      own.buffers = buffers->second;
      own.messages = EmitMessages(builder, ranks[rank],
                                  module.is_compact ? &packer : nullptr);
      own.relays = StructsOrNone(builder, LowerRelays(module, *lowered, rank));
      if (!module.quantizes.empty()) {
        EmitQuantizes(builder, module.quantizes[rank], quantize_lowering, own);
      }
    }
    const ProgramLists& of_first = lists[first];
    EmittedMessages messages = of_first.messages;
    uint32_t source_shift = 0;
    uint32_t destination_shift = 0;
    if (first != rank) {
      const AlikeParts alike = module.AlikePartsOf(id);
      const int32_t part = module.PartOf(id) - alike.first;
      source_shift = static_cast<uint32_t>(part * alike.source_shift);
      destination_shift = static_cast<uint32_t>(part * alike.destination_shift);
      if (!module.is_compact) {
        messages = EmitShifted(builder, module, ranks[first], source_shift,
                               destination_shift);
        source_shift = destination_shift = 0;
      }
    }
    programs.push_back(fb::CreateRankProgram(
        builder, of_first.buffers, messages.messages, fills[rank],
        static_cast<uint64_t>(ranks[first].staging_bytes),
        static_cast<uint32_t>(module.topology.host[rank]),
        of_first.scratch_buffers, of_first.quantizes, of_first.windows,
        of_first.arena_bytes, of_first.relays, source_shift, destination_shift,
        messages.packed_list));
  }
  return builder.CreateVector(programs);
}

OffsetVector<Offset<fb::Skip>> EmitSkips(Builder& builder,
                                         const Module& module) {
  std::vector<Offset<fb::Skip>> skips;
  for (const Skip& skip : module.skips) {
    const auto name = builder.CreateString(skip.name);
    const auto detail = builder.CreateString(skip.detail);
    skips.push_back(fb::CreateSkip(builder, name, skip.reason, detail));
  }
  return builder.CreateVector(skips);
}

OffsetVector<Offset<fb::Requirement>> EmitRequirements(Builder& builder,
                                                       const Module& module) {
  std::vector<Offset<fb::Requirement>> requirements;
  const auto add = [&](fb::Side side, const SideLayout& layout) {
    for (const auto& [key, value] : layout.requirements) {
      const auto key_offset = builder.CreateString(key);
      const auto value_offset = builder.CreateString(value);
      requirements.push_back(
          fb::CreateRequirement(builder, side, key_offset, value_offset));
    }
  };
  add(fb::Side::kSource, module.source);
  add(fb::Side::kDestination, module.destination);
  if (requirements.empty()) return 0;
  return builder.CreateVector(requirements);
}

Offset<fb::Stats> EmitStats(Builder& builder, const Stats& stats) {
  fb::StatsBuilder of_bytes(builder);
  of_bytes.add_moved_bytes(static_cast<uint64_t>(stats.moved_bytes));
  of_bytes.add_local_bytes(static_cast<uint64_t>(stats.local_bytes));
  of_bytes.add_peer_bytes(static_cast<uint64_t>(stats.peer_bytes));
  of_bytes.add_network_bytes(static_cast<uint64_t>(stats.network_bytes));
  of_bytes.add_relayed_bytes(static_cast<uint64_t>(stats.relayed_bytes));
  return of_bytes.Finish();
}

Offset<fb::Estimates> EmitEstimates(Builder& builder, const Stats& stats) {
  return fb::CreateEstimates(builder, stats.lower_bound_seconds,
                             stats.predicted_seconds,
                             builder.CreateString(stats.binding_link));
}

absl::StatusOr<Offset<fb::Body>> EmitBody(Builder& builder,
                                          const Module& module) {
  std::vector<Offset<fb::Param>> param_offsets;
  for (const Param& param : module.params) {
    param_offsets.push_back(EmitParam(builder, param));
  }
  const auto params = builder.CreateVector(param_offsets);
  std::vector<Offset<fb::Buffer>> buffer_offsets;
  for (const Buffer& buffer : module.buffers.all()) {
    buffer_offsets.push_back(EmitBuffer(builder, buffer));
  }
  const auto buffers = builder.CreateVector(buffer_offsets);
  CopyLowering lowering(module);
  QuantizeLowering quantize_lowering(module);
  MessagePacker packer(module);
  const auto programs =
      EmitPrograms(builder, module, lowering, quantize_lowering, packer);
  if (!programs.ok()) return programs.status();
  const Offset<fb::PackedMessages> packed = packer.Emit(builder);
  std::vector<fb::Round> round_structs;
  for (const Round& round : module.rounds) {
    round_structs.emplace_back(round.route, round.mechanism, /*reserved=*/0);
  }
  const auto rounds = builder.CreateVectorOfStructs(round_structs);
  const auto lists = builder.CreateVectorOfStructs(lowering.lists());
  const auto copies = builder.CreateVectorOfStructs(lowering.copies());
  const auto loops = builder.CreateVectorOfStructs(lowering.loops());
  const auto skips = EmitSkips(builder, module);
  std::vector<Offset<fb::Cast>> cast_offsets;
  for (const auto& [from, to] : module.casts) {
    cast_offsets.push_back(fb::CreateCast(builder, from, to));
  }
  const auto casts = builder.CreateVector(cast_offsets);
  const auto limits = fb::CreateLimits(
      builder, static_cast<uint64_t>(module.limits.bucket_bytes),
      static_cast<uint64_t>(module.limits.staging_bytes),
      static_cast<uint32_t>(module.limits.slots),
      static_cast<uint32_t>(module.limits.operations_per_round),
      static_cast<uint32_t>(module.limits.network_peers),
      static_cast<uint32_t>(module.limits.direct_multiprocessors),
      module.limits.direct_pulls);
  const auto stats = EmitStats(builder, module.stats);
  const auto quantizations = EmitQuantizations(builder, module);
  const auto quantize_loops = StructsOrNone(builder, quantize_lowering.loops());
  const auto requirements = EmitRequirements(builder, module);
  Offset<fb::Delta> delta = 0;
  if (module.delta.has_value()) {
    const auto rungs = module.delta->rungs.empty()
                           ? Offset<flatbuffers::Vector<uint8_t>>()
                           : builder.CreateVector(module.delta->rungs);
    delta = fb::CreateDelta(builder, module.delta->changes,
                            static_cast<uint32_t>(module.delta->dense_every),
                            module.delta->check, rungs);
  }
  Offset<fb::Topology> topology = 0;
  if (const std::optional<Fabric>& fabric = module.topology.fabric) {
    const auto machine = fabric->machine.empty()
                             ? Offset<flatbuffers::String>()
                             : builder.CreateString(fabric->machine);
    topology = fb::CreateTopology(
        builder, machine,
        static_cast<uint32_t>(fabric->hosts_per_nvlink_domain),
        static_cast<uint32_t>(fabric->gpus_per_nic),
        static_cast<uint32_t>(fabric->hosts_per_leaf), fabric->rails,
        fabric->spine_oversubscription, module.topology.peer_bytes_per_second,
        fabric->nic_bytes_per_second);
  }
  return fb::CreateBody(builder, static_cast<uint32_t>(module.source_ranks()),
                        params, buffers, *programs, rounds, lists, copies,
                        loops, skips, casts, limits, stats,
                        module.topology.colocated, quantizations,
                        quantize_loops, requirements, delta, topology, packed);
}

}  // namespace

absl::StatusOr<std::vector<uint8_t>> EmitPlan(const Module& module) {
  // Large enough, so that it seldom has to be moved: what is not used of it is
  // never touched.
  constexpr size_t kLeastBytes = 1 << 20;
  size_t ends = 2 * module.messages.size();
  if (module.fold.has_value() && !module.is_compact) {
    ends *= static_cast<size_t>(module.parts());
  }
  Builder body_builder(
      std::min(kLeastBytes + 2 * ends * sizeof(fb::Message),
               static_cast<size_t>(FLATBUFFERS_MAX_BUFFER_SIZE / 2)));
  const absl::StatusOr<Offset<fb::Body>> emitted =
      EmitBody(body_builder, module);
  if (!emitted.ok()) return emitted.status();
  body_builder.Finish(*emitted);
  const absl::Span<const uint8_t> body(body_builder.GetBufferPointer(),
                                       body_builder.GetSize());
  Builder builder(body.size() + 1024);
  const fb::Digest body_digest = DigestOf(body);
  // The body is a buffer of its own, read in place: keep its 8-byte fields
  // aligned.
  builder.ForceVectorAlignment(body.size(), sizeof(uint8_t), 16);
  const auto body_vector = builder.CreateVector(body.data(), body.size());
  const auto producer = builder.CreateString("refitc " REFIT_VERSION);
  std::vector<Offset<fb::JobFact>> facts;
  for (const auto& [key, value] : module.job_facts) {
    facts.push_back(fb::CreateJobFact(builder, builder.CreateString(key),
                                      builder.CreateString(value)));
  }
  const auto job = builder.CreateVector(facts);
  const auto estimates = EmitEstimates(builder, module.stats);
  const auto provenance =
      fb::CreateProvenance(builder, producer, job, estimates);
  // Only what the plan uses, so that older executors run what they can.
  const fb::Body& emitted_body = *flatbuffers::GetRoot<fb::Body>(body.data());
  const uint64_t features = RequiredFeatures(emitted_body);
  const fb::Digest no_digest;  // until the bytes are there
  builder.Finish(
      fb::CreatePlan(builder, FormatVersionFor(emitted_body, features),
                     features, &module.inputs_digest, &body_digest, body_vector,
                     provenance, &no_digest),
      fb::PlanIdentifier());
  std::vector<uint8_t> bytes(builder.GetBufferPointer(),
                             builder.GetBufferPointer() + builder.GetSize());
  const fb::Plan& plan = *fb::GetPlan(bytes.data());
  const fb::Digest file_digest = FileDigestOf(bytes, plan);
  std::memcpy(
      bytes.data() +
          (reinterpret_cast<const uint8_t*>(plan.file_digest()) - bytes.data()),
      &file_digest, sizeof(file_digest));
  return bytes;
}

}  // namespace refit
