#include "plan/text/trace_events.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/enum_text.h"

namespace refit {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 18;

}  // namespace

std::string RoundText(const PlanFile& plan, uint32_t round) {
  const fb::Round& entry = *plan.body().rounds()->Get(round);
  return absl::StrCat("round ", round, " ",
                      RouteText(entry.route(), entry.mechanism()));
}

TraceEvents::TraceEvents(const PlanFile& plan, uint32_t first_process,
                         std::string_view kind, TextSink sink)
    : plan_(plan),
      first_process_(first_process),
      sink_(std::move(sink)),
      text_("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n") {
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const auto process = static_cast<uint32_t>(rank);
    NameProcess(
        process,
        absl::StrCat("rank ", rank, " ", EnumText(plan.side(rank)), ", host ",
                     plan.body().programs()->Get(process)->host(),
                     kind.empty() ? "" : ", ", std::string(kind)));
    Name(process, Track::kRounds, "rounds");
    Name(process, Track::kPacks, "pack");
    Name(process, Track::kUnpacks, "unpack");
    Name(process, Track::kQuantizes, "quantize");
    Name(process, Track::kReceived, "received");
    if (plan.body().colocated()) {
      Name(process, Track::kOwnRounds, "rounds on its GPU");
    }
  }
}

void TraceEvents::Begin() {
  if (text_.size() >= kPieceBytes) {
    sink_(text_);
    text_.clear();
  }
  absl::StrAppend(&text_, is_first_ ? "" : ",\n");
  is_first_ = false;
}

void TraceEvents::Name(uint32_t process, std::optional<Track> track,
                       std::string_view name) {
  Begin();
  absl::StrAppendFormat(
      &text_,
      R"({"ph":"M","pid":%d,"tid":%d,"name":"%s","args":{"name":"%s"}})",
      first_process_ + process,
      track.has_value() ? static_cast<int>(*track) : 0,
      track.has_value() ? "thread_name" : "process_name", name);
}

void TraceEvents::NameProcess(uint32_t process, std::string_view name) {
  Name(process, std::nullopt, name);
}

void TraceEvents::Slice(int32_t rank, Track track, std::string_view name,
                        double begin, double end) {
  Begin();
  absl::StrAppendFormat(
      &text_,
      R"({"ph":"X","pid":%d,"tid":%d,"ts":%.3f,"dur":%.3f,"name":"%s"})",
      first_process_ + static_cast<uint32_t>(rank), static_cast<int>(track),
      begin * 1e6, (end - begin) * 1e6, name);
}

void TraceEvents::Round(int32_t rank, uint32_t round, double begin,
                        double end) {
  const bool stays =
      plan_.body().rounds()->Get(round)->route() == fb::Route::kLocal;
  Slice(rank, stays ? Track::kOwnRounds : Track::kRounds,
        absl::StrCat("refit ", RoundText(plan_, round)), begin, end);
}

// A message lasts while others of its rank do, so it has no slice but a span of
// its own.
void TraceEvents::Message(const MessageTimes& message) {
  const uint32_t source =
      first_process_ + static_cast<uint32_t>(message.source);
  const uint32_t destination =
      first_process_ + static_cast<uint32_t>(message.destination);
  constexpr int kSent = static_cast<int>(Track::kRounds);
  const std::string name =
      absl::StrCat("to rank ", message.destination, ", round ", message.round);
  Begin();
  absl::StrAppendFormat(
      &text_,
      R"({"ph":"b","cat":"message","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"%s","args":{"bytes":%d%s}})",
      message.number, source, kSent, message.begin * 1e6, name,
      message.size_bytes,
      message.held_by.has_value()
          ? absl::StrCat(",\"held by\":\"", *message.held_by, "\"")
          : "");
  Begin();
  absl::StrAppendFormat(
      &text_,
      R"({"ph":"e","cat":"message","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"%s"})",
      message.number, source, kSent, message.end * 1e6, name);
  Slice(message.destination, Track::kReceived,
        absl::StrCat("from rank ", message.source, ", round ", message.round),
        message.end, message.end);
  Begin();
  absl::StrAppendFormat(
      &text_,
      R"({"ph":"s","cat":"flow","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"message"})",
      message.number, source, kSent, message.begin * 1e6);
  Begin();
  absl::StrAppendFormat(
      &text_,
      R"({"ph":"f","bp":"e","cat":"flow","id":%d,"pid":%d,"tid":%d,"ts":%.3f,"name":"message"})",
      message.number, destination, static_cast<int>(Track::kReceived),
      message.end * 1e6);
}

void TraceEvents::Share(uint32_t process, std::string_view link, double seconds,
                        double share) {
  Begin();
  absl::StrAppendFormat(
      &text_,
      R"({"ph":"C","pid":%d,"ts":%.3f,"name":"%s","args":{"share":%.3f}})",
      first_process_ + process, seconds * 1e6, link, share);
}

void TraceEvents::End() {
  absl::StrAppend(&text_, "\n]}\n");
  sink_(text_);
  text_.clear();
}

}  // namespace refit
