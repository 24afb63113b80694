#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "plan/enum_text.h"
#include "plan/scratch_windows.h"
#include "plan/text/plan_view.h"
#include "plan/text/stats.h"
#include "report/sections.h"

namespace refit::report {
namespace {

constexpr uint32_t kMostGroups = 2000;      // of rounds
constexpr size_t kMostRankPairs = 100'000;  // with traffic; more: hosts

// Body.buffers of the rank without its scratch.
std::vector<uint32_t> TensorStacks(const fb::RankProgram& program) {
  std::vector<uint32_t> stacks(program.buffers()->begin(),
                               program.buffers()->end());
  stacks.resize(stacks.size() - program.scratch_buffers());
  return stacks;
}

// In base 36.
std::string ShortNumber(uint64_t value) {
  std::string text;
  do {
    text += "0123456789abcdefghijklmnopqrstuvwxyz"[value % 36];
    value /= 36;
  } while (value > 0);
  std::reverse(text.begin(), text.end());
  return text;
}

// A rank, or a host and a side.
struct End {
  fb::Side side = fb::Side::kSource;
  uint32_t host = 0;
  int32_t rank = 0;

  friend auto operator<=>(const End&, const End&) = default;
};

using Row = std::map<End, uint64_t>;  // bytes by receiver

// "4 0*3 2": the numbers of the row's values at the columns, "N*COUNT" where
// one stands several times.
std::string RowText(const Row& row, const std::vector<End>& columns,
                    const std::map<uint64_t, uint64_t>& numbers) {
  std::string text;
  for (size_t begin = 0; begin < columns.size();) {
    const auto value_at = [&](size_t column) {
      const auto found = row.find(columns[column]);
      return found == row.end() ? 0 : found->second;
    };
    const uint64_t value = value_at(begin);
    size_t end = begin + 1;
    while (end < columns.size() && value_at(end) == value) ++end;
    absl::StrAppend(&text, begin == 0 ? "" : " ",
                    ShortNumber(numbers.at(value)));
    if (end - begin > 1) {
      absl::StrAppend(&text, "*", ShortNumber(end - begin));
    }
    begin = end;
  }
  return text;
}

// The most bytes that any rank uses in a round, by group of rounds.
struct PeakBytes {
  explicit PeakBytes(size_t groups) : bytes(groups), ranks(groups) {}

  void Take(uint32_t group, uint64_t used, uint32_t rank) {
    if (used <= bytes[group]) return;
    bytes[group] = used;
    ranks[group] = rank;
  }

  std::vector<uint64_t> bytes;
  std::vector<uint64_t> ranks;
};

using ByteRange = std::pair<uint64_t, uint64_t>;

// How many bytes the ranges cover. They may overlap: what a rank relays is sent
// from where it was received.
uint64_t CoveredBytes(std::vector<ByteRange>& ranges) {
  std::sort(ranges.begin(), ranges.end());
  uint64_t covered = 0;
  uint64_t end = 0;
  for (const auto& [from, to] : ranges) {
    if (to <= end) continue;
    covered += to - std::max(from, end);
    end = to;
  }
  return covered;
}

void AddStaging(const PlanFile& plan, uint32_t rank, uint32_t rounds_per_group,
                PeakBytes& staging) {
  const fb::Body& body = plan.body();
  const MessageVector& messages = plan.messages().Of(rank);
  std::vector<ByteRange> ranges;
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message& message = *messages.Get(i);
    if (!IsDirect(body, message.round())) {
      ranges.emplace_back(message.staging_offset(),
                          message.staging_offset() + message.size_bytes());
    }
    if (i + 1 < messages.size() &&
        messages.Get(i + 1)->round() == message.round()) {
      continue;
    }
    staging.Take(message.round() / rounds_per_group, CoveredBytes(ranges),
                 rank);
    ranges.clear();
  }
}

void AddScratchUse(const fb::Body& body, uint32_t rank,
                   uint32_t rounds_per_group, PeakBytes& scratch) {
  const std::vector<ScratchRange> ranges =
      ScratchRanges(body, *body.programs()->Get(rank));
  if (ranges.empty()) return;
  std::vector<int64_t> changes(body.rounds()->size() + 1, 0);
  for (const ScratchRange& range : ranges) {
    const auto bytes = static_cast<int64_t>(range.end_byte - range.begin_byte);
    const size_t end = std::min<size_t>(range.end, changes.size() - 1);
    if (range.begin >= end) continue;
    changes[range.begin] += bytes;
    changes[end] -= bytes;
  }
  int64_t used = 0;
  for (uint32_t round = 0; round < body.rounds()->size(); ++round) {
    used += changes[round];
    scratch.Take(round / rounds_per_group, static_cast<uint64_t>(used), rank);
  }
}

}  // namespace

