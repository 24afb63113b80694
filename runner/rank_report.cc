#include "runner/rank_report.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "control/payload.h"
#include "executor/agreement.h"

namespace refit {
namespace {

// The fields of a report, written or read: `field` is called with each.
template <typename Counters, typename Field>
void VisitCounters(Counters& counters, const Field& field) {
  field(counters.rounds);
  field(counters.messages_sent);
  field(counters.messages_received);
  field(counters.bytes_sent);
  field(counters.bytes_received);
  field(counters.graph_launches);
  field(counters.pack_seconds);
  field(counters.wire_seconds);
  field(counters.unpack_seconds);
  field(counters.scratch_bytes);
  field(counters.fused_elements);
  for (auto& of_route : counters.traffic) {
    for (auto& traffic : of_route) {
      field(traffic.bytes_sent);
      field(traffic.bytes_received);
    }
  }
}

template <typename Report, typename Field>
void VisitReport(Report& report, const Field& field) {
  field(report.refit.seconds);
  field(report.refit.host_seconds);
  VisitCounters(report.refit.counters, field);
  field(report.check.checked_bytes);
  field(report.check.skipped_bytes);
  field(report.check.wrong_elements);
}

template <typename Delta, typename Field>
void VisitDelta(Delta& delta, const Field& field) {
  field(delta.base_version);
  field(delta.version);
  field(delta.elements);
  field(delta.changed_elements);
  field(delta.stored_bytes);
  field(delta.dense_bytes);
  field(delta.move_seconds);
  field(delta.keep_seconds);
  field(delta.find_seconds);
  field(delta.encode_seconds);
  field(delta.wire_seconds);
  field(delta.apply_seconds);
  field(delta.check_seconds);
  field(delta.agree_seconds);
  field(delta.total_seconds);
}

template <typename Round, typename Field>
void VisitSpans(Round& round, const Field& field) {
  for (auto* span : {&round.pack, &round.move, &round.unpack}) {
    field(span->begin);
    field(span->end);
  }
}

constexpr size_t kRoundBytes = 78;  // written

struct FieldWriter {
  PayloadWriter& bytes;
  void operator()(uint64_t value) const { bytes.U64(value); }
  void operator()(double value) const {
    bytes.U64(std::bit_cast<uint64_t>(value));
  }
};

struct FieldReader {
  PayloadReader& bytes;
  void operator()(uint64_t& value) const { value = bytes.U64(); }
  void operator()(double& value) const {
    value = std::bit_cast<double>(bytes.U64());
  }
};

}  // namespace

std::string WriteReport(const RankReport& report) {
  PayloadWriter writer;
  const FieldWriter field{writer};
  VisitReport(report, field);
  writer.Bool(report.refit.delta.has_value());
  if (report.refit.delta.has_value()) {
    writer.Bool(report.refit.delta->is_delta)
        .String(report.refit.delta->why_dense)
        .U32(report.refit.delta->rung);
    VisitDelta(*report.refit.delta, field);
  }
  writer.U64(report.refit.rounds.size());
  for (const RoundMeasurement& round : report.refit.rounds) {
    writer.U32(round.round)
        .U8(static_cast<uint8_t>(round.route))
        .U8(static_cast<uint8_t>(round.mechanism))
        .U64(round.bytes_sent)
        .U64(round.bytes_received);
    field(round.seconds);
    VisitSpans(round, field);
  }
  return writer.Take();
}

absl::StatusOr<RankReport> ReadReport(std::string_view bytes) {
  PayloadReader reader(bytes);
  RankReport report;
  const FieldReader field{reader};
  VisitReport(report, field);
  if (reader.Bool()) {
    DeltaReport& delta = report.refit.delta.emplace();
    delta.is_delta = reader.Bool();
    delta.why_dense = reader.String();
    delta.rung = reader.U32();
    VisitDelta(delta, field);
  }
  report.refit.rounds.resize(reader.Count(kRoundBytes));
  for (RoundMeasurement& round : report.refit.rounds) {
    round.round = reader.U32();
    const uint8_t route = reader.U8();
    const uint8_t mechanism = reader.U8();
    if (route > static_cast<uint8_t>(fb::Route::MAX) ||
        mechanism > static_cast<uint8_t>(fb::Mechanism::MAX)) {
      reader.Fail();
    }
    round.route = static_cast<fb::Route>(route);
    round.mechanism = static_cast<fb::Mechanism>(mechanism);
    round.bytes_sent = reader.U64();
    round.bytes_received = reader.U64();
    field(round.seconds);
    VisitSpans(round, field);
  }
  if (reader.Complete()) return report;
  return absl::InternalError("a rank sent a report that cannot be read");
}

void AddReport(const RankReport& of_rank, RankReport& all) {
  all.refit.seconds = std::max(all.refit.seconds, of_rank.refit.seconds);
  all.refit.host_seconds =
      std::max(all.refit.host_seconds, of_rank.refit.host_seconds);
  all.refit.counters += of_rank.refit.counters;
  AddRounds(of_rank.refit.rounds, all.refit.rounds);
  all.refit.rounds_of_ranks.push_back(of_rank.refit.rounds);
  AddDelta(of_rank.refit.delta, all.refit.delta);
  all.check.checked_bytes += of_rank.check.checked_bytes;
  all.check.skipped_bytes += of_rank.check.skipped_bytes;
  all.check.wrong_elements += of_rank.check.wrong_elements;
}

absl::StatusOr<RankReport> GatherReports(Transport& transport,
                                         const RankReport& mine,
                                         Deadline deadline) {
  RankReport all;
  const absl::StatusOr<std::string> summed = ThroughRankZero(
      transport, deadline, WriteReport(mine),
      [&](absl::Span<const std::string> by_rank)
          -> absl::StatusOr<std::string> {
        for (const std::string& bytes : by_rank) {
          const absl::StatusOr<RankReport> of_rank = ReadReport(bytes);
          if (!of_rank.ok()) return of_rank.status();
          AddReport(*of_rank, all);
        }
        return WriteReport(all);
      });
  if (!summed.ok()) return summed.status();
  return transport.rank() == 0 ? std::move(all) : ReadReport(*summed);
}

}  // namespace refit
