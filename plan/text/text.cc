#include "plan/text/text.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/scratch_windows.h"
#include "plan/text/dealt.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

std::string QuotedOrEmpty(const flatbuffers::String* text) {
  return text == nullptr ? "\"\"" : QuotedText(text);
}

// "0..7", or "none" for an empty range.
std::string RangeText(int32_t begin, int32_t end) {
  if (begin >= end) return "none";
  return end - begin == 1 ? absl::StrCat(begin)
                          : absl::StrCat(begin, "..", end - 1);
}

class TextPrinter {
 public:
  TextPrinter(const PlanFile& plan, const TextOptions& options)
      : plan_(plan),
        body_(plan.body()),
        rank_(options.rank),
        view_(SelectView(plan, options)) {}

  std::string Print();

 private:
  void PrintHeader();
  void PrintRanks();
  void PrintRequirements();
  void PrintDelta();
  void PrintTopology();
  void PrintStats();
  void PrintParams();
  void PrintBuffers();
  void PrintFragments(uint32_t id, const fb::Buffer& buffer);
  void PrintRegions(const fb::Buffer& buffer);
  void PrintRounds();
  void PrintProgram(const PlanView::Program& shown);
  void PrintQuantizes(const PlanView::Program& shown);
  void PrintCopyLists();

  const PlanFile& plan_;
  const fb::Body& body_;
  const std::optional<int32_t> rank_;
  const PlanView view_;
  std::string text_;
};

std::string TextPrinter::Print() {
  PrintHeader();
  PrintRanks();
  PrintRequirements();
  PrintDelta();
  PrintTopology();
  PrintStats();
  PrintParams();
  PrintBuffers();
  PrintRounds();
  for (const PlanView::Program& shown : view_.programs) PrintProgram(shown);
  PrintCopyLists();
  return std::move(text_);
}

void TextPrinter::PrintHeader() {
  const fb::Plan& plan = plan_.plan();
  text_ += FormatText(plan);
  if (plan.body_digest() != nullptr) {
    absl::StrAppend(&text_, " body ", DigestText(*plan.body_digest()));
  }
  if (plan.inputs_digest() != nullptr) {
    absl::StrAppend(&text_, " inputs ", DigestText(*plan.inputs_digest()));
  }
  text_ += '\n';
}

void TextPrinter::PrintRanks() {
  absl::StrAppend(&text_, "ranks source ", RangeText(0, plan_.source_ranks()),
                  " destination ",
                  RangeText(plan_.source_ranks(), plan_.world_size()),
                  body_.colocated() ? " colocated" : "", "\n");
  for (const auto& [host, ranks] : RanksByHost(body_)) {
    absl::StrAppend(&text_, "host ", host, " ranks ", NumberSetText(ranks),
                    "\n");
  }
}

void TextPrinter::PrintRequirements() {
  for (uint32_t i = 0; i < Length(body_.requirements()); ++i) {
    const fb::Requirement& requirement = *body_.requirements()->Get(i);
    absl::StrAppend(&text_, "requires ", EnumText(requirement.side()), " ",
                    requirement.key()->str(), " ", requirement.value()->str(),
                    "\n");
  }
}

void TextPrinter::PrintDelta() {
  const fb::Delta* const delta = body_.delta();
  if (delta == nullptr) return;
  absl::StrAppend(&text_, "delta ", DeltaText(*delta), "\n");
}

void TextPrinter::PrintTopology() {
  if (body_.topology() == nullptr) return;
  absl::StrAppend(&text_, "topology ", TopologyText(*body_.topology()), "\n");
}

