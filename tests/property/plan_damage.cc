#include "tests/property/plan_damage.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

// A number, an enum or a character somewhere in a body.
struct Field {
  void* at = nullptr;
  size_t width = 0;
  bool is_flag = false;
  bool is_text = false;
};

uint64_t Get(const Field& field) {
  uint64_t value = 0;
  std::memcpy(&value, field.at, field.width);
  return value;
}

void Set(const Field& field, uint64_t value) {
  std::memcpy(field.at, &value, field.width);
}

// Where a member of a struct lies. Structs are frozen, so this is their
// contract, and it holds whatever a reserved byte is called one day.
struct Member {
  std::string name;
  size_t offset = 0;
  size_t width = 0;
};

const std::vector<Member> kLoopMembers = {{"loop.extent", 0, 8},
                                          {"loop.stride", 8, 8}};
const std::vector<Member> kCopyMembers = {
    {"copy.buffer_slot", 0, 4}, {"copy.loops_begin", 4, 4},
    {"copy.loops_count", 8, 2}, {"copy.wire_dtype", 10, 1},
    {"copy.byte_11", 11, 1},    {"copy.bytes_12", 12, 4},
    {"copy.offset", 16, 8},     {"copy.staging_offset", 24, 8}};
const std::vector<Member> kCopyListMembers = {{"copy_list.begin", 0, 4},
                                              {"copy_list.count", 4, 4}};
const std::vector<Member> kMessageMembers = {
    {"message.round", 0, 4},           {"message.peer", 4, 4},
    {"message.copies", 8, 4},          {"message.kind", 12, 1},
    {"message.byte_13", 13, 1},        {"message.bytes_14", 14, 2},
    {"message.staging_offset", 16, 8}, {"message.size_bytes", 24, 8}};
const std::vector<Member> kRoundMembers = {
    {"round.route", 0, 1}, {"round.mechanism", 1, 1}, {"round.bytes_2", 2, 2}};
const std::vector<Member> kQuantizeLoopMembers = {
    {"quantize_loop.extent", 0, 8},
    {"quantize_loop.input_stride", 8, 8},
    {"quantize_loop.output_stride", 16, 8},
    {"quantize_loop.scale_stride", 24, 8}};
const std::vector<Member> kQuantizeMembers = {
    {"quantize.quantization", 0, 4},
    {"quantize.input_slot", 4, 4},
    {"quantize.output_slot", 8, 4},
    {"quantize.scale_slot", 12, 4},
    {"quantize.loops_begin", 16, 4},
    {"quantize.loops_count", 20, 4},
    {"quantize.input_offset", 24, 8},
    {"quantize.output_offset", 32, 8},
    {"quantize.scale_offset", 40, 8},
    {"quantize.rows", 48, 8},
    {"quantize.columns", 56, 8},
    {"quantize.input_row_stride", 64, 8},
    {"quantize.output_row_stride", 72, 8},
    {"quantize.scale_row_stride", 80, 8}};
const std::vector<Member> kWindowMembers = {{"scratch_window.offset", 0, 8},
                                            {"scratch_window.begin", 8, 4},
                                            {"scratch_window.end", 12, 4}};
const std::vector<Member> kMessageListMembers = {
    {"message_list.rounds_begin", 0, 4},
    {"message_list.rounds_count", 4, 4},
    {"message_list.messages_begin", 8, 4},
    {"message_list.messages_count", 12, 4}};
const std::vector<Member> kMessageRoundMembers = {
    {"message_round.staging_offset", 0, 8},
    {"message_round.round", 8, 4},
    {"message_round.receives", 12, 2},
    {"message_round.sends", 14, 2}};
static_assert(sizeof(fb::MessageList) == 16 && sizeof(fb::MessageRound) == 16);
static_assert(sizeof(fb::QuantizeLoop) == 32 && sizeof(fb::Quantize) == 88 &&
              sizeof(fb::ScratchWindow) == 16);