uint32_t RoundsPerGroup(const PlanFile& plan) {
  return 1 + plan.body().rounds()->size() / kMostGroups;
}

void WritePlan(const ReportInputs& inputs, DataWriter& data) {
  const PlanFile& plan = inputs.plan;
  const fb::Plan& file = plan.plan();
  const PlanStats stats = StatsOf(plan);
  data.OpenObject("plan");
  data.FileName("name", inputs.path);
  data.Text("digest", DigestText(*file.body_digest()));
  data.Text("inputs_digest", DigestText(*file.inputs_digest()));
  data.Text("format", absl::StrCat(file.format_version() >> 16, ".",
                                   file.format_version() & 0xffff));
  const fb::Provenance* provenance = file.provenance();
  data.Text("producer",
            provenance == nullptr || provenance->producer() == nullptr
                ? ""
                : provenance->producer()->str());
  data.Number("file_bytes", plan.bytes().size());
  data.Number("source_ranks", plan.source_ranks());
  data.Number("destination_ranks", plan.world_size() - plan.source_ranks());
  data.Number("hosts", RanksByHost(plan.body()).size());
  data.Bool("colocated", plan.body().colocated());
  data.Bool("delta", plan.body().delta() != nullptr);
  data.Number("params", stats.params);
  data.Number("param_stacks", plan.body().params()->size());
  data.Number("tensors", stats.tensors);
  data.Number("messages", stats.totals.messages);
  data.Number("rounds", plan.body().rounds()->size());
  const auto bytes_of = [&](fb::Route route) {
    return stats.totals.route_bytes[static_cast<size_t>(route)];
  };
  data.OpenObject("bytes");
  data.Number("moved", stats.totals.moved_bytes());
  data.Number("local", bytes_of(fb::Route::kLocal));
  data.Number("peer", bytes_of(fb::Route::kPeer));
  data.Number("network", bytes_of(fb::Route::kNetwork));
  data.Number("direct", stats.totals.direct_bytes);
  data.Number("relayed", stats.totals.relayed_bytes);
  data.Number("dealt", stats.dealt.bytes);
  data.CloseObject();
  if (stats.dealt.bytes > 0) {
    data.OpenObject("dealt");
    data.Number("ranks", stats.dealt.ranks);
    data.Number("busiest", stats.dealt.busiest);
    data.Number("busiest_bytes", stats.dealt.busiest_bytes);
    data.Text("receivers", NumberSetText(stats.dealt.receivers));
    data.CloseObject();
  }
  if (inputs.job.has_value()) {
    data.OpenObject("job");
    data.FileName("name", inputs.job->path);
    data.FileName("model", inputs.job->model_path);
    data.Text("source", inputs.job->source);
    data.Text("destination", inputs.job->destination);
    data.CloseObject();
  }
  data.CloseObject();
}

