#include "plan/text/text.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/scratch_windows.h"
#include "plan/text/dealt.h"
#include "plan/text/fact_writer.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

// "0..7", or "none" for an empty range.
std::string RangeText(int64_t begin, int64_t end) {
  if (begin >= end) return "none";
  return end - begin == 1 ? absl::StrCat(begin)
                          : absl::StrCat(begin, "..", end - 1);
}

std::vector<uint32_t> Positions(const std::vector<bool>& entries) {
  std::vector<uint32_t> shown;
  for (uint32_t id = 0; id < entries.size(); ++id) {
    if (entries[id]) shown.push_back(id);
  }
  return shown;
}

// With `label` before the line.
void SayTopology(const fb::Topology& topology, const char* label,
                 FactWriter& facts) {
  facts.Name("machine", topology.machine());
  facts.Number("hosts_per_nvlink_domain", topology.hosts_per_nvlink_domain());
  facts.Number("gpus_per_nic", topology.gpus_per_nic());
  facts.Shown("leaf", topology.hosts_per_leaf() == 0
                          ? "all"
                          : absl::StrCat(topology.hosts_per_leaf()));
  facts.Number("hosts_per_leaf", topology.hosts_per_leaf());
  facts.Flag("rails", topology.rails());
  facts.Real("spine_oversubscription", topology.spine_oversubscription());
  facts.Real("peer_bytes_per_second", topology.peer_bytes_per_second());
  facts.Real("network_bytes_per_second", topology.network_bytes_per_second());
  facts.Line(absl::StrCat(
      label,
      "| machine {machine}| hosts_per_nvlink_domain "
      "{hosts_per_nvlink_domain} gpus_per_nic {gpus_per_nic} hosts_per_leaf "
      "{leaf}| rails{rails}| spine_oversubscription {spine_oversubscription} "
      "peer {peer_bytes_per_second} network {network_bytes_per_second} bytes "
      "per second"));
}

template <typename Loop>
struct LoopField {
  const char* key;
  const char* before;  // of its value in text
  uint64_t (Loop::*get)() const;
};

// Stacks and lists by their numbers, as the view has them.
class PlanPrinter : FactWriter {
 public:
  PlanPrinter(const PlanFile& plan, const TextOptions& options, FactForm form)
      : FactWriter(form),
        plan_(plan),
        body_(plan.body()),
        rank_(options.rank),
        view_(SelectView(plan, options)) {}

  std::string Print();

 private:
  void PrintHeader();
  void PrintJobFacts();
  void PrintLimits();
  void PrintStats();
  void PrintParams();
  void PrintConversions();
  void PrintBuffers();
  void PrintRounds();
  void PrintProgram(const PlanView::Program& shown);
  void PrintMessage(int32_t rank, uint32_t position);
  void PrintQuantizes(const PlanView::Program& shown);
  void PrintCopy(const fb::Copy& copy);
  template <typename Loop, typename Op>
  void Loops(const flatbuffers::Vector<const Loop*>* loops, const Op& op,
             std::initializer_list<LoopField<Loop>> fields);
  template <typename Stack>
  void PrintStack(uint32_t id, const Stack& stack);
  const fb::RankProgram& ProgramOf(int32_t rank) const {
    return *body_.programs()->Get(static_cast<uint32_t>(rank));
  }

  const PlanFile& plan_;
  const fb::Body& body_;
  const std::optional<int32_t> rank_;
  const PlanView view_;
};

std::string PlanPrinter::Print() {
  Object("", [&] {
    PrintHeader();
    PrintJobFacts();
    PrintLimits();
    PrintStats();
    PrintParams();
    PrintConversions();
    PrintBuffers();
    PrintRounds();
    List("ranks", view_.programs,
         [&](const auto& shown) { PrintProgram(shown); });
    List("copy_lists", Positions(view_.copy_lists), [&](uint32_t id) {
      Number("id", id);
      Line("copies c{id}");
      std::vector<const fb::Copy*> copies;
      const fb::CopyList& list = *body_.copy_lists()->Get(id);
      for (uint32_t i = list.begin(); i < list.begin() + list.count(); ++i) {
        if (view_.copies[i]) copies.push_back(body_.copies()->Get(i));
      }
      List("copies", copies, [&](const fb::Copy* copy) { PrintCopy(*copy); });
    });
  });
  return Take();
}

