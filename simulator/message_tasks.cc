#include "simulator/message_tasks.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace refit::simulator {

constexpr absl::string_view kAskVerify =
    "; refit-verify tells what is wrong with the plan";

MessageTasks::Open& MessageTasks::Find(const Key& key, const RoundWork& work,
                                       int32_t rank, int32_t sender,
                                       uint64_t size_bytes,
                                       uint64_t dense_bytes) {
  const auto [found, inserted] = messages_.try_emplace(key);
  Open& open = found->second;
  if (!inserted) return open;
  open.task = static_cast<uint32_t>(graph_.tasks.size());
  graph_.tasks.push_back(
      {.kind = TaskKind::kMessage,
       .rank = key.source,
       .round = key.round,
       .message = static_cast<uint32_t>(graph_.messages.size())});
  graph_.messages.push_back(
      {.round = key.round,
       .source = key.source,
       .destination = key.destination,
       .size_bytes = size_bytes,
       .links = links_.Cross(work.route, sender, key.destination, size_bytes)});
  if (work.IsStagedRound()) {
    const uint64_t alike = graph_.equal_ranks.CountOf(rank);
    graph_.stored_bytes += alike * size_bytes;
    graph_.dense_bytes += alike * dense_bytes;
  }
  return open;
}

uint32_t MessageTasks::TaskOf(const MessageEnd& end) {
  const Operation& operation = end.operation;
  const bool sends = operation.kind == fb::MessageKind::kSend;
  Key key = {.round = end.work.index,
             .part = end.part,
             .source = sends ? end.rank : operation.peer,
             .destination = sends ? operation.peer : end.rank,
             .ordinal = end.ordinal};
  int32_t sender = key.source;
  if (end.is_broadcast) {
    key.part = kBroadcastPart - operation.broadcast;
    key.ordinal = 0;
    sender = static_cast<int32_t>(
        broadcasts_.Before(static_cast<uint32_t>(key.source),
                           static_cast<uint32_t>(key.destination)));
  }
  Open& open = Find(key, end.work, end.rank, sender, end.size_bytes,
                    operation.size_bytes);
  if (sends) {
    graph_.messages[graph_.tasks[open.task].message].position = end.position;
  }
  bool& is_listed = sends ? open.is_sent : open.is_received;
  if (std::exchange(is_listed, true) && misordered_.ok()) {
    misordered_ = absl::InvalidArgumentError(absl::StrCat(
        "round ", key.round, ": rank ", end.rank,
        sends ? " sends to rank " : " receives from rank ", operation.peer,
        " in two places, with other messages between them", kAskVerify));
  }
  (sends ? open.sent_bytes : open.received_bytes) = end.size_bytes;
  return open.task;
}

uint32_t MessageTasks::TaskOfPassedOn(int32_t rank, const RoundWork& work,
                                      const Operation& received, int32_t next) {
  return Find({.round = work.index,
               .part = kBroadcastPart - received.broadcast,
               .source = received.peer,
               .destination = next},
              work, rank, rank, received.size_bytes, received.size_bytes)
      .task;
}

void MessageTasks::AddConnections() {
  const size_t first = graph_.waits.size();
  for (const auto& [key, open] : messages_) {
    if (key.source < key.destination ||
        RouteBetween(body_, static_cast<uint32_t>(key.source),
                     static_cast<uint32_t>(key.destination)) !=
            fb::Route::kNetwork) {
      continue;
    }
    Key other = key;
    std::swap(other.source, other.destination);
    other.ordinal = 0;
    for (auto found = messages_.find(other); found != messages_.end();
         ++other.ordinal, found = messages_.find(other)) {
      graph_.waits.push_back({.from = found->second.task, .to = open.task});
    }
  }
  // The table's order is another in each process.
  std::sort(graph_.waits.begin() + static_cast<std::ptrdiff_t>(first),
            graph_.waits.end(), [](const Wait& a, const Wait& b) {
              return std::pair(a.from, a.to) < std::pair(b.from, b.to);
            });
}

absl::Status MessageTasks::Check() const {
  if (!misordered_.ok()) return misordered_;
  // The first in the order of rounds and ranks, whatever the table's order.
  std::optional<std::pair<uint32_t, std::string>> first;
  for (const auto& [key, open] : messages_) {
    if (open.is_sent && open.is_received &&
        open.sent_bytes == open.received_bytes) {
      continue;
    }
    std::string wrong =
        open.is_sent ? absl::StrCat("rank ", key.source, " sends ",
                                    open.sent_bytes, " bytes to rank ",
                                    key.destination, ", which receives ")
                     : absl::StrCat("rank ", key.destination, " receives ",
                                    open.received_bytes, " bytes from rank ",
                                    key.source, ", which sends nothing");
    if (open.is_sent && open.is_received) {
      absl::StrAppend(&wrong, open.received_bytes);
    } else if (open.is_sent) {
      wrong += "nothing";
    }
    std::pair<uint32_t, std::string> found(key.round, std::move(wrong));
    if (!first.has_value() || found < *first) first = std::move(found);
  }
  if (!first.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("round ", first->first, ": ", first->second, kAskVerify));
}

}  // namespace refit::simulator
