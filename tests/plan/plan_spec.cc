#include "tests/plan/plan_spec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

namespace refit {
namespace {

using Builder = flatbuffers::FlatBufferBuilder;
template <typename T>
using Offset = flatbuffers::Offset<T>;

Offset<flatbuffers::Vector<Offset<fb::IndexDim>>> BuildIndex(
    const std::vector<PlanSpec::IndexDim>& index, Builder& builder) {
  if (index.empty()) return 0;
  std::vector<Offset<fb::IndexDim>> dims;
  for (const PlanSpec::IndexDim& dim : index) {
    const auto numbers =
        dim.numbers.empty() ? 0 : builder.CreateVector(dim.numbers);
    dims.push_back(fb::CreateIndexDim(builder, dim.first, dim.count, numbers));
  }
  return builder.CreateVector(dims);
}

Offset<fb::Param> BuildParam(const PlanSpec::Param& param, Builder& builder) {
  const auto name = builder.CreateString(param.name);
  const auto index = BuildIndex(param.index, builder);
  const auto shape = builder.CreateVector(param.shape);
  return fb::CreateParam(builder, name, index, shape, param.dtype, param.skip);
}

Offset<fb::Buffer> BuildBuffer(const PlanSpec::Buffer& buffer,
                               Builder& builder) {
  std::vector<Offset<fb::Fragment>> fragments;
  for (const PlanSpec::Fragment& fragment : buffer.fragments) {
    const auto lo = builder.CreateVector(fragment.lo);
    const auto extent = builder.CreateVector(fragment.extent);
    const auto stride = builder.CreateVector(fragment.stride);
    fragments.push_back(fb::CreateFragment(builder, fragment.param, lo, extent,
                                           fragment.offset, stride));
  }
  std::vector<Offset<fb::Region>> regions;
  for (const PlanSpec::Region& region : buffer.regions) {
    const auto extent = builder.CreateVector(region.extent);
    const auto stride = builder.CreateVector(region.stride);
    const auto detail =
        region.detail.empty() ? 0 : builder.CreateString(region.detail);
    regions.push_back(fb::CreateRegion(builder, region.kind, region.reason,
                                       region.offset, extent, stride, detail));
  }
  const auto name = builder.CreateString(buffer.name);
  const auto index = BuildIndex(buffer.index, builder);
  const auto shape = builder.CreateVector(buffer.shape);
  const auto fragments_vector = builder.CreateVector(fragments);
  const auto regions_vector = builder.CreateVector(regions);
  std::vector<Offset<fb::PostHook>> hooks;
  for (const PlanSpec::PostHook& hook : buffer.post_hooks) {
    hooks.push_back(fb::CreatePostHookDirect(builder, hook.name.c_str(),
                                             hook.detail.c_str()));
  }
  const auto hooks_vector = hooks.empty() ? 0 : builder.CreateVector(hooks);
  return fb::CreateBuffer(builder, name, index, shape, buffer.dtype,
                          fragments_vector, regions_vector, hooks_vector);
}

// As refitc writes them: ranks that hold the same share the list.
using BufferLists =
    std::map<std::vector<uint32_t>, Offset<flatbuffers::Vector<uint32_t>>>;

// What a program that shares its lists has of its own, and those lists.
struct BuiltLists {
  Offset<flatbuffers::Vector<uint32_t>> buffers;
  Offset<flatbuffers::Vector<const fb::Message*>> messages;
};

Offset<fb::RankProgram> BuildSharing(const PlanSpec& spec,
                                     const PlanSpec::Program& program,
                                     const std::vector<BuiltLists>& lists,
                                     Builder& builder) {
  const PlanSpec::Program& shared = spec.programs[*program.shares];
  const BuiltLists& built = lists[*program.shares];
  return fb::CreateRankProgram(builder, built.buffers, built.messages,
                               shared.fills, shared.staging_bytes, program.host,
                               0, 0, 0, 0, 0, program.source_shift,
                               program.destination_shift, shared.message_list);
}

Offset<fb::RankProgram> BuildProgram(const PlanSpec::Program& program,
                                     Builder& builder,
                                     BufferLists& buffer_lists,
                                     std::vector<BuiltLists>& lists) {
  const auto [known, is_new] = buffer_lists.try_emplace(program.buffers);
  if (is_new) known->second = builder.CreateVector(program.buffers);
  const auto buffers = known->second;
  Offset<MessageVector> messages = 0;
  if (program.message_list == -1 || !program.messages.empty()) {
    messages = builder.CreateVectorOfStructs(program.messages);
  }
  lists.push_back({buffers, messages});
  flatbuffers::Offset<flatbuffers::Vector<const fb::Quantize*>> quantizes = 0;
  if (!program.quantizes.empty()) {
    quantizes = builder.CreateVectorOfStructs(program.quantizes);
  }
  flatbuffers::Offset<flatbuffers::Vector<const fb::ScratchWindow*>> windows =
      0;
  if (!program.scratch_windows.empty()) {
    windows = builder.CreateVectorOfStructs(program.scratch_windows);
  }
  flatbuffers::Offset<flatbuffers::Vector<const fb::Relay*>> relays = 0;
  if (!program.relays.empty()) {
    relays = builder.CreateVectorOfStructs(program.relays);
  }
  return fb::CreateRankProgram(
      builder, buffers, messages, program.fills, program.staging_bytes,
      program.host, program.scratch_buffers, quantizes, windows,
      program.scratch_arena_bytes, relays, program.source_shift,
      program.destination_shift, program.message_list);
}

struct CopyTables {
  std::vector<fb::CopyList> lists;
  std::vector<fb::Copy> copies;
  std::vector<fb::Loop> loops;
};

CopyTables BuildCopies(const PlanSpec& spec) {
  CopyTables tables;
  for (const std::vector<PlanSpec::Copy>& list : spec.copy_lists) {
    tables.lists.emplace_back(static_cast<uint32_t>(tables.copies.size()),
                              static_cast<uint32_t>(list.size()));
    for (const PlanSpec::Copy& copy : list) {
      tables.copies.emplace_back(
          copy.slot, static_cast<uint32_t>(tables.loops.size()),
          static_cast<uint16_t>(copy.loops.size()), copy.dtype, 0, 0,
          copy.offset, copy.staging_offset);
      tables.loops.insert(tables.loops.end(), copy.loops.begin(),
                          copy.loops.end());
    }
  }
  for (const uint32_t list : spec.shared_copy_lists) {
    tables.lists.push_back(fb::CopyList(tables.lists[list]));
  }
  return tables;
}

std::vector<uint8_t> BuildBody(const PlanSpec& spec) {
  Builder builder;
  std::vector<Offset<fb::Param>> params;
  for (const PlanSpec::Param& param : spec.params)
    params.push_back(BuildParam(param, builder));
  std::vector<Offset<fb::Buffer>> buffers;
  for (const PlanSpec::Buffer& buffer : spec.buffers) {
    buffers.push_back(BuildBuffer(buffer, builder));
  }
  std::vector<Offset<fb::RankProgram>> programs;
  std::vector<BuiltLists> lists;
  BufferLists buffer_lists;
  for (const PlanSpec::Program& program : spec.programs) {
    if (program.shares.has_value()) {
      lists.push_back(lists[*program.shares]);
      programs.push_back(BuildSharing(spec, program, lists, builder));
    } else {
      programs.push_back(BuildProgram(program, builder, buffer_lists, lists));
    }
  }
  std::vector<Offset<fb::Skip>> skips;
  for (const PlanSpec::Skip& skip : spec.skips) {
    const auto name = builder.CreateString(skip.name);
    const auto detail = builder.CreateString(skip.detail);
    skips.push_back(fb::CreateSkip(builder, name, skip.reason, detail));
  }
  std::vector<Offset<fb::Cast>> casts;
  for (const PlanSpec::Cast& cast : spec.casts) {
    casts.push_back(fb::CreateCast(builder, cast.from, cast.to));
  }
  std::vector<fb::Round> rounds;
  for (size_t i = 0; i < spec.rounds.size(); ++i) {
    rounds.emplace_back(spec.rounds[i],
                        i < spec.mechanisms.size() ? spec.mechanisms[i]
                                                   : fb::Mechanism::kStaged,
                        0);
  }
  const CopyTables copies = BuildCopies(spec);
  const auto params_vector = builder.CreateVector(params);
  const auto buffers_vector = builder.CreateVector(buffers);
  const auto programs_vector = builder.CreateVector(programs);
  const auto rounds_vector = builder.CreateVectorOfStructs(rounds);
  const auto lists_vector = builder.CreateVectorOfStructs(copies.lists);
  const auto copies_vector = builder.CreateVectorOfStructs(copies.copies);
  const auto loops_vector = builder.CreateVectorOfStructs(copies.loops);
  const auto skips_vector = builder.CreateVector(skips);
  const auto casts_vector = builder.CreateVector(casts);
  const auto limits = fb::CreateLimits(
      builder, spec.bucket_bytes, spec.staging_bytes, spec.slots,
      spec.operations_per_round, spec.network_peers,
      spec.direct_multiprocessors, spec.direct_pulls);
  const auto link = builder.CreateString("egress of rank 0");
  const auto stats = fb::CreateStats(builder, spec.moved_bytes, 0,
                                     spec.moved_bytes, 0, 0.001, 0.0025, link);
  std::vector<Offset<fb::Quantization>> quantizations;
  for (const PlanSpec::Quantization& quantization : spec.quantizations) {
    quantizations.push_back(fb::CreateQuantization(
        builder, quantization.of, quantization.data, quantization.scales,
        quantization.block_rows, quantization.block_columns,
        quantization.format));
  }
  const auto quantizations_vector = builder.CreateVector(quantizations);
  const auto quantize_loops_vector =
      builder.CreateVectorOfStructs(spec.quantize_loops);
  std::vector<Offset<fb::Requirement>> requirements;
  for (const PlanSpec::Requirement& requirement : spec.requirements) {
    requirements.push_back(fb::CreateRequirementDirect(
        builder, requirement.side, requirement.key.c_str(),
        requirement.value.c_str()));
  }
  const auto requirements_vector = builder.CreateVector(requirements);
  Offset<fb::Delta> delta = 0;
  if (spec.delta.has_value()) {
    const auto rungs = spec.delta->rungs.empty()
                           ? Offset<flatbuffers::Vector<uint8_t>>()
                           : builder.CreateVector(spec.delta->rungs);
    delta = fb::CreateDelta(builder, spec.delta->changes,
                            spec.delta->dense_every, spec.delta->check, rungs);
  }
  Offset<fb::Topology> topology = 0;
  if (const std::optional<PlanSpec::Topology>& of = spec.topology) {
    topology = fb::CreateTopologyDirect(
        builder, of->machine.empty() ? nullptr : of->machine.c_str(),
        of->hosts_per_nvlink_domain, of->gpus_per_nic, of->hosts_per_leaf,
        of->rails, of->spine_oversubscription, of->peer_bytes_per_second,
        of->network_bytes_per_second);
  }
  builder.Finish(fb::CreateBody(
      builder, spec.source_ranks, params_vector, buffers_vector,
      programs_vector, rounds_vector, lists_vector, copies_vector, loops_vector,
      skips_vector, casts_vector, limits, stats, spec.colocated,
      quantizations_vector, quantize_loops_vector, requirements_vector, delta,
      topology,
      spec.packed_messages.has_value()
          ? fb::CreatePackedMessages(builder, &*spec.packed_messages)
          : 0));
  return {builder.GetBufferPointer(),
          builder.GetBufferPointer() + builder.GetSize()};
}

}  // namespace

fb::Message SendTo(uint32_t peer, uint32_t round, uint32_t copies,
                   uint64_t staging_offset, uint64_t size_bytes) {
  return fb::Message(round, peer, copies, fb::MessageKind::kSend, 0, 0,
                     staging_offset, size_bytes);
}

fb::Message RecvFrom(uint32_t peer, uint32_t round, uint32_t copies,
                     uint64_t staging_offset, uint64_t size_bytes) {
  return fb::Message(round, peer, copies, fb::MessageKind::kRecv, 0, 0,
                     staging_offset, size_bytes);
}

std::vector<uint8_t> BuildPlan(const PlanSpec& spec) {
  const std::vector<uint8_t> body = BuildBody(spec);
  Builder builder;
  builder.ForceVectorAlignment(body.size(), 1, 16);
  const auto body_vector = builder.CreateVector(body);
  const auto producer = builder.CreateString(spec.producer);
  std::vector<flatbuffers::Offset<fb::JobFact>> facts;
  for (const auto& [key, value] : spec.job) {
    facts.push_back(fb::CreateJobFact(builder, builder.CreateString(key),
                                      builder.CreateString(value)));
  }
  const auto provenance = fb::CreateProvenance(
      builder, producer, spec.job.empty() ? 0 : builder.CreateVector(facts));
  const fb::Digest inputs_digest(0x89abcdef, 0x01234567);
  const fb::Digest body_digest = DigestOf(body);
  const fb::Body& root = *flatbuffers::GetRoot<fb::Body>(body.data());
  // What cannot be read has them too.
  const uint64_t features = CheckPackedMessages(root).ok()
                                ? RequiredFeatures(root)
                                : kFeaturePackedMessages;
  builder.Finish(
      fb::CreatePlan(builder,
                     spec.format_version == 0 ? FormatVersionFor(root, features)
                                              : spec.format_version,
                     features, &inputs_digest, &body_digest, body_vector,
                     provenance),
      fb::PlanIdentifier());
  return {builder.GetBufferPointer(),
          builder.GetBufferPointer() + builder.GetSize()};
}

PlanFile OpenSpec(const PlanSpec& spec) {
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(BuildPlan(spec));
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return *std::move(plan);
}

namespace {

// As schema/FORMAT.md says, without the loader.
std::vector<fb::Message> Unpack(const fb::BodyT& body, int32_t number) {
  const fb::PackedMessagesT& packed = *body.packed_messages;
  const fb::MessageList& list = packed.lists[static_cast<size_t>(number)];
  std::vector<fb::Message> messages;
  size_t at = list.messages_begin();
  for (uint32_t r = 0; r < list.rounds_count(); ++r) {
    const fb::MessageRound& round = packed.rounds[list.rounds_begin() + r];
    uint64_t offset = round.staging_offset();
    for (int i = 0; i < round.receives() + round.sends(); ++i, ++at) {
      uint32_t peer = packed.peers[at];
      uint32_t copies = packed.copies[at];
      if (!packed.peers_high.empty()) peer += packed.peers_high[at] * 65536u;
      if (!packed.copies_high.empty()) {
        copies += packed.copies_high[at] * 65536u;
      }
      const uint64_t size_bytes = packed.sizes[copies];
      messages.push_back(
          i < round.receives()
              ? RecvFrom(peer, round.round(), copies, offset, size_bytes)
              : SendTo(peer, round.round(), copies, offset, size_bytes));
      if (body.rounds[round.round()].mechanism() == fb::Mechanism::kDirect) {
        continue;
      }
      offset += size_bytes + (16 - size_bytes % 16) % 16;
    }
  }
  return messages;
}

}  // namespace

PlanSpec SpecOf(const fb::Body& packed) {
  fb::BodyT body;
  packed.UnPackTo(&body);
  const auto index_of =
      [](const std::vector<std::unique_ptr<fb::IndexDimT>>& index) {
        std::vector<PlanSpec::IndexDim> dims;
        for (const auto& dim : index) {
          dims.push_back({dim->first, dim->count, dim->numbers});
        }
        return dims;
      };
  PlanSpec spec;
  spec.source_ranks = body.source_ranks;
  for (const auto& param : body.params) {
    spec.params.push_back({param->name, index_of(param->index), param->shape,
                           param->dtype, param->skip});
  }
  for (const auto& buffer : body.buffers) {
    PlanSpec::Buffer& to = spec.buffers.emplace_back();
    to = {buffer->name,
          index_of(buffer->index),
          buffer->shape,
          buffer->dtype,
          {},
          {}};
    for (const auto& fragment : buffer->fragments) {
      to.fragments.push_back({fragment->param, fragment->lo, fragment->extent,
                              fragment->offset, fragment->stride});
    }
    for (const auto& region : buffer->regions) {
      to.regions.push_back({region->kind, region->reason, region->offset,
                            region->extent, region->stride, region->detail});
    }
    for (const auto& hook : buffer->post_hooks) {
      to.post_hooks.push_back({hook->name, hook->detail});
    }
  }
  for (const auto& program : body.programs) {
    spec.programs.push_back(
        {program->buffers, program->messages, program->fills,
         program->staging_bytes, program->host, program->scratch_buffers,
         program->quantizes, program->scratch_windows,
         program->scratch_arena_bytes, program->relays, program->source_shift,
         program->destination_shift});
    if (program->message_list >= 0) {
      spec.programs.back().messages = Unpack(body, program->message_list);
    }
  }
  for (const fb::Round& round : body.rounds) {
    spec.rounds.push_back(round.route());
    spec.mechanisms.push_back(round.mechanism());
  }
  for (const fb::CopyList& list : body.copy_lists) {
    std::vector<PlanSpec::Copy>& copies = spec.copy_lists.emplace_back();
    for (uint32_t i = 0; i < list.count(); ++i) {
      const fb::Copy& copy = body.copies[list.begin() + i];
      const auto loops = body.loops.begin() + copy.loops_begin();
      copies.push_back({copy.buffer_slot(),
                        copy.offset(),
                        {loops, loops + copy.loops_count()},
                        copy.staging_offset(),
                        copy.wire_dtype()});
    }
  }
  for (const auto& skip : body.skips) {
    spec.skips.push_back({skip->name, skip->reason, skip->detail});
  }
  for (const auto& cast : body.casts)
    spec.casts.push_back({cast->from, cast->to});
  for (const auto& quantization : body.quantizations) {
    spec.quantizations.push_back(
        {quantization->of, quantization->data, quantization->scales,
         quantization->block_rows, quantization->block_columns,
         quantization->scale_format});
  }
  spec.quantize_loops = body.quantize_loops;
  for (const auto& requirement : body.requirements) {
    spec.requirements.push_back(
        {requirement->side, requirement->key, requirement->value});
  }
  if (body.delta != nullptr) {
    spec.delta = {.changes = body.delta->changes,
                  .dense_every = body.delta->dense_every,
                  .check = body.delta->check,
                  .rungs = body.delta->rungs};
  }
  if (body.topology != nullptr) {
    spec.topology = {
        .machine = body.topology->machine,
        .hosts_per_nvlink_domain = body.topology->hosts_per_nvlink_domain,
        .gpus_per_nic = body.topology->gpus_per_nic,
        .hosts_per_leaf = body.topology->hosts_per_leaf,
        .rails = body.topology->rails,
        .spine_oversubscription = body.topology->spine_oversubscription,
        .peer_bytes_per_second = body.topology->peer_bytes_per_second,
        .network_bytes_per_second = body.topology->network_bytes_per_second};
  }
  spec.bucket_bytes = body.limits->bucket_bytes;
  spec.staging_bytes = body.limits->staging_bytes;
  spec.slots = body.limits->slots;
  spec.operations_per_round = body.limits->operations_per_round;
  spec.network_peers = body.limits->network_peers;
  spec.direct_multiprocessors = body.limits->direct_multiprocessors;
  spec.direct_pulls = body.limits->direct_pulls;
  spec.moved_bytes = body.stats->moved_bytes;
  spec.colocated = body.colocated;
  return spec;
}

void PackMessages(PlanSpec& spec) {
  fb::PackedMessagesT packed;
  packed.sizes.resize(spec.copy_lists.size());
  for (PlanSpec::Program& program : spec.programs) {
    if (program.shares.has_value()) continue;
    const size_t rounds = packed.rounds.size();
    for (const fb::Message& message : program.messages) {
      if (packed.rounds.size() == rounds ||
          packed.rounds.back().round() != message.round()) {
        packed.rounds.emplace_back(message.staging_offset(), message.round(), 0,
                                   0);
      }
      fb::MessageRound& round = packed.rounds.back();
      const int receives = message.kind() == fb::MessageKind::kRecv ? 1 : 0;
      round =
          fb::MessageRound(round.staging_offset(), round.round(),
                           static_cast<uint16_t>(round.receives() + receives),
                           static_cast<uint16_t>(round.sends() + 1 - receives));
      packed.peers.push_back(static_cast<uint16_t>(message.peer()));
      packed.copies.push_back(static_cast<uint16_t>(message.copies()));
      packed.sizes[message.copies()] = message.size_bytes();
    }
    program.message_list = static_cast<int32_t>(packed.lists.size());
    packed.lists.emplace_back(
        static_cast<uint32_t>(rounds),
        static_cast<uint32_t>(packed.rounds.size() - rounds),
        static_cast<uint32_t>(packed.peers.size() - program.messages.size()),
        static_cast<uint32_t>(program.messages.size()));
    program.messages.clear();
  }
  spec.packed_messages = packed;
}

PlanSpec SampleSpec() {
  const std::string kUpProj = "model.layers.{0}.mlp.up_proj.weight";
  PlanSpec spec;
  spec.source_ranks = 2;
  spec.params = {{.name = kUpProj, .index = {{0, 2}}, .shape = {4, 8}},
                 {.name = "model.norm.weight", .index = {}, .shape = {8}},
                 {.name = "lm_head.weight",
                  .index = {},
                  .shape = {16, 8},
                  .skip = fb::SkipReason::kTied}};
  const auto half = [&](uint64_t first_row) {
    return PlanSpec::Buffer{.name = "decoder.layers.{0}.mlp.linear_fc1.weight",
                            .index = {{0, 2}},
                            .shape = {2, 8},
                            .fragments = {{.param = 0,
                                           .lo = {0, first_row, 0},
                                           .extent = {2, 2, 8},
                                           .offset = 0,
                                           .stride = {16, 8, 1}}},
                            .regions = {}};
  };
  const PlanSpec::Fragment norm = {
      .param = 1, .lo = {0}, .extent = {8}, .offset = 0, .stride = {1}};
  spec.buffers = {
      half(0),
      half(2),
      {.name = "decoder.final_layernorm.weight",
       .index = {},
       .shape = {8},
       .fragments = {norm},
       .regions = {}},
      {.name = kUpProj,
       .index = {{0, 2}},
       .shape = {5, 8},
       .fragments = {{.param = 0,
                      .lo = {0, 0, 0},
                      .extent = {2, 4, 8},
                      .offset = 0,
                      .stride = {40, 8, 1}}},
       .regions =
           {{.offset = 32, .extent = {2, 8}, .stride = {40, 1}, .detail = ""}}},
      {.name = "model.norm.weight",
       .index = {},
       .shape = {8},
       .fragments = {norm},
       .regions = {}}};
  const PlanSpec::Copy norm_copy = {
      .slot = 1, .offset = 0, .loops = {{8, 1}}, .staging_offset = 64};
  const auto rows = [](uint64_t offset) {
    return PlanSpec::Copy{
        .slot = 0, .offset = offset, .loops = {{2, 40}, {16, 1}}};
  };
  // No loop may run across two tensors, so one stands for the layers.
  const PlanSpec::Copy halves = {
      .slot = 0, .offset = 0, .loops = {{2, 16}, {16, 1}}};
  spec.copy_lists = {
      {},                     // c0: nothing
      {halves, norm_copy},    // c1: a source's half and the norm
      {halves},               // c2
      {rows(0), norm_copy},   // c3: rank 0's half and the norm arrive
      {rows(16), norm_copy},  // c4: rank 1's
      {rows(0)},              // c5
      {rows(16)},             // c6
      {{.slot = 0,
        .offset = 32,
        .loops = {{2, 40}, {8, 1}}}},  // c7: the padding
  };
  spec.rounds = {fb::Route::kPeer, fb::Route::kPeer};
  spec.programs = {
      {{0, 2}, {SendTo(2, 0, 1, 0, 80), SendTo(3, 1, 2, 80, 64)}, 0, 144, 0},
      {{1, 2}, {SendTo(3, 0, 1, 0, 80), SendTo(2, 1, 2, 80, 64)}, 0, 144, 0},
      {{3, 4},
       {RecvFrom(0, 0, 3, 0, 80), RecvFrom(1, 1, 6, 80, 64)},
       7,
       144,
       0},
      {{3, 4},
       {RecvFrom(1, 0, 4, 0, 80), RecvFrom(0, 1, 5, 80, 64)},
       7,
       144,
       0},
  };
  spec.skips = {{"lm_head.weight", fb::SkipReason::kTied,
                 "tied to model.embed_tokens.weight"}};
  spec.bucket_bytes = 128;
  spec.staging_bytes = 256;
  spec.slots = 2;
  spec.operations_per_round = 8;
  spec.moved_bytes = 288;
  spec.producer = "refitc 0.1.0";
  return spec;
}

PlanSpec FoldedSpec() {
  PlanSpec spec = SampleSpec();
  const std::vector<PlanSpec::Program> first = spec.programs;
  spec.source_ranks = 4;
  // Sources 0 and 1, their copies; destinations 4 and 5, their copies.
  for (const size_t rank : {0, 1}) {
    for (fb::Message& message : spec.programs[rank].messages) {
      message = SendTo(message.peer() + 2, message.round(), message.copies(),
                       message.staging_offset(), message.size_bytes());
    }
  }
  const auto copy_of = [](size_t rank) {
    PlanSpec::Program program;
    program.host = 1;
    program.source_shift = program.destination_shift = 2;
    program.shares = rank;
    return program;
  };
  spec.programs = {spec.programs[0], spec.programs[1], copy_of(0), copy_of(1),
                   first[2],         first[3],         copy_of(4), copy_of(5)};
  return spec;
}

PlanSpec QuantizedSpec() {
  const std::string kName = "model.layers.{0}.mlp.up_proj.weight";
  PlanSpec spec;
  spec.source_ranks = 1;
  spec.params = {{.name = kName, .index = {{0, 2}}, .shape = {3, 6}},
                 {.name = kName + ":fp8_e4m3",
                  .index = {{0, 2}},
                  .shape = {3, 6},
                  .dtype = fb::DType::kFp8E4m3},
                 {.name = kName + "_scale_inv",
                  .index = {{0, 2}},
                  .shape = {2, 2},
                  .dtype = fb::DType::kFp32}};
  spec.quantizations = {
      {.of = 0, .data = 1, .scales = 2, .block_rows = 2, .block_columns = 4}};
  const auto fragment = [](uint32_t param, uint64_t rows, uint64_t columns,
                           uint64_t layer_stride) {
    return PlanSpec::Fragment{.param = param,
                              .lo = {0, 0, 0},
                              .extent = {2, rows, columns},
                              .offset = 0,
                              .stride = {layer_stride, columns, 1}};
  };
  const auto stack = [&](std::string name, uint32_t param, uint64_t rows,
                         uint64_t columns, fb::DType dtype) {
    return PlanSpec::Buffer{
        .name = std::move(name),
        .index = {{0, 2}},
        .shape = {rows, columns},
        .dtype = dtype,
        .fragments = {fragment(param, rows, columns, rows * columns)},
        .regions = {}};
  };
  spec.buffers = {stack("decoder.layers.{0}.mlp.linear_fc1.weight", 0, 3, 6,
                        fb::DType::kBf16),
                  {.name = "scratch.fp8_e4m3",
                   .index = {},
                   .shape = {36},
                   .dtype = fb::DType::kFp8E4m3,
                   .fragments = {fragment(1, 3, 6, 18)},
                   .regions = {}},
                  {.name = "scratch.fp32",
                   .index = {},
                   .shape = {16},  // more than its scales need
                   .dtype = fb::DType::kFp32,
                   .fragments = {fragment(2, 2, 2, 4)},
                   .regions = {}},
                  stack(kName, 1, 3, 6, fb::DType::kFp8E4m3),
                  stack(kName + "_scale_inv", 2, 2, 2, fb::DType::kFp32)};
  spec.quantize_loops = {fb::QuantizeLoop(2, 18, 18, 4)};
  const PlanSpec::Copy values = {.slot = 1,
                                 .offset = 0,
                                 .loops = {{36, 1}},
                                 .staging_offset = 0,
                                 .dtype = fb::DType::kFp8E4m3};
  const PlanSpec::Copy scales = {.slot = 2,
                                 .offset = 0,
                                 .loops = {{8, 1}},
                                 .staging_offset = 48,
                                 .dtype = fb::DType::kFp32};
  spec.copy_lists = {{},
                     {values, scales},
                     {{.slot = 0,
                       .offset = 0,
                       .loops = {{2, 18}, {18, 1}},
                       .staging_offset = 0,
                       .dtype = fb::DType::kFp8E4m3},
                      {.slot = 1,
                       .offset = 0,
                       .loops = {{2, 4}, {4, 1}},
                       .staging_offset = 48,
                       .dtype = fb::DType::kFp32}}};
  spec.rounds = {fb::Route::kPeer};
  spec.programs = {
      {.buffers = {0, 1, 2},
       .messages = {SendTo(1, 0, 1, 0, 80)},
       .fills = 0,
       .staging_bytes = 80,
       .host = 0,
       .scratch_buffers = 2,
       .quantizes = {fb::Quantize(/*quantization=*/0, /*input_slot=*/0,
                                  /*output_slot=*/1, /*scale_slot=*/2,
                                  /*loops_begin=*/0, /*loops_count=*/1,
                                  /*offsets=*/0, 0, 0, /*rows=*/3,
                                  /*columns=*/6, /*row strides=*/6, 6, 2)}},
      {.buffers = {3, 4},
       .messages = {RecvFrom(0, 0, 2, 0, 80)},
       .fills = 0,
       .staging_bytes = 80,
       .host = 0}};
  spec.bucket_bytes = 128;
  spec.staging_bytes = 256;
  spec.slots = 2;
  spec.operations_per_round = 8;
  spec.moved_bytes = 68;
  spec.producer = "refitc 0.1.0";
  return spec;
}

PlanSpec DealtSpec() {
  PlanSpec spec;
  spec.source_ranks = 1;
  spec.params = {{.name = "w", .index = {}, .shape = {16}}};
  const auto buffer = [](uint64_t begin, uint64_t elements) {
    return PlanSpec::Buffer{.name = "w",
                            .index = {},
                            .shape = {elements},
                            .fragments = {{.param = 0,
                                           .lo = {begin},
                                           .extent = {elements},
                                           .offset = 0,
                                           .stride = {1}}},
                            .regions = {}};
  };
  spec.buffers = {buffer(0, 16), buffer(0, 8), buffer(8, 8)};
  spec.copy_lists = {{},
                     {{.slot = 0, .offset = 0, .loops = {{8, 1}}}},
                     {{.slot = 0, .offset = 8, .loops = {{8, 1}}}}};
  spec.rounds.assign(3, fb::Route::kNetwork);
  spec.programs = {
      {{0}, {SendTo(1, 0, 1, 0, 16), SendTo(1, 1, 2, 16, 16)}, 0, 32, 0},
      {{1},
       {RecvFrom(0, 0, 1, 0, 16), RecvFrom(0, 1, 0, 16, 16),
        SendTo(2, 2, 0, 16, 16)},
       0,
       32,
       1},
      {{2}, {RecvFrom(1, 2, 1, 0, 16)}, 0, 16, 1},
  };
  spec.programs[1].relays = {fb::Relay(2, 1)};
  spec.bucket_bytes = spec.staging_bytes = 64;
  spec.slots = 2;
  spec.operations_per_round = 8;
  spec.producer = "refitc 0.1.0";
  return spec;
}

PlanSpec WindowedSpec() {
  PlanSpec spec = QuantizedSpec();
  const auto scratch = [&](std::string name, fb::DType dtype, uint32_t param,
                           uint64_t layer, uint64_t rows, uint64_t columns) {
    return PlanSpec::Buffer{
        .name = std::move(name),
        .index = {},
        .shape = {rows * columns},
        .dtype = dtype,
        .fragments = {{.param = param,
                       .lo = {layer, 0, 0},
                       .extent = {1, rows, columns},
                       .offset = 0,
                       .stride = {rows * columns, columns, 1}}},
        .regions = {}};
  };
  // b1 b2: layer 0. b5 b6: layer 1.
  spec.buffers[1] =
      scratch("scratch.0.fp8_e4m3", fb::DType::kFp8E4m3, 1, 0, 3, 6);
  spec.buffers[2] = scratch("scratch.0.fp32", fb::DType::kFp32, 2, 0, 2, 2);
  spec.buffers.push_back(
      scratch("scratch.1.fp8_e4m3", fb::DType::kFp8E4m3, 1, 1, 3, 6));
  spec.buffers.push_back(
      scratch("scratch.1.fp32", fb::DType::kFp32, 2, 1, 2, 2));
  spec.quantize_loops.clear();
  const auto copies = [](uint32_t values_slot, uint64_t values_offset,
                         uint64_t scales_offset) {
    return std::vector<PlanSpec::Copy>{{.slot = values_slot,
                                        .offset = values_offset,
                                        .loops = {{18, 1}},
                                        .staging_offset = 0,
                                        .dtype = fb::DType::kFp8E4m3},
                                       {.slot = values_slot + 1,
                                        .offset = scales_offset,
                                        .loops = {{4, 1}},
                                        .staging_offset = 32,
                                        .dtype = fb::DType::kFp32}};
  };
  spec.copy_lists = {
      {}, copies(1, 0, 0), copies(3, 0, 0), copies(0, 0, 0), copies(0, 18, 4)};
  spec.rounds = {fb::Route::kPeer, fb::Route::kPeer};
  PlanSpec::Program& source = spec.programs[0];
  source.buffers = {0, 1, 2, 5, 6};
  source.messages = {SendTo(1, 0, 1, 0, 48), SendTo(1, 1, 2, 48, 48)};
  source.staging_bytes = 96;
  source.scratch_buffers = 4;
  source.quantizes.clear();
  for (const uint32_t layer : {0, 1}) {
    source.quantizes.push_back(fb::Quantize(
        /*quantization=*/0, /*input_slot=*/0, /*output_slot=*/1 + 2 * layer,
        /*scale_slot=*/2 + 2 * layer, /*loops_begin=*/0, /*loops_count=*/0,
        /*offsets=*/18 * layer, 0, 0, /*rows=*/3, /*columns=*/6,
        /*row strides=*/6, 6, 2));
  }
  source.scratch_windows = {{0, 0, 1}, {128, 0, 1}, {0, 1, 2}, {128, 1, 2}};
  source.scratch_arena_bytes = 144;
  PlanSpec::Program& destination = spec.programs[1];
  destination.messages = {RecvFrom(0, 0, 3, 0, 48), RecvFrom(0, 1, 4, 48, 48)};
  destination.staging_bytes = 96;
  return spec;
}

}  // namespace refit