void WriteCoverage(const ReportInputs& inputs, DataWriter& data) {
  const fb::Body& body = inputs.plan.body();
  std::vector<uint64_t> holders(body.buffers()->size(), 0);
  for (uint32_t rank = body.source_ranks(); rank < body.programs()->size();
       ++rank) {
    for (const uint32_t stack : TensorStacks(*body.programs()->Get(rank))) {
      holders[stack] += 1;
    }
  }
  struct Skipped {
    uint64_t tensors = 0;
    uint64_t elements = 0;
  };
  uint64_t tensors = 0;
  uint64_t written = 0;
  uint64_t filled = 0;
  std::map<std::pair<std::string, std::string>, Skipped> skips;  // why
  std::map<std::pair<std::string, std::string>, uint64_t> hooks;
  for (uint32_t id = 0; id < holders.size(); ++id) {
    const fb::Buffer& buffer = *body.buffers()->Get(id);
    const uint64_t held = holders[id] * StackTensors(buffer);
    tensors += held;
    for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
      written += holders[id] * ProductOf(buffer.fragments()->Get(i)->extent());
    }
    for (uint32_t i = 0; i < Length(buffer.regions()); ++i) {
      const fb::Region& region = *buffer.regions()->Get(i);
      const uint64_t elements = holders[id] * ProductOf(region.extent());
      if (region.kind() == fb::RegionKind::kFill) {
        filled += elements;
        continue;
      }
      Skipped& skipped =
          skips[{EnumText(region.reason()),
                 region.detail() == nullptr ? "" : region.detail()->str()}];
      skipped.tensors += held;
      skipped.elements += elements;
    }
    for (uint32_t i = 0; held > 0 && i < Length(buffer.post_hooks()); ++i) {
      const fb::PostHook& hook = *buffer.post_hooks()->Get(i);
      hooks[{hook.name()->str(), hook.detail()->str()}] += held;
    }
  }
  data.OpenObject("coverage");
  data.Number("proved_messages", inputs.proof.messages);
  data.Number("proved_elements", inputs.proof.destination_elements);
  data.Number("proved_bytes", inputs.proof.moved_bytes);
  data.Number("tensors", tensors);
  data.Number("written", written);
  data.Number("filled", filled);
  data.Objects("skips", skips, [&](const auto& entry) {
    const auto& [why, skipped] = entry;
    data.Text("reason", why.first);
    data.Text("detail", why.second);
    data.Number("tensors", skipped.tensors);
    data.Number("elements", skipped.elements);
  });
  data.OpenArray("unmoved_params");
  for (uint32_t i = 0; i < Length(body.skips()); ++i) {
    const fb::Skip& skip = *body.skips()->Get(i);
    data.OpenObject();
    data.Text("name", skip.name()->str());
    data.Text("reason", EnumText(skip.reason()));
    data.Text("detail", skip.detail() == nullptr ? "" : skip.detail()->str());
    data.CloseObject();
  }
  data.CloseArray();
  data.Objects("post_hooks", hooks, [&](const auto& entry) {
    const auto& [hook, held] = entry;
    data.Text("name", hook.first);
    data.Text("detail", hook.second);
    data.Number("tensors", held);
  });
  data.CloseObject();
}

void WriteRanks(const PlanFile& plan, DataWriter& data) {
  const fb::Body& body = plan.body();
  const PlanStats stats = StatsOf(plan);
  // Ranks of one side that hold the same are one shard's replicas.
  std::array<std::map<std::vector<uint32_t>, uint64_t>, 2> shards;
  std::vector<uint64_t> hosts, shard_of, moved;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const auto number = static_cast<uint32_t>(rank);
    const fb::RankProgram& program = *body.programs()->Get(number);
    auto& of_side = shards[static_cast<size_t>(plan.side(rank))];
    std::vector<uint32_t> stacks = TensorStacks(program);
    std::sort(stacks.begin(), stacks.end());
    hosts.push_back(program.host());
    shard_of.push_back(
        of_side.emplace(std::move(stacks), of_side.size()).first->second);
    moved.push_back(plan.side(rank) == fb::Side::kSource
                        ? stats.totals.sent_bytes[number]
                        : stats.totals.received_bytes[number]);
  }
  data.OpenObject("ranks");
  data.Line("host", hosts);
  data.Line("shard", shard_of);
  data.Line("bytes", moved);
  data.CloseObject();
}

// Adds up what ranks of one host and side send and receive.
static void JoinByHost(std::map<End, Row>& rows,
                       std::map<End, uint64_t>& receivers) {
  const auto host_of = [](End end) {
    end.rank = -1;
    return end;
  };
  std::map<End, Row> of_hosts;
  for (const auto& [sender, row] : rows) {
    Row& sum = of_hosts[host_of(sender)];
    for (const auto& [receiver, bytes] : row) sum[host_of(receiver)] += bytes;
  }
  std::map<End, uint64_t> hosts;
  for (const auto& [receiver, unused] : receivers) hosts[host_of(receiver)];
  rows = std::move(of_hosts);
  receivers = std::move(hosts);
}

