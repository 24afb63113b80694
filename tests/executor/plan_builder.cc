#include "tests/executor/plan_builder.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <utility>

namespace refit {
namespace {

using flatbuffers::FlatBufferBuilder;
using flatbuffers::Offset;

uint64_t Aligned(uint64_t size_bytes) {
  return (size_bytes + kStagingAlignmentBytes - 1) / kStagingAlignmentBytes *
         kStagingAlignmentBytes;
}

auto IndexDims(FlatBufferBuilder& builder,
               const std::vector<uint32_t>& counts) {
  std::vector<Offset<fb::IndexDim>> dims;
  for (const uint32_t count : counts) {
    dims.push_back(fb::CreateIndexDim(builder, 0, count));
  }
  return builder.CreateVector(dims);
}

// Body.loops, copies and copy_lists while they grow.
struct CopyPools {
  std::vector<fb::Loop> loops;
  std::vector<fb::Copy> copies;
  std::vector<fb::CopyList> lists;

  uint32_t AddList(const std::vector<PlanBuilder::Copy>& list) {
    lists.emplace_back(copies.size(), list.size());
    for (const PlanBuilder::Copy& copy : list) {
      copies.emplace_back(copy.slot, loops.size(), copy.loops.size(),
                          copy.wire_dtype, 0, 0, copy.offset,
                          copy.staging_offset);
      loops.insert(loops.end(), copy.loops.begin(), copy.loops.end());
    }
    return static_cast<uint32_t>(lists.size() - 1);
  }
};

Offset<fb::Buffer> CreateBuffer(FlatBufferBuilder& builder,
                                const PlanBuilder::Buffer& buffer) {
  std::vector<Offset<fb::Fragment>> fragments;
  for (const PlanBuilder::Fragment& f : buffer.fragments) {
    fragments.push_back(fb::CreateFragmentDirect(
        builder, f.param, &f.lo, &f.extent, f.offset, &f.stride));
  }
  std::vector<Offset<fb::Region>> regions;
  for (const PlanBuilder::Region& r : buffer.regions) {
    const bool skip = r.kind == fb::RegionKind::kSkip;
    regions.push_back(fb::CreateRegionDirect(
        builder, r.kind,
        skip ? fb::SkipReason::kExcluded : fb::SkipReason::kUnspecified,
        r.offset, &r.extent, &r.stride, skip ? "by the test" : nullptr));
  }
  const auto name = builder.CreateString(buffer.name);
  const auto index = IndexDims(builder, buffer.index);
  const auto shape = builder.CreateVector(buffer.shape);
  const auto fragments_vector = builder.CreateVector(fragments);
  const auto regions_vector = builder.CreateVector(regions);
  std::vector<Offset<fb::PostHook>> hooks;
  for (const std::string& hook : buffer.post_hooks) {
    hooks.push_back(
        fb::CreatePostHookDirect(builder, hook.c_str(), "for the test"));
  }
  return fb::CreateBuffer(builder, name, index, shape, buffer.dtype,
                          fragments_vector, regions_vector,
                          builder.CreateVector(hooks));
}

Offset<fb::RankProgram> CreateProgram(FlatBufferBuilder& builder,
                                      const PlanBuilder::Rank& rank,
                                      CopyPools& pools) {
  std::vector<PlanBuilder::Message> messages = rank.messages;
  std::stable_sort(messages.begin(), messages.end(),
                   [](const auto& a, const auto& b) {
                     // Receives before sends.
                     return std::tuple(a.round, b.kind, a.peer) <
                            std::tuple(b.round, a.kind, b.peer);
                   });
  std::vector<fb::Message> structs;
  for (const PlanBuilder::Message& m : messages) {
    structs.emplace_back(m.round, m.peer, pools.AddList(m.copies), m.kind, 0, 0,
                         m.staging_offset, m.size_bytes);
  }
  const uint32_t fills = pools.AddList(rank.fills);
  const auto buffers = builder.CreateVector(rank.buffers);
  const auto message_vector = builder.CreateVectorOfStructs(structs);
  flatbuffers::Offset<flatbuffers::Vector<const fb::Relay*>> relays = 0;
  if (!rank.relays.empty()) {
    relays = builder.CreateVectorOfStructs(rank.relays);
  }
  return fb::CreateRankProgram(
      builder, buffers, message_vector, fills, rank.staging_bytes, /*host=*/0,
      /*scratch_buffers=*/0, /*quantizes=*/0, /*scratch_windows=*/0,
      /*scratch_arena_bytes=*/0, relays);
}

Offset<fb::Body> CreateBody(FlatBufferBuilder& builder,
                            const PlanBuilder& plan) {
  std::vector<Offset<fb::Param>> params;
  for (const PlanBuilder::Param& p : plan.params) {
    const auto name = builder.CreateString(p.name);
    const auto index = IndexDims(builder, p.index);
    const auto shape = builder.CreateVector(p.shape);
    params.push_back(
        fb::CreateParam(builder, name, index, shape, p.dtype, p.skip));
  }
  std::vector<Offset<fb::Buffer>> buffers;
  for (const PlanBuilder::Buffer& b : plan.buffers) {
    buffers.push_back(CreateBuffer(builder, b));
  }
  CopyPools pools;
  std::vector<Offset<fb::RankProgram>> programs;
  for (const PlanBuilder::Rank& r : plan.ranks) {
    programs.push_back(CreateProgram(builder, r, pools));
  }
  std::vector<fb::Round> rounds;
  for (uint32_t i = 0; i < plan.rounds; ++i) {
    rounds.emplace_back(plan.route,
                        i < plan.mechanisms.size() ? plan.mechanisms[i]
                                                   : fb::Mechanism::kStaged,
                        0);
  }
  const bool has_deltas = plan.delta != fb::DeltaChanges::kUnspecified;
  // Of so small buckets messages of a few elements are coded too.
  const auto limits = fb::CreateLimits(
      builder, uint64_t{1} << (has_deltas ? 12 : 40), uint64_t{1} << 40, 1,
      1024,
      /*network_peers=*/0, /*direct_multiprocessors=*/0, plan.direct_pulls);
  const auto stats = fb::CreateStatsDirect(builder);
  Offset<fb::Delta> delta = 0;
  if (has_deltas) {
    const auto rungs =
        builder.CreateVector(std::vector<uint8_t>{7, 6, 5, 4, 3, 2, 1});
    delta = fb::CreateDelta(builder, plan.delta, /*dense_every=*/0,
                            /*check=*/true, rungs);
  }
  return fb::CreateBody(
      builder, plan.source_ranks, builder.CreateVector(params),
      builder.CreateVector(buffers), builder.CreateVector(programs),
      builder.CreateVectorOfStructs(rounds),
      builder.CreateVectorOfStructs(pools.lists),
      builder.CreateVectorOfStructs(pools.copies),
      builder.CreateVectorOfStructs(pools.loops),
      builder.CreateVector(std::vector<Offset<fb::Skip>>()),
      builder.CreateVector(std::vector<Offset<fb::Cast>>()), limits, stats,
      /*colocated=*/false, /*quantizations=*/0, /*quantize_loops=*/0,
      /*requirements=*/0, delta);
}

}  // namespace

std::vector<uint8_t> PlanBuilder::Bytes() const {
  FlatBufferBuilder inner;
  inner.Finish(CreateBody(inner, *this));
  const fb::Digest inputs_digest;
  const fb::Digest body_digest =
      DigestOf({inner.GetBufferPointer(), inner.GetSize()});
  FlatBufferBuilder outer;
  outer.ForceVectorAlignment(inner.GetSize(), 1, 16);
  const auto body =
      outer.CreateVector(inner.GetBufferPointer(), inner.GetSize());
  const auto provenance = fb::CreateProvenanceDirect(outer, "a test");
  const fb::Body& root =
      *flatbuffers::GetRoot<fb::Body>(inner.GetBufferPointer());
  const uint64_t features = RequiredFeatures(root);
  fb::FinishPlanBuffer(
      outer, fb::CreatePlan(outer, FormatVersionFor(root, features), features,
                            &inputs_digest, &body_digest, body, provenance));
  return {outer.GetBufferPointer(), outer.GetBufferPointer() + outer.GetSize()};
}

PlanFile PlanBuilder::Open() const {
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(Bytes());
  if (!plan.ok()) {
    std::cerr << "the test's plan is not sound: " << plan.status() << "\n";
    std::abort();
  }
  return *std::move(plan);
}

PlanBuilder ReshardPlan(const ReshardOptions& options) {
  const uint64_t sources = options.source_ranks;
  const uint64_t destinations = options.destination_ranks;
  const uint64_t layers = options.layers;
  const uint64_t rows = options.rows / sources;             // of a source rank
  const uint64_t columns = options.columns / destinations;  // of a destination
  const uint64_t width = columns + options.padding;
  PlanBuilder plan;
  plan.source_ranks = options.source_ranks;
  plan.rounds = options.layers;
  plan.mechanisms.assign(options.layers, options.mechanism);
  plan.route = options.route;
  plan.params.push_back({.name = "model.layers.{0}.weight",
                         .index = {options.layers},
                         .shape = {options.rows, options.columns},
                         .dtype = options.source_dtype});
  for (uint32_t s = 0; s < sources; ++s) {
    plan.buffers.push_back(
        {.name = "decoder.layers.{0}.weight",
         .index = {options.layers},
         .shape = {rows, options.columns},
         .dtype = options.source_dtype,
         .fragments = {{.param = 0,
                        .lo = {0, s * rows, 0},
                        .extent = {layers, rows, options.columns},
                        .offset = 0,
                        .stride = {rows * options.columns, options.columns,
                                   1}}},
         .regions = {}});
    plan.ranks.push_back({.buffers = {s}, .messages = {}, .fills = {}});
  }
  for (uint32_t d = 0; d < destinations; ++d) {
    PlanBuilder::Buffer buffer = {
        .name = "model.layers.{0}.weight",
        .index = {options.layers},
        .shape = {options.rows, width},
        .dtype = options.destination_dtype,
        .fragments = {{.param = 0,
                       .lo = {0, 0, d * columns},
                       .extent = {layers, options.rows, columns},
                       .offset = 0,
                       .stride = {options.rows * width, width, 1}}},
        .regions = {}};
    PlanBuilder::Rank rank = {
        .buffers = {static_cast<uint32_t>(plan.buffers.size())},
        .messages = {},
        .fills = {}};
    if (options.padding > 0) {
      buffer.regions.push_back(
          {.kind = options.padding_kind,
           .offset = columns,
           .extent = {layers * options.rows, options.padding},
           .stride = {width, 1}});
    }
    if (options.padding > 0 && options.padding_kind == fb::RegionKind::kFill) {
      PlanBuilder::Copy fill = {.slot = 0,
                                .offset = columns,
                                .loops = {},
                                .wire_dtype = options.destination_dtype};
      if (layers > 1) fill.loops.emplace_back(layers, options.rows * width);
      if (options.rows > 1) fill.loops.emplace_back(options.rows, width);
      if (options.padding > 1) fill.loops.emplace_back(options.padding, 1);
      rank.fills.push_back(fill);
    }
    plan.buffers.push_back(buffer);
    plan.ranks.push_back(rank);
  }
  // Casts happen at the sender.
  const uint64_t size_bytes =
      rows * columns * DTypeBytes(options.destination_dtype);
  const auto box = [&](uint64_t stride) {
    std::vector<fb::Loop> loops;
    if (rows > 1) loops.emplace_back(rows, stride);
    if (columns > 1) loops.emplace_back(columns, 1);
    return loops;
  };
  for (uint32_t layer = 0; layer < layers; ++layer) {
    for (uint32_t s = 0; s < sources; ++s) {
      for (uint32_t d = 0; d < destinations; ++d) {
        PlanBuilder::Message send = {
            .round = layer,
            .kind = fb::MessageKind::kSend,
            .peer = static_cast<uint32_t>(sources + d),
            .staging_offset = d * Aligned(size_bytes),
            .size_bytes = size_bytes,
            .copies = {{.slot = 0,
                        .offset = layer * rows * options.columns + d * columns,
                        .loops = box(options.columns),
                        .wire_dtype = options.destination_dtype}}};
        PlanBuilder::Message recv = send;
        recv.kind = fb::MessageKind::kRecv;
        recv.peer = s;
        recv.staging_offset = s * Aligned(size_bytes);
        recv.copies[0].offset = (layer * options.rows + s * rows) * width;
        recv.copies[0].loops = box(width);
        plan.ranks[s].messages.push_back(send);
        plan.ranks[sources + d].messages.push_back(recv);
      }
    }
  }
  if (options.mechanism == fb::Mechanism::kDirect) {
    for (PlanBuilder::Rank& rank : plan.ranks) {
      for (PlanBuilder::Message& m : rank.messages) m.staging_offset = 0;
    }
    return plan;
  }
  for (uint32_t rank = 0; rank < plan.ranks.size(); ++rank) {
    plan.ranks[rank].staging_bytes =
        (rank < sources ? destinations : sources) * Aligned(size_bytes);
  }
  return plan;
}

PlanBuilder RelayPlan(const RelayOptions& options) {
  const uint32_t replicas = options.replicas;
  const uint64_t rows = options.rows_per_stripe * replicas;
  const uint64_t stripe = options.rows_per_stripe * options.columns;
  const uint64_t layer_elements = rows * options.columns;
  PlanBuilder plan;
  plan.source_ranks = 1;
  plan.rounds = options.layers + 1;
  plan.mechanisms.assign(plan.rounds, fb::Mechanism::kDirect);
  plan.params.push_back({.name = "layers.{0}.weight",
                         .index = {options.layers},
                         .shape = {rows, options.columns}});
  plan.buffers.push_back(
      {.name = "layers.{0}.weight",
       .index = {options.layers},
       .shape = {rows, options.columns},
       .fragments = {{.param = 0,
                      .lo = {0, 0, 0},
                      .extent = {options.layers, rows, options.columns},
                      .offset = 0,
                      .stride = {layer_elements, options.columns, 1}}},
       .regions = {}});
  plan.ranks.assign(1 + replicas,
                    {.buffers = {0}, .messages = {}, .fills = {}});
  const auto add = [&](uint32_t rank, uint32_t round, fb::MessageKind kind,
                       uint32_t peer, uint32_t layer, uint32_t member) {
    plan.ranks[rank].messages.push_back(
        {.round = round,
         .kind = kind,
         .peer = peer,
         .staging_offset = 0,
         .size_bytes = stripe * 2,
         .copies = {{.slot = 0,
                     .offset = layer * layer_elements + (member - 1) * stripe,
                     .loops = {{stripe, 1}}}}});
  };
  for (uint32_t round = 0; round < plan.rounds; ++round) {
    for (uint32_t member = 1; member <= replicas; ++member) {
      if (round < options.layers) {
        add(member, round, fb::MessageKind::kRecv, 0, round, member);
        add(0, round, fb::MessageKind::kSend, member, round, member);
      }
      if (round == 0) continue;
      for (uint32_t other = 1; other <= replicas; ++other) {
        if (other == member) continue;
        add(member, round, fb::MessageKind::kRecv, other, round - 1, other);
      }
      for (uint32_t other = 1; other <= replicas; ++other) {
        if (other == member) continue;
        add(member, round, fb::MessageKind::kSend, other, round - 1, member);
      }
    }
  }
  return plan;
}

}  // namespace refit
