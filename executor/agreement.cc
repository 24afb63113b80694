#include "executor/agreement.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control/frame.h"
#include "control/payload.h"
#include "executor/transport/handshake.h"

namespace refit {
namespace {

// The error, "" if there is none, and the value.
std::string BytesOf(const absl::StatusOr<std::string>& value) {
  return PayloadWriter()
      .String(value.ok() ? "" : control::StatusPayload(value.status()))
      .Bytes(value.ok() ? *value : "")
      .Take();
}

// What `rank` wrote with BytesOf.
absl::StatusOr<std::string> ReadBytes(const std::string& bytes, size_t rank) {
  PayloadReader reader(bytes);
  const std::string error = reader.String();
  if (!reader.ok()) {
    return absl::InternalError(
        absl::StrCat("what rank ", rank, " gives cannot be read"));
  }
  if (!error.empty()) return control::PayloadStatus(error);
  return std::string(reader.rest());
}

}  // namespace

absl::StatusOr<std::string> ThroughRankZero(
    Transport& transport, Deadline deadline,
    const absl::StatusOr<std::string>& mine,
    const std::function<absl::StatusOr<std::string>(
        absl::Span<const std::string> by_rank)>& decide) {
  if (transport.rank() != 0) {
    const auto given =
        transport.ExchangeBytes(BytesOf(mine), {0}, {}, deadline);
    if (!given.ok()) return given.status();
    const auto decided = transport.ExchangeBytes("", {}, {0}, deadline);
    if (!decided.ok()) return decided.status();
    const absl::StatusOr<std::string> decision = ReadBytes(decided->front(), 0);
    return mine.ok() ? decision : mine;
  }
  std::vector<int32_t> others;
  for (int32_t rank = 1; rank < transport.world_size(); ++rank) {
    others.push_back(rank);
  }
  auto gathered = transport.ExchangeBytes("", {}, others, deadline);
  if (!gathered.ok()) return gathered.status();
  gathered->insert(gathered->begin(), BytesOf(mine));
  // What `decide` makes of all ranks' values, or the first error.
  const auto decide_for_all = [&]() -> absl::StatusOr<std::string> {
    std::vector<std::string> values;
    for (size_t rank = 0; rank < gathered->size(); ++rank) {
      absl::StatusOr<std::string> value = ReadBytes((*gathered)[rank], rank);
      if (!value.ok()) {
        return AbortedBy(static_cast<int32_t>(rank), value.status());
      }
      values.push_back(*std::move(value));
    }
    return decide(values);
  };
  const absl::StatusOr<std::string> decision = decide_for_all();
  const auto given =
      transport.ExchangeBytes(BytesOf(decision), others, {}, deadline);
  if (!given.ok()) return given.status();
  return mine.ok() ? decision : mine;
}

}  // namespace refit
