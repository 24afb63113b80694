#include "runner/measured_trace.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/text/trace_events.h"

namespace refit {
namespace {

constexpr uint32_t kFirstProcess = 1'000'000;

double BeginOf(const RoundMeasurement& round) {
  return round.pack.end > 0 ? round.pack.begin : round.move.begin;
}

// The steady clocks' time 0 of the trace, by host: each has its own.
std::map<uint32_t, double> Origins(const PlanFile& plan,
                                   const RefitMeasurement& refit) {
  std::map<uint32_t, double> origins;
  for (uint32_t rank = 0; rank < refit.rounds_of_ranks.size(); ++rank) {
    const uint32_t host = plan.body().programs()->Get(rank)->host();
    for (const RoundMeasurement& round : refit.rounds_of_ranks[rank]) {
      if (round.move.end == 0) continue;
      const auto [origin, is_new] = origins.try_emplace(host, BeginOf(round));
      origin->second = std::min(origin->second, BeginOf(round));
    }
  }
  return origins;
}

}  // namespace

std::string MeasuredTrace(const PlanFile& plan, const RefitMeasurement& refit) {
  std::string text;
  TraceEvents events(plan, kFirstProcess, "measured",
                     [&](std::string_view piece) { text += piece; });
  const std::map<uint32_t, double> origins = Origins(plan, refit);
  // The whole of a round that a transport sends in parts.
  std::vector<std::map<uint32_t, TimeSpan>> rounds(
      refit.rounds_of_ranks.size());
  for (size_t i = 0; i < rounds.size(); ++i) {
    const auto rank = static_cast<int32_t>(i);
    const auto origin = origins.find(
        plan.body().programs()->Get(static_cast<uint32_t>(rank))->host());
    for (const RoundMeasurement& round : refit.rounds_of_ranks[i]) {
      const auto slice = [&](Track track, const TimeSpan& span) {
        if (span.end == 0) return;
        events.Slice(rank, track, absl::StrCat("round ", round.round),
                     span.begin - origin->second, span.end - origin->second);
      };
      if (round.move.end == 0) continue;
      slice(Track::kPacks, round.pack);
      slice(Track::kUnpacks, round.unpack);
      const TimeSpan move = {.begin = round.move.begin - origin->second,
                             .end = round.move.end - origin->second};
      events.Round(rank, round.round, move.begin, move.end);
      const auto [whole, is_new] = rounds[i].try_emplace(round.round, move);
      whole->second.end = std::max(whole->second.end, move.end);
    }
  }
  uint32_t number = 0;
  for (size_t i = 0; i < rounds.size(); ++i) {
    const fb::RankProgram& program =
        *plan.body().programs()->Get(static_cast<uint32_t>(i));
    for (const fb::Message* message : plan.messages().Of(program)) {
      if (message->kind() != fb::MessageKind::kSend) continue;
      const uint32_t peer = PeerOf(plan.body(), program, *message);
      const auto at_sender = rounds[i].find(message->round());
      const auto at_receiver = rounds[peer].find(message->round());
      const bool sender_sees = at_sender != rounds[i].end();
      const bool receiver_sees = at_receiver != rounds[peer].end();
      if (!sender_sees && !receiver_sees) continue;
      const double begin =
          (sender_sees ? at_sender : at_receiver)->second.begin;
      const double end = (receiver_sees ? at_receiver : at_sender)->second.end;
      events.Message({.number = number++,
                      .source = static_cast<int32_t>(i),
                      .destination = static_cast<int32_t>(peer),
                      .round = message->round(),
                      .size_bytes = message->size_bytes(),
                      .begin = begin,
                      .end = std::max(begin, end),
                      .held_by = std::nullopt});
    }
  }
  events.End();
  return text;
}

}  // namespace refit