static_assert(sizeof(fb::Loop) == 16 && sizeof(fb::Copy) == 32 &&
              sizeof(fb::CopyList) == 8 && sizeof(fb::Message) == 32 &&
              sizeof(fb::Round) == 4);

// A change of a list's entries as wholes; returns what it did, or "".
using ListChange = std::function<std::string(Draw&)>;

// All that can be changed in a body, by kind. The order is that of the kinds'
// names, so that a draw means the same in every build.
class Fields {
 public:
  explicit Fields(fb::BodyT& body) { AddBody(body); }

  std::string Change(Draw& draw) {
    while (true) {
      auto kind = kinds_.begin();
      std::advance(kind,
                   draw.Between(0, static_cast<int64_t>(kinds_.size()) - 1));
      const auto& [name, sites] = *kind;
      const std::string change = sites.changes.empty()
                                     ? ChangeField(draw, sites.fields)
                                     : draw.Pick(sites.changes)(draw);
      if (!change.empty()) return absl::StrCat(name, change);
    }
  }

 private:
  struct Sites {
    std::vector<Field> fields;
    std::vector<ListChange> changes;  // of a list; then there are no fields
  };

  static std::string ChangeField(Draw& draw, const std::vector<Field>& fields) {
    const Field& field = draw.Pick(fields);
    const uint64_t before = Get(field);
    if (draw.Chance(15)) {
      const Field& other = draw.Pick(fields);
      const uint64_t after = Get(other);
      if (after == before) return "";
      Set(field, after);
      Set(other, before);
      return absl::StrCat(" ", before, " <-> ", after);
    }
    for (int attempt = 0; attempt < 8; ++attempt) {
      Set(field, NewValue(draw, field, fields));
      const uint64_t after = Get(field);
      if (after != before) return absl::StrCat(" ", before, " -> ", after);
    }
    return "";
  }

  static uint64_t NewValue(Draw& draw, const Field& field,
                           const std::vector<Field>& alike) {
    const uint64_t value = Get(field);
    if (field.is_flag) return 1 - value;
    if (field.is_text) {
      return static_cast<uint64_t>(draw.Chance(10) ? draw.Between(0x80, 0xff)
                                                   : draw.Between(' ', '~'));
    }
    const auto near = static_cast<uint64_t>(draw.Between(1, 3));
    switch (draw.Between(0, 8)) {
      case 0:
        return value + near;
      case 1:
        return value - near;
      case 2:
        return value + 16 * near;
      case 3:
        return value - 16 * near;
      case 4:
        return static_cast<uint64_t>(draw.Between(0, 8));
      case 5:
        return draw.Chance(50) ? value * 2 : value / 2;
      case 6: {
        const auto bits = static_cast<int64_t>(8 * field.width);
        return value ^ (uint64_t{1} << draw.Between(0, bits - 1));
      }
      default:
        // What another field of the kind holds fits best where it is wrong.
        return Get(draw.Pick(alike));
    }
  }

  template <typename T>
  void Add(const std::string& kind, T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    kinds_[kind].fields.push_back(
        {&value, sizeof(T), std::is_same_v<T, bool>, false});
  }

  void Add(const std::string& kind, std::string& text) {
    for (char& c : text) {
      kinds_[kind].fields.push_back({&c, 1, false, true});
    }
  }

  template <typename T>
  void AddNumbers(const std::string& kind, std::vector<T>& numbers) {
    for (T& number : numbers) Add(kind, number);
    AddList(kind, numbers);
  }

  template <typename T>
  void AddStructs(const std::string& kind, const std::vector<Member>& members,
                  std::vector<T>& structs) {
    for (T& entry : structs) {
      for (const Member& member : members) {
        kinds_[member.name].fields.push_back(
            {reinterpret_cast<uint8_t*>(&entry) + member.offset, member.width,
             false, false});
      }
    }
    AddList(kind, structs);
  }

