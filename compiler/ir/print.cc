#include "compiler/ir/print.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "plan/enum_text.h"

namespace refit {
namespace {

std::string DimsText(const Dims& dims) {
  return absl::StrCat("[", absl::StrJoin(dims, ", "), "]");
}

// "{0}=0..47", or the numbers one by one when they have gaps.
std::string IndexText(const std::vector<IndexDim>& index) {
  std::string text;
  for (size_t dim = 0; dim < index.size(); ++dim) {
    const std::vector<int32_t>& numbers = index[dim].numbers;
    const bool run =
        !numbers.empty() && numbers.back() - numbers.front() + 1 ==
                                static_cast<int32_t>(numbers.size());
    absl::StrAppend(&text, " {", dim, "}=");
    if (run) {
      absl::StrAppend(&text, numbers.front(), "..", numbers.back());
    } else {
      absl::StrAppend(&text, absl::StrJoin(numbers, ","));
    }
  }
  return text;
}

// "0..3, 8" for ascending ranks.
std::string RanksText(const std::vector<Rank>& ranks) {
  std::string text;
  for (size_t begin = 0; begin < ranks.size();) {
    size_t end = begin + 1;
    while (end < ranks.size() &&
           IndexOf(ranks[end]) == IndexOf(ranks[end - 1]) + 1) {
      ++end;
    }
    absl::StrAppend(&text, begin == 0 ? "" : ", ", IndexOf(ranks[begin]));
    if (end - begin > 1) absl::StrAppend(&text, "..", IndexOf(ranks[end - 1]));
    begin = end;
  }
  return text;
}

std::string RelaysText(absl::Span<const Relay> relays) {
  std::string text;
  for (size_t begin = 0; begin < relays.size();) {
    const Rank sender = relays[begin].sender;
    std::vector<Rank> receivers;
    for (; begin < relays.size() && relays[begin].sender == sender; ++begin) {
      receivers.push_back(relays[begin].receiver);
    }
    absl::StrAppend(&text, ", relayed by ", IndexOf(sender), " to ",
                    RanksText(receivers));
  }
  return text;
}

void AppendBuffer(const Module& module, const Buffer& buffer,
                  const std::vector<Rank>& ranks, std::string& text) {
  absl::StrAppend(&text, "buffer \"", buffer.name, "\"",
                  IndexText(buffer.index), " ",
                  std::string(DTypeName(buffer.dtype)), " ",
                  DimsText(buffer.shape), " ranks ", RanksText(ranks), "\n");
  for (const Fragment& fragment : buffer.fragments) {
    absl::StrAppend(&text, "  holds \"", module.param(fragment.param).name,
                    "\" ", BoxText(fragment.box), " at ", fragment.offset,
                    " strides ", DimsText(fragment.stride), "\n");
  }
  for (const Region& region : buffer.regions) {
    absl::StrAppend(
        &text, region.kind == fb::RegionKind::kFill ? "  fill " : "  skip ",
        DimsText(region.extent), " at ", region.offset, " strides ",
        DimsText(region.stride), region.detail.empty() ? "" : ": ",
        region.detail, "\n");
  }
}

std::string SideText(const Module& module, const SideLayout& side,
                     int32_t first_rank) {
  std::map<BufferId, std::vector<Rank>> ranks_by_buffer;
  for (size_t i = 0; i < side.ranks.size(); ++i) {
    for (BufferId id : side.ranks[i]) {
      ranks_by_buffer[id].push_back(Rank{first_rank + static_cast<int32_t>(i)});
    }
  }
  std::string text;
  for (const auto& [id, ranks] : ranks_by_buffer) {
    AppendBuffer(module, module.buffers[id], ranks, text);
  }
  return text;
}

std::string PieceText(const Module& module, PieceId id) {
  const Piece& piece = module.piece(id);
  return absl::StrCat("t", IndexOf(id), " \"", module.param(piece.param).name,
                      "\" ", BoxText(piece.box));
}

}  // namespace

std::string SourceText(const Module& module) {
  return SideText(module, module.source, 0);
}

std::string DestinationText(const Module& module) {
  return SideText(module, module.destination, module.source_ranks());
}

std::string QuantizationText(const Module& module) {
  std::string text;
  for (const Quantization& quantization : module.quantizations) {
    absl::StrAppend(&text, "quantize \"", module.param(quantization.of).name,
                    "\" ", std::string(quantization.scheme.name), " ",
                    EnumText(quantization.scheme.scale_format), " scales ");
    switch (quantization.at) {
      case QuantizedAt::kNowhere:
        text += "nowhere";
        break;
      case QuantizedAt::kSource:
        text += "at the source";
        break;
      case QuantizedAt::kDestination:
        absl::StrAppend(&text, "at the destination: ", quantization.reason);
        break;
    }
    text += '\n';
  }
  for (size_t rank = 0; rank < module.quantizes.size(); ++rank) {
    const RankQuantizes& of_rank = module.quantizes[rank];
    if (of_rank.scratch_buffers == 0) continue;
    const std::vector<BufferId>& buffers =
        module.buffers_of(Rank{static_cast<int32_t>(rank)});
    absl::StrAppend(&text, "rank ", rank, " quantizes ",
                    of_rank.quantizes.size(), " boxes");
    const size_t first = buffers.size() - of_rank.scratch_buffers;
    for (size_t i = first; i < buffers.size(); ++i) {
      const Buffer& buffer = module.buffers[buffers[i]];
      absl::StrAppend(&text, ", \"", buffer.name, "\" ",
                      std::string(DTypeName(buffer.dtype)), " ",
                      DimsText(buffer.shape));
      if (of_rank.windows.empty()) continue;
      absl::StrAppend(&text, " at ", of_rank.windows[i - first].offset);
    }
    text += '\n';
  }
  return text;
}

std::string PostHooksText(const Module& module) {
  std::string text;
  for (const Buffer& buffer : module.buffers.all()) {
    for (const PostHook& hook : buffer.post_hooks) {
      absl::StrAppend(&text, "buffer \"", buffer.name, "\"",
                      IndexText(buffer.index), " ",
                      std::string(hook.name.text()), ": ", hook.detail, "\n");
    }
  }
  return text;
}

std::string TopologyText(const Module& module) {
  const Topology& topology = module.topology;
  std::string text = absl::StrFormat(
      "links local %g, peer %g, network %g bytes/s%s\n",
      topology.local_bytes_per_second, topology.peer_bytes_per_second,
      topology.network_bytes_per_second,
      topology.colocated ? ", colocated" : "");
  if (const std::optional<Fabric>& fabric = topology.fabric) {
    absl::StrAppendFormat(
        &text,
        "fabric%s hosts_per_nvlink_domain %d gpus_per_nic %d hosts_per_leaf "
        "%d%s spine_oversubscription %g, a NIC %g bytes/s\n",
        fabric->machine.empty() ? "" : absl::StrCat(" ", fabric->machine),
        fabric->hosts_per_nvlink_domain, fabric->gpus_per_nic,
        fabric->hosts_per_leaf, fabric->rails ? " rails" : "",
        fabric->spine_oversubscription, fabric->nic_bytes_per_second);
  }
  std::map<int32_t, std::vector<Rank>> ranks_by_host;
  for (size_t rank = 0; rank < topology.host.size(); ++rank) {
    ranks_by_host[topology.host[rank]].push_back(
        Rank{static_cast<int32_t>(rank)});
  }
  for (const auto& [host, ranks] : ranks_by_host) {
    absl::StrAppend(&text, "host ", host, " ranks ", RanksText(ranks), "\n");
  }
  return text;
}

std::string FoldText(const Module& module) {
  if (!module.fold.has_value()) return "not folded\n";
  std::string text;
  for (const AlikeParts& alike : module.fold->alike) {
    if (alike.count == 1) {
      absl::StrAppend(&text, "1 part");
    } else {
      absl::StrAppendFormat(
          &text, "%d parts, %d sources and %d destinations apart%s",
          alike.count, alike.source_shift, alike.destination_shift,
          module.is_compact ? ", share lists" : "");
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::string PiecesText(const Module& module) {
  std::string text;
  for (size_t i = 0; i < module.pieces.size(); ++i) {
    const Piece& piece = module.pieces[i];
    absl::StrAppend(&text, PieceText(module, PieceId{static_cast<int>(i)}),
                    " from ", RanksText(piece.sources), " to ",
                    RanksText(piece.destinations), RelaysText(piece.relays),
                    piece.broadcasts ? ", broadcast between hosts" : "", "\n");
  }
  return text;
}

std::string TransfersText(const Module& module) {
  std::string text;
  for (const Transfer& transfer : module.transfers) {
    absl::StrAppend(&text, IndexOf(transfer.source), " -> ",
                    IndexOf(transfer.destination), " ",
                    PieceText(module, transfer.piece), "\n");
  }
  return text;
}

std::string MessagesText(const Module& module) {
  std::string text;
  for (size_t i = 0; i < module.contents.size(); ++i) {
    absl::StrAppend(&text, "contents c", i, "\n");
    for (const Packed& packed : module.contents[i]) {
      absl::StrAppend(
          &text, "  \"", module.param(module.piece(packed.piece).param).name,
          "\" ", BoxText(packed.box), " at ", packed.staging_offset, "\n");
    }
  }
  for (const Message& message : module.messages) {
    absl::StrAppend(&text, IndexOf(message.source), " -> ",
                    IndexOf(message.destination), " c", message.contents, " ",
                    message.size_bytes, " bytes ",
                    RouteText(message.route, message.mechanism),
                    message.is_broadcast() ? " broadcast" : "", "\n");
  }
  return text;
}

std::string RoundsText(const Module& module) {
  std::vector<std::vector<const Message*>> by_round(module.rounds.size());
  for (const Message& message : module.messages) {
    by_round[static_cast<size_t>(message.round)].push_back(&message);
  }
  std::string text;
  for (size_t round = 0; round < by_round.size(); ++round) {
    absl::StrAppend(
        &text, "round ", round, " ",
        RouteText(module.rounds[round].route, module.rounds[round].mechanism),
        "\n");
    for (const Message* message : by_round[round]) {
      absl::StrAppend(&text, "  ", IndexOf(message->source), " -> ",
                      IndexOf(message->destination), " c", message->contents,
                      " ", message->size_bytes, " bytes at ",
                      message->source_staging_offset, " -> ",
                      message->destination_staging_offset, "\n");
    }
  }
  return text;
}

std::string BoundText(const Module& module) {
  return absl::StrFormat("lower bound %.6f s\n",
                         module.stats.lower_bound_seconds);
}

std::string CostText(const Module& module) {
  const Stats& stats = module.stats;
  return absl::StrFormat(
      "moved %d bytes: local %d, peer %d, network %d; relayed %d\n"
      "lower bound %.6f s, predicted %.6f s\n",
      stats.moved_bytes, stats.local_bytes, stats.peer_bytes,
      stats.network_bytes, stats.relayed_bytes, stats.lower_bound_seconds,
      stats.predicted_seconds);
}

}  // namespace refit
