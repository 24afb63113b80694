// GOAL (Group Operation Assembly Language): T. Hoefler, C. Siebert and
// A. Lumsdaine, "Group Operation Assembly Language - A Flexible Way to Express
// Collective Communication", ICPP 2009.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

// What one rank tells another without data: a fence. Some bytes have to travel.
constexpr uint64_t kFenceBytes = 8;

// Pieces of the text, so that the sink is not called for each line.
constexpr size_t kPieceBytes = 1 << 16;

// Numbers by rank, in the order in which they are added: once to be counted,
// and again to be kept.
class ByRank {
 public:
  explicit ByRank(size_t ranks) : ends_(ranks + 1, 0) {}

  void Count(int32_t rank) { ++ends_[static_cast<size_t>(rank) + 1]; }
  void StartAdding() {
    for (size_t rank = 1; rank < ends_.size(); ++rank) {
      ends_[rank] += ends_[rank - 1];
    }
    numbers_.resize(ends_.back());
  }
  // Its position among the rank's, from 1 on.
  uint32_t Add(int32_t rank, uint32_t number) {
    const auto of = static_cast<size_t>(rank);
    if (added_.empty()) added_.resize(ends_.size() - 1, 0);
    numbers_[ends_[of] + added_[of]] = number;
    return ++added_[of];
  }
  absl::Span<const uint32_t> Of(size_t rank) const {
    return absl::MakeSpan(numbers_).subspan(ends_[rank],
                                            ends_[rank + 1] - ends_[rank]);
  }

 private:
  std::vector<size_t> ends_;     // by rank, and one more: where its numbers end
  std::vector<uint32_t> added_;  // by rank: how many
  std::vector<uint32_t> numbers_;
};

// A wait for another rank that is not for a message: a message of its own.
struct Fence {
  uint32_t wait = 0;
  uint32_t sent = 0;  // labels
  uint32_t received = 0;
};

class GoalPrinter {
 public:
  GoalPrinter(const PlanFile& plan, const TaskGraph& graph,
              const TextSink& sink)
      : graph_(graph),
        sink_(sink),
        ranks_(static_cast<size_t>(plan.world_size())),
        tasks_(ranks_),
        waits_(ranks_),
        labels_(graph.tasks.size()),
        tags_(graph.messages.size()),
        labels_of_receives_(graph.messages.size()) {}

  void Print();

 private:
  template <typename... Parts>
  void Append(const Parts&... parts) {
    absl::StrAppend(&text_, parts...);
    if (text_.size() < kPieceBytes) return;
    sink_(text_);
    text_.clear();
  }

  // Calls `visit` with each rank that has an operation of the task.
  template <typename Visit>
  void ForEachRankOf(uint32_t task, const Visit& visit) const {
    const Task& of = graph_.tasks[task];
    if (of.kind != TaskKind::kMessage) {
      visit(of.rank);
      return;
    }
    visit(graph_.messages[of.message].source);
    visit(graph_.messages[of.message].destination);
  }
  bool IsFence(const Wait& wait) const {
    const Task& from = graph_.tasks[wait.from];
    const Task& to = graph_.tasks[wait.to];
    return from.kind != TaskKind::kMessage && to.kind != TaskKind::kMessage &&
           from.rank != to.rank;
  }
  // The rank that waits. A wait for a message is one for the rank's own end of
  // it.
  int32_t WaiterOf(const Wait& wait) const {
    const Task& from = graph_.tasks[wait.from];
    const Task& to = graph_.tasks[wait.to];
    return to.kind == TaskKind::kMessage ? from.rank : to.rank;
  }
  template <typename Visit>
  void ForEachRankOf(const Wait& wait, const Visit& visit) const {
    visit(WaiterOf(wait));
    if (IsFence(wait)) visit(graph_.tasks[wait.from].rank);
  }

  // The label of the rank's own end of a task.
  uint32_t LabelAt(uint32_t number, int32_t rank) const {
    const Task& task = graph_.tasks[number];
    const bool receives = task.kind == TaskKind::kMessage && task.rank != rank;
    return receives ? labels_of_receives_[task.message] : labels_[number];
  }
  const Fence& FenceOf(uint32_t wait) const {
    return *std::lower_bound(fences_.begin(), fences_.end(), wait,
                             [](const Fence& fence, uint32_t number) {
                               return fence.wait < number;
                             });
  }

  void ListTasks();
  void ListWaits();
  void PrintTask(int32_t rank, uint32_t label, uint32_t number);
  void PrintFence(int32_t rank, uint32_t number);
  void PrintWait(int32_t rank, uint32_t number);

  const TaskGraph& graph_;
  const TextSink& sink_;
  const size_t ranks_;
  std::string text_;
  ByRank tasks_;  // a rank's label of one is its position among the rank's
  ByRank waits_;
  std::vector<uint32_t> labels_;  // of a message: of its send
  // By message; those of fences follow. Unique, so that no two operations can
  // be confused.
  std::vector<uint32_t> tags_;
  std::vector<uint32_t> labels_of_receives_;  // by message
  std::vector<Fence> fences_;                 // in order of waits
};

