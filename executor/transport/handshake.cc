#include "executor/transport/handshake.h"

#include "absl/strings/str_cat.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

const char* StageName(HandshakeStage stage) {
  switch (stage) {
    case HandshakeStage::kConnect:
      return "connect";
    case HandshakeStage::kBind:
      return "bind";
    case HandshakeStage::kCheck:
      return "check";
    case HandshakeStage::kPostHooks:
      return "post-hooks";
  }
  return "unknown";
}

std::string VersionText(uint32_t version) {
  return absl::StrCat(version >> 16, ".", version & 0xffff);
}

// One sentence on the first field that differs; "" if none does.
std::string RecordDifference(const HandshakeRecord& a, const HandshakeRecord& b,
                             int32_t rank_a, int32_t rank_b) {
  const auto differs = [&](const char* field, const std::string& value_a,
                           const std::string& value_b) {
    return absl::StrCat(field, " differs: ", value_a, " on rank ", rank_a, ", ",
                        value_b, " on rank ", rank_b);
  };
  if (a.stage != b.stage) {
    return differs("stage", StageName(a.stage), StageName(b.stage));
  }
  if (a.world_size != b.world_size) {
    return differs("world size", absl::StrCat(a.world_size),
                   absl::StrCat(b.world_size));
  }
  if (a.body_digest.low() != b.body_digest.low() ||
      a.body_digest.high() != b.body_digest.high()) {
    return differs("plan digest", DigestText(a.body_digest),
                   DigestText(b.body_digest));
  }
  // Last: a plan has the lowest version that knows all it uses, so plans of two
  // jobs differ in it too.
  if (a.format_version != b.format_version) {
    return differs("format version", VersionText(a.format_version),
                   VersionText(b.format_version));
  }
  return "";
}

}  // namespace

void WriteFields(const HandshakeRecord& record, PayloadWriter& writer) {
  writer.U32(static_cast<uint32_t>(record.stage))
      .Bool(record.ready)
      .String(record.why)
      .U32(record.format_version)
      .U32(record.world_size)
      .U64(record.body_digest.low())
      .U64(record.body_digest.high());
}

void ReadFields(PayloadReader& reader, HandshakeRecord& record) {
  const uint32_t stage = reader.U32();
  if (stage > static_cast<uint32_t>(HandshakeStage::kPostHooks)) reader.Fail();
  record.stage = static_cast<HandshakeStage>(stage);
  record.ready = reader.Bool();
  record.why = reader.String();
  record.format_version = reader.U32();
  record.world_size = reader.U32();
  const uint64_t low = reader.U64();
  record.body_digest = fb::Digest(low, reader.U64());
}

absl::Status CompareRecords(absl::Span<const OfRank<HandshakeRecord>> records) {
  for (const auto& [rank, record] : records) {
    if (record.ready) continue;
    return absl::AbortedError(absl::StrCat(
        "rank ", rank, " cannot go on",
        record.why.empty() ? "; its own error says why" : ": ", record.why));
  }
  for (const auto& [rank, record] : records) {
    std::string difference =
        RecordDifference(records[0].value, record, records[0].rank, rank);
    if (!difference.empty()) {
      return absl::FailedPreconditionError(std::move(difference));
    }
  }
  return absl::OkStatus();
}

std::string OperationText(uint32_t round, const Operation& operation) {
  const bool send = operation.kind == fb::MessageKind::kSend;
  return absl::StrCat("round ", round, ": ", send ? "send" : "recv", " of ",
                      operation.size_bytes, " bytes ",
                      send ? "to rank " : "from rank ", operation.peer);
}

}  // namespace refit