void TextPrinter::PrintStats() {
  const fb::Limits& limits = *body_.limits();
  absl::StrAppend(&text_, "limits bucket ", limits.bucket_bytes(),
                  " bytes staging ", limits.staging_bytes(), " bytes slots ",
                  limits.slots(), " operations_per_round ",
                  limits.operations_per_round());
  if (limits.network_peers() > 0) {
    absl::StrAppend(&text_, " network_peers ", limits.network_peers());
  }
  if (limits.direct_multiprocessors() > 0) {
    absl::StrAppend(&text_, " direct_multiprocessors ",
                    limits.direct_multiprocessors());
  }
  if (limits.direct_pulls()) absl::StrAppend(&text_, " direct_pulls");
  text_ += '\n';
  const fb::Stats& stats = *body_.stats();
  absl::StrAppend(&text_, "stats moved ", stats.moved_bytes(), " bytes local ",
                  stats.local_bytes(), " peer ", stats.peer_bytes(),
                  " network ", stats.network_bytes());
  if (stats.relayed_bytes() > 0) {
    absl::StrAppend(&text_, " relayed ", stats.relayed_bytes());
  }
  text_ += '\n';
  if (const Dealt dealt = DealtOf(plan_); dealt.bytes > 0) {
    absl::StrAppend(&text_, "dealt ", DealtText(dealt), "\n");
  }
  const Estimates estimates = EstimatesOf(plan_);
  absl::StrAppendFormat(
      &text_, "stats lower_bound %.6g s predicted %.6g s binding_link %s\n",
      estimates.lower_bound_seconds, estimates.predicted_seconds,
      QuotedText(estimates.binding_link));
}

void TextPrinter::PrintParams() {
  for (uint32_t id = 0; id < view_.params.size(); ++id) {
    if (!view_.params[id]) continue;
    const fb::Param& param = *body_.params()->Get(id);
    absl::StrAppend(&text_, "param p", id, " ", QuotedText(param.name()),
                    IndexText(param.index()), " ", EnumText(param.dtype()), " ",
                    DimsText(param.shape()));
    if (param.skip() != fb::SkipReason::kUnspecified) {
      absl::StrAppend(&text_, " skip ", EnumText(param.skip()));
    }
    text_ += '\n';
  }
  for (uint32_t id = 0; id < view_.skips.size(); ++id) {
    if (!view_.skips[id]) continue;
    const fb::Skip& skip = *body_.skips()->Get(id);
    absl::StrAppend(&text_, "skip ", QuotedText(skip.name()), " ",
                    EnumText(skip.reason()), " ", QuotedOrEmpty(skip.detail()),
                    "\n");
  }
  for (uint32_t id = 0; id < Length(body_.quantizations()); ++id) {
    const fb::Quantization& quantization = *body_.quantizations()->Get(id);
    if (!view_.params[quantization.of()] &&
        !view_.params[quantization.data()] &&
        !view_.params[quantization.scales()]) {
      continue;
    }
    absl::StrAppend(
        &text_, "quantization q", id, " p", quantization.of(), " -> p",
        quantization.data(), " scales p", quantization.scales(), " ",
        EnumText(quantization.scale_format()), " blocks ",
        quantization.block_rows(), " x ", quantization.block_columns(), "\n");
  }
  for (uint32_t id = 0; id < Length(body_.casts()); ++id) {
    const fb::Cast& cast = *body_.casts()->Get(id);
    absl::StrAppend(&text_, "cast ", EnumText(cast.from()), " -> ",
                    EnumText(cast.to()), "\n");
  }
}

void TextPrinter::PrintBuffers() {
  const std::vector<std::vector<int32_t>> holders = HoldersByBuffer(body_);
  for (uint32_t id = 0; id < view_.buffers.size(); ++id) {
    if (!view_.buffers[id]) continue;
    const fb::Buffer& buffer = *body_.buffers()->Get(id);
    absl::StrAppend(&text_, "buffer b", id, " ", QuotedText(buffer.name()),
                    IndexText(buffer.index()), " ", EnumText(buffer.dtype()),
                    " ", DimsText(buffer.shape()), " ranks ",
                    NumberSetText(holders[id]), "\n");
    PrintFragments(id, buffer);
    if (!view_.partial_buffers[id]) PrintRegions(buffer);
    for (uint32_t i = 0; i < Length(buffer.post_hooks()); ++i) {
      absl::StrAppend(&text_, "  post-hook ",
                      PostHookText(*buffer.post_hooks()->Get(i)), "\n");
    }
  }
}