  template <typename T>
  void AddList(const std::string& kind, std::vector<T>& list) {
    if (list.empty()) return;
    kinds_[absl::StrCat(kind, "[]")].changes.push_back(
        [&list](Draw& draw) { return ChangeList(draw, list); });
  }

  template <typename T>
  static std::string ChangeList(Draw& draw, std::vector<T>& list) {
    const auto last = static_cast<int64_t>(list.size()) - 1;
    const auto at = static_cast<size_t>(draw.Between(0, last));
    const auto other = static_cast<size_t>(draw.Between(0, last));
    switch (draw.Between(0, 2)) {
      case 0:
        list.erase(list.begin() + static_cast<ptrdiff_t>(at));
        return absl::StrCat(" drops entry ", at);
      case 1:
        if (at == other) return "";
        std::swap(list[at], list[other]);
        return absl::StrCat(" swaps entries ", at, " and ", other);
      default:
        if constexpr (std::is_copy_constructible_v<T>) {
          list.push_back(T(list[at]));
        } else {
          list.push_back(std::make_unique<typename T::element_type>(*list[at]));
        }
        return absl::StrCat(" repeats entry ", at);
    }
  }

  void AddIndex(const std::string& of,
                std::vector<std::unique_ptr<fb::IndexDimT>>& index) {
    for (const auto& dim : index) {
      Add(absl::StrCat(of, ".index.first"), dim->first);
      Add(absl::StrCat(of, ".index.count"), dim->count);
      AddNumbers(absl::StrCat(of, ".index.numbers"), dim->numbers);
    }
    AddList(absl::StrCat(of, ".index"), index);
  }

  void AddParam(fb::ParamT& param) {
    Add("param.name", param.name);
    AddIndex("param", param.index);
    AddNumbers("param.shape", param.shape);
    Add("param.dtype", param.dtype);
    Add("param.skip", param.skip);
  }

  void AddBuffer(fb::BufferT& buffer) {
    Add("buffer.name", buffer.name);
    AddIndex("buffer", buffer.index);
    AddNumbers("buffer.shape", buffer.shape);
    Add("buffer.dtype", buffer.dtype);
    for (const auto& fragment : buffer.fragments) {
      Add("fragment.param", fragment->param);
      AddNumbers("fragment.lo", fragment->lo);
      AddNumbers("fragment.extent", fragment->extent);
      Add("fragment.offset", fragment->offset);
      AddNumbers("fragment.stride", fragment->stride);
    }
    AddList("buffer.fragments", buffer.fragments);
    for (const auto& region : buffer.regions) {
      Add("region.kind", region->kind);
      Add("region.reason", region->reason);
      Add("region.offset", region->offset);
      AddNumbers("region.extent", region->extent);
      AddNumbers("region.stride", region->stride);
      Add("region.detail", region->detail);
    }
    AddList("buffer.regions", buffer.regions);
  }

  void AddProgram(fb::RankProgramT& program) {
    AddNumbers("program.buffers", program.buffers);
    AddStructs("program.messages", kMessageMembers, program.messages);
    Add("program.fills", program.fills);
    Add("program.staging_bytes", program.staging_bytes);
    Add("program.host", program.host);
    if (program.message_list >= 0) {
      Add("program.message_list", program.message_list);
    }
    AddStructs("program.quantizes", kQuantizeMembers, program.quantizes);
    AddStructs("program.scratch_windows", kWindowMembers,
               program.scratch_windows);
    if (program.scratch_buffers == 0) return;
    Add("program.scratch_buffers", program.scratch_buffers);
    Add("program.scratch_arena_bytes", program.scratch_arena_bytes);
  }

  void AddPacked(fb::PackedMessagesT& packed) {
    AddStructs("packed.lists", kMessageListMembers, packed.lists);
    AddStructs("packed.rounds", kMessageRoundMembers, packed.rounds);
    AddNumbers("packed.peers", packed.peers);
    AddNumbers("packed.copies", packed.copies);
    AddNumbers("packed.sizes", packed.sizes);
  }

