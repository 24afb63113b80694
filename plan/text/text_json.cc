#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cmath>

#include "absl/strings/str_cat.h"
#include "plan/scratch_windows.h"
#include "plan/text/plan_view.h"
#include "plan/text/text.h"

namespace refit {
namespace {

// An object a table row, its numbers in one line.
class JsonPrinter {
 public:
  JsonPrinter(const PlanFile& plan, const TextOptions& options)
      : plan_(plan),
        body_(plan.body()),
        view_(SelectView(plan, options)),
        writer_(buffer_) {
    writer_.SetIndent(' ', 2);
  }

  std::string Print();

 private:
  void PrintHeader();
  void PrintDelta();
  void PrintStats();
  void PrintParams();
  void PrintSkipsAndCasts();
  void PrintBuffers();
  void PrintFragments(uint32_t id, const fb::Buffer& buffer);
  void PrintRegions(const fb::Buffer& buffer);
  void PrintPostHooks(const fb::Buffer& buffer);
  void PrintRounds();
  void PrintPrograms();
  void PrintQuantizations();
  void PrintQuantizes(const fb::RankProgram& program,
                      const PlanView::Program& shown);
  void PrintCopyLists();
  void PrintCopy(const fb::Copy& copy);

  void Number(const char* key, uint64_t value) {
    writer_.Key(key);
    writer_.Uint64(value);
  }
  // JSON has no word for what is not finite.
  void Seconds(const char* key, double value) {
    writer_.Key(key);
    if (std::isfinite(value)) {
      writer_.Double(value);
    } else {
      writer_.Null();
    }
  }
  void Text(const char* key, const std::string& value) {
    writer_.Key(key);
    writer_.String(value.data(),
                   static_cast<rapidjson::SizeType>(value.size()));
  }
  void Text(const char* key, const flatbuffers::String* value) {
    if (value != nullptr) Text(key, value->str());
  }
  void StartLine(const char* key) {
    writer_.Key(key);
    writer_.SetFormatOptions(rapidjson::kFormatSingleLineArray);
    writer_.StartArray();
  }
  void EndLine() {
    writer_.EndArray();
    writer_.SetFormatOptions(rapidjson::kFormatDefault);
  }
  void Dims(const char* key, const flatbuffers::Vector<uint64_t>* dims) {
    StartLine(key);
    for (uint32_t i = 0; i < Length(dims); ++i) writer_.Uint64(dims->Get(i));
    EndLine();
  }
  // One list of numbers per index dimension.
  void Index(const IndexDims* index) {
    if (Length(index) == 0) return;
    writer_.Key("index");
    writer_.StartArray();
    for (uint32_t dim = 0; dim < index->size(); ++dim) {
      writer_.SetFormatOptions(rapidjson::kFormatDefault);
      writer_.StartArray();
      writer_.SetFormatOptions(rapidjson::kFormatSingleLineArray);
      for (uint32_t i = 0; i < index->Get(dim)->count(); ++i) {
        writer_.Int(IndexNumber(*index->Get(dim), i));
      }
      writer_.EndArray();
    }
    writer_.SetFormatOptions(rapidjson::kFormatDefault);
    writer_.EndArray();
  }