void WriteTraffic(const PlanFile& plan, DataWriter& data) {
  const fb::Body& body = plan.body();
  const SendPayloads payloads(plan.messages());
  const auto end_of = [&](uint32_t rank) {
    return End{.side = plan.side(static_cast<int32_t>(rank)),
               .host = body.programs()->Get(rank)->host(),
               .rank = static_cast<int32_t>(rank)};
  };
  std::map<End, Row> rows;
  std::map<End, uint64_t> receivers;  // none of the values is used
  size_t pairs = 0;
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const End sender = end_of(rank);
    if (sender.side == fb::Side::kSource) {
      rows[sender];
    } else {
      receivers[sender];
    }
    const MessageVector& messages = plan.messages().Of(rank);
    for (uint32_t position = 0; position < messages.size(); ++position) {
      const fb::Message& message = *messages.Get(position);
      if (message.kind() != fb::MessageKind::kSend) continue;
      const End receiver = end_of(PeerOf(body, rank, message));
      receivers[receiver];
      rows[sender][receiver] += payloads.Bytes(rank, position);
    }
    const auto found = rows.find(sender);
    if (found != rows.end()) pairs += found->second.size();
  }
  const bool by_host = pairs > kMostRankPairs;
  if (by_host) JoinByHost(rows, receivers);
  std::vector<End> columns;
  for (const auto& [receiver, unused] : receivers) columns.push_back(receiver);
  std::map<uint64_t, uint64_t> numbers = {{0, 0}};
  for (const auto& [sender, row] : rows) {
    for (const auto& [receiver, bytes] : row) numbers[bytes];
  }
  std::vector<uint64_t> values;
  for (auto& [value, number] : numbers) {
    number = values.size();
    values.push_back(value);
  }
  // Senders of one host often send alike.
  std::map<std::string, uint64_t> texts;
  std::vector<std::string> distinct;
  std::vector<uint64_t> senders, row_of, receiving;
  const auto label = [&](const End& end) {
    return by_host ? uint64_t{2} * end.host +
                         (end.side == fb::Side::kDestination ? 1 : 0)
                   : static_cast<uint64_t>(end.rank);
  };
  for (const auto& [sender, row] : rows) {
    std::string text = RowText(row, columns, numbers);
    const auto [found, is_new] = texts.emplace(text, distinct.size());
    if (is_new) distinct.push_back(std::move(text));
    senders.push_back(label(sender));
    row_of.push_back(found->second);
  }
  for (const End& receiver : columns) receiving.push_back(label(receiver));
  data.OpenObject("traffic");
  data.Bool("by_host", by_host);
  data.Line("senders", senders);
  data.Line("receivers", receiving);
  data.Line("values", values);
  data.Line("row_of", row_of);
  data.Line("rows", distinct);
  data.CloseObject();
}

void WriteMemory(const PlanFile& plan, DataWriter& data) {
  const fb::Body& body = plan.body();
  const uint32_t rounds_per_group = RoundsPerGroup(plan);
  const size_t groups =
      (body.rounds()->size() + rounds_per_group - 1) / rounds_per_group;
  PeakBytes staging(groups);
  PeakBytes scratch(groups);
  uint64_t staging_arena = 0;
  uint64_t scratch_arena = 0;
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    AddStaging(plan, rank, rounds_per_group, staging);
    AddScratchUse(body, rank, rounds_per_group, scratch);
    staging_arena =
        std::max(staging_arena, body.programs()->Get(rank)->staging_bytes());
    scratch_arena =
        std::max(scratch_arena, ScratchBytes(plan, static_cast<int32_t>(rank)));
  }
  data.OpenObject("memory");
  data.Number("staging_arena", staging_arena);
  data.Number("scratch_arena", scratch_arena);
  data.Line("staging", staging.bytes);
  data.Line("staging_rank", staging.ranks);
  data.Line("scratch", scratch.bytes);
  data.Line("scratch_rank", scratch.ranks);
  data.CloseObject();
}

}  // namespace refit::report
