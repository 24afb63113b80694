#include "absl/strings/str_cat.h"
#include "plan/scratch_windows.h"
#include "plan/text/dealt.h"
#include "plan/text/json_writer.h"
#include "plan/text/plan_view.h"
#include "plan/text/text.h"

namespace refit {
namespace {

// An object a table row, its numbers in one line.
class PlanJsonPrinter : JsonWriter {
 public:
  PlanJsonPrinter(const PlanFile& plan, const TextOptions& options)
      : plan_(plan), body_(plan.body()), view_(SelectView(plan, options)) {}

  std::string Print();

 private:
  void PrintHeader();
  void PrintDelta();
  void PrintTopology();
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

  using JsonWriter::Text;
  void Text(const char* key, const flatbuffers::String* value) {
    if (value != nullptr) Text(key, value->string_view());
  }
  void Dims(const char* key, const flatbuffers::Vector<uint64_t>* dims) {
    OpenLine(key);
    for (uint32_t i = 0; i < Length(dims); ++i) Number(dims->Get(i));
    CloseLine();
  }
  // One list of numbers per index dimension.
  void Index(const IndexDims* index) {
    if (Length(index) == 0) return;
    OpenArray("index");
    for (uint32_t dim = 0; dim < index->size(); ++dim) {
      OpenLine();
      for (uint32_t i = 0; i < index->Get(dim)->count(); ++i) {
        Integer(IndexNumber(*index->Get(dim), i));
      }
      CloseLine();
    }
    CloseArray();
  }