void PlanPrinter::PrintHeader() {
  const fb::Plan& plan = plan_.plan();
  const int32_t sources = plan_.source_ranks();
  Word("format", absl::StrCat(plan.format_version() >> 16, ".",
                              plan.format_version() & 0xffff));
  Number("required_features", plan.required_features());
  if (plan.body_digest() != nullptr) {
    Word("body_digest", DigestText(*plan.body_digest()));
  }
  if (plan.inputs_digest() != nullptr) {
    Word("inputs_digest", DigestText(*plan.inputs_digest()));
  }
  Shown("plan", FormatText(plan));
  Line("{plan}| body {body_digest}| inputs {inputs_digest}");
  Number("source_ranks", sources);
  Number("destination_ranks", plan_.world_size() - sources);
  Flag("colocated", body_.colocated());
  Shown("sources", RangeText(0, sources));
  Shown("destinations", RangeText(sources, plan_.world_size()));
  Line(
      "ranks source {sources} destination {destinations}| "
      "colocated{colocated}");
  List("hosts", RanksByHost(body_), [&](const auto& host) {
    Number("host", host.first);
    Ranks("ranks", host.second);
    Line("host {host} ranks {ranks}");
  });
}

// What the job says of the workers, of deltas and of the network.
void PlanPrinter::PrintJobFacts() {
  List("requirements", body_.requirements(),
       [&](const fb::Requirement& requirement) {
         Word("side", EnumText(requirement.side()));
         Word("key", requirement.key()->string_view());
         Word("value", requirement.value()->string_view());
         Line("requires {side} {key} {value}");
       });
  if (const fb::Delta* const delta = body_.delta()) {
    Object("delta", [&] {
      Word("changes", EnumText(delta->changes()));
      Number("dense_every", delta->dense_every());
      Flag("check", delta->check());
      if (delta->rungs() != nullptr) Values("rungs", *delta->rungs());
      Shown("delta", DeltaText(*delta));
      Line("delta {delta}");
    });
  }
  if (body_.topology() != nullptr) {
    Object("topology",
           [&] { SayTopology(*body_.topology(), "topology", *this); });
  }
}

void PlanPrinter::PrintLimits() {
  const fb::Limits& limits = *body_.limits();
  Object("limits", [&] {
    Number("bucket_bytes", limits.bucket_bytes());
    Number("staging_bytes", limits.staging_bytes());
    Number("slots", limits.slots());
    Number("operations_per_round", limits.operations_per_round());
    Positive("network_peers", limits.network_peers());
    Positive("direct_multiprocessors", limits.direct_multiprocessors());
    if (limits.direct_pulls()) Flag("direct_pulls", true);
    Line(
        "limits bucket {bucket_bytes} bytes staging {staging_bytes} bytes "
        "slots {slots} operations_per_round {operations_per_round}| "
        "network_peers {network_peers}| direct_multiprocessors "
        "{direct_multiprocessors}| direct_pulls{direct_pulls}");
  });
}

void PlanPrinter::PrintStats() {
  const fb::Stats& stats = *body_.stats();
  const Dealt dealt = DealtOf(plan_);
  const Estimates estimates = EstimatesOf(plan_);
  Object("stats", [&] {
    Number("moved_bytes", stats.moved_bytes());
    Number("local_bytes", stats.local_bytes());
    Number("peer_bytes", stats.peer_bytes());
    Number("network_bytes", stats.network_bytes());
    Positive("relayed_bytes", stats.relayed_bytes());
    Line(
        "stats moved {moved_bytes} bytes local {local_bytes} peer "
        "{peer_bytes} network {network_bytes}| relayed {relayed_bytes}");
    if (dealt.bytes > 0) {
      Number("dealt_bytes", dealt.bytes);
      Number("dealing_ranks", dealt.ranks);
      Shown("dealt", DealtText(dealt));
      Line("dealt {dealt}");
    }
    Real("lower_bound_seconds", estimates.lower_bound_seconds);
    Real("predicted_seconds", estimates.predicted_seconds);
    Name("binding_link", estimates.binding_link);
    Line(
        "stats lower_bound {lower_bound_seconds} s predicted "
        "{predicted_seconds} s binding_link {binding_link}");
  });
}