  const PlanFile& plan_;
  const fb::Body& body_;
  const PlanView view_;
  rapidjson::StringBuffer buffer_;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> writer_;
};

std::string JsonPrinter::Print() {
  writer_.StartObject();
  PrintHeader();
  PrintDelta();
  PrintStats();
  PrintParams();
  PrintSkipsAndCasts();
  PrintQuantizations();
  PrintBuffers();
  PrintRounds();
  PrintPrograms();
  PrintCopyLists();
  writer_.EndObject();
  return absl::StrCat(buffer_.GetString(), "\n");
}

void JsonPrinter::PrintHeader() {
  const fb::Plan& plan = plan_.plan();
  Text("format", absl::StrCat(plan.format_version() >> 16, ".",
                              plan.format_version() & 0xffff));
  Number("required_features", plan.required_features());
  if (plan.body_digest() != nullptr)
    Text("body_digest", DigestText(*plan.body_digest()));
  if (plan.inputs_digest() != nullptr)
    Text("inputs_digest", DigestText(*plan.inputs_digest()));
  Number("source_ranks", static_cast<uint64_t>(plan_.source_ranks()));
  Number("destination_ranks",
         static_cast<uint64_t>(plan_.world_size() - plan_.source_ranks()));
  writer_.Key("colocated");
  writer_.Bool(body_.colocated());
  writer_.Key("hosts");
  writer_.StartArray();
  for (const auto& [host, ranks] : RanksByHost(body_)) {
    writer_.StartObject();
    Number("host", host);
    StartLine("ranks");
    for (const int32_t rank : ranks) writer_.Int(rank);
    EndLine();
    writer_.EndObject();
  }
  writer_.EndArray();
  writer_.Key("requirements");
  writer_.StartArray();
  for (uint32_t i = 0; i < Length(body_.requirements()); ++i) {
    const fb::Requirement& requirement = *body_.requirements()->Get(i);
    writer_.StartObject();
    Text("side", EnumText(requirement.side()));
    Text("key", requirement.key());
    Text("value", requirement.value());
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintDelta() {
  const fb::Delta* const delta = body_.delta();
  if (delta == nullptr) return;
  writer_.Key("delta");
  writer_.StartObject();
  Text("changes", EnumText(delta->changes()));
  Number("dense_every", delta->dense_every());
  writer_.Key("check");
  writer_.Bool(delta->check());
  writer_.EndObject();
}

void JsonPrinter::PrintStats() {
  const fb::Limits& limits = *body_.limits();
  writer_.Key("limits");
  writer_.StartObject();
  Number("bucket_bytes", limits.bucket_bytes());
  Number("staging_bytes", limits.staging_bytes());
  Number("slots", limits.slots());
  Number("operations_per_round", limits.operations_per_round());
  writer_.EndObject();
  const fb::Stats& stats = *body_.stats();
  writer_.Key("stats");
  writer_.StartObject();
  Number("moved_bytes", stats.moved_bytes());
  Number("local_bytes", stats.local_bytes());
  Number("peer_bytes", stats.peer_bytes());
  Number("network_bytes", stats.network_bytes());
  if (stats.relayed_bytes() > 0) {
    Number("relayed_bytes", stats.relayed_bytes());
  }
  Seconds("lower_bound_seconds", stats.lower_bound_seconds());
  Seconds("predicted_seconds", stats.predicted_seconds());
  Text("binding_link", stats.binding_link());
  writer_.EndObject();
}

void JsonPrinter::PrintParams() {
  writer_.Key("params");
  writer_.StartArray();
  for (uint32_t id = 0; id < view_.params.size(); ++id) {
    if (!view_.params[id]) continue;
    const fb::Param& param = *body_.params()->Get(id);
    writer_.StartObject();
    Number("id", id);
    Text("name", param.name());
    Index(param.index());
    Text("dtype", EnumText(param.dtype()));
    Dims("shape", param.shape());
    if (param.skip() != fb::SkipReason::kUnspecified)
      Text("skip", EnumText(param.skip()));
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintSkipsAndCasts() {
  writer_.Key("skips");
  writer_.StartArray();
  for (uint32_t id = 0; id < view_.skips.size(); ++id) {
    if (!view_.skips[id]) continue;
    const fb::Skip& skip = *body_.skips()->Get(id);
    writer_.StartObject();
    Text("name", skip.name());
    Text("reason", EnumText(skip.reason()));
    Text("detail", skip.detail());
    writer_.EndObject();
  }
  writer_.EndArray();
  writer_.Key("casts");
  writer_.StartArray();
  for (uint32_t id = 0; id < Length(body_.casts()); ++id) {
    writer_.StartObject();
    Text("from", EnumText(body_.casts()->Get(id)->from()));
    Text("to", EnumText(body_.casts()->Get(id)->to()));
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintBuffers() {
  const std::vector<std::vector<int32_t>> holders = HoldersByBuffer(body_);
  writer_.Key("buffers");
  writer_.StartArray();
  for (uint32_t id = 0; id < view_.buffers.size(); ++id) {
    if (!view_.buffers[id]) continue;
    const fb::Buffer& buffer = *body_.buffers()->Get(id);
    writer_.StartObject();
    Number("id", id);
    Text("name", buffer.name());
    Index(buffer.index());
    Text("dtype", EnumText(buffer.dtype()));
    Dims("shape", buffer.shape());
    StartLine("ranks");
    for (const int32_t rank : holders[id]) writer_.Int(rank);
    EndLine();
    PrintFragments(id, buffer);
    if (!view_.partial_buffers[id]) PrintRegions(buffer);
    PrintPostHooks(buffer);
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintFragments(uint32_t id, const fb::Buffer& buffer) {
  writer_.Key("holds");
  writer_.StartArray();
  for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
    const fb::Fragment& fragment = *buffer.fragments()->Get(i);
    if (view_.partial_buffers[id] && !view_.params[fragment.param()]) continue;
    writer_.StartObject();
    Number("param", fragment.param());
    Dims("lo", fragment.lo());
    Dims("extent", fragment.extent());
    Number("offset", fragment.offset());
    Dims("stride", fragment.stride());
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintRegions(const fb::Buffer& buffer) {
  if (Length(buffer.regions()) == 0) return;
  writer_.Key("regions");
  writer_.StartArray();
  for (uint32_t i = 0; i < buffer.regions()->size(); ++i) {
    const fb::Region& region = *buffer.regions()->Get(i);
    writer_.StartObject();
    Text("kind", EnumText(region.kind()));
    if (region.kind() == fb::RegionKind::kSkip)
      Text("reason", EnumText(region.reason()));
    Number("offset", region.offset());
    Dims("extent", region.extent());
    Dims("stride", region.stride());
    Text("detail", region.detail());
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintPostHooks(const fb::Buffer& buffer) {
  if (Length(buffer.post_hooks()) == 0) return;
  writer_.Key("post_hooks");
  writer_.StartArray();
  for (uint32_t i = 0; i < buffer.post_hooks()->size(); ++i) {
    const fb::PostHook& hook = *buffer.post_hooks()->Get(i);
    writer_.StartObject();
    Text("name", hook.name());
    Text("detail", hook.detail());
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintRounds() {
  writer_.Key("rounds");
  writer_.StartArray();
  for (uint32_t id = 0; id < view_.rounds.size(); ++id) {
    if (!view_.rounds[id]) continue;
    writer_.StartObject();
    Number("id", id);
    Text("route", EnumText(body_.rounds()->Get(id)->route()));
    Text("mechanism", EnumText(body_.rounds()->Get(id)->mechanism()));
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintPrograms() {
  writer_.Key("ranks");
  writer_.StartArray();
  for (const PlanView::Program& shown : view_.programs) {
    const fb::RankProgram& program =
        *body_.programs()->Get(static_cast<uint32_t>(shown.rank));
    writer_.StartObject();
    Number("rank", static_cast<uint64_t>(shown.rank));
    Text("side", EnumText(plan_.side(shown.rank)));
    Number("host", program.host());
    Number("staging_bytes", program.staging_bytes());
    writer_.Key("slots");
    writer_.StartArray();
    for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
      if (!view_.buffers[program.buffers()->Get(slot)]) continue;
      writer_.StartObject();
      Number("slot", slot);
      Number("buffer", program.buffers()->Get(slot));
      if (const fb::ScratchWindow* window = WindowOf(program, slot)) {
        Number("arena_offset", window->offset());
        Number("begin_round", window->begin());
        Number("end_round", window->end());
      }
      writer_.EndObject();
    }
    writer_.EndArray();
    if (program.scratch_buffers() > 0) {
      Number("scratch_buffers", program.scratch_buffers());
      Number("scratch_bytes", ScratchBytes(plan_, shown.rank));
    }
    if (shown.fills) Number("fills", program.fills());
    PrintQuantizes(program, shown);
    writer_.Key("messages");
    writer_.StartArray();
    for (const uint32_t position : shown.messages) {
      const fb::Message& message = *program.messages()->Get(position);
      writer_.StartObject();
      Number("round", message.round());
      Text("kind", message.kind() == fb::MessageKind::kSend ? "send" : "recv");
      Number("peer", message.peer());
      Number("size_bytes", message.size_bytes());
      Number("staging_offset", message.staging_offset());
      Number("copies", message.copies());
      if (const fb::Message* fed_by = FedBy(program, position)) {
        writer_.Key("fed_by");
        writer_.StartObject();
        Number("round", fed_by->round());
        Number("peer", fed_by->peer());
        writer_.EndObject();
      }
      writer_.EndObject();
    }
    writer_.EndArray();
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintQuantizes(const fb::RankProgram& program,
                                 const PlanView::Program& shown) {
  if (shown.quantizes.empty()) return;
  writer_.Key("quantizes");
  writer_.StartArray();
  for (const uint32_t position : shown.quantizes) {
    const fb::Quantize& op = *program.quantizes()->Get(position);
    writer_.StartObject();
    Number("quantization", op.quantization());
    Number("rows", op.rows());
    Number("columns", op.columns());
    Number("input_slot", op.input_slot());
    Number("input_offset", op.input_offset());
    Number("input_row_stride", op.input_row_stride());
    Number("output_slot", op.output_slot());
    Number("output_offset", op.output_offset());
    Number("output_row_stride", op.output_row_stride());
    Number("scale_slot", op.scale_slot());
    Number("scale_offset", op.scale_offset());
    Number("scale_row_stride", op.scale_row_stride());
    const auto loops = [&](const char* key, auto field) {
      StartLine(key);
      for (uint32_t i = 0; i < op.loops_count(); ++i) {
        writer_.Uint64(
            (body_.quantize_loops()->Get(op.loops_begin() + i)->*field)());
      }
      EndLine();
    };
    loops("extent", &fb::QuantizeLoop::extent);
    loops("input_stride", &fb::QuantizeLoop::input_stride);
    loops("output_stride", &fb::QuantizeLoop::output_stride);
    loops("scale_stride", &fb::QuantizeLoop::scale_stride);
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintQuantizations() {
  if (Length(body_.quantizations()) == 0) return;
  writer_.Key("quantizations");
  writer_.StartArray();
  for (uint32_t id = 0; id < body_.quantizations()->size(); ++id) {
    const fb::Quantization& quantization = *body_.quantizations()->Get(id);
    writer_.StartObject();
    Number("id", id);
    Number("of", quantization.of());
    Number("data", quantization.data());
    Number("scales", quantization.scales());
    Number("block_rows", quantization.block_rows());
    Number("block_columns", quantization.block_columns());
    Text("scale_format", EnumText(quantization.scale_format()));
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintCopyLists() {
  writer_.Key("copy_lists");
  writer_.StartArray();
  for (uint32_t id = 0; id < view_.copy_lists.size(); ++id) {
    if (!view_.copy_lists[id]) continue;
    writer_.StartObject();
    Number("id", id);
    writer_.Key("copies");
    writer_.StartArray();
    const fb::CopyList& run = *body_.copy_lists()->Get(id);
    for (uint32_t i = run.begin(); i < run.begin() + run.count(); ++i) {
      if (view_.copies[i]) PrintCopy(*body_.copies()->Get(i));
    }
    writer_.EndArray();
    writer_.EndObject();
  }
  writer_.EndArray();
}

void JsonPrinter::PrintCopy(const fb::Copy& copy) {
  writer_.StartObject();
  Number("slot", copy.buffer_slot());
  Number("offset", copy.offset());
  StartLine("extent");
  for (uint32_t i = 0; i < copy.loops_count(); ++i) {
    writer_.Uint64(body_.loops()->Get(copy.loops_begin() + i)->extent());
  }
  EndLine();
  StartLine("stride");
  for (uint32_t i = 0; i < copy.loops_count(); ++i) {
    writer_.Uint64(body_.loops()->Get(copy.loops_begin() + i)->stride());
  }
  EndLine();
  Text("wire_dtype", EnumText(copy.wire_dtype()));
  Number("staging_offset", copy.staging_offset());
  writer_.EndObject();
}

}  // namespace

std::string PlanJson(const PlanFile& plan, const TextOptions& options) {
  return JsonPrinter(plan, options).Print();
}

}  // namespace refit