void TextPrinter::PrintFragments(uint32_t id, const fb::Buffer& buffer) {
  for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
    const fb::Fragment& fragment = *buffer.fragments()->Get(i);
    if (view_.partial_buffers[id] && !view_.params[fragment.param()]) continue;
    absl::StrAppend(&text_, "  holds p", fragment.param(), " ",
                    BoxText(fragment), " at ", fragment.offset(), " strides ",
                    DimsText(fragment.stride()), "\n");
  }
}

void TextPrinter::PrintRegions(const fb::Buffer& buffer) {
  for (uint32_t i = 0; i < Length(buffer.regions()); ++i) {
    const fb::Region& region = *buffer.regions()->Get(i);
    absl::StrAppend(&text_, "  ", EnumText(region.kind()));
    if (region.kind() == fb::RegionKind::kSkip) {
      absl::StrAppend(&text_, " ", EnumText(region.reason()));
    }
    absl::StrAppend(&text_, " extents ", DimsText(region.extent()), " at ",
                    region.offset(), " strides ", DimsText(region.stride()));
    if (region.detail() != nullptr)
      absl::StrAppend(&text_, " ", QuotedText(region.detail()));
    text_ += '\n';
  }
}

// Consecutive rounds of one route share a line.
void TextPrinter::PrintRounds() {
  const auto route = [this](uint32_t id) {
    const fb::Round& round = *body_.rounds()->Get(id);
    return RouteText(round.route(), round.mechanism());
  };
  for (uint32_t id = 0; id < view_.rounds.size(); ++id) {
    if (!view_.rounds[id]) continue;
    uint32_t last = id;
    while (last + 1 < view_.rounds.size() && view_.rounds[last + 1] &&
           route(last + 1) == route(id)) {
      ++last;
    }
    absl::StrAppend(
        &text_, last == id ? "round " : "rounds ",
        RangeText(static_cast<int32_t>(id), static_cast<int32_t>(last) + 1),
        " ", route(id), "\n");
    id = last;
  }
}

void TextPrinter::PrintProgram(const PlanView::Program& shown) {
  const fb::RankProgram& program =
      *body_.programs()->Get(static_cast<uint32_t>(shown.rank));
  absl::StrAppend(&text_, "rank ", shown.rank, " ",
                  EnumText(plan_.side(shown.rank)), " host ", program.host(),
                  " staging ", program.staging_bytes(), " bytes");
  if (program.scratch_buffers() > 0) {
    absl::StrAppend(&text_, " scratch ", ScratchBytes(plan_, shown.rank),
                    " bytes");
  }
  text_ += '\n';
  for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
    const uint32_t buffer = program.buffers()->Get(slot);
    if (!view_.buffers[buffer]) continue;
    absl::StrAppend(&text_, "  slot ", slot, " b", buffer,
                    IsScratch(program, slot) ? " scratch" : "");
    if (const fb::ScratchWindow* window = WindowOf(program, slot)) {
      absl::StrAppend(&text_, " at ", window->offset(), " rounds ",
                      RangeText(static_cast<int32_t>(window->begin()),
                                static_cast<int32_t>(window->end())));
    }
    text_ += '\n';
  }
  if (shown.fills) absl::StrAppend(&text_, "  fills c", program.fills(), "\n");
  if (plan_.side(shown.rank) == fb::Side::kSource) PrintQuantizes(shown);
  for (const uint32_t position : shown.messages) {
    const fb::Message& message = *plan_.messages().Of(program).Get(position);
    const uint32_t peer = PeerOf(body_, program, message);
    const bool relays = plan_.side(shown.rank) == fb::Side::kDestination;
    const bool deals =
        relays && IsDealt(body_, message.round(),
                          static_cast<uint32_t>(shown.rank), peer);
    absl::StrAppend(
        &text_, "  round ", message.round(),
        message.kind() == fb::MessageKind::kRecv
            ? message.broadcast() != 0 ? " recv broadcast <- " : " recv <- "
        : message.broadcast() != 0 ? " broadcast -> "
        : deals                    ? " deal -> "
        : relays                   ? " relay -> "
                                   : " send -> ",
        peer, " ");
    absl::StrAppend(&text_, message.size_bytes(), " bytes at ",
                    message.staging_offset(), " copies c", message.copies());
    if (const fb::Message* fed_by =
            FedBy(plan_.messages(), program, position)) {
      absl::StrAppend(&text_, " fed by round ", fed_by->round(), " <- ",
                      PeerOf(body_, program, *fed_by));
    }
    text_ += '\n';
  }
  if (plan_.side(shown.rank) == fb::Side::kDestination) PrintQuantizes(shown);
}