void PlanPrinter::PrintParams() {
  List("params", Positions(view_.params), [&](uint32_t id) {
    const fb::Param& param = *body_.params()->Get(id);
    PrintStack(id, param);
    if (param.skip() != fb::SkipReason::kUnspecified) {
      Word("skip", EnumText(param.skip()));
    }
    Line("param p{id} {name}{index} {dtype} {shape}| skip {skip}");
  });
  List("skips", Positions(view_.skips), [&](uint32_t id) {
    const fb::Skip& skip = *body_.skips()->Get(id);
    Name("name", skip.name());
    Word("reason", EnumText(skip.reason()));
    Name("detail", skip.detail());
    Shown("detail", "\"\"");
    Line("skip {name} {reason} {detail}");
  });
}

void PlanPrinter::PrintConversions() {
  if (const auto* all = body_.quantizations(); Length(all) > 0) {
    List("quantizations", Positions(view_.quantizations), [&](uint32_t id) {
      const fb::Quantization& quantization = *all->Get(id);
      Number("id", id);
      Number("of", quantization.of());
      Number("data", quantization.data());
      Number("scales", quantization.scales());
      Number("block_rows", quantization.block_rows());
      Number("block_columns", quantization.block_columns());
      Word("scale_format", EnumText(quantization.scale_format()));
      Line(
          "quantization q{id} p{of} -> p{data} scales p{scales} "
          "{scale_format} blocks {block_rows} x {block_columns}");
    });
  }
  List("casts", body_.casts(), [&](const fb::Cast& cast) {
    Word("from", EnumText(cast.from()));
    Word("to", EnumText(cast.to()));
    Line("cast {from} -> {to}");
  });
}

void PlanPrinter::PrintBuffers() {
  const std::vector<std::vector<int32_t>> holders = HoldersByBuffer(body_);
  List("buffers", Positions(view_.buffers), [&](uint32_t id) {
    const fb::Buffer& buffer = *body_.buffers()->Get(id);
    const bool partial = view_.partial_buffers[id];
    PrintStack(id, buffer);
    Ranks("ranks", holders[id]);
    Line("buffer b{id} {name}{index} {dtype} {shape} ranks {ranks}");
    std::vector<const fb::Fragment*> fragments;
    for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
      const fb::Fragment* const fragment = buffer.fragments()->Get(i);
      if (partial && !view_.params[fragment->param()]) continue;
      fragments.push_back(fragment);
    }
    List("holds", fragments, [&](const fb::Fragment* fragment) {
      Number("param", fragment->param());
      Dims("lo", fragment->lo());
      Dims("extent", fragment->extent());
      Number("offset", fragment->offset());
      Dims("stride", fragment->stride());
      Shown("box", BoxText(*fragment));
      Line("  holds p{param} {box} at {offset} strides {stride}");
    });
    if (!partial && Length(buffer.regions()) > 0) {
      List("regions", buffer.regions(), [&](const fb::Region& region) {
        Word("kind", EnumText(region.kind()));
        if (region.kind() == fb::RegionKind::kSkip) {
          Word("reason", EnumText(region.reason()));
        }
        Number("offset", region.offset());
        Dims("extent", region.extent());
        Dims("stride", region.stride());
        Name("detail", region.detail());
        Line(
            "  {kind}| {reason}| extents {extent} at {offset} strides "
            "{stride}| {detail}");
      });
    }
    if (Length(buffer.post_hooks()) > 0) {
      List("post_hooks", buffer.post_hooks(), [&](const fb::PostHook& hook) {
        Word("name", hook.name()->string_view());
        Name("detail", hook.detail());
        Line("  post-hook {name} {detail}");
      });
    }
  });
}