  const PlanFile& plan_;
  const fb::Body& body_;
  const PlanView view_;
};

std::string PlanJsonPrinter::Print() {
  OpenObject();
  PrintHeader();
  PrintDelta();
  PrintTopology();
  PrintStats();
  PrintParams();
  PrintSkipsAndCasts();
  PrintQuantizations();
  PrintBuffers();
  PrintRounds();
  PrintPrograms();
  PrintCopyLists();
  CloseObject();
  return Take();
}

void PlanJsonPrinter::PrintHeader() {
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
  Bool("colocated", body_.colocated());
  OpenArray("hosts");
  for (const auto& [host, ranks] : RanksByHost(body_)) {
    OpenObject();
    Number("host", host);
    OpenLine("ranks");
    for (const int32_t rank : ranks) Integer(rank);
    CloseLine();
    CloseObject();
  }
  CloseArray();
  OpenArray("requirements");
  for (uint32_t i = 0; i < Length(body_.requirements()); ++i) {
    const fb::Requirement& requirement = *body_.requirements()->Get(i);
    OpenObject();
    Text("side", EnumText(requirement.side()));
    Text("key", requirement.key());
    Text("value", requirement.value());
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintDelta() {
  const fb::Delta* const delta = body_.delta();
  if (delta == nullptr) return;
  OpenObject("delta");
  Text("changes", EnumText(delta->changes()));
  Number("dense_every", delta->dense_every());
  Bool("check", delta->check());
  if (delta->rungs() != nullptr) {
    OpenLine("rungs");
    for (const uint8_t rung : *delta->rungs()) Number(rung);
    CloseLine();
  }
  CloseObject();
}

void PlanJsonPrinter::PrintTopology() {
  const fb::Topology* const topology = body_.topology();
  if (topology == nullptr) return;
  OpenObject("topology");
  Text("machine", topology->machine());
  Number("hosts_per_nvlink_domain", topology->hosts_per_nvlink_domain());
  Number("gpus_per_nic", topology->gpus_per_nic());
  Number("hosts_per_leaf", topology->hosts_per_leaf());
  Bool("rails", topology->rails());
  Real("spine_oversubscription", topology->spine_oversubscription());
  Real("peer_bytes_per_second", topology->peer_bytes_per_second());
  Real("network_bytes_per_second", topology->network_bytes_per_second());
  CloseObject();
}

void PlanJsonPrinter::PrintStats() {
  const fb::Limits& limits = *body_.limits();
  OpenObject("limits");
  Number("bucket_bytes", limits.bucket_bytes());
  Number("staging_bytes", limits.staging_bytes());
  Number("slots", limits.slots());
  Number("operations_per_round", limits.operations_per_round());
  if (limits.network_peers() > 0) {
    Number("network_peers", limits.network_peers());
  }
  if (limits.direct_multiprocessors() > 0) {
    Number("direct_multiprocessors", limits.direct_multiprocessors());
  }
  if (limits.direct_pulls()) Bool("direct_pulls", true);
  CloseObject();
  const fb::Stats& stats = *body_.stats();
  OpenObject("stats");
  Number("moved_bytes", stats.moved_bytes());
  Number("local_bytes", stats.local_bytes());
  Number("peer_bytes", stats.peer_bytes());
  Number("network_bytes", stats.network_bytes());
  if (stats.relayed_bytes() > 0) {
    Number("relayed_bytes", stats.relayed_bytes());
  }
  if (const Dealt dealt = DealtOf(plan_); dealt.bytes > 0) {
    Number("dealt_bytes", dealt.bytes);
    Number("dealing_ranks", dealt.ranks);
  }
  const Estimates estimates = EstimatesOf(plan_);
  Real("lower_bound_seconds", estimates.lower_bound_seconds);
  Real("predicted_seconds", estimates.predicted_seconds);
  Text("binding_link", estimates.binding_link);
  CloseObject();
}

void PlanJsonPrinter::PrintParams() {
  OpenArray("params");
  for (uint32_t id = 0; id < view_.params.size(); ++id) {
    if (!view_.params[id]) continue;
    const fb::Param& param = *body_.params()->Get(id);
    OpenObject();
    Number("id", id);
    Text("name", param.name());
    Index(param.index());
    Text("dtype", EnumText(param.dtype()));
    Dims("shape", param.shape());
    if (param.skip() != fb::SkipReason::kUnspecified)
      Text("skip", EnumText(param.skip()));
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintSkipsAndCasts() {
  OpenArray("skips");
  for (uint32_t id = 0; id < view_.skips.size(); ++id) {
    if (!view_.skips[id]) continue;
    const fb::Skip& skip = *body_.skips()->Get(id);
    OpenObject();
    Text("name", skip.name());
    Text("reason", EnumText(skip.reason()));
    Text("detail", skip.detail());
    CloseObject();
  }
  CloseArray();
  OpenArray("casts");
  for (uint32_t id = 0; id < Length(body_.casts()); ++id) {
    OpenObject();
    Text("from", EnumText(body_.casts()->Get(id)->from()));
    Text("to", EnumText(body_.casts()->Get(id)->to()));
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintBuffers() {
  const std::vector<std::vector<int32_t>> holders = HoldersByBuffer(body_);
  OpenArray("buffers");
  for (uint32_t id = 0; id < view_.buffers.size(); ++id) {
    if (!view_.buffers[id]) continue;
    const fb::Buffer& buffer = *body_.buffers()->Get(id);
    OpenObject();
    Number("id", id);
    Text("name", buffer.name());
    Index(buffer.index());
    Text("dtype", EnumText(buffer.dtype()));
    Dims("shape", buffer.shape());
    OpenLine("ranks");
    for (const int32_t rank : holders[id]) Integer(rank);
    CloseLine();
    PrintFragments(id, buffer);
    if (!view_.partial_buffers[id]) PrintRegions(buffer);
    PrintPostHooks(buffer);
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintFragments(uint32_t id, const fb::Buffer& buffer) {
  OpenArray("holds");
  for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
    const fb::Fragment& fragment = *buffer.fragments()->Get(i);
    if (view_.partial_buffers[id] && !view_.params[fragment.param()]) continue;
    OpenObject();
    Number("param", fragment.param());
    Dims("lo", fragment.lo());
    Dims("extent", fragment.extent());
    Number("offset", fragment.offset());
    Dims("stride", fragment.stride());
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintRegions(const fb::Buffer& buffer) {
  if (Length(buffer.regions()) == 0) return;
  OpenArray("regions");
  for (uint32_t i = 0; i < buffer.regions()->size(); ++i) {
    const fb::Region& region = *buffer.regions()->Get(i);
    OpenObject();
    Text("kind", EnumText(region.kind()));
    if (region.kind() == fb::RegionKind::kSkip)
      Text("reason", EnumText(region.reason()));
    Number("offset", region.offset());
    Dims("extent", region.extent());
    Dims("stride", region.stride());
    Text("detail", region.detail());
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintPostHooks(const fb::Buffer& buffer) {
  if (Length(buffer.post_hooks()) == 0) return;
  OpenArray("post_hooks");
  for (uint32_t i = 0; i < buffer.post_hooks()->size(); ++i) {
    const fb::PostHook& hook = *buffer.post_hooks()->Get(i);
    OpenObject();
    Text("name", hook.name());
    Text("detail", hook.detail());
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintRounds() {
  OpenArray("rounds");
  for (uint32_t id = 0; id < view_.rounds.size(); ++id) {
    if (!view_.rounds[id]) continue;
    OpenObject();
    Number("id", id);
    Text("route", EnumText(body_.rounds()->Get(id)->route()));
    Text("mechanism", EnumText(body_.rounds()->Get(id)->mechanism()));
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintPrograms() {
  OpenArray("ranks");
  for (const PlanView::Program& shown : view_.programs) {
    const fb::RankProgram& program =
        *body_.programs()->Get(static_cast<uint32_t>(shown.rank));
    OpenObject();
    Number("rank", static_cast<uint64_t>(shown.rank));
    Text("side", EnumText(plan_.side(shown.rank)));
    Number("host", program.host());
    Number("staging_bytes", program.staging_bytes());
    OpenArray("slots");
    for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
      if (!view_.buffers[program.buffers()->Get(slot)]) continue;
      OpenObject();
      Number("slot", slot);
      Number("buffer", program.buffers()->Get(slot));
      if (const fb::ScratchWindow* window = WindowOf(program, slot)) {
        Number("arena_offset", window->offset());
        Number("begin_round", window->begin());
        Number("end_round", window->end());
      }
      CloseObject();
    }
    CloseArray();
    if (program.scratch_buffers() > 0) {
      Number("scratch_buffers", program.scratch_buffers());
      Number("scratch_bytes", ScratchBytes(plan_, shown.rank));
    }
    if (shown.fills) Number("fills", program.fills());
    PrintQuantizes(program, shown);
    OpenArray("messages");
    for (const uint32_t position : shown.messages) {
      const fb::Message& message = *plan_.messages().Of(program).Get(position);
      OpenObject();
      Number("round", message.round());
      Text("kind", message.kind() == fb::MessageKind::kSend ? "send" : "recv");
      const uint32_t peer = PeerOf(body_, program, message);
      Number("peer", peer);
      if (message.kind() == fb::MessageKind::kSend &&
          IsDealt(body_, message.round(), static_cast<uint32_t>(shown.rank),
                  peer)) {
        Bool("deals", true);
      }
      if (message.broadcast() != 0) Number("broadcast", message.broadcast());
      Number("size_bytes", message.size_bytes());
      Number("staging_offset", message.staging_offset());
      Number("copies", message.copies());
      if (const fb::Message* fed_by =
              FedBy(plan_.messages(), program, position)) {
        OpenObject("fed_by");
        Number("round", fed_by->round());
        Number("peer", PeerOf(body_, program, *fed_by));
        CloseObject();
      }
      CloseObject();
    }
    CloseArray();
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintQuantizes(const fb::RankProgram& program,
                                     const PlanView::Program& shown) {
  if (shown.quantizes.empty()) return;
  OpenArray("quantizes");
  for (const uint32_t position : shown.quantizes) {
    const fb::Quantize& op = *program.quantizes()->Get(position);
    OpenObject();
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
      OpenLine(key);
      for (uint32_t i = 0; i < op.loops_count(); ++i) {
        Number((body_.quantize_loops()->Get(op.loops_begin() + i)->*field)());
      }
      CloseLine();
    };
    loops("extent", &fb::QuantizeLoop::extent);
    loops("input_stride", &fb::QuantizeLoop::input_stride);
    loops("output_stride", &fb::QuantizeLoop::output_stride);
    loops("scale_stride", &fb::QuantizeLoop::scale_stride);
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintQuantizations() {
  if (Length(body_.quantizations()) == 0) return;
  OpenArray("quantizations");
  for (uint32_t id = 0; id < body_.quantizations()->size(); ++id) {
    const fb::Quantization& quantization = *body_.quantizations()->Get(id);
    OpenObject();
    Number("id", id);
    Number("of", quantization.of());
    Number("data", quantization.data());
    Number("scales", quantization.scales());
    Number("block_rows", quantization.block_rows());
    Number("block_columns", quantization.block_columns());
    Text("scale_format", EnumText(quantization.scale_format()));
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintCopyLists() {
  OpenArray("copy_lists");
  for (uint32_t id = 0; id < view_.copy_lists.size(); ++id) {
    if (!view_.copy_lists[id]) continue;
    OpenObject();
    Number("id", id);
    OpenArray("copies");
    const fb::CopyList& run = *body_.copy_lists()->Get(id);
    for (uint32_t i = run.begin(); i < run.begin() + run.count(); ++i) {
      if (view_.copies[i]) PrintCopy(*body_.copies()->Get(i));
    }
    CloseArray();
    CloseObject();
  }
  CloseArray();
}

void PlanJsonPrinter::PrintCopy(const fb::Copy& copy) {
  OpenObject();
  Number("slot", copy.buffer_slot());
  Number("offset", copy.offset());
  OpenLine("extent");
  for (uint32_t i = 0; i < copy.loops_count(); ++i) {
    Number(body_.loops()->Get(copy.loops_begin() + i)->extent());
  }
  CloseLine();
  OpenLine("stride");
  for (uint32_t i = 0; i < copy.loops_count(); ++i) {
    Number(body_.loops()->Get(copy.loops_begin() + i)->stride());
  }
  CloseLine();
  Text("wire_dtype", EnumText(copy.wire_dtype()));
  Number("staging_offset", copy.staging_offset());
  CloseObject();
}

}  // namespace

std::string PlanJson(const PlanFile& plan, const TextOptions& options) {
  return PlanJsonPrinter(plan, options).Print();
}

}  // namespace refit