void TextPrinter::PrintQuantizes(const PlanView::Program& shown) {
  const fb::RankProgram& program =
      *body_.programs()->Get(static_cast<uint32_t>(shown.rank));
  for (const uint32_t position : shown.quantizes) {
    const fb::Quantize& op = *program.quantizes()->Get(position);
    absl::StrAppend(&text_, "  quantize q", op.quantization(), " ", op.rows(),
                    " x ", op.columns(), " slot ", op.input_slot(), " at ",
                    op.input_offset(), " rows ", op.input_row_stride(),
                    " -> slot ");
    absl::StrAppend(&text_, op.output_slot(), " at ", op.output_offset(),
                    " rows ", op.output_row_stride(), " scales slot ",
                    op.scale_slot(), " at ", op.scale_offset(), " rows ",
                    op.scale_row_stride());
    absl::StrAppend(&text_, " loops [");
    for (uint32_t i = 0; i < op.loops_count(); ++i) {
      const fb::QuantizeLoop& loop =
          *body_.quantize_loops()->Get(op.loops_begin() + i);
      absl::StrAppend(&text_, i == 0 ? "" : ", ", loop.extent(), " x ",
                      loop.input_stride(), " -> ", loop.output_stride(), ", ",
                      loop.scale_stride());
    }
    text_ += "]\n";
  }
}

void TextPrinter::PrintCopyLists() {
  for (uint32_t id = 0; id < view_.copy_lists.size(); ++id) {
    if (!view_.copy_lists[id]) continue;
    absl::StrAppend(&text_, "copies c", id, "\n");
    const fb::CopyList& run = *body_.copy_lists()->Get(id);
    for (uint32_t i = run.begin(); i < run.begin() + run.count(); ++i) {
      if (!view_.copies[i]) continue;
      const fb::Copy& copy = *body_.copies()->Get(i);
      absl::StrAppend(&text_, "  slot ", copy.buffer_slot());
      // Ranks that share a list may hold different buffers in the slot.
      if (rank_.has_value()) {
        const fb::RankProgram& program =
            *body_.programs()->Get(static_cast<uint32_t>(*rank_));
        absl::StrAppend(&text_, " b",
                        program.buffers()->Get(copy.buffer_slot()));
      }
      absl::StrAppend(&text_, " at ", copy.offset(), " loops [");
      for (uint32_t j = 0; j < copy.loops_count(); ++j) {
        const fb::Loop& loop = *body_.loops()->Get(copy.loops_begin() + j);
        absl::StrAppend(&text_, j == 0 ? "" : ", ", loop.extent(), " x ",
                        loop.stride());
      }
      absl::StrAppend(&text_, "] ", EnumText(copy.wire_dtype()), " staging ",
                      copy.staging_offset(), "\n");
    }
  }
}

}  // namespace

std::string PlanText(const PlanFile& plan, const TextOptions& options) {
  return TextPrinter(plan, options).Print();
}

std::string TopologyText(const fb::Topology& topology) {
  std::string text;
  if (topology.machine() != nullptr) {
    text = absl::StrCat("machine ", QuotedText(topology.machine()), " ");
  }
  absl::StrAppend(
      &text, "hosts_per_nvlink_domain ", topology.hosts_per_nvlink_domain(),
      " gpus_per_nic ", topology.gpus_per_nic(), " hosts_per_leaf ",
      topology.hosts_per_leaf() == 0 ? "all"
                                     : absl::StrCat(topology.hosts_per_leaf()),
      topology.rails() ? " rails" : "", " spine_oversubscription ",
      topology.spine_oversubscription(), " peer ",
      topology.peer_bytes_per_second(), " network ",
      topology.network_bytes_per_second(), " bytes per second");
  return text;
}

}  // namespace refit