// Consecutive rounds of one route share a line of text.
void PlanPrinter::PrintRounds() {
  const auto route = [&](uint32_t id) {
    const fb::Round& round = *body_.rounds()->Get(id);
    return RouteText(round.route(), round.mechanism());
  };
  const auto are_alike = [&](uint32_t id, uint32_t other) {
    return other < view_.rounds.size() && view_.rounds[other] &&
           route(id) == route(other);
  };
  uint32_t first = 0;  // of the line
  List("rounds", Positions(view_.rounds), [&](uint32_t id) {
    Number("id", id);
    Word("route", EnumText(body_.rounds()->Get(id)->route()));
    Word("mechanism", EnumText(body_.rounds()->Get(id)->mechanism()));
    if (!are_alike(id, id - 1)) first = id;
    if (are_alike(id, id + 1)) return;
    Shown("rounds", absl::StrCat(first == id ? "round " : "rounds ",
                                 RangeText(first, int64_t{id} + 1)));
    Shown("how", route(id));
    Line("{rounds} {how}");
  });
}

void PlanPrinter::PrintProgram(const PlanView::Program& shown) {
  const fb::RankProgram& program = ProgramOf(shown.rank);
  Number("rank", shown.rank);
  Word("side", EnumText(plan_.side(shown.rank)));
  Number("host", program.host());
  Number("staging_bytes", program.staging_bytes());
  if (program.scratch_buffers() > 0) {
    Number("scratch_buffers", program.scratch_buffers());
    Number("scratch_bytes", ScratchBytes(plan_, shown.rank));
  }
  Line(
      "rank {rank} {side} host {host} staging {staging_bytes} bytes| scratch "
      "{scratch_bytes} bytes");
  std::vector<uint32_t> slots;
  for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
    if (view_.buffers[program.buffers()->Get(slot)]) slots.push_back(slot);
  }
  List("slots", slots, [&](uint32_t slot) {
    Number("slot", slot);
    Number("buffer", program.buffers()->Get(slot));
    if (IsScratch(program, slot)) Shown("scratch", "");
    if (const fb::ScratchWindow* window = WindowOf(program, slot)) {
      Number("arena_offset", window->offset());
      Number("begin_round", window->begin());
      Number("end_round", window->end());
      Shown("rounds", RangeText(window->begin(), window->end()));
    }
    Line(
        "  slot {slot} b{buffer}| scratch{scratch}| at {arena_offset} rounds "
        "{rounds}");
  });
  if (shown.fills) {
    Number("fills", program.fills());
    Line("  fills c{fills}");
  }
  const bool is_source = plan_.side(shown.rank) == fb::Side::kSource;
  if (is_source) PrintQuantizes(shown);
  List("messages", shown.messages,
       [&](uint32_t position) { PrintMessage(shown.rank, position); });
  if (!is_source) PrintQuantizes(shown);
}

void PlanPrinter::PrintMessage(int32_t rank, uint32_t position) {
  const fb::RankProgram& program = ProgramOf(rank);
  const fb::Message& message = *plan_.messages().Of(program).Get(position);
  const uint32_t peer = PeerOf(body_, program, message);
  const bool sends = message.kind() == fb::MessageKind::kSend;
  const bool relays = sends && plan_.side(rank) == fb::Side::kDestination;
  const bool deals = relays && IsDealt(body_, message.round(),
                                       static_cast<uint32_t>(rank), peer);
  Number("round", message.round());
  Word("kind", sends ? "send" : "recv");
  Number("peer", peer);
  if (deals) Flag("deals", true);
  Positive("broadcast", message.broadcast());
  Number("size_bytes", message.size_bytes());
  Number("staging_offset", message.staging_offset());
  Number("copies", message.copies());
  if (const fb::Message* fed_by = FedBy(plan_.messages(), program, position)) {
    const uint32_t feeder = PeerOf(body_, program, *fed_by);
    Shown("feed", absl::StrCat(fed_by->round(), " <- ", feeder));
    Object("fed_by", [&] {
      Number("round", fed_by->round());
      Number("peer", feeder);
    });
  }
  const bool broadcasts = message.broadcast() != 0;
  Shown("way", !sends       ? broadcasts ? "recv broadcast <-" : "recv <-"
               : broadcasts ? "broadcast ->"
               : deals      ? "deal ->"
               : relays     ? "relay ->"
                            : "send ->");
  Line(
      "  round {round} {way} {peer} {size_bytes} bytes at {staging_offset} "
      "copies c{copies}| fed by round {feed}");
}