void GoalPrinter::ListTasks() {
  const auto count = static_cast<uint32_t>(graph_.tasks.size());
  for (uint32_t i = 0; i < count; ++i) {
    ForEachRankOf(i, [&](int32_t rank) { tasks_.Count(rank); });
  }
  tasks_.StartAdding();
  uint32_t tags = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const Task& task = graph_.tasks[i];
    if (task.kind != TaskKind::kMessage) {
      labels_[i] = tasks_.Add(task.rank, i);
      continue;
    }
    const Message& message = graph_.messages[task.message];
    tags_[task.message] = tags++;
    labels_[i] = tasks_.Add(message.source, i);
    labels_of_receives_[task.message] = tasks_.Add(message.destination, i);
  }
}

void GoalPrinter::ListWaits() {
  const auto count = static_cast<uint32_t>(graph_.waits.size());
  for (uint32_t i = 0; i < count; ++i) {
    ForEachRankOf(graph_.waits[i], [&](int32_t rank) { waits_.Count(rank); });
  }
  waits_.StartAdding();
  std::vector<uint32_t> labels;  // by rank: the last
  for (size_t rank = 0; rank < ranks_; ++rank) {
    labels.push_back(static_cast<uint32_t>(tasks_.Of(rank).size()));
  }
  for (uint32_t i = 0; i < count; ++i) {
    const Wait& wait = graph_.waits[i];
    ForEachRankOf(wait, [&](int32_t rank) { waits_.Add(rank, i); });
    if (!IsFence(wait)) continue;
    const auto label_of = [&](uint32_t task) -> uint32_t& {
      return labels[static_cast<size_t>(graph_.tasks[task].rank)];
    };
    fences_.push_back({.wait = i,
                       .sent = ++label_of(wait.from),
                       .received = ++label_of(wait.to)});
  }
}

void GoalPrinter::PrintTask(int32_t rank, uint32_t label, uint32_t number) {
  const Task& task = graph_.tasks[number];
  if (task.kind != TaskKind::kMessage) {
    Append("l", label, ": calc ",
           static_cast<uint64_t>(std::llround(task.seconds * 1e9)), "\n");
    return;
  }
  const Message& message = graph_.messages[task.message];
  const bool sends = label == labels_[number] && rank == message.source;
  Append("l", label, sends ? ": send " : ": recv ", message.size_bytes,
         sends ? "b to " : "b from ",
         sends ? message.destination : message.source, " tag ",
         tags_[task.message], "\n");
}

void GoalPrinter::PrintFence(int32_t rank, uint32_t number) {
  const Wait& wait = graph_.waits[number];
  const Fence& fence = FenceOf(number);
  const int32_t from = graph_.tasks[wait.from].rank;
  const int32_t to = graph_.tasks[wait.to].rank;
  const uint64_t tag = tags_.size() + static_cast<size_t>(&fence - &fences_[0]);
  if (rank == from) {
    Append("l", fence.sent, ": send ", kFenceBytes, "b to ", to, " tag ", tag,
           "\n");
  } else {
    Append("l", fence.received, ": recv ", kFenceBytes, "b from ", from,
           " tag ", tag, "\n");
  }
}

void GoalPrinter::PrintWait(int32_t rank, uint32_t number) {
  const Wait& wait = graph_.waits[number];
  uint32_t label = LabelAt(wait.to, rank);
  uint32_t required = LabelAt(wait.from, rank);
  if (IsFence(wait)) {
    const Fence& fence = FenceOf(number);
    if (rank == graph_.tasks[wait.from].rank) {
      label = fence.sent;
    } else {
      required = fence.received;
    }
  }
  Append("l", label, " requires l", required, "\n");
}

// Ranks come one after the other, and tasks in another order: so they are
// listed by rank before.
void GoalPrinter::Print() {
  ListTasks();
  ListWaits();
  Append("num_ranks ", ranks_, "\n");
  for (size_t i = 0; i < ranks_; ++i) {
    const auto rank = static_cast<int32_t>(i);
    Append("\nrank ", i, " {\n");
    uint32_t label = 0;
    for (const uint32_t task : tasks_.Of(i)) PrintTask(rank, ++label, task);
    for (const uint32_t wait : waits_.Of(i)) {
      if (IsFence(graph_.waits[wait])) PrintFence(rank, wait);
    }
    for (const uint32_t wait : waits_.Of(i)) PrintWait(rank, wait);
    Append("}\n");
  }
  sink_(text_);
}

}  // namespace

void WriteGoal(const PlanFile& plan, const TaskGraph& graph,
               const TextSink& sink) {
  GoalPrinter(plan, graph, sink).Print();
}

}  // namespace refit::simulator