  void AddStats(fb::StatsT& stats) {
    Add("stats", stats.moved_bytes);
    Add("stats", stats.local_bytes);
    Add("stats", stats.peer_bytes);
    Add("stats", stats.network_bytes);
  }

  void AddBody(fb::BodyT& body) {
    Add("source_ranks", body.source_ranks);
    for (const auto& param : body.params) AddParam(*param);
    AddList("params", body.params);
    for (const auto& buffer : body.buffers) AddBuffer(*buffer);
    AddList("buffers", body.buffers);
    for (const auto& program : body.programs) AddProgram(*program);
    AddList("programs", body.programs);
    AddStructs("rounds", kRoundMembers, body.rounds);
    AddStructs("copy_lists", kCopyListMembers, body.copy_lists);
    AddStructs("copies", kCopyMembers, body.copies);
    AddStructs("loops", kLoopMembers, body.loops);
    for (const auto& skip : body.skips) {
      Add("skip.name", skip->name);
      Add("skip.reason", skip->reason);
      Add("skip.detail", skip->detail);
    }
    AddList("skips", body.skips);
    for (const auto& cast : body.casts) {
      Add("cast.from", cast->from);
      Add("cast.to", cast->to);
    }
    AddList("casts", body.casts);
    for (const auto& quantization : body.quantizations) {
      Add("quantization.of", quantization->of);
      Add("quantization.data", quantization->data);
      Add("quantization.scales", quantization->scales);
      Add("quantization.block_rows", quantization->block_rows);
      Add("quantization.block_columns", quantization->block_columns);
      Add("quantization.scale_format", quantization->scale_format);
    }
    AddList("quantizations", body.quantizations);
    AddStructs("quantize_loops", kQuantizeLoopMembers, body.quantize_loops);
    for (const auto& requirement : body.requirements) {
      Add("requirement.side", requirement->side);
      Add("requirement.key", requirement->key);
      Add("requirement.value", requirement->value);
    }
    AddList("requirements", body.requirements);
    if (body.delta != nullptr) {
      Add("delta.changes", body.delta->changes);
      Add("delta.dense_every", body.delta->dense_every);
      Add("delta.check", body.delta->check);
    }
    if (body.packed_messages != nullptr) AddPacked(*body.packed_messages);
    Add("limits.bucket_bytes", body.limits->bucket_bytes);
    Add("limits.staging_bytes", body.limits->staging_bytes);
    Add("limits.slots", body.limits->slots);
    Add("limits.operations_per_round", body.limits->operations_per_round);
    AddStats(*body.stats);
    Add("colocated", body.colocated);
  }

  std::map<std::string, Sites> kinds_;
};

}  // namespace

std::vector<uint8_t> PackPlan(const fb::BodyT& body,
                              uint64_t required_features) {
  flatbuffers::FlatBufferBuilder body_builder;
  body_builder.Finish(fb::CreateBody(body_builder, &body));
  const absl::Span<const uint8_t> bytes(body_builder.GetBufferPointer(),
                                        body_builder.GetSize());
  flatbuffers::FlatBufferBuilder builder;
  const fb::Digest digest = DigestOf(bytes);
  builder.ForceVectorAlignment(bytes.size(), sizeof(uint8_t), 16);
  const auto vector = builder.CreateVector(bytes.data(), bytes.size());
  const uint32_t version = FormatVersionFor(
      *flatbuffers::GetRoot<fb::Body>(bytes.data()), required_features);
  builder.Finish(fb::CreatePlan(builder, version, required_features, &digest,
                                &digest, vector),
                 fb::PlanIdentifier());
  return {builder.GetBufferPointer(),
          builder.GetBufferPointer() + builder.GetSize()};
}

std::string DamageBody(Draw& draw, fb::BodyT& body) {
  return Fields(body).Change(draw);
}

}  // namespace refit