void PlanPrinter::PrintQuantizes(const PlanView::Program& shown) {
  if (shown.quantizes.empty()) return;
  List("quantizes", shown.quantizes, [&](uint32_t position) {
    const fb::Quantize& op = *ProgramOf(shown.rank).quantizes()->Get(position);
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
    Loops<fb::QuantizeLoop>(
        body_.quantize_loops(), op,
        {{"extent", "", &fb::QuantizeLoop::extent},
         {"input_stride", " x ", &fb::QuantizeLoop::input_stride},
         {"output_stride", " -> ", &fb::QuantizeLoop::output_stride},
         {"scale_stride", ", ", &fb::QuantizeLoop::scale_stride}});
    Line(
        "  quantize q{quantization} {rows} x {columns} slot {input_slot} at "
        "{input_offset} rows {input_row_stride} -> slot {output_slot} at "
        "{output_offset} rows {output_row_stride} scales slot {scale_slot} at "
        "{scale_offset} rows {scale_row_stride} loops [{loops}]");
  });
}

void PlanPrinter::PrintCopy(const fb::Copy& copy) {
  Number("slot", copy.buffer_slot());
  // Ranks that share a list may hold different buffers in the slot.
  if (rank_.has_value()) {
    Shown("buffer", absl::StrCat(" b", ProgramOf(*rank_).buffers()->Get(
                                           copy.buffer_slot())));
  }
  Number("offset", copy.offset());
  Loops<fb::Loop>(body_.loops(), copy,
                  {{"extent", "", &fb::Loop::extent},
                   {"stride", " x ", &fb::Loop::stride}});
  Word("wire_dtype", EnumText(copy.wire_dtype()));
  Number("staging_offset", copy.staging_offset());
  Line(
      "  slot {slot}|{buffer}| at {offset} loops [{loops}] {wire_dtype} "
      "staging {staging_offset}");
}

// JSON has a list for each field, text has a list of the loops.
template <typename Loop, typename Op>
void PlanPrinter::Loops(const flatbuffers::Vector<const Loop*>* loops,
                        const Op& op,
                        std::initializer_list<LoopField<Loop>> fields) {
  std::string text;
  std::vector<std::vector<uint64_t>> values(fields.size());
  for (uint32_t i = 0; i < op.loops_count(); ++i) {
    if (i > 0) text += ", ";
    auto* of_field = values.data();
    for (const LoopField<Loop>& field : fields) {
      of_field->push_back((loops->Get(op.loops_begin() + i)->*field.get)());
      absl::StrAppend(&text, field.before, (of_field++)->back());
    }
  }
  Shown("loops", std::move(text));
  for (size_t i = 0; i < values.size(); ++i) {
    Values(fields.begin()[i].key, values[i]);
  }
}

template <typename Stack>
void PlanPrinter::PrintStack(uint32_t id, const Stack& stack) {
  Number("id", id);
  Name("name", stack.name());
  Shown("index", IndexText(stack.index()));
  if (JsonWriter* const to = json(); to && Length(stack.index()) > 0) {
    to->OpenArray("index");
    for (const fb::IndexDim* dim : *stack.index()) {
      to->OpenLine();
      for (uint32_t i = 0; i < dim->count(); ++i) {
        to->Number(IndexNumber(*dim, i));
      }
      to->CloseLine();
    }
    to->CloseArray();
  }
  Word("dtype", EnumText(stack.dtype()));
  Dims("shape", stack.shape());
}

}  // namespace

std::string PlanText(const PlanFile& plan, const TextOptions& options) {
  return PlanPrinter(plan, options, FactForm::kText).Print();
}

std::string PlanJson(const PlanFile& plan, const TextOptions& options) {
  return PlanPrinter(plan, options, FactForm::kJson).Print();
}

std::string TopologyText(const fb::Topology& topology) {
  FactWriter facts(FactForm::kText);
  SayTopology(topology, "", facts);
  const std::string line = facts.Take();
  return line.substr(1, line.size() - 2);
}

}  // namespace refit
